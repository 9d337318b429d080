"""Casts to FP8 by block and by channel, and to FP4, each one Triton kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ._call import (
    Plan,
    Planned,
    Spec,
    allocate,
    check_matrix,
    check_outputs,
    is_traced,
    placeholders,
    served_by_triton,
    sf_spec,
)
from ._ops import add_op_namespace_prefix, ops
from ._quant import max_abs_bits, reciprocal, to_fp32
from ._tile_cast import TileCast
from ._tiles import layout, tile_pointers
from ._triton import Launch, jit, tl
from .utils.math import ceil_div, per_token_cast_to_fp4


def fused_per_block_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    with_transpose: bool = False,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
    out_t: torch.Tensor | None = None,
    out_sf_t: torch.Tensor | None = None,
):
    """Cast `gran_k` x `gran_k` blocks of `x` to e4m3: `utils.per_block_cast_to_fp8` in one kernel, for weights.

    Args:
        x: `[M, N]` bf16, fp16 or fp32, any strides.
        gran_k: 32 or 128; blocks at the edges may be partial.
        with_transpose: also return the transpose, K-major for dgrad, from the same read of x.
        out, out_sf, out_t, out_sf_t: written in place and returned where given, with any strides.
    Returns:
        `(x_fp8, sf)`: `[M, N]` e4m3 and fp32 `[ceil(M / gran_k), ceil(N / gran_k)]`, row-major. With `with_transpose`
        `((x_fp8, sf), (xT_fp8, sfT))`: also `[N, M]` e4m3 with rows at multiples of 16 bytes and fp32
        `[ceil(N / gran_k), ceil(M / gran_k)]`, row-major.
    Raises:
        TypeError, ValueError: as `fused_per_token_cast_to_fp8`, and for out_t or out_sf_t without with_transpose.
    """
    if with_transpose:
        outputs = _BLOCK_TRANSPOSED(x, None, (out, out_sf, out_t, out_sf_t), use_ue8m0, gran_k, False, 1)
        return outputs[:2], outputs[2:]
    if out_t is not None or out_sf_t is not None:
        raise ValueError("out_t and out_sf_t need with_transpose=True")
    return _BLOCK(x, None, (out, out_sf), use_ue8m0, gran_k, False, 1)


def fused_per_channel_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast each column of `x` to e4m3 in groups of `gran_k` rows: `utils.per_channel_cast_to_fp8` in one kernel.

    Args:
        x: `[M, N]` bf16, fp16 or fp32, any strides, M a multiple of gran_k.
        gran_k: 32 or 128.
        out, out_sf: written in place and returned where given, with any strides.
    Returns:
        `(x_fp8, sf)`: `[M, N]` e4m3 and fp32 `[M / gran_k, N]`, row-major; `sf.T` is MN-major for `x_fp8.T`.
    Raises:
        TypeError, ValueError: as `fused_per_token_cast_to_fp8`, and for an M that gran_k does not divide.
    """
    return _CHANNEL(x, None, (out, out_sf), use_ue8m0, gran_k, False, 1)


