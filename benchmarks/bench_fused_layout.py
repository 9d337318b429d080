"""Speed of the scale-factor layouts, beside their PyTorch references.

Needs a CUDA GPU. Prints a table and merges its rows into <out>/<gpu>.json (form: common.py).
"""

import argparse
from functools import partial
from pathlib import Path

import torch

from common import RESULTS, Results, environment, load_kernel, print_table
from common import eager_seconds, graph_seconds

US = 1e6


def powers_of_two(*shape):
    return torch.exp2(torch.randint(-20, 20, shape, device="cuda").float())


def cases(kernel, quick):
    """(case, function, reference, arguments, bar): inputs stay in L2, where the kernel before them has put them."""
    fused, reference = kernel.get_mn_major_tma_aligned_tensor, kernel.utils.layout.get_mn_major_tma_aligned_tensor
    for shape in ((8192, 57),) if quick else ((64, 57), (512, 57), (4096, 57), (8192, 57), (8192, 56), (4, 8192, 56)):
        bar = "value <= 3" if shape == (8192, 57) else None
        yield f"{' x '.join(map(str, shape))} fp32 to MN-major", fused, reference, (powers_of_two(*shape),), bar
    name = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
    fused, reference = getattr(kernel, name), getattr(kernel.utils.layout, name)
    for shape in ((8192, 56),) if quick else ((64, 56), (8192, 56), (8192, 57), (4, 8192, 56)):
        yield f"{' x '.join(map(str, shape))} fp32 to packed UE8M0", fused, reference, (powers_of_two(*shape),), None
    name = "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"
    fused, reference = getattr(kernel, name), getattr(kernel.utils.layout, name)
    for ks in ([8192] * 4,) if quick else ([8192] * 4, [2048, 0, 8192, 640], [2048] * 16):
        sf = powers_of_two(sum(-(-k // 128) for k in ks), 7168)
        arguments = sf, torch.tensor(ks, dtype=torch.int32, device="cuda"), ks, 128
        yield f"K-grouped, {len(ks)} groups, {len(sf)} x 7168 fp32 to packed UE8M0", fused, reference, arguments, None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats; marked as quick in the results")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of <gpu>.json (default: benchmarks/results)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")

    torch.manual_seed(0)
    kernel = load_kernel()
    results = Results("fused_layout", environment(kernel, args.quick), args.out)
    repeats = 3 if args.quick else 7
    for case, fused, reference, arguments, bar in cases(kernel, args.quick):
        assert torch.equal(fused(*arguments), reference(*arguments)), case
        workloads = [partial(fused, *arguments)], [partial(reference, *arguments)]
        nbytes = 2 * arguments[0].nbytes
        device, device_reference = graph_seconds(*workloads, nbytes=nbytes, repeats=repeats)
        results.add(f"{case}, in L2", "device time (graph replay)", device * US, "us", f"utils.{fused.__name__}",
                    device_reference * US, bar)
        eager, eager_reference = eager_seconds(*workloads, calls=100, repeats=repeats)
        results.add(f"{case}, in L2", "speedup over the reference (eager)", eager * US, "us", f"utils.{fused.__name__}",
                    eager_reference * US)
    results.save()
    print_table(results.rows)


if __name__ == "__main__":
    main()
