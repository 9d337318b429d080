"""Speed of `fused_per_token_cast_to_fp8`, beside a device copy of the same bytes and beside the PyTorch reference.

Needs a CUDA GPU. Prints a table and merges its rows into <out>/<gpu>.json (form: common.py), from which
scripts/render_results.py makes README's table and plot.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from common import copies, eager_seconds, graph_seconds, host_seconds, load_kernel, rotated, run

RECIPES = {
    "group 32, packed UE8M0": dict(use_ue8m0=True, gran_k=32, use_packed_ue8m0=True),
    "group 128, FP32": dict(use_ue8m0=False, gran_k=128, use_packed_ue8m0=False),
}
COPY = "device copy of the same bytes"
REFERENCE = "utils.per_token_cast_to_fp8"
HIDDEN = 4096
US = 1e6
L2_TOKENS = 512  # up to here one buffer set is timed over and over, and it stays in L2


def buffers(tokens, hidden, options, sf_padding=0, out_padding=0):
    """(x, out, out_sf); padded columns make `out` strided, padded rows make `out_sf` MN-major."""
    columns = -(-hidden // options["gran_k"])
    sf_dtype = torch.float32
    if options["use_packed_ue8m0"]:
        columns, sf_dtype = columns // 4, torch.int32
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(tokens, hidden + out_padding, dtype=torch.float8_e4m3fn, device="cuda")[:, :hidden]
    if sf_padding:
        return x, out, torch.empty(columns, tokens + sf_padding, dtype=sf_dtype, device="cuda").T[:tokens]
    return x, out, torch.empty(tokens, columns, dtype=sf_dtype, device="cuda")


def moved(tokens, hidden, options):
    """Bytes that the cast must read and write."""
    sf_bytes = 1 if options["use_packed_ue8m0"] else 4
    return tokens * (hidden * 3 + hidden // options["gran_k"] * sf_bytes)


def buffer_sets(tokens, hidden, options, **padding):
    make = partial(buffers, tokens, hidden, options, **padding)
    return [make()] if tokens <= L2_TOKENS else rotated(make, moved(tokens, hidden, options))


def casts(kernel, sets, options):
    return [partial(kernel.fused_per_token_cast_to_fp8, x, **options, out=out, out_sf=sf) for x, out, sf in sets]


def case(tokens, hidden, recipe):
    return f"{tokens} x {hidden}{' in L2' if tokens <= L2_TOKENS else ''}; {recipe}"


def copy_share(kernel, results, quick):
    for recipe, options in RECIPES.items():
        for hidden in (128, 512, 4096, 7168):
            for tokens in (131072,) if hidden < HIDDEN else (4096, 16384) if quick else (4096, 8192, 16384, 32768):
                sets, nbytes = buffer_sets(tokens, hidden, options), moved(tokens, hidden, options)
                fused, copy = graph_seconds(casts(kernel, sets, options), copies(nbytes, len(sets)), nbytes=nbytes)
                results.add(case(tokens, hidden, recipe), "share of the copy rate (graph replay)",
                            nbytes / fused / 1e12, "TB/s", COPY, nbytes / copy / 1e12,
                            "ratio >= 0.95" if hidden >= HIDDEN else None)


def few_tokens(kernel, results, quick):
    for recipe, options in RECIPES.items():
        for tokens, limit in {1: 1.5, 64: 1.7, 512: 2.4}.items():
            sets, nbytes = buffer_sets(tokens, HIDDEN, options), moved(tokens, HIDDEN, options)
            fused, copy = graph_seconds(casts(kernel, sets, options), copies(nbytes, len(sets)), nbytes=nbytes)
            results.add(case(tokens, HIDDEN, recipe), "device time (graph replay)", fused * US, "us", COPY, copy * US,
                        f"value <= {limit}")


def host_cost(kernel, results, quick):
    for recipe, options in RECIPES.items():
        x, out, sf = buffers(1, HIDDEN, options)
        cast, y = kernel.fused_per_token_cast_to_fp8, torch.empty_like(x)

        def two_empty():
            torch.empty((1, HIDDEN), dtype=out.dtype, device=x.device)
            torch.empty(sf.shape, dtype=sf.dtype, device=x.device)

        mul, given, empty, allocated = host_seconds(
            lambda: torch.mul(x, x, out=y),
            lambda: cast(x, **options, out=out, out_sf=sf),
            two_empty,
            lambda: cast(x, **options),
            repeats=5 if quick else 15,
        )
        one_token = f"1 x {HIDDEN}; {recipe}"
        results.add(one_token, "host time, outputs given", given * US, "us", "torch.mul(x, x, out=y)", mul * US,
                    "ratio <= 1.6")
        results.add(one_token, "host time, outputs allocated", allocated * US, "us",
                    "outputs given + two torch.empty", (given + empty) * US, "ratio <= 1.15")


def speedup(kernel, results, quick):
    bars = dict(zip(RECIPES, ("ratio >= 26", "ratio >= 17")))
    repeats = 3 if quick else 7
    for recipe, options in RECIPES.items():
        for tokens in (1, 64, 512, 4096, 16384):
            sets, nbytes = buffer_sets(tokens, HIDDEN, options), moved(tokens, HIDDEN, options)
            reference = [partial(kernel.utils.per_token_cast_to_fp8, x, **options) for x, _, _ in sets]
            allocating = [partial(kernel.fused_per_token_cast_to_fp8, x, **options) for x, _, _ in sets]
            bar = bars[recipe] if tokens == 16384 else None
            eager, eager_reference = eager_seconds(allocating, reference, calls=100 if tokens <= L2_TOKENS else 30,
                                                   repeats=repeats)
            results.add(case(tokens, HIDDEN, recipe), "speedup over the reference (eager)", eager * US, "us", REFERENCE,
                        eager_reference * US, "ratio >= 20 (aim)" if tokens == 1 else bar)
            given = casts(kernel, sets, options)
            graph, graph_reference = graph_seconds(given, reference, nbytes=nbytes, repeats=repeats)
            results.add(case(tokens, HIDDEN, recipe), "speedup over the reference (graph replay)", graph * US, "us",
                        REFERENCE, graph_reference * US, bar)


def layouts(kernel, results, quick):
    # Paddings of a whole number of 16 bytes, as a caller who wants speed would choose them.
    forms = {"plain": {}, "MN-major scales": dict(sf_padding=64), "strided out": dict(out_padding=256)}
    for recipe, options in RECIPES.items():
        for tokens in (512, 4096, 16384):
            sets = [buffer_sets(tokens, HIDDEN, options, **padding) for padding in forms.values()]
            workloads = [casts(kernel, form, options) for form in sets]
            plain, *others = graph_seconds(*workloads, nbytes=moved(tokens, HIDDEN, options))
            for form, seconds in zip(list(forms)[1:], others):
                results.add(case(tokens, HIDDEN, recipe), f"{form} (graph replay)", seconds * US, "us",
                            "contiguous outputs", plain * US, "ratio <= 1.05")


def first_call(kernel, results, quick):
    for recipe in RECIPES:
        cold = []
        for _ in range(1 if quick else 3):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(_fresh_process(recipe, cache))
                if len(cold) == 1:
                    warm = _fresh_process(recipe, cache, "--sweep")
        one = f"128 x {HIDDEN}; {recipe}"
        results.add(one, "first call, empty Triton cache", statistics.median(run["seconds"] for run in cold), "s",
                    bar="value <= 1")
        results.add(one, "first call, Triton cache on disk", warm["seconds"], "s")
        results.add(f"1 to 8192 x {HIDDEN}; {recipe}", "compiled kernels", warm["kernels"], "",
                    bar="value <= 1")


def _fresh_process(recipe, cache, *options):
    command = [sys.executable, __file__, "--first-call", recipe, *options]
    run = subprocess.run(command, env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def measure_first_call(recipe, sweep):
    """In a fresh process: seconds of the first call, and the kernels compiled by then or, with `sweep`, for M to 8192."""
    cast, options = load_kernel().fused_per_token_cast_to_fp8, RECIPES[recipe]
    x = torch.randn(8192, HIDDEN, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    cast(x[:128], **options)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    for tokens in range(1, len(x) + 1) if sweep else ():
        cast(x[:tokens], **options)
    torch.cuda.synchronize()
    kernels = len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))
    print(json.dumps({"seconds": seconds, "kernels": kernels}))


SECTIONS = (copy_share, few_tokens, host_cost, speedup, layouts, first_call)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first-call"]:
        measure_first_call(sys.argv[2], sweep="--sweep" in sys.argv)
    else:
        run("fused_cast", SECTIONS, __doc__)
