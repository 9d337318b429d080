"""Speed of the dense GEMMs, beside cuBLASLt's block-scaled FP8, cuBLAS's BF16 and this package's plain-Triton path.

Needs a CUDA GPU. Prints a table and merges its rows into <out>/<gpu>.json (form: common.py). Data is random. Rows of
M up to 128 rotate over more weights than the L2 holds. `geometric mean` rows are over the rows above them.
"""

import math
import time
from functools import partial

import torch

from common import ROTATED_BYTES, graph_seconds, run

E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
CUBLASLT = "torch._scaled_mm, 1x128 by 128x128"
CUBLAS = "torch.mm"
PORTABLE = "the plain-Triton path"
# (N, K) of attention and MLP layers of large models.
SHAPES = ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
LARGE = [(4096, n, k) for n, k in SHAPES] + [(8192, 8192, 8192)]
# TFLOPS that the CUDA library of this interface publishes for its wgrad on this GPU, resting between its runs, and of
# cuBLASLt's block-scaled FP8 on the machine of those figures: their ratio to today's says how fast today's machine is.
WGRAD = {
    (4096, 7168, 4096): 973, (7168, 16384, 4096): 1068, (24576, 1536, 4096): 729, (7168, 2048, 4096): 735,
    (2112, 7168, 4096): 925, (576, 7168, 4096): 590, (32768, 512, 4096): 306,
}  # fmt: skip
CUBLASLT_THEN = {
    (4096, 2112, 7168): 1039, (4096, 24576, 1536): 1024, (4096, 7168, 16384): 1120, (4096, 4096, 7168): 1178,
    (4096, 7168, 2048): 1158,
}  # fmt: skip
HOT = 0.92  # of a figure measured with rests, in a hot run
COPY_RATE = 4.1e12  # bytes/s read and written by a device copy, for the bar of one token


