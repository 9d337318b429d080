"""Cast activations to FP8 as a model does before its matrix products, and check every byte against the reference."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from kernels import get_kernel

BUILD = Path(__file__).resolve().parent / "build"
if BUILD.is_dir():
    os.environ.setdefault("LOCAL_KERNELS", f"kernels-community/deep-gemm={BUILD}")
deep_gemm = get_kernel("kernels-community/deep-gemm", version=3)
cast, reference = deep_gemm.fused_per_token_cast_to_fp8, deep_gemm.utils.per_token_cast_to_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, SEQUENCE, HIDDEN = (4, 4096, 4096) if DEVICE == "cuda" else (2, 512, 4096)

RECIPES = {
    "one fp32 scale per 128 elements": {"use_ue8m0": False, "gran_k": 128},
    "one power-of-two scale per 32 elements, four in an int32": {
        "use_ue8m0": True,
        "gran_k": 32,
        "use_packed_ue8m0": True,
    },
}


def check(made, expected):
    for name, a, b in zip(("payload", "scales"), made, expected):
        if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            raise SystemExit(f"the {name} differ from the reference")


def relative_error(x, x_fp8, sf, gran_k):
    if sf.dtype == torch.int32:  # each byte is the exponent of a power of two
        sf = torch.exp2(sf.contiguous().view(torch.uint8).float() - 127)
    restored = x_fp8.float() * sf.repeat_interleave(gran_k, dim=1)
    return ((restored - x.float()).norm() / x.float().norm()).item()


def microseconds(function, *args, calls=200, **kwargs):
    """Mean time of a call in a CUDA graph of many, between two events."""
    function(*args, **kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function(*args, **kwargs)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / calls


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def main():
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU (the PyTorch reference; the kernel needs a GPU)"
    packages = ", ".join(f"{name} {installed(name)}" for name in ("torch", "triton", "kernels"))
    print(f"device    {device}\nversions  {packages}\nkernel    {deep_gemm.__name__}\n")

    torch.manual_seed(0)
    hidden_states = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    x = hidden_states.view(-1, HIDDEN)  # [tokens, hidden]

    for name, recipe in RECIPES.items():
        x_fp8, sf = cast(x, **recipe)
        check((x_fp8, sf), reference(x, **recipe))
        print(f"{name}:\n  {x.dtype} {list(x.shape)} -> {x_fp8.dtype} {list(x_fp8.shape)}, {sf.dtype} {list(sf.shape)}")
        print(f"  every byte equals the reference; relative error {relative_error(x, x_fp8, sf, recipe['gran_k']):.2%}")

        # The same into the middle of a larger buffer, with scales that are contiguous along the tokens.
        buffer = torch.zeros(3, len(x), HIDDEN + 64, dtype=torch.uint8, device=DEVICE)
        out = buffer[1, :, :HIDDEN].view(torch.float8_e4m3fn)
        out_sf = torch.empty_like(sf.T, memory_format=torch.contiguous_format).T
        cast(x, **recipe, out=out, out_sf=out_sf)
        check((out, out_sf), (x_fp8, sf))
        if buffer[0].any() or buffer[2].any() or buffer[1, :, HIDDEN:].any():
            raise SystemExit("the cast wrote outside of the view it was given")
        print(f"  into views with strides {out.stride()} and {out_sf.stride()}: the same bytes, nothing else touched")

        if DEVICE == "cuda":
            time = microseconds(cast, x, **recipe, out=x_fp8, out_sf=sf)
            rate = sum(tensor.nbytes for tensor in (x, x_fp8, sf)) / time / 1000
            print(f"  {time:.1f} us in a CUDA graph, {rate:.0f} GB/s read and written")
        print()


if __name__ == "__main__":
    main()
