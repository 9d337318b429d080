"""Block-scaled and BF16 GEMMs in plain Triton, for any GPU, shape and strides that `hopper` does not serve."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._quant import converts_in_hardware
from .._tiles import layout, tile_pointers
from .._triton import Launch, jit, tl
from ..utils.math import ceil_div
from .reference import Gran, num_k, packed_dim


@dataclass(frozen=True)
class PortableConfig:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int


def fp8_config(gran: Gran, wide: bool) -> PortableConfig:
    """Tile and warps, one dot for each block of scales; the same for every M, so that a row does not depend on it.

    wide: whether both operands have rows that are read 16 bytes at a time; others take more registers for addresses.
    """
    return PortableConfig(64, 128 if wide else 64, min(gran.k_a, gran.k_b), 8)


def bf16_config(wide: bool) -> PortableConfig:
    """Tile and warps, the same for every M, so that the batch changes no bit of a row."""
    return PortableConfig(64, 128 if wide else 64, 64, 8)


def bind(a, sfa, b, sfb, d, gran: Gran, accumulate: bool) -> Launch:
    """The FP8 or FP4 kernel for tensors of these dtypes, shapes and strides."""
    (m, n), config = d.shape, fp8_config(gran, _is_wide(a) and _is_wide(b))
    device = a.device.index if a.is_cuda else -1
    packed = packed_dim(a, m), packed_dim(b, n)
    scalars, constants = _problem(a, b, d, num_k(a, m), config)
    args = (
        *scalars, *sfa.stride(), *sfb.stride(), *constants, *packed,
        gran.m, gran.n, gran.k_a, gran.k_b, converts_in_hardware(device), accumulate,
        config.block_m, config.block_n, config.block_k,
    )  # fmt: skip
    return Launch(portable_fp8_gemm_kernel, _grid(m, n, config), args, config.num_warps, device)


def bind_bf16(a, b, d, accumulate: bool) -> Launch:
    """The BF16 kernel for tensors of these dtypes, shapes and strides."""
    (m, n), config = d.shape, bf16_config(_is_wide(a) and _is_wide(b))
    device = a.device.index if a.is_cuda else -1
    scalars, constants = _problem(a, b, d, a.shape[1], config)
    args = (*scalars, *constants, accumulate, config.block_m, config.block_n, config.block_k)
    return Launch(portable_bf16_gemm_kernel, _grid(m, n, config), args, config.num_warps, device)


def _is_wide(data):
    major, unit, *_ = layout(data, data.shape[1])
    return major == "n" and unit * data.element_size() >= 16


def _grid(m, n, config):
    return (ceil_div(m, config.block_m) * ceil_div(n, config.block_n), 1, 1)


def _problem(a, b, d, k, config):
    """Sizes and strides, divided by their units, and what kernels know of them when they are compiled."""
    (m, n), layouts = d.shape, (layout(a, a.shape[1]), layout(b, b.shape[1]), layout(d, d.shape[1]))
    # M is left out where it is not needed, so that it never recompiles a kernel for row-major operands.
    m_unit = math.gcd(32, m) if "m" in (layouts[0][0], layouts[2][0]) else 1
    units = m_unit, math.gcd(32, n), math.gcd(32, k)
    strides = [stride for _, _, *pair in layouts for stride in pair]
    majors = [constant for major, unit, *_ in layouts for constant in (major, unit)]
    return (*(size // unit for size, unit in zip((m, n, k), units)), *strides), (
        *units, *majors, k % config.block_k == 0
    )  # fmt: skip


@jit
def tile_of_program(m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Corner of this program's tile; programs that run side by side share rows and columns in L2."""
    GROUP: tl.constexpr = 8
    tiles_m = ((m + BLOCK_M - 1) // BLOCK_M).to(tl.int32)
    tiles_n = ((n + BLOCK_N - 1) // BLOCK_N).to(tl.int32)
    pid = tl.program_id(0)
    first = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = pid % (GROUP * tiles_n)
    return (first + within % height).to(tl.int64) * BLOCK_M, (within // height).to(tl.int64) * BLOCK_N


@jit
def operand_tile(
    ptr, row, mn, k, step, stride_mn, stride_k,
    MAJOR: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_MN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The memory of [BLOCK_MN, BLOCK_K] values from `row` and block `step` of K, zero outside [mn, k]."""
    PER_ROW: tl.constexpr = 2 if PACKED == "mn" else 1
    PER_COL: tl.constexpr = 2 if PACKED == "k" else 1
    rows, cols = tl.arange(0, BLOCK_MN // PER_ROW), tl.arange(0, BLOCK_K // PER_COL)
    row, col = row // PER_ROW, tl.cast(step, tl.int64) * (BLOCK_K // PER_COL)
    mask = (rows < mn // PER_ROW - row)[:, None]
    if not EVEN_K:
        mask = mask & (cols < k // PER_COL - col)[None, :]
    return tl.load(tile_pointers(ptr, row, col, rows, cols, stride_mn, stride_k, MAJOR, UNIT), mask=mask, other=0)


@jit
def e4m3_of_e2m1(packed, PACKED: tl.constexpr):
    """e4m3 bytes of packed e2m1 values, exact."""
    byte = packed.to(tl.uint8, bitcast=True)
    low, high = byte & 15, byte >> 4
    if PACKED == "k":
        code = tl.interleave(low, high)
    else:
        code = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [2 * byte.shape[0], byte.shape[1]])
    magnitude = code & 7
    return tl.where(magnitude < 2, magnitude * 0x30, magnitude * 4 + 0x30) | ((code & 8) << 4)


@jit
def dot_operand(tile, PACKED: tl.constexpr, HARDWARE: tl.constexpr):
    """What tensor cores take: e4m3, or below sm_89 fp16, which holds every e4m3 value."""
    byte = tile
    if PACKED != "":
        byte = e4m3_of_e2m1(tile, PACKED)
    if HARDWARE:
        return byte.to(tl.float8e4nv, bitcast=True)
    else:
        bits = byte.to(tl.int16)
        magnitude = bits & 0x7F
        # The exponents of fp16 start 8 lower, which leaves room for e4m3's subnormals.
        value = (magnitude << 7).to(tl.float16, bitcast=True) * 256.0
        value = tl.where(magnitude == 0x7F, float("nan"), value).to(tl.float16)
        return (value.to(tl.int16, bitcast=True) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)


@jit
def scale_factors(ptr, row, rows, mask, step, stride_mn, stride_k, GRAN_MN: tl.constexpr, PER_GROUP: tl.constexpr):
    """fp32 scale factors of rows, for block `step` of K, of which PER_GROUP share a scale factor."""
    group = step // PER_GROUP
    index = ((row + rows) // GRAN_MN) * stride_mn
    if ptr.dtype.element_ty == tl.int32:
        word = tl.load(ptr + index + tl.cast(group // 4, tl.int64) * stride_k, mask=mask, other=0)
        return (((word >> (group % 4 * 8)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    else:
        return tl.load(ptr + index + tl.cast(group, tl.int64) * stride_k, mask=mask, other=0.0)


@jit
def store_d(
    d_ptr, acc, row, col, m, n, stride_m, stride_n,
    MAJOR: tl.constexpr, UNIT: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Round the tile, or its sum with what is there, into d."""
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    mask = (rows < m - row)[:, None] & (cols < n - col)[None, :]
    tile = tile_pointers(d_ptr, row, col, rows, cols, stride_m, stride_n, MAJOR, UNIT)
    if ACCUMULATE:
        acc = tl.load(tile, mask=mask, other=0.0).to(tl.float32) + acc
    tl.store(tile, acc.to(d_ptr.dtype.element_ty), mask=mask)


@jit(
    do_not_specialize=(
        "m", "n", "k", "a_stride_m", "a_stride_k", "b_stride_n", "b_stride_k", "d_stride_m", "d_stride_n",
        "sfa_stride_m", "sfa_stride_k", "sfb_stride_n", "sfb_stride_k",
    ),
    do_not_specialize_on_alignment=("sfa_ptr", "sfb_ptr"),
)  # fmt: skip
def portable_fp8_gemm_kernel(
    a_ptr,
    sfa_ptr,
    b_ptr,
    sfb_ptr,
    d_ptr,
    m,
    n,
    k,
    a_stride_m,
    a_stride_k,
    b_stride_n,
    b_stride_k,
    d_stride_m,
    d_stride_n,
    sfa_stride_m,
    sfa_stride_k,
    sfb_stride_n,
    sfb_stride_k,
    M_UNIT: tl.constexpr,
    N_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    A_MAJOR: tl.constexpr,
    A_UNIT: tl.constexpr,
    B_MAJOR: tl.constexpr,
    B_UNIT: tl.constexpr,
    D_MAJOR: tl.constexpr,
    D_UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    A_PACKED: tl.constexpr,
    B_PACKED: tl.constexpr,
    GRAN_M: tl.constexpr,
    GRAN_N: tl.constexpr,
    GRAN_K_A: tl.constexpr,
    GRAN_K_B: tl.constexpr,
    HARDWARE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tl.static_assert(GRAN_K_A % BLOCK_K == 0 and GRAN_K_B % BLOCK_K == 0)
    m, n, k = m.to(tl.int64) * M_UNIT, n.to(tl.int64) * N_UNIT, k.to(tl.int64) * K_UNIT
    row, col = tile_of_program(m, n, BLOCK_M, BLOCK_N)
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(((k + BLOCK_K - 1) // BLOCK_K).to(tl.int32)):
        a = operand_tile(
            a_ptr, row, m, k, step, a_stride_m, a_stride_k, A_MAJOR, A_UNIT, A_PACKED, EVEN_K, BLOCK_M, BLOCK_K
        )
        b = operand_tile(
            b_ptr, col, n, k, step, b_stride_n, b_stride_k, B_MAJOR, B_UNIT, B_PACKED, EVEN_K, BLOCK_N, BLOCK_K
        )
        sfa = scale_factors(
            sfa_ptr, row, rows, rows < m - row, step, sfa_stride_m, sfa_stride_k, GRAN_M, GRAN_K_A // BLOCK_K
        )
        sfb = scale_factors(
            sfb_ptr, col, cols, cols < n - col, step, sfb_stride_n, sfb_stride_k, GRAN_N, GRAN_K_B // BLOCK_K
        )
        # Hopper's tensor cores keep few bits of a sum of FP8 products: it never gets longer than a block.
        product = tl.dot(dot_operand(a, A_PACKED, HARDWARE), tl.trans(dot_operand(b, B_PACKED, HARDWARE)))
        acc += (sfa[:, None] * sfb[None, :]) * product
    store_d(d_ptr, acc, row, col, m, n, d_stride_m, d_stride_n, D_MAJOR, D_UNIT, ACCUMULATE, BLOCK_M, BLOCK_N)


@jit(
    do_not_specialize=(
        "m", "n", "k", "a_stride_m", "a_stride_k", "b_stride_n", "b_stride_k", "d_stride_m", "d_stride_n"
    ),
)  # fmt: skip
def portable_bf16_gemm_kernel(
    a_ptr,
    b_ptr,
    d_ptr,
    m,
    n,
    k,
    a_stride_m,
    a_stride_k,
    b_stride_n,
    b_stride_k,
    d_stride_m,
    d_stride_n,
    M_UNIT: tl.constexpr,
    N_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    A_MAJOR: tl.constexpr,
    A_UNIT: tl.constexpr,
    B_MAJOR: tl.constexpr,
    B_UNIT: tl.constexpr,
    D_MAJOR: tl.constexpr,
    D_UNIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m, n, k = m.to(tl.int64) * M_UNIT, n.to(tl.int64) * N_UNIT, k.to(tl.int64) * K_UNIT
    row, col = tile_of_program(m, n, BLOCK_M, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(((k + BLOCK_K - 1) // BLOCK_K).to(tl.int32)):
        a = operand_tile(a_ptr, row, m, k, step, a_stride_m, a_stride_k, A_MAJOR, A_UNIT, "", EVEN_K, BLOCK_M, BLOCK_K)
        b = operand_tile(b_ptr, col, n, k, step, b_stride_n, b_stride_k, B_MAJOR, B_UNIT, "", EVEN_K, BLOCK_N, BLOCK_K)
        acc = tl.dot(a, tl.trans(b), acc)
    store_d(d_ptr, acc, row, col, m, n, d_stride_m, d_stride_n, D_MAJOR, D_UNIT, ACCUMULATE, BLOCK_M, BLOCK_N)