def fp8(mn, k, gran_mn, mn_major=False):
    """Random e4m3 `[mn, k]` and its scale factors, MN-major where asked."""
    data = torch.randn(mn, k, device="cuda", dtype=BF16).to(E4M3)
    sf = torch.rand(-(-mn // gran_mn), -(-k // 128), device="cuda") + 0.5
    if mn_major:
        aligned = -(-sf.shape[0] // 4) * 4
        sf = torch.empty_strided(sf.shape, (1, aligned), device="cuda").copy_(sf)
    return data, sf


def scaled_mm(a, b):
    """cuBLASLt on the same operands; raises where it does not take them."""
    return torch._scaled_mm(a[0], b[0].T, scale_a=a[1], scale_b=b[1].T, out_dtype=BF16)


def sets_of(nbytes, limit=ROTATED_BYTES):
    return max(2, limit // nbytes + 1)


def tflops(m, n, k, seconds):
    return 2 * m * n * k / seconds / 1e12


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def timed(*workloads, m, n, k):
    """Seconds of each workload; None for one that refuses its operands."""
    works = []
    for workload in workloads:
        try:
            workload[0]()
            works.append(workload)
        except (RuntimeError, ValueError) as error:
            print(f"{m} x {n} x {k}: {str(error).splitlines()[0]}")
    # As bytes of a copy that takes about as long, which decides how many launches a graph holds.
    seconds = iter(graph_seconds(*works, nbytes=max(n * k, 2 * m * n * k // 250), repeats=7))
    return [next(seconds) if workload in works else None for workload in workloads]


def forward(kernel, results, quick):
    """FP8 at M = 4096."""
    metric, ratios = "FP8, BF16 out (graph replay)", []
    for m, n, k in LARGE[:2] if quick else LARGE:
        a, b = fp8(m, k, 1, mn_major=True), fp8(n, k, 128)
        d = torch.empty(m, n, device="cuda", dtype=BF16)
        ours, theirs = timed([partial(kernel.fp8_gemm_nt, a, b, d)], [partial(scaled_mm, a, b)], m=m, n=n, k=k)
        add(results, f"{m} x {n} x {k}", metric, m, n, k, ours, CUBLASLT, theirs, "ratio >= 1.0")
        ratios += [theirs / ours] if theirs else []
    results.add(f"geometric mean of {len(ratios)}", metric, geometric_mean(ratios), "", CUBLASLT, 1.0, "ratio >= 1.1")


def few_rows(kernel, results, quick):
    """FP8 at M = 64 and 128, with other weights in each launch."""
    metric, ratios = "FP8, few rows (graph replay)", []
    for m in (64, 128):
        for n, k in SHAPES[:2] if quick else SHAPES:
            operands = [
                (fp8(m, k, 1, mn_major=True), fp8(n, k, 128), torch.empty(m, n, device="cuda", dtype=BF16))
                for _ in range(sets_of(n * k))
            ]
            ours, theirs = timed(
                [partial(kernel.fp8_gemm_nt, *tensors) for tensors in operands],
                [partial(scaled_mm, a, b) for a, b, _ in operands], m=m, n=n, k=k,
            )  # fmt: skip
            add(results, f"{m} x {n} x {k}", metric, m, n, k, ours, CUBLASLT, theirs, "ratio >= 1.1")
            ratios += [theirs / ours] if theirs else []
    results.add(f"geometric mean of {len(ratios)}", metric, geometric_mean(ratios), "", CUBLASLT, 1.0, "ratio >= 1.3")


def one_row(kernel, results, quick):
    """FP8 and FP4 weights at M = 1 to 64, with other weights in each launch."""
    for n, k in SHAPES[:2] if quick else SHAPES:
        for m in (1, 64):
            sets = sets_of(n * k // 2)
            a = fp8(m, k, 1, mn_major=True)
            d = torch.empty(m, n, device="cuda", dtype=BF16)
            weights = [fp8(n, k, 128) for _ in range(sets)]
            quarter = [
                (torch.randint(-128, 128, (n, k // 2), device="cuda", dtype=torch.int8),
                 torch.randint(120, 131, (n, -(-k // 128) * 4), device="cuda", dtype=torch.uint8).view(torch.int32))
                for _ in range(sets)
            ]  # fmt: skip
            ours, fp4, theirs = timed(
                [partial(kernel.fp8_gemm_nt, a, b, d) for b in weights],
                [partial(kernel.fp8_fp4_gemm_nt, a, b, d, recipe_a=(1, 128), recipe_b=(1, 32)) for b in quarter],
                [partial(scaled_mm, a, b) for b in weights], m=m, n=n, k=k,
            )  # fmt: skip
            case, us = f"{m} x {n} x {k}", 1e6
            nbytes = n * k + m * k + 2 * m * n
            if m == 1:
                limit = max(8.0, nbytes / (0.6 * COPY_RATE) * us)
                results.add(case, "FP8 weights, device time (graph replay)", ours * us, "us", CUBLASLT if theirs else None,
                            theirs * us if theirs else None, f"value <= {limit:.1f}")
            bar = "ratio >= 1.4" if n * k > 2**25 else None
            results.add(case, "speedup of FP4 weights over FP8 weights (graph replay)", fp4 * us, "us",
                        "FP8 weights", ours * us, bar)


def wgrad(kernel, results, quick):
    """fp32 C accumulated in place."""
    metric = "FP8 wgrad, FP32 accumulated (graph replay)"
    drift = geometric_mean([
        row["baseline_value"] / then for (m, n, k), then in CUBLASLT_THEN.items() for row in results.rows
        if row["case"] == f"{m} x {n} x {k}" and row["baseline"] == CUBLASLT
    ] or [1.0])  # fmt: skip
    for (m, n, k), figure in list(WGRAD.items())[: 2 if quick else None]:
        a, b = fp8(m, k, 1, mn_major=True), fp8(n, k, 1, mn_major=True)
        d = torch.zeros(m, n, device="cuda")
        (ours,) = timed([partial(kernel.fp8_gemm_nt, a, b, d, d, recipe=(1, 1, 128))], m=m, n=n, k=k)
        results.add(f"{m} x {n} x {k}", metric, tflops(m, n, k, ours), "TFLOPS",
                    "the CUDA library's figure, scaled to this run", figure * HOT * drift, "ratio >= 0.95")


def bf16(kernel, results, quick):
    for m, n, k in LARGE[:2] if quick else LARGE:
        a, b = (torch.randn(mn, k, device="cuda", dtype=BF16) for mn in (m, n))
        d = torch.empty(m, n, device="cuda", dtype=BF16)
        ours, theirs = timed(
            [partial(kernel.bf16_gemm_nt, a, b, d)], [partial(torch.mm, a, b.T, out=d)], m=m, n=n, k=k
        )
        add(results, f"{m} x {n} x {k}", "BF16 (graph replay)", m, n, k, ours, CUBLAS, theirs, "ratio >= 0.95")


def portable(kernel, results, quick):
    """The path that serves other GPUs, on this one."""
    path, gran = kernel.gemm.portable, kernel.gemm.reference.Gran(1, 128, 128, 128)
    for m, n, k in LARGE[:1] if quick else LARGE[2:6:3]:
        a, b = fp8(m, k, 1, mn_major=True), fp8(n, k, 128)
        d = torch.empty(m, n, device="cuda", dtype=BF16)
        launch, tensors = path.bind(*a, *b, d, gran, False), (*a, *b, d)
        pointers = tuple(t.data_ptr() for t in tensors)
        ours, theirs = timed(
            [partial(kernel.fp8_gemm_nt, a, b, d)], [partial(launch, tensors, pointers)], m=m, n=n, k=k
        )
        add(results, f"{m} x {n} x {k}", "FP8, BF16 out (graph replay)", m, n, k, ours, PORTABLE, theirs, None)


def add(results, case, metric, m, n, k, ours, baseline, theirs, bar):
    results.add(case, metric, tflops(m, n, k, ours), "TFLOPS", baseline if theirs else None,
                tflops(m, n, k, theirs) if theirs else None, bar if theirs else None)


def first_calls(kernel, results, quick):
    """Every number of rows from 1 to 8192, by powers of two and their neighbours, at one (N, K)."""
    n, k = 4096, 7168
    b, slowest = fp8(n, k, 128), 0.0
    start = time.perf_counter()
    sizes = sorted({max(1, 2**i + j) for i in range(14) for j in (-1, 0, 1) if 2**i + j <= 8192})
    for m in sizes:
        a, d = fp8(m, k, 1, mn_major=True), torch.empty(m, n, device="cuda", dtype=BF16)
        torch.cuda.synchronize()
        before = time.perf_counter()
        kernel.fp8_gemm_nt(a, b, d)
        torch.cuda.synchronize()
        slowest = max(slowest, time.perf_counter() - before)
    results.add(f"M of 1 to 8192, {n} x {k}", "first calls, the slowest", slowest, "s", bar="value <= 3")
    results.add(f"M of 1 to 8192, {n} x {k}", "first calls, together", time.perf_counter() - start, "s")


SECTIONS = (first_calls, forward, few_rows, one_row, wgrad, bf16, portable)


if __name__ == "__main__":
    run("gemm", SECTIONS, __doc__)
