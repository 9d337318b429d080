"""Speed of the casts by block, by channel and to FP4, beside a device copy of the same bytes and beside separate steps.

Needs a CUDA GPU. Prints a table and merges its rows into <out>/<gpu>.json (form: common.py).
"""

from functools import partial

import torch

from bench_fused_transpose_cast import COPY, HIDDEN, SHAPES, US, made
from common import copies, eager_seconds, graph_seconds, rotated, run

NAMES = ("out", "out_sf", "out_t", "out_sf_t")


def casts(kernel):
    """Name -> (cast, bar, separate steps, what those are)."""
    utils = kernel.utils

    def block_and_transpose(x, use_ue8m0):
        payload, sf = kernel.fused_per_block_cast_to_fp8(x, use_ue8m0)
        return payload.view(torch.uint8).T.contiguous(), sf.T.contiguous()

    return {
        "block": (kernel.fused_per_block_cast_to_fp8, {}, "ratio >= 0.92", utils.per_block_cast_to_fp8,
                  "utils.per_block_cast_to_fp8"),
        "block and transpose": (kernel.fused_per_block_cast_to_fp8, dict(with_transpose=True), "ratio >= 0.88",
                                block_and_transpose, "the fused block cast, then T.contiguous()"),
        "channel": (kernel.fused_per_channel_cast_to_fp8, {}, "ratio >= 0.92", utils.per_channel_cast_to_fp8,
                    "utils.per_channel_cast_to_fp8"),
        "fp4": (kernel.fused_per_token_cast_to_fp4, {}, "ratio >= 0.92", utils.per_token_cast_to_fp4,
                "utils.per_token_cast_to_fp4"),
    }  # fmt: skip


def buffers(cast, m, n, **options):
    x = torch.randn(m, n, dtype=torch.bfloat16, device="cuda")
    return x, dict(zip(NAMES, made(cast(x, **options))))


def size(x, outputs):
    """Bytes that a cast must read and write."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (x, *outputs.values()))


def calls(cast, sets, **options):
    return [partial(cast, x, **options, **outputs) for x, outputs in sets]


def copy_share(kernel, results, quick):
    for name, (cast, extra, bar, *_) in casts(kernel).items():
        for use_ue8m0 in (False, True):
            options = dict(use_ue8m0=use_ue8m0, **extra)
            if name == "fp4":
                options.update(gran_k=32 if use_ue8m0 else 128, use_packed_ue8m0=use_ue8m0)
            for m, n in SHAPES[1:3] if quick else SHAPES:
                make = partial(buffers, cast, m, n, **options)
                nbytes = size(*make())
                sets = rotated(make, nbytes)
                fused, copy = graph_seconds(
                    calls(cast, sets, **options), copies(nbytes, len(sets)), nbytes=nbytes, repeats=9
                )
                case = f"{m} x {n}; {name}{', UE8M0' if use_ue8m0 else ''}"
                results.add(case, "share of the copy rate (graph replay)", nbytes / fused / 1e12, "TB/s",
                            COPY, nbytes / copy / 1e12, bar)


def against_separate_steps(kernel, results, quick):
    for name, (cast, extra, _, steps, baseline) in casts(kernel).items():
        for m in (1, 64, 512, 8192):
            if name == "channel" and m % 128:
                continue
            options = dict(use_ue8m0=True, **extra)
            make = partial(buffers, cast, m, HIDDEN, **options)
            nbytes = size(*make())
            sets = rotated(make, nbytes) if m > 512 else [make()]
            fused, separate = calls(cast, sets, **options), [partial(steps, x, True) for x, _ in sets]
            case = f"{m} x {HIDDEN}{'' if m > 512 else ' in L2'}; {name}, UE8M0"
            graph, graph_steps = graph_seconds(fused, separate, nbytes=nbytes, repeats=3)
            results.add(case, "speedup over separate steps (graph replay)", graph * US, "us", baseline,
                        graph_steps * US)
            eager, eager_steps = eager_seconds(fused, separate, calls=20 if m > 512 else 50, repeats=3)
            results.add(case, "speedup over separate steps (eager)", eager * US, "us", baseline, eager_steps * US)


SECTIONS = (copy_share, against_separate_steps)


if __name__ == "__main__":
    run("fused_block_cast", SECTIONS, __doc__)
