"""Inputs for casts, and the comparison of the fused per-token cast with its reference."""

import pytest
import torch
from generators import DEVICE, deep_gemm
from views import Guarded

assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal
cast = deep_gemm.fused_per_token_cast_to_fp8
reference = deep_gemm.utils.per_token_cast_to_fp8

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# (use_ue8m0, gran_k, use_packed_ue8m0)
RECIPES = tuple(
    (use_ue8m0, gran_k, packed)
    for gran_k in (32, 128)
    for use_ue8m0, packed in ((False, False), (True, False), (True, True))
)
RECIPE_IDS = [f"{'packed' if packed else 'ue8m0' if ue8m0 else 'fp32'}-{gran_k}" for ue8m0, gran_k, packed in RECIPES]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_IDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def gpu(test):
    """Mark a test that needs a CUDA GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")(test))


def sf_spec(m, n, recipe):
    """Shape and dtype of the scale factors; None where the recipe refuses the number of groups."""
    _, gran_k, packed = recipe
    groups = -(-n // gran_k)
    if not packed:
        return (m, groups), torch.float32
    return None if groups % 4 else ((m, groups // 4), torch.int32)


def distinct(m, n, dtype=torch.bfloat16, seed=0, device=DEVICE):
    """Random values whose magnitude differs by powers of two between neighbouring rows and groups of 32 columns."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, n, generator=generator, device=device).clamp_(-4, 4)
    rows, groups = torch.arange(m, device=device)[:, None], torch.arange(n, device=device)[None, :] // 32
    return (x * torch.exp2(((rows * 5 + groups * 7) % 23 - 11).float())).to(dtype)


def bf16_patterns(device=DEVICE):
    """All 65536 bf16 values, [128, 512]; neighbours in a row share a sign and most of an exponent."""
    return torch.arange(65536, device=device).to(torch.int16).view(torch.bfloat16).view(128, 512)


def bits(*patterns, device=DEVICE):
    """fp32 values of bit patterns."""
    return torch.tensor(patterns, dtype=torch.int64).to(torch.uint32).view(torch.float32).to(device)


def specials(dtype=torch.float32, device=DEVICE):
    """[16, 512]: a row for each kind of group that is not plain, beside plain groups."""
    info = torch.finfo(dtype)
    x = distinct(16, 512, torch.float32, device=device)
    x[0] = 0.0
    x[1, 128:256] = 0.0
    x[2] = -0.0
    x[3, 5::7] = -0.0
    x[4] *= info.max / x[4].abs().max()
    x[5, 130], x[5, 131] = info.max, -info.max
    x[6] *= info.tiny / x[6].abs().max()
    x[7, 3::5], x[7, 4::5] = info.smallest_normal / 2, -info.smallest_normal / 4
    x[8, 7], x[8, 400] = torch.inf, -torch.inf
    x[9] = torch.inf
    x[9, ::2] = -torch.inf
    x[10, 33] = torch.nan
    x[11, 34] = -bits(0x7FC00000, device=device)[0]
    x[12, 64], x[12, 65] = torch.nan, torch.inf
    x[13, 0::3], x[13, 1::3] = 1e-4, -1e-4  # the floor of amax
    x[14] = 2.0**-24
    x[15, 511] = torch.inf
    return x.to(dtype)


def assert_same(result, expected, label=""):
    """Raise unless payload and scale factors have the same dtypes, shapes and bytes."""
    for name, got, want in zip(("x_fp8", "sf"), result, expected):
        assert_bitwise_equal(got, want, f"{label} {name}".strip())


def check(x, recipe, out=None, out_sf=None, label=""):
    """Cast and compare with the reference on the same device; return what the cast returned."""
    expected = reference(x, *recipe)
    result = cast(x, *recipe, out=out, out_sf=out_sf)
    assert_same(result, expected, label)
    for got, given, want in zip(result, (out, out_sf), expected):
        assert got is given if given is not None else got.stride() == want.stride(), label
        assert got.device == x.device and not got.requires_grad, label
    return result


def check_guarded(x, recipe, out: Guarded, out_sf: Guarded, label=""):
    """`check` into views whose surroundings must stay as they are."""
    check(x, recipe, out.view, out_sf.view, label)
    out.assert_untouched(f"{label} out")
    out_sf.assert_untouched(f"{label} out_sf")
