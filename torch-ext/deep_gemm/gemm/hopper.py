"""GEMMs for compute capability 9.0. Not built: `portable` serves it."""


def bind(a, sfa, b, sfb, d, gran, accumulate):
    """What launches the FP8 GEMM, called with (a, sfa, b, sfb, d) and their pointers; None where `portable` has to."""
    return None


def bind_bf16(a, b, d, accumulate):
    """What launches the BF16 GEMM, called with (a, b, d) and their pointers; None where `portable` has to."""
    return None
