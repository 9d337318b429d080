"""Operands of GEMMs whose product is exact, and their oracle in NumPy.

Values are small powers of two, scale factors differ by powers of two between neighbouring groups: up to K = 8192 every
partial sum fits into 24 bits, in any order, so that a right answer is right to the last bit.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from generators import DEVICE, deep_gemm

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
math = deep_gemm.utils.math
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# (gran_m, gran_k_a), (gran_n, gran_k_b)
RECIPES = {
    "1x128 by 128x128": ((1, 128), (128, 128)),
    "1x128 by 1x128": ((1, 128), (1, 128)),
    "1x32 by 1x32": ((1, 32), (1, 32)),
    "1x128 by 1x32": ((1, 128), (1, 32)),
    "128x32 by 128x128": ((128, 32), (128, 128)),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@dataclass
class Operand:
    """data and sf as a GEMM takes them; `values`: the fp64 matrix that they stand for, on the host."""

    data: torch.Tensor
    sf: torch.Tensor
    values: np.ndarray

    @property
    def pair(self):
        return self.data, self.sf

    @property
    def transposed(self):
        return self.data.T, self.sf.T


def operand(mn, k, gran, seed=0, packed=False, fp4=False, device=DEVICE) -> Operand:
    """An operand of mn rows; packed: UE8M0 scale factors, four to a word."""
    gran_mn, gran_k = gran
    random = np.random.default_rng(seed)
    codes = random.choice([2, 4], (mn, k)) + 8 * random.integers(0, 2, (mn, k))  # of e2m1: 1, 2, -1 and -2
    values = np.where(codes & 8, -1, 1) * _E2M1[codes & 7]
    rows, groups = np.arange(-(-mn // gran_mn))[:, None], np.arange(-(-k // gran_k))[None, :]
    exponent = (3 * rows + 2 * groups + seed) % 5
    dequantized = values * np.exp2(exponent)[np.arange(mn)[:, None] // gran_mn, np.arange(k)[None, :] // gran_k]
    if fp4:
        data = torch.tensor((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)).view(torch.int8)
    else:
        data = torch.tensor(values, dtype=FP32).to(E4M3)
    if packed:
        # 255 in unused bytes, which would give Inf.
        biased = np.pad(exponent + 127, ((0, 0), (0, -exponent.shape[1] % 4)), constant_values=255).astype("<i8")
        words = sum(biased[:, i::4] << 8 * i for i in range(4))
        sf = torch.tensor(words.astype(np.uint32).astype(np.int64)).to(torch.int32)
    else:
        sf = torch.tensor(np.exp2(exponent), dtype=FP32)
    return Operand(data.to(device), sf.to(device), dequantized)


def bf16_operand(mn, k, seed=0, device=DEVICE) -> Operand:
    """A bf16 operand, without scale factors."""
    values = operand(mn, k, (1, 32), seed, device="cpu").values
    return Operand(torch.tensor(values, dtype=BF16, device=device), None, values)


def product(a: Operand, b: Operand) -> torch.Tensor:
    """A @ B^T in fp64."""
    return torch.tensor(a.values @ b.values.T)


def addend(m, n, dtype=FP32, device=DEVICE):
    """Small integers, different from each other in rows and columns."""
    rows, columns = torch.arange(m, device=device)[:, None], torch.arange(n, device=device)[None, :]
    return ((rows * 7 + columns * 3) % 61 - 30).to(dtype)


def nan(m, n, dtype=FP32, device=DEVICE):
    return torch.full((m, n), torch.nan, dtype=dtype, device=device)


def assert_product(d, expected, label=""):
    """Raise unless d holds the fp64 values, rounded once."""
    assert expected.eq(expected.float()).all(), "the oracle has more than 24 bits"
    deep_gemm.testing.assert_bitwise_equal(d, expected.float().to(d.dtype).to(d.device), label)
