"""Inputs for RMSNorm, and the comparison of its kernels with their references."""

import torch
from casting import distinct
from generators import DEVICE, deep_gemm

assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal
fused_norm = deep_gemm.fused_norm
forward, backward = deep_gemm.fused_rms_norm_cast_to_fp8, deep_gemm.fused_rms_norm_backward

EPS = 1e-6
FIELDS = fused_norm.RMSNormCast._fields
# Which of residual, norm, rstd and transposed there are.
NOTHING, EVERYTHING = (False, False, False, False), (True, True, True, True)


def weight(n, dtype=torch.bfloat16, device=DEVICE):
    """Random values whose magnitude differs by powers of two between neighbouring groups of 16."""
    return distinct(16, n, dtype, seed=1, device=device)[torch.arange(n) % 16, torch.arange(n)]


def expected_forward(wanted, x, w, residual, recipe, eps=EPS):
    """`RMSNormCast` by reference: the op, rounded to x's dtype, then the reference casts."""
    y, h, rstd = fused_norm.rms_norm(x, w, eps, residual)
    cast = deep_gemm.utils.per_token_cast_to_fp8
    transposed, transposed_sf = cast(y.T, recipe[0])
    everything = (*cast(y, *recipe), h, y, rstd, transposed, transposed_sf)
    present = (True, True, *wanted, wanted[3])
    return fused_norm.RMSNormCast(*(value if there else None for value, there in zip(everything, present)))


def one_nan(t):
    """t with every NaN the same one: on CPUs sign and payload depend on the instruction that PyTorch or NumPy picks."""
    if t.is_cuda or not t.dtype.is_floating_point:
        return t
    if t.dtype == torch.float8_e4m3fn:
        byte = t.view(torch.uint8)
        return torch.where(byte & 0x7F == 0x7F, 0x7F, byte)
    return torch.where(t.isnan(), torch.nan, t)


def assert_same(results, expected, names, label=""):
    for name, got, want in zip(names, results, expected, strict=True):
        assert (got is None) == (want is None), f"{label} {name}"
        if got is not None:
            assert_bitwise_equal(one_nan(got), one_nan(want), f"{label} {name}".strip())


def check_forward(x, w, recipe, residual=None, wanted=EVERYTHING, eps=EPS, label="", **outputs):
    """Run and compare with the reference on the same device; return the result."""
    wanted = (residual is not None, *wanted[1:])
    expected = expected_forward(wanted, x, w, residual, recipe, eps)
    _, with_norm, with_rstd, with_transposed = wanted
    result = forward(
        x, w, eps, *recipe, residual, with_norm=with_norm, with_rstd=with_rstd, with_transposed=with_transposed, **outputs
    )
    assert_same(result, expected, FIELDS, label)
    for name, got in zip(FIELDS, result):
        given = outputs.get(name if name.startswith("out") else f"out_{name}")
        assert given is None or got is given, f"{label} {name}"
        assert got is None or (got.device == x.device and not got.requires_grad), f"{label} {name}"
    return result


def check_backward(dy, h, w, rstd, dresidual=None, label="", **outputs):
    expected = fused_norm.rms_norm_backward(dy, h, w, rstd, dresidual)
    result = backward(dy, h, w, rstd, dresidual, **outputs)
    assert_same(result, expected, ("dx", "dweight"), label)
    return result


def backward_inputs(m, n, dtype=torch.bfloat16, weight_dtype=None, device=DEVICE):
    """(dy, h, weight, rstd, dresidual) of [m, n]."""
    dy, h, dresidual = (distinct(m, n, dtype, seed, device) for seed in (2, 3, 4))
    w = weight(n, weight_dtype or dtype, device)
    return dy, h, w, fused_norm.rms_norm(h, w, EPS)[2], dresidual
