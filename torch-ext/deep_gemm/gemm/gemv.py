"""The block-scaled FP8 GEMM of one row in plain Triton, for any GPU: made to stream the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .._quant import converts_in_hardware
from .._triton import Launch, jit, tl
from ..utils.math import ceil_div
from .portable import dot_operand
from .reference import Gran

_GRAN = Gran(1, 128, 128, 128)
_WARP_K = 512  # that a warp reads of a row at a time, 16 bytes a thread
# So many keep memory busy.
_PROGRAMS_PER_SM, _WARPS_PER_SM = 4, 12


@dataclass(frozen=True)
class GemvConfig:
    """rows of B and columns of a block of K, which the warps share, for a program."""

    rows: int
    block_k: int
    num_warps: int


def gemv_config(n: int, k: int, num_sms: int) -> GemvConfig:
    """Many rows, for A is read once for them, and few warps, which wait for each other, but enough for memory."""
    rows = next((rows for rows in (4, 2) if ceil_div(n, rows) >= _PROGRAMS_PER_SM * num_sms), 1)
    programs = ceil_div(n, rows)
    num_warps = next((w for w in (1, 2, 4) if w * programs >= _WARPS_PER_SM * num_sms or w * _WARP_K >= k), 8)
    # Two loads a row are on their way at a time, unless that leaves much of the last block empty.
    block_k = num_warps * _WARP_K * 2
    return GemvConfig(rows, block_k // 2 if 4 * (-k % block_k) > k else block_k, num_warps)


def bind(a, sfa, b, sfb, d, gran: Gran, accumulate: bool, num_sms: int) -> Launch | None:
    """What launches the kernel, called with (a, sfa, b, sfb, d) and their pointers; None for tensors it does not serve.

    It serves one row of e4m3 by K-major e4m3 weights, with scale factors for 1x128 by 128x128, of any strides.
    """
    (m, n), k = d.shape, a.shape[1]
    if m != 1 or gran != _GRAN or torch.int8 in (a.dtype, b.dtype) or (k > 1 and (a.stride(1), b.stride(1)) != (1, 1)):
        return None
    config, device = gemv_config(n, k, num_sms), a.device.index if a.is_cuda else -1
    b_stride = b.stride(0) if n > 1 else 16
    unit, k_unit = math.gcd(16, b_stride), math.gcd(16, k)
    args = (
        n, k // k_unit, b_stride // unit, d.stride(1), sfa.stride(1), *sfb.stride(),
        unit, k_unit, k % config.block_k == 0, converts_in_hardware(device), accumulate, config.rows, config.block_k,
    )  # fmt: skip
    grid = (ceil_div(n, config.rows), 1, 1)
    return Launch(fp8_gemm_m1_kernel, grid, args, config.num_warps, device, enable_fp_fusion=True)


@jit
def _load_sf(ptr, group, k, stride_k):
    """fp32 scale factors of groups of K; zero from k on."""
    mask = group * 128 < k
    if ptr.dtype.element_ty == tl.int32:
        word = tl.load(ptr + group // 4 * stride_k, mask=mask, other=0)
        return (((word >> (group % 4 * 8).to(tl.int32)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    else:
        return tl.load(ptr + group * stride_k, mask=mask, other=0.0)


@jit(
    do_not_specialize=("n", "k", "b_stride", "d_stride", "sfa_stride_k", "sfb_stride_n", "sfb_stride_k"),
    do_not_specialize_on_alignment=("sfa_ptr", "sfb_ptr", "d_ptr"),
)
def fp8_gemm_m1_kernel(
    a_ptr,
    sfa_ptr,
    b_ptr,
    sfb_ptr,
    d_ptr,
    n,
    k,
    b_stride,
    d_stride,
    sfa_stride_k,
    sfb_stride_n,
    sfb_stride_k,
    UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    HARDWARE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tl.static_assert(128 % ROWS == 0)  # which share their scale factors
    GROUPS: tl.constexpr = BLOCK_K // 128
    k, row = k.to(tl.int64) * K_UNIT, tl.program_id(0).to(tl.int64) * ROWS
    rows, groups = tl.arange(0, ROWS), tl.arange(0, GROUPS)[None, :, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    # Rows past the last are computed from it and not stored.
    b_rows = tl.minimum(row + rows, n - 1)[:, None] * b_stride * UNIT
    a_ptrs, b_ptrs = a_ptr + cols, b_ptr + (b_rows + cols)
    sfb_ptr += row // 128 * sfb_stride_n
    acc = tl.zeros([ROWS, GROUPS, 8], tl.float32)
    for step in range(((k + BLOCK_K - 1) // BLOCK_K).to(tl.int32)):
        col = tl.cast(step, tl.int64) * BLOCK_K
        mask = None if EVEN_K else cols < k - col
        zero: tl.constexpr = None if EVEN_K else 0
        a, b = tl.load(a_ptrs + col, mask, zero), tl.load(b_ptrs + col, mask, zero)
        group = groups + col // 128
        sf = _load_sf(sfa_ptr, group, k, sfa_stride_k) * _load_sf(sfb_ptr, group, k, sfb_stride_k)
        product = dot_operand(a, "", HARDWARE).to(tl.float32) * dot_operand(b, "", HARDWARE).to(tl.float32)
        # What a thread loaded has one scale factor.
        acc += sf * tl.sum(tl.reshape(product, [ROWS, GROUPS, 8, 16]), 3)
    d_ptrs = d_ptr + (row + rows) * d_stride
    d = tl.sum(tl.sum(acc, 2), 1)
    if ACCUMULATE:
        d += tl.load(d_ptrs, mask=row + rows < n, other=0.0).to(tl.float32)
    tl.store(d_ptrs, d.to(d_ptr.dtype.element_ty), mask=row + rows < n)
