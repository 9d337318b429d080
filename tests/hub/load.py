"""Load the kernel in this fresh process, as LOCAL_KERNELS says, cast on the CPU, and print what came out as JSON."""

import argparse
import json
import os
import sys


class NoTriton:
    """Meta-path finder that makes a machine without triton of any machine."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError(f"{name} is blocked")


def cast_like_reference(kernel, device):
    import torch

    x = torch.randn(5, 384, device=device, dtype=torch.bfloat16)
    made = kernel.fused_per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=128)
    expected = kernel.utils.per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=128)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(made, expected))


def cast_in_fork(kernel):
    import torch

    child = os.fork()
    if child == 0:
        matches = False
        try:
            matches = cast_like_reference(kernel, "cuda" if torch.cuda.is_available() else "cpu")
        finally:
            os._exit(0 if matches else 1)
    return os.waitpid(child, 0)[1] == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-triton", action="store_true", help="make triton impossible to import")
    parser.add_argument("--fork", action="store_true", help="cast in a forked child, on the GPU where there is one")
    args = parser.parse_args()
    if args.block_triton:
        sys.meta_path.insert(0, NoTriton)

    import torch
    from kernels import get_kernel

    kernel = get_kernel("kernels-community/deep-gemm", version=3)
    print(
        json.dumps(
            {
                "file": kernel.__file__,
                "module": kernel.__name__,
                "cuda_initialized": torch.cuda.is_initialized(),
                "triton": "triton" in sys.modules,
                "matches": cast_in_fork(kernel) if args.fork else cast_like_reference(kernel, "cpu"),
            }
        )
    )


if __name__ == "__main__":
    main()
