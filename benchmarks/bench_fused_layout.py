"""Speed of the scale-factor layouts, beside their PyTorch references.

Needs a CUDA GPU. Prints a table and merges its rows into <out>/<gpu>.json (form: common.py).
"""

from functools import partial

import torch

from common import eager_seconds, graph_seconds, run

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


def layouts(kernel, results, quick):
    repeats = 3 if quick else 7
    for case, fused, reference, arguments, bar in cases(kernel, quick):
        assert torch.equal(fused(*arguments), reference(*arguments)), case
        workloads = [partial(fused, *arguments)], [partial(reference, *arguments)]
        nbytes = 2 * arguments[0].nbytes
        device, device_reference = graph_seconds(*workloads, nbytes=nbytes, repeats=repeats)
        results.add(f"{case}, in L2", "device time (graph replay)", device * US, "us", f"utils.{fused.__name__}",
                    device_reference * US, bar)
        eager, eager_reference = eager_seconds(*workloads, calls=100, repeats=repeats)
        results.add(f"{case}, in L2", "speedup over the reference (eager)", eager * US, "us", f"utils.{fused.__name__}",
                    eager_reference * US)


SECTIONS = (layouts,)


if __name__ == "__main__":
    run("fused_layout", SECTIONS, __doc__)
