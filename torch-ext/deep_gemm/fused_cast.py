"""Casts to FP8, each one Triton kernel."""

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
from ._quant import converts_in_hardware, group_sf, max_abs_bits, to_e4m3, to_e4m3_inf_to_nan, to_fp32, torch_saturates
from ._tiles import layout, tile_pointers
from ._triton import Launch, jit, tl
from .utils.math import ceil_div, per_token_cast_to_fp8


def fused_per_token_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast each row of `x` to e4m3 in groups of `gran_k` columns: `utils.per_token_cast_to_fp8` in one kernel.

    For each group `sf = max(max|x|, 1e-4) * fp32(1/448)`, rounded up to a power of two with `use_ue8m0`, and
    `x_fp8 = e4m3(fp32(x) * (1 / sf))`: every byte equals the reference's on the same device, NaN and Inf included.

    Args:
        x: `[M, N]` bf16, fp16 or fp32, any strides; no copy is made of it.
        use_ue8m0: scale factors that are powers of two.
        gran_k: columns of a group, 32 or 128; the last group of a row may be partial.
        use_packed_ue8m0: scale factors as UE8M0 bytes, four groups to an int32, the first in the lowest byte; needs
            `use_ue8m0` and a number of groups that is a multiple of 4.
        out, out_sf: written in place and returned where given, with any strides, and nothing outside them: `[M, N]`
            e4m3, and `[M, ceil(N / gran_k)]` fp32 or, packed, `[M, ceil(N / gran_k) / 4]` int32. Else new, row-major.
    Returns:
        `(x_fp8, sf)`, without gradient. CPU tensors take the reference. No host sync; works in CUDA graphs (call it
        once before the capture, to compile) and under torch.compile, whose functionalisation is limited for e4m3:
        inside a compiled function give whole tensors, or views of a uint8 buffer, as outputs.
    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape or device, or an output that requires grad or
            overlaps the input, itself or the other output. Nothing is written then.
    """
    if type(gran_k) is not int:  # 128.0 would find the plan of 128
        raise TypeError(f"gran_k must be an int, 32 or 128, got {gran_k!r}")
    use_ue8m0, use_packed_ue8m0 = not not use_ue8m0, not not use_packed_ue8m0
    if is_traced(x):
        specs = _check(x, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf)
        out, out_sf = allocate((out, out_sf), specs, x)
        # As bytes, for torch compares no e4m3 tensors when opcheck asks it to.
        ops.fused_per_token_cast_to_fp8(
            x.detach(), use_ue8m0, gran_k, use_packed_ue8m0, out.view(torch.uint8), out_sf
        )
        return out, out_sf
    return _per_token_cast((x,), (out, out_sf), use_ue8m0, gran_k, use_packed_ue8m0)


@torch.library.custom_op(add_op_namespace_prefix("fused_per_token_cast_to_fp8"), mutates_args=("out", "out_sf"))
def _op(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int, use_packed_ue8m0: bool, out: torch.Tensor, out_sf: torch.Tensor
) -> None:
    _per_token_cast((x,), (out.view(torch.float8_e4m3fn), out_sf), use_ue8m0, gran_k, use_packed_ue8m0)


@torch.library.register_fake(add_op_namespace_prefix("fused_per_token_cast_to_fp8"))
def _(x, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf):
    return None


def _check(x, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf) -> tuple[Spec, Spec]:
    """Refuse what types, dtypes, shapes and strides say is wrong; what `out` and `out_sf` are to be."""
    check_matrix("x", x, torch.bfloat16, torch.float16, torch.float32)
    m, n = x.shape
    specs = (Spec((m, n), torch.float8_e4m3fn), sf_spec((m,), n, use_ue8m0, gran_k, use_packed_ue8m0))
    return check_outputs(("out", "out_sf"), (out, out_sf), x, specs)


def _make_plan(inputs, outputs, *recipe) -> Plan:
    (x,) = inputs
    specs = _check(x, *recipe, *outputs)
    empty, launch = x.numel() == 0, None
    if not empty and served_by_triton(x.device):
        launch = bind_per_token_cast(x, *recipe, *placeholders(outputs, specs))
    return Plan(inputs, outputs, specs, launch, lambda x: per_token_cast_to_fp8(x, *recipe), empty)


_per_token_cast = Planned(_make_plan, ("x", "out", "out_sf"))


@dataclass(frozen=True)
class CastConfig:
    block_m: int
    block_n: int
    num_warps: int


def cast_config(x_major: str, n: int, sf_mn_major: bool) -> CastConfig:
    """Tile and warps of the per-token cast, the same for every M, so that M never recompiles.

    Sixteen elements a thread make one 16-byte store; few rows in a tile keep a single token's latency low, narrow rows
    share a tile, and MN-major scale factors want more of them, for longer runs of memory.
    """
    if x_major == "m":
        return CastConfig(64, 128, 8)
    block_n = min(512 if sf_mn_major else 1024, max(128, 1 << (n - 1).bit_length()))
    return CastConfig(2048 // block_n, block_n, 4)


def bind_per_token_cast(x, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf) -> Launch:
    """The kernel for tensors of these dtypes, shapes and strides, which it gets divided by their units."""
    m, n = x.shape
    x_major, x_unit, *x_strides = layout(x, n)
    out_major, out_unit, *out_strides = layout(out, n)
    # M is left out where it is not needed, so that it never recompiles a row-major cast.
    m_unit, n_unit = (math.gcd(16, m) if x_major == "m" else 1), math.gcd(16, n)
    sf_row_major = out_sf.shape[1] == 1 or out_sf.stride(1) == 1
    config = cast_config(x_major, n, sf_mn_major=not sf_row_major and out_sf.stride(0) == 1)
    device = x.device.index if x.is_cuda else -1
    # With fp32 scale factors Inf meets a zero reciprocal and is NaN before the rounding.
    saturate = torch_saturates() or not use_ue8m0
    scalars = (m // m_unit, n // n_unit, *x_strides, *out_strides, *out_sf.stride())
    constants = (
        m_unit, n_unit, x_major, x_unit, out_major, out_unit, sf_row_major,
        gran_k, use_ue8m0, use_packed_ue8m0, converts_in_hardware(device), saturate,
        n % config.block_n == 0, config.block_m, config.block_n,
    )  # fmt: skip
    tiles_m = ceil_div(m, config.block_m)
    # Axes y and z end at 65535.
    grid = (ceil_div(n, config.block_n), min(tiles_m, 65535), ceil_div(tiles_m, 65535))
    return Launch(per_token_cast_kernel, grid, scalars + constants, config.num_warps, device)


@jit(
    do_not_specialize=(
        "m", "n", "x_stride_m", "x_stride_n", "out_stride_m", "out_stride_n", "sf_stride_m", "sf_stride_n"
    ),
    do_not_specialize_on_alignment=("sf_ptr",),
)  # fmt: skip
def per_token_cast_kernel(
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
    M_UNIT: tl.constexpr,
    N_UNIT: tl.constexpr,
    X_MAJOR: tl.constexpr,
    X_UNIT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    SF_ROW_MAJOR: tl.constexpr,
    GRAN_K: tl.constexpr,
    USE_UE8M0: tl.constexpr,
    PACKED: tl.constexpr,
    HARDWARE: tl.constexpr,
    SATURATE: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tl.static_assert(BLOCK_N % GRAN_K == 0)
    GROUPS: tl.constexpr = BLOCK_N // GRAN_K
    col = tl.program_id(0).to(tl.int64) * BLOCK_N
    row = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    row_mask = (rows < m.to(tl.int64) * M_UNIT - row)[:, None]
    columns = n.to(tl.int64) * N_UNIT - col
    mask = row_mask
    if not EVEN_N:
        mask = mask & (cols < columns)[None, :]

    x_tile = tile_pointers(x_ptr, row, col, rows, cols, x_stride_m, x_stride_n, X_MAJOR, X_UNIT)
    x = to_fp32(tl.load(x_tile, mask=mask, other=0.0), HARDWARE)  # [BLOCK_M, BLOCK_N]
    groups = tl.reshape(x, [BLOCK_M, GROUPS, GRAN_K])
    amax_bits = max_abs_bits(groups, HARDWARE)
    sf, inv = group_sf(amax_bits, USE_UE8M0)  # [BLOCK_M, GROUPS]
    y = tl.reshape(groups * inv[:, :, None], [BLOCK_M, BLOCK_N])
    if SATURATE:
        byte = to_e4m3(y, HARDWARE)
    else:
        amax_bits = tl.broadcast_to(amax_bits[:, :, None], [BLOCK_M, GROUPS, GRAN_K])
        byte = to_e4m3_inf_to_nan(y, tl.reshape(amax_bits, [BLOCK_M, BLOCK_N]), HARDWARE)
    out_tile = tile_pointers(out_ptr, row, col, rows, cols, out_stride_m, out_stride_n, OUT_MAJOR, OUT_UNIT)
    tl.store(out_tile, byte, mask=mask)

    sf_mask = row_mask
    group = tl.arange(0, GROUPS)
    if not EVEN_N:
        sf_mask = sf_mask & (group * GRAN_K < columns)[None, :]
    if SF_ROW_MAJOR:
        sf_stride_n = 1
    sf_rows = rows.to(tl.int64)[:, None] * sf_stride_m
    first = tl.program_id(0) * GROUPS
    if PACKED:
        # Bytes of a word: the first group is the lowest.
        group += first % 4
        sf_corner = sf_ptr + (row * sf_stride_m + (first // 4).to(tl.int64) * sf_stride_n)
        sf_tile = sf_corner.to(tl.pointer_type(tl.uint8), bitcast=True) + (
            (sf_rows + (group // 4).to(tl.int64)[None, :] * sf_stride_n) * 4 + (group % 4)[None, :]
        )
        tl.store(sf_tile, (sf.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=sf_mask)
    else:
        sf_corner = sf_ptr + (row * sf_stride_m + first.to(tl.int64) * sf_stride_n)
        tl.store(sf_corner + (sf_rows + group.to(tl.int64)[None, :] * sf_stride_n), sf, mask=sf_mask)
