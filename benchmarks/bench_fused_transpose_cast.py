"""Speed of the casts that store a transposed copy, beside a device copy of the same bytes and beside separate steps.

Needs a CUDA GPU. Prints a table and merges its rows into <out>/<gpu>.json (form: common.py).
"""

from functools import partial

import torch

from common import copies, eager_seconds, graph_seconds, rotated, run

COPY = "device copy of the same bytes"
SEPARATE = "x.T.contiguous(), then the fused per-token casts"
SHAPES = ((8192, 4096), (8192, 7168), (16384, 4096), (16384, 7168))
HIDDEN = 4096
US = 1e6
E4M3 = torch.float8_e4m3fn
EXPERTS = 64


def casts(kernel):
    """Name -> (cast, bar, whether x is also cast by rows)."""
    return {
        "transposed": (kernel.fused_per_channel_cast_to_fp8_transposed, "ratio >= 0.88", False),
        "both orientations": (kernel.fused_per_token_and_channel_cast_to_fp8, "ratio >= 0.85", True),
    }


def made(result):
    return [tensor for part in result for tensor in (part if isinstance(part, tuple) else (part,))]


def buffers(cast, m, n, both, **options):
    """(x, outputs by name), with MN-major scale factors as the GEMM reads them."""
    x = torch.randn(m, n, dtype=torch.bfloat16, device="cuda")
    outputs = made(cast(x, mn_major_sf=True, **options))
    return x, dict(zip(("out", "out_sf", "out_t", "out_sf_t") if both else ("out", "out_sf"), outputs))


def moved(m, n, both):
    """Bytes that a cast must read and write."""
    return m * n * (4 if both else 3) + 4 * (-(-m // 128) * n + (m * -(-n // 128) if both else 0))


def calls(cast, sets, **options):
    return [partial(cast, x, **options, **outputs) for x, outputs in sets]


def separate(kernel, both, use_ue8m0, x):
    """What a user does without these casts."""
    if both:
        kernel.fused_per_token_cast_to_fp8(x, use_ue8m0)
    return kernel.fused_per_token_cast_to_fp8(x.T.contiguous(), use_ue8m0)


def copy_share(kernel, results, quick):
    for name, (cast, bar, both) in casts(kernel).items():
        for use_ue8m0 in (False, True):
            for m, n in SHAPES[1:3] if quick else SHAPES:
                nbytes = moved(m, n, both)
                sets = rotated(partial(buffers, cast, m, n, both, use_ue8m0=use_ue8m0), nbytes)
                fused, copy = graph_seconds(
                    calls(cast, sets, use_ue8m0=use_ue8m0), copies(nbytes, len(sets)), nbytes=nbytes, repeats=9
                )
                case = f"{m} x {n}; {name}{', UE8M0' if use_ue8m0 else ''}"
                results.add(case, "share of the copy rate (graph replay)", nbytes / fused / 1e12, "TB/s",
                            COPY, nbytes / copy / 1e12, bar)


def groups(kernel, results, quick):
    """Experts of a few hundred rows, none a multiple of 128."""
    for name, (cast, bar, both) in casts(kernel).items():
        for m, n in SHAPES[1:3]:
            ks = torch.full((EXPERTS,), m // EXPERTS, dtype=torch.int32, device="cuda")
            ks += torch.arange(EXPERTS, dtype=torch.int32, device="cuda") * 2 - EXPERTS + 1
            written = -(-ks // 128) * 128
            # Groups are written filled up to 128 rows.
            nbytes = moved(m, n, both) + (int(written.sum()) - m) * n
            sets = rotated(partial(buffers, cast, m, n, both, use_ue8m0=False, ks=ks), nbytes)
            fused, copy = graph_seconds(
                calls(cast, sets, use_ue8m0=False, ks=ks), copies(nbytes, len(sets)), nbytes=nbytes, repeats=9
            )
            results.add(f"{m} x {n} in {EXPERTS} ragged groups; {name}", "share of the copy rate (graph replay)",
                        nbytes / fused / 1e12, "TB/s", COPY, nbytes / copy / 1e12, bar)


def against_separate_steps(kernel, results, quick):
    for name, (cast, _, both) in casts(kernel).items():
        for m in (1, 64, 512, 8192):
            nbytes = moved(m, HIDDEN, both)
            make = partial(buffers, cast, m, HIDDEN, both, use_ue8m0=True)
            sets = rotated(make, nbytes) if m > 512 else [make()]
            fused = calls(cast, sets, use_ue8m0=True)
            steps = [partial(separate, kernel, both, True, x) for x, _ in sets]
            case = f"{m} x {HIDDEN}{'' if m > 512 else ' in L2'}; {name}, UE8M0"
            graph, graph_steps = graph_seconds(fused, steps, nbytes=nbytes, repeats=5)
            results.add(case, "speedup over separate steps (graph replay)", graph * US, "us", SEPARATE,
                        graph_steps * US)
            eager, eager_steps = eager_seconds(fused, steps, calls=30 if m > 512 else 100, repeats=5)
            results.add(case, "speedup over separate steps (eager)", eager * US, "us", SEPARATE, eager_steps * US)


SECTIONS = (copy_share, groups, against_separate_steps)


if __name__ == "__main__":
    run("fused_transpose_cast", SECTIONS, __doc__)
