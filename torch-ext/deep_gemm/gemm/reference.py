"""The block-scaled GEMM in plain PyTorch: what every kernel is held to, and what serves devices without Triton.

For each block of K that has one scale factor on either side, `acc += (sfa * sfb) * (A_block @ B_block^T)` in fp32,
the product of the scale factors rounded first; then `d = round(c + acc)`, once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..utils.math import _dequantize_from_fp4_e2m1, _unpack_nibbles, unpack_ue8m0_from_int

_MAX_ELEMENTS = 1 << 24  # of an accumulator


@dataclass(frozen=True)
class Gran:
    """Elements that share a scale factor: rows of A, rows of B, and columns (K) of either."""

    m: int
    n: int
    k_a: int
    k_b: int


def packed_dim(data: torch.Tensor, mn: int) -> str:
    """The dimension of an operand of `mn` rows along which a byte holds two values: "k", "mn", or "" for FP8."""
    if data.dtype != torch.int8:
        return ""
    return "k" if data.shape[0] == mn else "mn"


def num_k(data: torch.Tensor, mn: int) -> int:
    """K of an operand of `mn` rows."""
    return data.shape[1] * (2 if packed_dim(data, mn) == "k" else 1)


@torch.no_grad()
def fp8_gemm(a, sfa, b, sfb, c, shape, dtype, gran: Gran) -> torch.Tensor:
    """`c + A @ B^T` of `shape` (M, N) and `dtype`; c may be None.

    a, b: e4m3 or int8 (packed e2m1) `[M, K]`, `[N, K]`; sfa, sfb: fp32 or packed int32, as `gran` says.
    """
    m, n = shape
    k = num_k(a, m)
    sfa, sfb = _sf_rows(sfa, gran.m, m), _sf_rows(sfb, gran.n, n)
    d = torch.empty(shape, dtype=dtype, device=a.device)
    with torch.autocast(a.device.type, enabled=False):
        _sum_blocks(a, sfa, b, sfb, c, d, k, gran)
    return d


def _sum_blocks(a, sfa, b, sfb, c, d, k, gran):
    m, n = d.shape
    step, rows = min(gran.k_a, gran.k_b), max(128, _MAX_ELEMENTS // max(n, 1) // 128 * 128)
    for i in range(0, m, rows):
        part = slice(i, min(i + rows, m))
        acc = torch.zeros(part.stop - i, n, dtype=torch.float32, device=a.device)
        for j in range(0, k, step):
            columns = slice(j, min(j + step, k))
            product = _values(a, m, part, columns) @ _values(b, n, slice(0, n), columns).T
            acc += (sfa[part, j // gran.k_a, None] * sfb[None, :, j // gran.k_b]) * product
        d[part] = acc if c is None else c[part].float() + acc


@torch.no_grad()
def bf16_gemm(a, b, c, shape, dtype) -> torch.Tensor:
    """`c + A @ B^T` of `shape` (M, N) and `dtype`, the product in fp32; c may be None."""
    with torch.autocast(a.device.type, enabled=False):
        acc = a.float() @ b.float().T
    return (acc if c is None else c.float() + acc).to(dtype)


def _sf_rows(sf, gran_mn, mn):
    """fp32 scale factors, one row for each of `mn` rows."""
    sf = unpack_ue8m0_from_int(sf) if sf.dtype == torch.int32 else sf
    return sf.repeat_interleave(gran_mn, dim=0)[:mn]


def _values(data, mn, rows, columns):
    """fp32 values of a block of an operand."""
    packed = packed_dim(data, mn)
    if packed == "k":
        return _e2m1(data[rows, columns.start // 2 : columns.stop // 2])
    if packed == "mn":  # blocks of rows start at even ones
        return _e2m1(data[rows.start // 2 : rows.stop // 2, columns].T).T
    return data[rows, columns].float()


def _e2m1(packed):
    return _dequantize_from_fp4_e2m1(_unpack_nibbles(packed.contiguous()))
