"""The kernels of the scale-factor layouts on CPU tensors, under Triton's interpreter.

Run as `TRITON_INTERPRET=1 pytest -m interpreter`.
"""

import os

import pytest
import torch
from generators import deep_gemm, forget
from test_fused_layout import check_aligned, check_packed, packed_k_grouped, transform
from test_layout import inputs, packed_words, powers_of_two, shape_of

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]
assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal
fused_layout, reference = deep_gemm.fused_layout, deep_gemm.utils.layout


@pytest.fixture(autouse=True)
def kernel_on_the_cpu(monkeypatch):
    """Send CPU tensors to the kernels, and prove that they went there."""
    pytest.importorskip("triton")
    launches = []
    launch = deep_gemm._triton.Launch.__call__
    monkeypatch.setattr(fused_layout, "served_by_triton", lambda device: True)
    monkeypatch.setattr(
        deep_gemm._triton.Launch, "__call__", lambda self, *args: (launches.append(self), launch(self, *args))
    )
    planned = fused_layout._transpose, fused_layout._pack, fused_layout._pack_k_grouped
    for function in planned:
        forget(function)
    yield
    for function in planned:
        forget(function)
    assert launches


@pytest.mark.parametrize("mn, k, groups", [(1, 1, None), (7, 57, None), (33, 65, 2), (129, 8, 1)])
def test_shapes(mn, k, groups):
    sf = powers_of_two(*shape_of(mn, k, groups))
    for name, x in inputs(sf).items():
        check_aligned(sf, groups, x, name)
        check_packed(sf, groups, x, name)


def test_packing_keeps_bytes_apart():
    """Signs and mantissas beside the exponents."""
    bits = torch.randint(-(2**31), 2**31, (33, 7), generator=torch.Generator().manual_seed(0)).int()
    exponent = torch.nn.functional.pad(bits >> 23 & 255, (0, 1)).view(33, 2, 4)
    word = (exponent.long() * 256 ** torch.arange(4)).sum(-1).to(torch.uint32).view(torch.int32)
    assert_bitwise_equal(deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(bits.view(torch.float32)), word)


@pytest.mark.parametrize("gran_mn", [1, 3, 32])
def test_repeated_rows(gran_mn, monkeypatch):
    for module in (reference, fused_layout):
        monkeypatch.setattr(module, "is_sm100", lambda device=None: True)
    mn, sf = 70, powers_of_two(2, -(-70 // gran_mn), 5)
    want = packed_words(sf[:, torch.arange(mn) // gran_mn])
    assert_bitwise_equal(transform(sf, mn, 640, (gran_mn, 128), num_groups=2), want)


@pytest.mark.parametrize("gran_k", [32, 128])
@pytest.mark.parametrize("ks", [[128], [0, 256, 0, 640], [1, 129, 511]])
def test_k_grouped(ks, gran_k):
    rows = [-(-k // gran_k) for k in ks]
    for mn in (4, 1028):
        sf = powers_of_two(sum(rows), mn)
        result = packed_k_grouped(sf, torch.tensor(ks, dtype=torch.int32), ks, gran_k)
        assert_bitwise_equal(result, torch.cat([packed_words(group.T).T for group in sf.split(rows)]), f"mn = {mn}")
