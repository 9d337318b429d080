"""The kernels of the MoE glue on CPU tensors, under Triton's interpreter, against the references.

Run as `TRITON_INTERPRET=1 pytest -m interpreter`. The interpreter truncates fp32 to bf16 instead of rounding, so that
what rounds to the dtype of its input is tested in fp16 and fp32 here.
"""

import os

import pytest
import torch
from casting import E4M3, distinct, each_recipe, sf_spec
from generators import deep_gemm, forget
from test_fused_moe import (
    FLOAT,
    PACKED,
    backward_inputs,
    check_backward,
    check_backward_cast,
    check_combine,
    check_gather_cast,
    check_route,
    random_ids,
    random_routing,
)
from views import Guarded, same_values

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in multiply"),  # NumPy, at NaN
]
fused_moe = deep_gemm.fused_moe
FP16, FP32 = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def kernel_on_the_cpu(monkeypatch):
    """Send CPU tensors to the kernels, and prove that they went there."""
    pytest.importorskip("triton")
    launches = []
    launch = deep_gemm._triton.Launch.__call__
    monkeypatch.setattr(fused_moe, "served_by_triton", lambda device: True)
    monkeypatch.setattr(
        deep_gemm._triton.Launch, "__call__", lambda self, *args: (launches.append(self), launch(self, *args))
    )
    planned = [value for value in vars(fused_moe).values() if isinstance(value, deep_gemm._call.Planned)]
    for function in planned:
        forget(function)
    yield launches
    for function in planned:
        forget(function)
    assert launches


@pytest.mark.parametrize(
    "tokens, topk, experts, alignment",
    [(1, 1, 1, 1), (1, 8, 40, 128), (7, 6, 5, 3), (128, 1, 3, 16), (43, 3, 16, 20), (65, 4, 33, 1)],
)
def test_route(tokens, topk, experts, alignment):
    check_route(random_ids(tokens, topk, experts, dtype=torch.int32), experts, alignment)
    check_route(random_ids(topk, tokens, experts, sentinels=False).t(), experts, alignment, "transposed")


def test_route_over_many_blocks(monkeypatch):
    monkeypatch.setattr(fused_moe, "route_config", lambda: fused_moe.RouteConfig(32, 4, 1))
    check_route(random_ids(100, 3, 7), 7, 8)
    check_route(torch.full((150, 2), 3), 7, 8, "all to one")


@each_recipe
def test_gather_cast(recipe):
    for tokens, topk, hidden in ((3, 2, 1000), (5, 8, 128), (2, 3, 1025)):
        if sf_spec(tokens, hidden, recipe):
            rows, row_map, used = random_routing(tokens, topk, alignment=2, device="cpu")
            for dtype in (torch.bfloat16, FP32):
                x = distinct(tokens, hidden, dtype, device="cpu")
                check_gather_cast(x, row_map, rows, used, recipe, label=f"{tokens}x{hidden} {dtype}")


@pytest.mark.parametrize("recipe", [FLOAT, PACKED], ids=["fp32-128", "packed-32"])
def test_gather_cast_views(recipe):
    rows, row_map, used = random_routing(5, 3, alignment=4, device="cpu")
    (_, groups), sf_dtype = sf_spec(rows, 512, recipe)
    x = distinct(5, 512, device="cpu")
    views = same_values(x)
    for name in ("column slice", "column-major, unaligned", "every other column"):
        view = views[name]
        out = Guarded((rows, 512), (515, 1), E4M3, 16, "cpu")
        out_sf = Guarded((rows, groups), (1, rows + 4), sf_dtype, 4, "cpu")
        check_gather_cast(view, row_map, rows, used, recipe, out.view, out_sf.view, label=name)
        out.assert_untouched(name), out_sf.assert_untouched(name)
        assert (out.view.view(torch.uint8)[~used] == 0xFF).all()
        assert (out_sf.view.view(torch.int32)[~used] == -1).all()


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("tokens, topk, hidden", [(3, 2, 1000), (5, 8, 128), (2, 3, 1025), (4, 1, 33)])
def test_combine(tokens, topk, hidden, dtype):
    _, y, row_map, weights, _ = backward_inputs(tokens, topk, hidden, dtype, alignment=2, device="cpu")
    weights = weights * 2**-12
    for w in (weights, weights.half(), None):
        assert not check_combine(y, row_map, w).isnan().any()
    check_combine(y.t().contiguous().t(), row_map, weights)


@pytest.mark.parametrize("tokens, topk, hidden", [(3, 2, 1000), (2, 8, 128), (2, 3, 1025), (4, 1, 33)])
def test_backward(tokens, topk, hidden):
    inputs = backward_inputs(tokens, topk, hidden, FP32, alignment=2, device="cpu")
    check_backward(*inputs)
    for recipe in (FLOAT, (True, 32, False)):
        check_backward_cast(*inputs, recipe)
