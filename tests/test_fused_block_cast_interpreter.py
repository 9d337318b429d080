"""The kernel of the cast to FP4 in Triton's interpreter, on CPU tensors."""

import os

import pytest
import torch
from casting import distinct
from generators import deep_gemm
from tile_casting import assert_bitwise_equal
from views import Guarded, with_stride

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]

fused = deep_gemm.fused_block_cast
RECIPES = [(False, 128, False), (True, 128, True), (False, 32, False), (True, 32, True)]


def check(x, recipe, padding=0, offset=0):
    expected = deep_gemm.utils.per_token_cast_to_fp4(x, *recipe)
    guards = [Guarded(t.shape, (t.shape[1] + padding, 1), t.dtype, offset, "cpu") for t in expected]
    outputs = [guard.view for guard in guards]
    launch = fused.bind_per_token_cast_to_fp4(x, *recipe, *outputs)
    launch((x, *outputs), tuple(tensor.data_ptr() for tensor in (x, *outputs)))
    for got, want, guard in zip(outputs, expected, guards):
        assert_bitwise_equal(got, want, f"{list(x.shape)} {recipe}")
        guard.assert_untouched()


@pytest.mark.parametrize("recipe", RECIPES)
def test_shapes(recipe):
    for m, n in ((1, 512), (5, 1000), (3, 2560)):
        check(distinct(m, n, device="cpu"), recipe)
        check(distinct(m, n, torch.float32, device="cpu"), recipe, padding=3, offset=1)
        check(with_stride(distinct(m, n, device="cpu"), (1, m + 1)), recipe)


def test_ties_and_specials():
    x = torch.zeros(3, 512)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[0, :8], x[0, 8:16] = ties, -ties
    x[0, 16:24], x[0, 24:32] = ties * (1 + 2**-23), ties * (1 - 2**-23)
    x[1, 0], x[1, 130], x[1, 300] = torch.inf, -torch.inf, torch.nan
    check(x, (True, 128, True))
