"""Dense GEMMs: public functions in `dense`, their definition in `reference`, the kernels in `hopper` and `portable`."""
