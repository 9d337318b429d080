"""Speed of SwiGLU with the cast, beside a device copy of the same bytes and beside torch's ops followed by the fused cast.

Needs a CUDA GPU. Prints a table and merges its rows into <out>/<gpu>.json (form: common.py).
"""

from functools import partial

import torch
import torch.nn.functional as F

from common import copies, eager_seconds, graph_seconds, rotated, run, warm_up

RECIPES = {
    "group 32, packed UE8M0": dict(use_ue8m0=True, gran_k=32, use_packed_ue8m0=True),
    "group 128, FP32": dict(use_ue8m0=False, gran_k=128, use_packed_ue8m0=False),
}
COPY = "device copy of the same bytes"
STEPS = "torch ops, then fused_per_token_cast_to_fp8"
US = 1e6
L2_ROWS = 512  # up to here one buffer set is timed over and over, and it stays in L2
LARGE = ((8192, 4096), (16384, 4096), (8192, 7168), (16384, 7168))


def sf_bytes(elements, options):
    return elements // options["gran_k"] * (1 if options["use_packed_ue8m0"] else 4)


def swiglu(x):
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate) * up


def forward(kernel, options, x, dy):
    return partial(kernel.fused_swiglu_cast_to_fp8, x, **options)


def forward_steps(kernel, options, x, dy):
    return lambda: kernel.fused_per_token_cast_to_fp8(swiglu(x), **options)


def with_transpose(kernel, options, x, dy):
    return partial(kernel.fused_swiglu_cast_to_fp8_with_transpose, x, **options)


def with_transpose_steps(kernel, options, x, dy):
    cast = partial(kernel.fused_per_token_cast_to_fp8, **options)

    def steps():
        y = swiglu(x)
        return cast(y), cast(y.T)

    return steps


def backward(kernel, options, x, dy):
    return partial(kernel.fused_swiglu_backward_cast_to_fp8, dy, x, **options)


def backward_steps(kernel, options, x, dy):
    cast = partial(kernel.fused_per_token_cast_to_fp8, **options)

    def steps():
        gate, up = x.chunk(2, dim=1)
        dx = torch.cat((torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)), dim=1)
        return cast(dx), cast(dx.T)

    return steps


# name -> (fused, separate steps, bytes of payloads and inputs for each element of y, groups for each, bar)
KERNELS = {
    "SwiGLU + cast": (forward, forward_steps, 5, 1, 0.92),
    "SwiGLU + cast + transposed copy": (with_transpose, with_transpose_steps, 6, 2, 0.85),
    "SwiGLU backward + both casts": (backward, backward_steps, 10, 4, 0.85),
}


def bf16(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def sets(m, h, nbytes):
    def make():
        return bf16(m, 2 * h), bf16(m, h)

    return [make()] if m <= L2_ROWS else rotated(make, nbytes)


def given(call):
    """The call with the outputs of its first run as its outputs."""
    names = ("out", "out_sf", "out_t", "out_sf_t")
    result = [t for part in call() if part is not None for t in (part if isinstance(part, tuple) else (part,))]
    return partial(call, **dict(zip(names, result)))


def compilation(kernel, results, quick):
    pair = bf16(128, 2 * 4096), bf16(128, 4096)
    masked_m = torch.full((2,), 128, dtype=torch.int32, device="cuda")
    calls = []
    for options in RECIPES.values():
        calls += [make(kernel, options, *pair) for one_and_steps in KERNELS.values() for make in one_and_steps[:2]]
        calls += [partial(kernel.fused_swiglu_cast_to_fp8_masked, bf16(2, 128, 2 * 4096), masked_m, **options)]
    warm_up(calls)


def copy_share(kernel, results, quick):
    for name, (fused, steps, nbytes, groups, bar) in KERNELS.items():
        for recipe, options in RECIPES.items():
            for m, h in LARGE[:2] if quick else LARGE:
                moved = nbytes * m * h + groups * sf_bytes(m * h, options)
                buffers = sets(m, h, moved)
                calls = [given(fused(kernel, options, *pair)) for pair in buffers]
                seconds, copy = graph_seconds(calls, copies(moved, len(buffers)), nbytes=moved, repeats=7)
                case = f"{name}, {m} x {h}; {recipe}"
                results.add(case, "share of the copy rate (graph replay)", moved / seconds / 1e12, "TB/s", COPY,
                            moved / copy / 1e12, f"ratio >= {bar}")


def speedup(kernel, results, quick):
    for name, (fused, steps, nbytes, groups, _) in KERNELS.items():
        for recipe, options in RECIPES.items():
            for m, h in ((512, 4096), (8192, 4096)) if groups > 1 else ((1, 4096), (64, 4096), (512, 4096), (8192, 4096)):
                moved = nbytes * m * h + groups * sf_bytes(m * h, options)
                buffers = sets(m, h, moved)
                one = [given(fused(kernel, options, *pair)) for pair in buffers]
                two = [steps(kernel, options, *pair) for pair in buffers]
                case = f"{name}, {m} x {h}{' in L2' if m <= L2_ROWS else ''}; {recipe}"
                a, b = graph_seconds(one, two, nbytes=moved, repeats=5)
                results.add(case, "speedup over separate steps (graph replay)", a * US, "us", STEPS, b * US)
                a, b = eager_seconds(one, two, calls=100 if m <= L2_ROWS else 20, repeats=5)
                results.add(case, "speedup over separate steps (eager)", a * US, "us", STEPS, b * US)


def masked(kernel, results, quick):
    experts, t = 256, 512
    generator = torch.Generator("cuda").manual_seed(0)
    masked_m = torch.randint(16, t + 1, (experts,), generator=generator, device="cuda", dtype=torch.int32)
    tokens = masked_m.sum().item()
    for recipe, options in RECIPES.items():
        for h in (2048,) if quick else (2048, 4096):
            moved = 5 * tokens * h + sf_bytes(tokens * h, options)
            call = given(partial(kernel.fused_swiglu_cast_to_fp8_masked, bf16(experts, t, 2 * h), masked_m, **options))
            seconds, copy = graph_seconds([call], copies(moved, 1), nbytes=moved, repeats=7)
            results.add(f"masked SwiGLU + cast, {experts} experts of 16 to {t} tokens x {h}; {recipe}",
                        "share of the copy rate of the valid bytes (graph replay)", moved / seconds / 1e12, "TB/s", COPY,
                        moved / copy / 1e12, "ratio >= 0.85")


SECTIONS = (compilation, copy_share, masked, speedup)


if __name__ == "__main__":
    run("fused_activation", SECTIONS, __doc__)