def fused_per_token_cast_to_fp4(
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast each row of `x` to packed e2m1 in groups of `gran_k` columns: `utils.per_token_cast_to_fp4` in one kernel.

    Args:
        x: `[M, N]` bf16, fp16 or fp32, any strides, N even.
        gran_k: 32 or 128; the last group of a row may be partial.
        use_packed_ue8m0: as in `fused_per_token_cast_to_fp8`.
        out, out_sf: written in place and returned where given, with any strides.
    Returns:
        `(packed, sf)`: int8 `[M, N / 2]`, even columns in the low nibble, ties rounded toward zero, and the scale
        factors as in `fused_per_token_cast_to_fp8` but for 1/6 in place of 1/448.
    Raises:
        TypeError, ValueError: as `fused_per_token_cast_to_fp8`, and for an odd N.
    """
    if is_traced(x):
        specs = _check_fp4(x, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf)
        out, out_sf = allocate((out, out_sf), specs, x)
        ops.fused_per_token_cast_to_fp4(x.detach(), use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf)
        return out, out_sf
    return _per_token_cast_to_fp4((x,), (out, out_sf), use_ue8m0, gran_k, use_packed_ue8m0)


_BLOCK = TileCast("block", "", ("out", "out_sf"))
_BLOCK_TRANSPOSED = TileCast("block", "block", ("out", "out_sf", "out_t", "out_sf_t"))
_CHANNEL = TileCast("channel", "", ("out", "out_sf"))


@torch.library.custom_op(add_op_namespace_prefix("fused_per_token_cast_to_fp4"), mutates_args=("out", "out_sf"))
def _op(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int, use_packed_ue8m0: bool, out: torch.Tensor, out_sf: torch.Tensor
) -> None:
    _per_token_cast_to_fp4((x,), (out, out_sf), use_ue8m0, gran_k, use_packed_ue8m0)


@torch.library.register_fake(add_op_namespace_prefix("fused_per_token_cast_to_fp4"))
def _(x, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf):
    return None


def _check_fp4(x, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf) -> tuple[Spec, Spec]:
    check_matrix("x", x, torch.bfloat16, torch.float16, torch.float32)
    m, n = x.shape
    if n % 2:
        raise ValueError(f"x must have an even number of columns, got {n}")
    specs = (Spec((m, n // 2), torch.int8), sf_spec((m,), n, use_ue8m0, gran_k, use_packed_ue8m0))
    return check_outputs(("out", "out_sf"), (out, out_sf), x, specs)


def _make_plan(inputs, outputs, *recipe) -> Plan:
    (x,) = inputs
    specs = _check_fp4(x, *recipe, *outputs)
    empty, launch = x.numel() == 0, None
    if not empty and served_by_triton(x.device):
        launch = bind_per_token_cast_to_fp4(x, *recipe, *placeholders(outputs, specs))
    return Plan(inputs, outputs, specs, launch, lambda x: per_token_cast_to_fp4(x, *recipe), empty)


_per_token_cast_to_fp4 = Planned(_make_plan, ("x", "out", "out_sf"))


@dataclass(frozen=True)
class Fp4CastConfig:
    block_m: int
    block_n: int
    num_warps: int


def fp4_cast_config() -> Fp4CastConfig:
    """Tile and warps of the cast to FP4, the same for every M and N so that neither recompiles.

    Its arithmetic is close to what the SMs can issue: 32 elements a thread share the addresses, and make a 16-byte store.
    """
    return Fp4CastConfig(4, 1024, 4)


def bind_per_token_cast_to_fp4(x, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf) -> Launch:
    """The kernel for tensors of these dtypes, shapes and strides."""
    m, n = x.shape
    x_major, x_unit, *x_strides = layout(x, n)
    out_major, out_unit, *out_strides = layout(out, n // 2)
    n_unit = math.gcd(32, n)
    config = fp4_cast_config()
    device = x.device.index if x.is_cuda else -1
    scalars = (m, n // n_unit, *x_strides, *out_strides, *out_sf.stride())
    constants = (
        n_unit, x_major, x_unit, out_major, out_unit, int(gran_k), bool(use_ue8m0), bool(use_packed_ue8m0),
        device >= 0, n % config.block_n == 0, config.block_m, config.block_n,
    )  # fmt: skip
    tiles_m = ceil_div(m, config.block_m)
    # Axes y and z end at 65535.
    grid = (ceil_div(n, config.block_n), min(tiles_m, 65535), ceil_div(tiles_m, 65535))
    return Launch(per_token_cast_to_fp4_kernel, grid, scalars + constants, config.num_warps, device)


def _to_e2m1_asm() -> str:
    """Eight fp32 values, $1 to $4 the even columns and $5 to $8 the odd ones, to a word of e2m1.

    The index of |y| is what its bits as fp16 of y * 2^-14 round to at bit 9. Ties go toward zero because the product is
    with the number below 2^-14, and what it and the truncation to fp16 take off is less than the spacing of fp32.
    """

    def halves(clamp):
        # Bytes 1 and 3 of a pair of fp16 values have the sign on top and the index in bits 1 to 3.
        lines = []
        for h, low, high in (("h0", "$1", "$2"), ("h1", "$3", "$4"), ("h2", "$5", "$6"), ("h3", "$7", "$8")):
            for register, y in (("a", low), ("b", high)):
                if clamp:
                    lines.append(f"min.f32 {register}, {y}, 0f40C00000; max.f32 {register}, {register}, 0fC0C00000;")
                lines.append(f"mul.rz.f32 {register}, {register if clamp else y}, 0f387FFFFF;")
            lines.append(f"cvt.rz.f16x2.f32 {h}, b, a;")
        return lines

    lines = [".reg .f32 a, b;", ".reg .b32 h0, h1, h2, h3, even, odd, signs;", ".reg .pred finite;", *halves(False)]
    # Only Inf and NaN, which are 6 and -6 then, are that large.
    lines += [
        "or.b32 even, h0, h1;", "or.b32 odd, h2, h3;", "or.b32 even, even, odd;", "and.b32 even, even, 0x70007000;",
        "setp.eq.u32 finite, even, 0;", "@finite bra DONE;", *halves(True), "DONE:",
    ]  # fmt: skip
    lines += [f"add.u32 h{i}, h{i}, 0x01000100;" for i in range(4)]
    lines += ["prmt.b32 even, h0, h1, 0x7531;", "prmt.b32 odd, h2, h3, 0x7531;"]
    lines += ["shr.b32 signs, even, 4;", "and.b32 signs, signs, 0x08080808;", "and.b32 h0, odd, 0x80808080;"]
    lines += ["or.b32 signs, signs, h0;", "shr.b32 even, even, 1;", "and.b32 even, even, 0x07070707;"]
    lines += ["shl.b32 odd, odd, 3;", "and.b32 odd, odd, 0x70707070;", "or.b32 even, even, odd;"]
    # Zero has no sign: a nibble's top bit is set by the addition where its index is not 0.
    lines += ["add.u32 odd, even, 0x77777777;", "and.b32 odd, odd, signs;", "or.b32 $0, even, odd;"]
    return "{" + " ".join(lines) + "}"


# Without Triton nothing reads them.
_TO_E2M1 = tl and tl.constexpr(_to_e2m1_asm())
_TO_E2M1_REGISTERS = tl and tl.constexpr("=&r" + ",r" * 8)


@jit
def _e2m1_code(y):
    """As int32, of fp32 values."""
    magnitude = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Bits order like the magnitudes, with NaN on top.
    code = (magnitude > 0x3E800000).to(tl.int32) + (magnitude > 0x3F400000) + (magnitude > 0x3FA00000)
    code = code + (magnitude > 0x3FE00000) + (magnitude > 0x40200000) + (magnitude > 0x40600000)
    code = code + (magnitude > 0x40A00000)
    return code + tl.where((y < 0) & (code != 0), 8, 0)


@jit
def _fp4_sf(amax_bits, USE_UE8M0: tl.constexpr, HARDWARE: tl.constexpr):
    """`group_sf` for e2m1."""
    sf = tl.maximum(amax_bits, 0x38D1B717).to(tl.float32, bitcast=True) * 0.16666666666666666  # fp32(1/6)
    if USE_UE8M0:
        bits = (tl.minimum(sf.to(tl.int32, bitcast=True), 0x7F000000) + 0x7FFFFF) & 0x7F800000
        sf = bits.to(tl.float32, bitcast=True)
        inv = tl.maximum(0x7F000000 - bits, 0x400000).to(tl.float32, bitcast=True)
    else:
        inv = reciprocal(sf, HARDWARE)
    return sf, inv


@jit(
    do_not_specialize=(
        "m", "n", "x_stride_m", "x_stride_n", "out_stride_m", "out_stride_n", "sf_stride_m", "sf_stride_n"
    ),
    do_not_specialize_on_alignment=("sf_ptr",),
)  # fmt: skip
def per_token_cast_to_fp4_kernel(
    x_ptr,
    out_ptr,
    sf_ptr,
    m,
    n,
    x_stride_m,
    x_stride_n,
    out_stride_m,
    out_stride_n,
    sf_stride_m,
    sf_stride_n,
    N_UNIT: tl.constexpr,
    X_MAJOR: tl.constexpr,
    X_UNIT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    GRAN_K: tl.constexpr,
    USE_UE8M0: tl.constexpr,
    PACKED: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tl.static_assert(BLOCK_N % GRAN_K == 0)
    GROUPS: tl.constexpr = BLOCK_N // GRAN_K
    col = tl.program_id(0).to(tl.int64) * BLOCK_N
    row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    pairs = tl.arange(0, BLOCK_N // 2)
    row_mask = (rows < m.to(tl.int64) - row)[:, None]
    mask, pair_mask = row_mask, row_mask
    if not EVEN_N:
        mask = mask & (cols < n.to(tl.int64) * N_UNIT - col)[None, :]
        pair_mask = pair_mask & (pairs < n.to(tl.int64) * (N_UNIT // 2) - col // 2)[None, :]

    x_tile = tile_pointers(x_ptr, row, col, rows, cols, x_stride_m, x_stride_n, X_MAJOR, X_UNIT)
    x = tl.load(x_tile, mask=mask, other=0.0)  # [BLOCK_M, BLOCK_N]
    groups = tl.reshape(to_fp32(x, HARDWARE), [BLOCK_M, GROUPS, GRAN_K])
    amax_bits = max_abs_bits(groups, HARDWARE)
    sf, inv = _fp4_sf(amax_bits, USE_UE8M0, HARDWARE)  # [BLOCK_M, GROUPS]
    low, high = tl.split(tl.reshape(groups * inv[:, :, None], [BLOCK_M, BLOCK_N // 2, 2]))
    if HARDWARE:
        byte = tl.inline_asm_elementwise(
            _TO_E2M1, _TO_E2M1_REGISTERS, args=[low, high], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        byte = (_e2m1_code(low) | (_e2m1_code(high) << 4)).to(tl.int8)
    out_tile = tile_pointers(out_ptr, row, col // 2, rows, pairs, out_stride_m, out_stride_n, OUT_MAJOR, OUT_UNIT)
    tl.store(out_tile, byte, mask=pair_mask)

    group = tl.arange(0, GROUPS)
    sf_mask = row_mask & (group * GRAN_K < n.to(tl.int64) * N_UNIT - col)[None, :]
    group = group.to(tl.int64) + col // GRAN_K
    sf_row = (row + rows.to(tl.int64)) * sf_stride_m
    if PACKED:
        # Bytes of a word: the first group is the lowest.
        sf_bytes = sf_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        sf_tile = sf_bytes + (sf_row[:, None] + (group // 4 * sf_stride_n)[None, :]) * 4 + (group % 4)[None, :]
        tl.store(sf_tile, (sf.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=sf_mask)
    else:
        tl.store(sf_ptr + (sf_row[:, None] + (group * sf_stride_n)[None, :]), sf, mask=sf_mask)
