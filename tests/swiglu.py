"""Inputs for SwiGLU with the cast, an oracle in NumPy, and the comparison with the references."""

import numpy as np
import torch
from casting import distinct
from generators import DEVICE, deep_gemm

activation = deep_gemm.fused_activation
assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal
# (use_ue8m0, gran_k, use_packed_ue8m0)
RECIPES = ((False, 128, False), (True, 128, False), (False, 32, False), (True, 32, False), (True, 32, True))
# M, H: around the tiles, their groups and the columns a program takes.
SHAPES = ((1, 128), (7, 256), (127, 128), (128, 384), (129, 1152), (260, 640))
OPTIONS = {  # limit, weight, grouped_layout
    "plain": (None, False, False),
    "limit": (1.5, False, False),
    "weight": (None, True, False),
    "skipped rows": (None, False, True),
    "all": (10.0, True, True),
}


def inputs(m, h, dtype=torch.bfloat16, weight=False, skipped=False, device=DEVICE):
    """(dy, x, weight, grouped_layout); rows that are to be skipped hold NaN."""
    x = distinct(m, 2 * h, dtype, 1, device).clamp_(-60, 60)
    dy = distinct(m, h, dtype, 2, device)
    row = torch.arange(m, device=device)
    weight = torch.exp2((row * 3 % 7 - 3).float()) * torch.where(row % 2 == 0, 1, -0.75) if weight else None
    rows = None
    if skipped:
        rows = torch.where(row * 7 % 5 < 2, -1, row % 3).int()
        for tensor in (x, dy, *(() if weight is None else (weight,))):
            tensor[rows < 0] = torch.nan
    return dy, x, weight, rows


def packs(m, h, recipe):
    """Whether both orientations have a multiple of 4 groups where the recipe packs."""
    return not recipe[2] or (m > 0 and -(-m // recipe[1]) % 4 == 0 and h // recipe[1] % 4 == 0)


def oracle(x, limit=None, weight=None, rows=None):
    """SwiGLU in fp64 with NumPy."""
    x = x.double().cpu().numpy()
    gate, up = np.split(x, 2, axis=1)
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    y = gate / (1 + np.exp(-gate)) * up
    if weight is not None:
        y = y * weight.double().cpu().numpy()[:, None]
    if rows is not None:
        y = np.where((rows >= 0).cpu().numpy()[:, None], y, 0)
    return torch.from_numpy(y)


def flat(result):
    """The tensors of a result in a row."""
    return [tensor for part in result for tensor in (part if isinstance(part, tuple) else (part,))]


def assert_same(result, expected, label=""):
    names = ("out", "out_sf", "out_t", "out_sf_t")
    for name, got, want in zip(names, flat(result), flat(expected)):
        assert_bitwise_equal(got, want, f"{label} {name}")


def assert_close_dweight(got, dy, x, limit, rows):
    """Within fp32 summation error of the sum in fp64."""
    gate, up = x.double().cpu().chunk(2, dim=1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    terms = dy.double().cpu() * gate * torch.sigmoid(gate) * up
    if rows is not None:
        terms[rows.cpu() < 0] = 0
    error = (got.double().cpu() - terms.sum(1)).abs()
    assert (error <= 1e-5 * terms.abs().sum(1) + 1e-30).all(), error.max()
