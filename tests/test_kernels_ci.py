"""The short subset for continuous integration: under a minute, on any CUDA GPU, and on the CPU where there is none."""

import pytest
import torch
from casting import check, check_guarded, distinct, each_recipe, sf_spec
from views import Guarded

pytestmark = pytest.mark.kernels_ci

SHAPES = ((1, 512), (7, 4096), (129, 7168), (64, 1000), (3000, 4096))
each_shape = pytest.mark.parametrize("m, n", SHAPES, ids=[f"{m}x{n}" for m, n in SHAPES])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@each_recipe
@each_shape
def test_bit_exact(m, n, recipe, dtype):
    check(distinct(m, n, dtype), recipe)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@each_recipe
def test_zero_group_and_very_large_values(recipe, dtype):
    x = distinct(7, 4096, dtype)
    x[2, 256:384] = 0
    x[3] = 0
    x[4] *= torch.finfo(dtype).max / x[4].abs().max()
    x[5, 1000], x[5, 1001] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    x_fp8, sf = check(x, recipe)
    assert not x_fp8.view(torch.uint8)[2, 256:384].any() and not x_fp8.view(torch.uint8)[3].any()
    assert x_fp8.float().isfinite().all()


@each_recipe
@each_shape
def test_views_of_a_larger_buffer(m, n, recipe):
    (_, groups), sf_dtype = sf_spec(m, n, recipe)
    x = distinct(m, n)
    rows = Guarded((m, n), (n, 1), torch.float8_e4m3fn, 3 * n)
    sf_rows = Guarded((m, groups), (groups, 1), sf_dtype, 5 * groups)
    check_guarded(x, recipe, rows, sf_rows, "rows")
    columns = Guarded((m, n), (n + 48, 1), torch.float8_e4m3fn, 16)
    mn_major = Guarded((m, groups), (1, (m + 3) // 4 * 4 + 4), sf_dtype, 4)
    check_guarded(x, recipe, columns, mn_major, "columns and MN-major sf")
