"""The kernel behind the casts by block and by channel, in x's orientation, transposed, or both from one read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ._call import (
    Plan,
    Planned,
    Spec,
    allocate,
    check_gran_k,
    check_matrix,
    check_outputs,
    is_traced,
    placeholders,
    served_by_triton,
)
from ._ops import add_op_namespace_prefix, ops
from ._quant import converts_in_hardware, reciprocal, to_e4m3, to_e4m3_inf_to_nan, to_fp32, torch_saturates
from ._tiles import layout, tile_pointers
from ._triton import Launch, jit, tl
from .utils.math import align, ceil_div, per_block_cast_to_fp8, per_channel_cast_to_fp8, per_token_cast_to_fp8

# Groups of a k-grouped operand start at multiples of this, which is also the block of its scale factors.
K_ALIGNMENT = 128


class TileCast:
    """Cast x `[M, N]` by groups named `rows`, and its transpose by groups named `columns`; either may be "".

    A group is a "token" (1 x gran_k of x), a "channel" (gran_k x 1) or a "block" (gran_k x gran_k). Call it with x,
    `ks` or None, one output or None for each of `names`, and `(use_ue8m0, gran_k, mn_major_sf, alignment)`.
    """

    def __init__(self, rows: str, columns: str, names: tuple[str, ...]):
        self.rows, self.columns, self.names = rows, columns, names
        self.planned = Planned(self._make_plan, ("x", *names))
        self.k_grouped = Planned(self._make_plan, ("x", "ks", *names))
        _CASTS[rows, columns] = self

    def __call__(self, x, ks, outputs, *options):
        if is_traced(x):
            specs = self._check(x, ks, outputs, *options)
            made = allocate(outputs, specs, x)
            places = made if self.rows and self.columns else (*made, None, None) if self.rows else (None, None, *made)
            ops.tile_cast(x.detach(), ks, self.rows, self.columns, *options, *places)
            return made
        return self.run(x, ks, outputs, *options)

    def run(self, x, ks, outputs, *options):
        if ks is None:
            return self.planned((x,), outputs, *options)
        return self.k_grouped((x, ks), outputs, *options)

    def _check(self, x, ks, outputs, use_ue8m0, gran_k, mn_major_sf, alignment) -> tuple[Spec, ...]:
        """Refuse what types, dtypes, shapes and strides say is wrong; what the outputs are to be."""
        check_matrix("x", x, torch.bfloat16, torch.float16, torch.float32)
        check_gran_k(gran_k)
        if ks is not None:
            _check_ks(x, ks, alignment)
        m, n = x.shape
        if (self.rows, self.columns) == ("channel", "") and m % gran_k:
            raise ValueError(f"x must have a number of rows that is a multiple of gran_k = {gran_k}, got {m}")
        specs = []
        if self.rows:
            sf_shape = _sf_shape(self.rows, m, n, gran_k)
            mn_major = mn_major_sf and self.rows == "token"
            specs += [Spec((m, n), torch.float8_e4m3fn), _sf_spec(sf_shape, mn_major)]
        if self.columns and ks is not None:
            k = max_k(m, ks.shape[0])
            specs += [Spec((n * k,), torch.float8_e4m3fn), _sf_spec((n, k // gran_k), True)]
        elif self.columns:
            # TMA reads rows that start at multiples of 16 bytes.
            transposed = Spec((n, m), torch.float8_e4m3fn, (align(m, 16), 1))
            sf_shape = _sf_shape(self.columns, m, n, gran_k)[::-1]
            specs += [transposed, _sf_spec(sf_shape, mn_major_sf and self.columns == "channel")]
        check_outputs(self.names, outputs, x, specs)
        if ks is not None and self.columns and outputs[-2] is not None and not outputs[-2].is_contiguous():
            raise ValueError(f"{self.names[-2]} must be contiguous, got stride {outputs[-2].stride()}")
        return tuple(specs)

    def _make_plan(self, inputs, outputs, *options) -> Plan:
        x, ks = (*inputs, None)[:2]
        specs = self._check(x, ks, outputs, *options)
        use_ue8m0, gran_k, _, alignment = options
        empty, launch = x.numel() == 0, None
        if not empty and served_by_triton(x.device):
            made = placeholders(outputs, specs)
            launch = bind_tile_cast(x, ks, self.rows, self.columns, made, use_ue8m0, gran_k, alignment)

        def reference(x, ks=None):
            rows = _row_reference(x, ks, self.rows, use_ue8m0, gran_k, alignment) if self.rows else ()
            return rows + (_column_reference(x, ks, self.columns, use_ue8m0, gran_k, alignment) if self.columns else ())

        return Plan(inputs, outputs, specs, launch, reference, empty)


_CASTS: dict[tuple[str, str], TileCast] = {}


@torch.library.custom_op(add_op_namespace_prefix("tile_cast"), mutates_args=("out", "out_sf", "out_t", "out_sf_t"))
def _op(
    x: torch.Tensor,
    ks: torch.Tensor | None,
    rows: str,
    columns: str,
    use_ue8m0: bool,
    gran_k: int,
    mn_major_sf: bool,
    alignment: int,
    out: torch.Tensor | None,
    out_sf: torch.Tensor | None,
    out_t: torch.Tensor | None,
    out_sf_t: torch.Tensor | None,
) -> None:
    outputs = tuple(output for output in (out, out_sf, out_t, out_sf_t) if output is not None)
    _CASTS[rows, columns].run(x, ks, outputs, use_ue8m0, gran_k, mn_major_sf, alignment)


@torch.library.register_fake(add_op_namespace_prefix("tile_cast"))
def _(x, ks, rows, columns, use_ue8m0, gran_k, mn_major_sf, alignment, out, out_sf, out_t, out_sf_t):
    return None


def max_k(m: int, groups: int) -> int:
    """The most that group sizes of sum m come to, each rounded up to K_ALIGNMENT."""
    return (m + (K_ALIGNMENT - 1) * min(groups, m)) // K_ALIGNMENT * K_ALIGNMENT


def _check_ks(x, ks, alignment):
    if not isinstance(ks, torch.Tensor):
        raise TypeError(f"ks must be a tensor or None, got {type(ks).__name__}")
    if ks.dtype not in (torch.int32, torch.int64) or ks.dim() != 1 or not ks.shape[0] or ks.device != x.device:
        raise ValueError(
            f"ks must be int32 or int64 [groups] on {x.device}, got {ks.dtype} {tuple(ks.shape)} on {ks.device}"
        )
    if not ks.is_contiguous():
        raise ValueError(f"ks must be contiguous, got stride {ks.stride()}")
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment must be a positive int, got {alignment!r}")
    if x.shape[0] >= 2**31 - 2**24:
        raise ValueError(f"x must have fewer than 2^31 - 2^24 rows with ks, got {x.shape[0]}")


def _sf_shape(group, m, n, gran_k):
    return (m if group == "token" else ceil_div(m, gran_k), n if group == "channel" else ceil_div(n, gran_k))


def _sf_spec(shape, mn_major):
    return Spec(shape, torch.float32, (1, align(shape[0], 4)) if mn_major else None)


def _split_groups(x, ks, alignment):
    start = 0
    for k in ks.tolist():
        yield start, x[start : start + k]
        start += align(k, alignment)


def _row_reference(x, ks, group, use_ue8m0, gran_k, alignment):
    """(payload, sf) in x's orientation."""
    if group == "token":
        return per_token_cast_to_fp8(x, use_ue8m0, gran_k)
    return (per_block_cast_to_fp8 if group == "block" else per_channel_cast_to_fp8)(x, use_ue8m0, gran_k)


def _column_reference(x, ks, group, use_ue8m0, gran_k, alignment):
    """(payload, sf) transposed; with ks the groups one after the other."""
    if ks is None:
        return _transposed_reference(x, group, use_ue8m0, gran_k)
    n, k = x.shape[1], max_k(x.shape[0], ks.shape[0])
    out, sf = x.new_zeros(n * k, dtype=torch.float8_e4m3fn), x.new_zeros((n, k // gran_k), dtype=torch.float32)
    start = 0
    for _, rows in _split_groups(x, ks, alignment):
        end = start + align(len(rows), K_ALIGNMENT)
        padded = torch.cat([rows, rows.new_zeros(end - start - len(rows), n)])
        payload, out_sf = _transposed_reference(padded, group, use_ue8m0, gran_k)
        out[n * start : n * end].view(n, -1).copy_(payload)
        sf[:, start // gran_k : end // gran_k] = out_sf
        start = end
    return out, sf


def _transposed_reference(x, group, use_ue8m0, gran_k):
    m = x.shape[0]
    if group == "block":
        payload, sf = per_block_cast_to_fp8(x, use_ue8m0, gran_k)
    else:
        padded = torch.cat([x, x.new_zeros(-m % gran_k, x.shape[1])])
        payload, sf = per_channel_cast_to_fp8(padded, use_ue8m0, gran_k)
    return payload[:m].T, sf.T


@dataclass(frozen=True)
class TileCastConfig:
    block_m: int
    block_n: int
    num_warps: int
    rows_first: bool
    pairs: bool = True
    twice: bool = False


def tile_cast_config(rows: str, columns: str) -> TileCastConfig:
    """Tile, warps and order of the tiles, the same for every M and N so that neither recompiles."""
    # Going down the columns first keeps the writes of a transposed copy close together. `pairs` takes two columns of a
    # 2-byte x at a time where tensors allow it, which halves what max |x| and its exchange cost. `twice` converts x to
    # fp32 again for the transposed copy: one instruction more for a third of the registers, hence more tiles on an SM.
    return {
        ("", "channel"): TileCastConfig(128, 64, 4, True),
        ("channel", ""): TileCastConfig(128, 64, 4, False),
        ("block", ""): TileCastConfig(128, 128, 4, False),
        ("block", "block"): TileCastConfig(128, 128, 16, False),
        ("token", "channel"): TileCastConfig(128, 128, 8, False, twice=True),
    }[rows, columns]


class _TileLaunch:
    """A launch whose kernel has a place for every tensor; those that a call lacks are x again."""

    __slots__ = ("places", "bind", "pairs", "words", "launches")

    def __init__(self, places, bind, pairs, words):
        self.places, self.bind, self.pairs, self.words, self.launches = places, bind, pairs, words, {}

    def launch(self, pairs: bool = True, words: bool = True) -> Launch:
        """For tensors that start where pairs of columns of x and words of the transposed copy may, or may not."""
        key = (pairs and self.pairs, words and self.words)
        if key not in self.launches:
            self.launches[key] = self.bind(*key)
        return self.launches[key]

    def __call__(self, tensors, pointers):
        tensors, pointers = tuple([tensors[i] for i in self.places]), tuple([pointers[i] for i in self.places])
        launch = self.launch(pointers[0] % 4 == 0 and pointers[2] % 2 == 0, pointers[4] % 4 == 0)
        launch(tensors, pointers)


def _takes_pairs(device: int) -> bool:
    """Whether there is an instruction for the larger of two 16-bit integers each (sm_90 and newer); not off the GPU."""
    return device < 0 or torch.cuda.get_device_capability(device) >= (9, 0)


def bind_tile_cast(x, ks, rows, columns, outputs, use_ue8m0, gran_k, alignment) -> _TileLaunch:
    """The kernel for tensors of these dtypes, shapes and strides."""
    m, n = x.shape
    config = tile_cast_config(rows, columns)
    groups = 0 if ks is None else ks.shape[0]
    x_major, x_unit, *x_strides = layout(x, n)
    out_major, out_unit, *out_strides = layout(outputs[0], n) if rows else ("", 1, 0, 0)
    sf_strides = outputs[1].stride() if rows else (0, 0)
    sf_t_strides = outputs[-1].stride() if columns else (0, 0)
    t_major, t_unit, *t_strides = layout(outputs[-2], align(m, 16)) if columns and not groups else ("", 1, 0, 1)
    t_units = (K_ALIGNMENT, 1) if groups else (1, t_unit) if t_major == "m" else (t_unit, 1)
    t_words = bool(columns) and t_units[0] % 4 == 0
    n_unit = math.gcd(16, n)
    device = x.device.index if x.is_cuda else -1
    # An odd unit of x or of the payload, or of n, would split a pair.
    even = x_major == "n" and x_unit % 2 == 0 and n_unit % 2 == 0
    even = even and (not rows or (out_major == "n" and out_unit % 2 == 0))
    pairs = config.pairs and even and x.element_size() == 2 and _takes_pairs(device)
    tiles_m = max_k(m, groups) // config.block_m if groups else ceil_div(m, config.block_m)
    tiles_n = ceil_div(n, config.block_n)
    fast, slow = (tiles_m, tiles_n) if config.rows_first else (tiles_n, tiles_m)
    # Axes y and z end at 65535; tiles beyond the last column, where z rounds up, need the mask.
    grid = (fast, min(slow, 65535), ceil_div(slow, 65535))
    even_n = n % config.block_n == 0 and not (config.rows_first and slow > 65535)
    scalars = (m, n // n_unit, *x_strides, *out_strides, *sf_strides, *t_strides, *sf_t_strides, groups, alignment)

    def bind(pairs, t_words):
        constants = (
            n_unit, x_major, x_unit, out_major, out_unit, *t_units, t_words, rows, columns,
            1 << (groups - 1).bit_length() if groups else 0, K_ALIGNMENT, int(gran_k), bool(use_ue8m0),
            converts_in_hardware(device), torch_saturates() or not use_ue8m0,
            even_n, config.rows_first, pairs, config.twice, config.block_m, config.block_n,
        )  # fmt: skip
        return Launch(tile_cast_kernel, grid, scalars + constants, config.num_warps, device)

    first = 2 if groups else 1
    end = first + len(outputs)
    places = (0, first - 1, *((first, first + 1) if rows else (0, 0)), *((end - 2, end - 1) if columns else (0, 0)))
    return _TileLaunch(places, bind, pairs, t_words)


@jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@jit
def _group_of_block(ks_ptr, block, groups, alignment, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Index of the group that holds a block, `groups` past the last, and the blocks and rows of x before it."""
    group = tl.arange(0, GROUPS)
    k = tl.load(ks_ptr + group, mask=group < groups, other=0).to(tl.int32)
    blocks = (k + (BLOCK - 1)) // BLOCK
    before = ((tl.cumsum(blocks, 0) <= block) & (group < groups)).to(tl.int32)
    aligned = (k + (alignment - 1)) // alignment * alignment
    return tl.reduce((before, before * blocks, before * aligned), 0, _add3)


@jit
def _load_rows(
    x_ptr, row, col, rows, cols, limit, mask_n, stride_m, stride_n,
    MAJOR: tl.constexpr, UNIT: tl.constexpr, EVEN_N: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """[GROUPS_M, rows of a group, GROUPS_N, columns or pairs of a group]; zero outside."""
    mask = (rows < limit)[:, None]
    if not EVEN_N:
        mask = mask & mask_n[None, :]
    pointers = tile_pointers(x_ptr, row, col, rows, cols, stride_m, stride_n, MAJOR, UNIT)
    return tl.reshape(tl.load(pointers, mask=mask, other=0), SHAPE)


@jit
def _columns(x, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """fp32 values of x, or of the even and of the odd column of each pair."""
    if x.dtype != tl.int32:
        columns = (to_fp32(x, HARDWARE),)
    elif DTYPE == tl.bfloat16:
        columns = ((x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True))
    else:
        low, high = x.to(tl.int16), (x >> 16).to(tl.int16)
        columns = (low.to(DTYPE, bitcast=True).to(tl.float32), high.to(DTYPE, bitcast=True).to(tl.float32))
    return columns


@jit
def _columns_again(x):
    """`_columns` of bf16 pairs in other instructions, so that the compiler does not keep the values of the first."""
    low = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x1044;", "=r,r", args=[x], dtype=tl.float32, is_pure=True, pack=1
    )
    high = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x3244;", "=r,r", args=[x], dtype=tl.float32, is_pure=True, pack=1
    )
    return low, high


@jit
def _magnitude(x, HARDWARE: tl.constexpr):
    """|x| as integers, which order like it with NaN on top: fp32 bits, or of pairs the bits of both columns."""
    if x.dtype == tl.int32:
        magnitude = x & 0x7FFF7FFF
    else:
        magnitude = to_fp32(x, HARDWARE).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return magnitude


@jit
def _larger_pair(a, b):
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", args=[a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@jit
def _larger(a, b, PAIRS: tl.constexpr, HARDWARE: tl.constexpr):
    if not PAIRS:
        larger = tl.maximum(a, b)
    elif HARDWARE:
        larger = _larger_pair(a, b)
    else:
        larger = tl.maximum(a & -65536, b & -65536) | tl.maximum(a & 0xFFFF, b & 0xFFFF)
    return larger


@jit
def _largest(x, axis: tl.constexpr, PAIRS: tl.constexpr, HARDWARE: tl.constexpr):
    """Along an axis, which stays with length 1."""
    if not PAIRS:
        largest = tl.max(x, axis=axis, keep_dims=True)
    elif HARDWARE:
        largest = tl.reduce(x, axis, _larger_pair, keep_dims=True)
    else:
        largest = tl.max(x & -65536, axis=axis, keep_dims=True) | tl.max(x & 0xFFFF, axis=axis, keep_dims=True)
    return largest


@jit
def _amax(magnitude, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """fp32 bits of magnitudes, of pairs for the even and for the odd columns."""
    if PAIRS:
        low, high = _columns(magnitude, DTYPE, True)
        bits = (low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True))
    else:
        bits = (magnitude,)
    return bits


@jit
def _amax_of_all(magnitude, axis: tl.constexpr, DTYPE: tl.constexpr, PAIRS: tl.constexpr, HARDWARE: tl.constexpr):
    """fp32 bits of the largest along an axis, of the columns of a pair as well."""
    bits = _amax(_largest(magnitude, axis, PAIRS, HARDWARE), DTYPE, PAIRS)
    if PAIRS:
        amax = tl.maximum(bits[0], bits[1])
    else:
        amax = bits[0]
    return amax


@jit
def _store_rows(
    out_ptr, x, inv, row, col, rows, cols, limit, mask_n, stride_m, stride_n,
    MAJOR: tl.constexpr, UNIT: tl.constexpr, HARDWARE: tl.constexpr, SATURATE: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Cast and store rows whose columns, and their reciprocals, are in one tensor or, in pairs, in two."""
    if len(x) == 2:
        out = to_e4m3_pairs(x[0] * inv[0], x[1] * inv[1], inv[0], inv[1], HARDWARE, SATURATE)
    else:
        y = x[0] * inv[0]
        if SATURATE:
            out = to_e4m3(y, HARDWARE)
        elif HARDWARE and inv[0].shape[3] == 1:
            # As `to_e4m3_inf_to_nan`, in fewer registers, for columns that share their group.
            out = tl.inline_asm_elementwise(
                _E4M3_INF_TO_NAN, "=r,r,r,r,r,r,r,r,r", args=[y, inv[0]], dtype=tl.uint8, is_pure=True, pack=4
            )
        else:
            out = to_e4m3_inf_to_nan(y, tl.broadcast_to(_amax_bits(inv[0]), y.shape), HARDWARE)
    mask = (rows < limit)[:, None]
    if not EVEN_N:
        mask = mask & mask_n[None, :]
    pointers = tile_pointers(out_ptr, row, col, rows, cols, stride_m, stride_n, MAJOR, UNIT)
    tl.store(pointers, tl.reshape(out, [rows.shape[0], cols.shape[0]]), mask=mask)


@jit
def _store_token_sf(
    sf_ptr, amax, row, col, limit, n, stride_m, stride_n,
    GRAN_K: tl.constexpr, USE_UE8M0: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Scale factors of the rows, whose max |x| come as four tensors of every fourth row, in one store."""
    GROUPS_N: tl.constexpr = amax[0].shape[2]
    BLOCK_M: tl.constexpr = amax[0].shape[0] * amax[0].shape[1] * 4
    bits = tl.join(tl.join(amax[0], amax[2]), tl.join(amax[1], amax[3]))
    bits = tl.reshape(bits, [BLOCK_M // 4, GROUPS_N, 4])
    if GROUPS_N > 1:
        bits = tl.permute(bits, (0, 2, 1))
    sf, _ = _group_sf(tl.reshape(bits, [BLOCK_M, GROUPS_N]), USE_UE8M0, HARDWARE)
    rows, group = tl.arange(0, BLOCK_M), tl.arange(0, GROUPS_N)
    mask = (rows < limit)[:, None] & (group * GRAN_K < n - col)[None, :]
    group = (col // GRAN_K + group) * stride_n
    tl.store(sf_ptr + (((row + rows) * stride_m)[:, None] + group[None, :]), sf, mask=mask)


# Four e4m3 bytes, $1 the lowest, of a group in UE8M0 mode with the reciprocal $5. Only an Inf or NaN in the group gives
# the reciprocal 2^-127, and then 0x7e is an Inf, which torch makes a NaN.
_E4M3_INF_TO_NAN = tl and tl.constexpr(
    """{
    .reg .b16 lo, hi;
    .reg .b32 code, a;
    .reg .pred infinite;
    cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
    mov.b32 code, {lo, hi};
    shl.b32 a, code, 1;
    and.b32 a, a, code;
    and.b32 a, a, 0x40404040;
    shr.b32 a, a, 6;
    setp.eq.b32 infinite, $5, 0x00400000;
    selp.b32 a, a, 0, infinite;
    or.b32 $0, code, a;
    }"""
)
_E4M3 = tl and tl.constexpr(
    """{
    .reg .b16 lo, hi;
    cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
    mov.b32 $0, {lo, hi};
    }"""
)


# Two pairs of e4m3 bytes, $1 and $2 of the even columns, $3 and $4 of the odd ones; $5 and $6 have 0x4040 where the
# group of a pair has an Inf, in the byte of its column.
_E4M3_PAIRS = tl and tl.constexpr(
    """{
    .reg .b16 lo, hi;
    cvt.rn.satfinite.e4m3x2.f32 lo, $3, $1;
    cvt.rn.satfinite.e4m3x2.f32 hi, $4, $2;
    mov.b32 $0, {lo, hi};
    }"""
)
_E4M3_PAIRS_INF_TO_NAN = tl and tl.constexpr(
    """{
    .reg .b16 lo, hi;
    .reg .b32 code, a, flag;
    cvt.rn.satfinite.e4m3x2.f32 lo, $3, $1;
    cvt.rn.satfinite.e4m3x2.f32 hi, $4, $2;
    mov.b32 code, {lo, hi};
    prmt.b32 flag, $5, $6, 0x5410;
    shl.b32 a, code, 1;
    and.b32 a, a, code;
    and.b32 a, a, flag;
    shr.b32 a, a, 6;
    or.b32 $0, code, a;
    }"""
)


@jit
def to_e4m3_pairs(y0, y1, inv0, inv1, HARDWARE: tl.constexpr, SATURATE: tl.constexpr):
    """e4m3 bytes of the even columns y0 and of the odd ones y1, next to each other in int16."""
    if not HARDWARE:
        if SATURATE:
            b0, b1 = to_e4m3(y0, False), to_e4m3(y1, False)
        else:
            b0 = to_e4m3_inf_to_nan(y0, tl.broadcast_to(_amax_bits(inv0), y0.shape), False)
            b1 = to_e4m3_inf_to_nan(y1, tl.broadcast_to(_amax_bits(inv1), y1.shape), False)
        pairs = (b0.to(tl.int32) | (b1.to(tl.int32) << 8)).to(tl.int16)
    elif SATURATE:
        pairs = tl.inline_asm_elementwise(
            _E4M3_PAIRS, "=r,r,r,r,r", args=[y0, y1], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        infinite0, infinite1 = inv0.to(tl.int32, bitcast=True) == 0x400000, inv1.to(tl.int32, bitcast=True) == 0x400000
        flag = tl.where(infinite0, 0x40, 0) | tl.where(infinite1, 0x4000, 0)
        pairs = tl.inline_asm_elementwise(
            _E4M3_PAIRS_INF_TO_NAN, "=r,r,r,r,r,r,r", args=[y0, y1, flag], dtype=tl.int16, is_pure=True, pack=2
        )
    return pairs


@jit
def _amax_bits(inv):
    """What `to_e4m3_inf_to_nan` needs to know of a group's max |x|."""
    return tl.where(inv.to(tl.int32, bitcast=True) == 0x400000, 0x7F800000, 0)


@jit
def to_e4m3_words(x0, x1, x2, x3, inv, HARDWARE: tl.constexpr, SATURATE: tl.constexpr):
    """e4m3 bytes of x * inv, four of one group to an int32, x0 the lowest.

    Words go through shared memory four times faster than bytes, and no FP8 tensor is ever transposed, which Triton
    gets wrong on Hopper (triton-lang/triton#11111).
    """
    y0, y1, y2, y3 = x0 * inv, x1 * inv, x2 * inv, x3 * inv
    if not HARDWARE:
        if SATURATE:
            b0, b1, b2, b3 = to_e4m3(y0, False), to_e4m3(y1, False), to_e4m3(y2, False), to_e4m3(y3, False)
        else:
            amax_bits = tl.broadcast_to(_amax_bits(inv), y0.shape)
            b0, b1 = to_e4m3_inf_to_nan(y0, amax_bits, False), to_e4m3_inf_to_nan(y1, amax_bits, False)
            b2, b3 = to_e4m3_inf_to_nan(y2, amax_bits, False), to_e4m3_inf_to_nan(y3, amax_bits, False)
        word = b0.to(tl.int32) | (b1.to(tl.int32) << 8) | (b2.to(tl.int32) << 16) | (b3.to(tl.int32) << 24)
    elif SATURATE:
        word = tl.inline_asm_elementwise(
            _E4M3, "=r,r,r,r,r", args=[y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = tl.inline_asm_elementwise(
            _E4M3_INF_TO_NAN, "=r,r,r,r,r,r", args=[y0, y1, y2, y3, inv], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@jit
def _store_words(ptr, words, limit_m, limit_n, stride_n):
    """Words [BLOCK_M / 4, BLOCK_N] of four rows each to ptr as bytes [BLOCK_N, BLOCK_M], up to the limits.

    stride_n is the distance of columns in words.
    """
    words = tl.trans(words)
    col = tl.arange(0, words.shape[0])
    word = tl.arange(0, words.shape[1])[None, :]
    cols = col.to(tl.int64) * stride_n
    mask = (col < limit_n)[:, None]
    pointers = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (cols[:, None] + word)
    if limit_m >= words.shape[1] * 4:
        tl.store(pointers, words, mask=mask)
    else:
        last = limit_m // 4
        tl.store(pointers, words, mask=mask & (word < last))
        # Up to three rows are left of the last word.
        rest = tl.sum(tl.where(word == last, words, 0), axis=1)
        for i in tl.static_range(3):
            row = last * 4 + i
            tl.store(ptr + (cols * 4 + row), (rest >> (8 * i)).to(tl.uint8), mask=(col < limit_n) & (row < limit_m))


@jit
def _store_bytes(ptr, words, limit_m, limit_n, stride_n, stride_m):
    """As `_store_words`, for any strides, in bytes, and any alignment."""
    words = tl.trans(words)
    mask = (tl.arange(0, words.shape[0]) < limit_n)[:, None]
    cols = (tl.arange(0, words.shape[0]).to(tl.int64) * stride_n)[:, None]
    for i in tl.static_range(4):
        row = (tl.arange(0, words.shape[1]) * 4 + i)[None, :]
        pointers = ptr + (cols + row.to(tl.int64) * stride_m)
        tl.store(pointers, (words >> (8 * i)).to(tl.uint8), mask=mask & (row < limit_m))


@jit
def _group_sf(amax_bits, USE_UE8M0: tl.constexpr, HARDWARE: tl.constexpr):
    """As `group_sf`, in fewer instructions, since every thread has the columns of its elements."""
    sf = tl.maximum(amax_bits, 0x38D1B717).to(tl.float32, bitcast=True) * 0.002232142857142857
    if USE_UE8M0:
        # The carry out of the mantissa rounds up; 2^127 is the largest, and its reciprocal is subnormal.
        bits = (tl.minimum(sf.to(tl.int32, bitcast=True), 0x7F000000) + 0x7FFFFF) & 0x7F800000
        sf = bits.to(tl.float32, bitcast=True)
        inv = tl.maximum(0x7F000000 - bits, 0x400000).to(tl.float32, bitcast=True)
    else:
        inv = reciprocal(sf, HARDWARE)
    return sf, inv


@jit(
    do_not_specialize=(
        "m", "n", "x_stride_m", "x_stride_n", "out_stride_m", "out_stride_n", "sf_stride_m", "sf_stride_n",
        "t_stride_n", "t_stride_m", "sf_t_stride_n", "sf_t_stride_m", "groups", "alignment",
    ),
    do_not_specialize_on_alignment=("ks_ptr", "sf_ptr", "sf_t_ptr"),
)  # fmt: skip
def tile_cast_kernel(
    x_ptr,
    ks_ptr,
    out_ptr,
    sf_ptr,
    out_t_ptr,
    sf_t_ptr,
    m,
    n,
    x_stride_m,
    x_stride_n,
    out_stride_m,
    out_stride_n,
    sf_stride_m,
    sf_stride_n,
    t_stride_n,
    t_stride_m,
    sf_t_stride_n,
    sf_t_stride_m,
    groups,
    alignment,
    N_UNIT: tl.constexpr,
    X_MAJOR: tl.constexpr,
    X_UNIT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    T_UNIT_N: tl.constexpr,
    T_UNIT_M: tl.constexpr,
    T_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    K_ALIGNMENT: tl.constexpr,
    GRAN_K: tl.constexpr,
    USE_UE8M0: tl.constexpr,
    HARDWARE: tl.constexpr,
    SATURATE: tl.constexpr,
    EVEN_N: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    PAIRS: tl.constexpr,
    TWICE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tl.static_assert(BLOCK_M % GRAN_K == 0)
    tl.static_assert(BLOCK_N % GRAN_K == 0 or (ROWS + COLUMNS == "channel"))
    tl.static_assert(GROUPS == 0 or BLOCK_M == K_ALIGNMENT)
    GROUPS_M: tl.constexpr = BLOCK_M // GRAN_K
    GROUPS_N: tl.constexpr = BLOCK_N // GRAN_K if BLOCK_N % GRAN_K == 0 else 1
    WIDTH: tl.constexpr = 2 if PAIRS else 1
    SHAPE: tl.constexpr = [GROUPS_M, GRAN_K // 4, GROUPS_N, BLOCK_N // WIDTH // GROUPS_N]
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    UNIT: tl.constexpr = X_UNIT // WIDTH
    PAYLOAD_UNIT: tl.constexpr = OUT_UNIT // WIDTH if ROWS != "" else 1

    fast = tl.program_id(0)
    slow = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    tile_m, tile_n = (fast, slow) if ROWS_FIRST else (slow, fast)
    col = tile_n.to(tl.int64) * BLOCK_N
    n = n.to(tl.int64) * N_UNIT
    if GROUPS:
        group, blocks, start = _group_of_block(ks_ptr, tile_m, groups, alignment, GROUPS, BLOCK_M)
        if group >= groups:
            return
        # Sizes that come to more than x has never lead outside of it.
        k = tl.minimum(tl.load(ks_ptr + group).to(tl.int32), m - start)
        row_t = (tile_m - blocks) * BLOCK_M
        if row_t >= k:
            return
        row = start.to(tl.int64) + row_t
        limit = k - row_t
    else:
        row = tile_m.to(tl.int64) * BLOCK_M
        limit = tl.minimum(m.to(tl.int64) - row, BLOCK_M).to(tl.int32)
    limit_n = tl.minimum(n - col, BLOCK_N).to(tl.int32)

    # Four rows that follow each other are in four tensors of one layout, so that a thread makes words of them.
    r0 = tl.arange(0, BLOCK_M // 4) * 4
    rows = (r0, r0 + 1, r0 + 2, r0 + 3)
    if PAIRS:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        if ROWS != "":
            out_ptr = out_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    corner_col = col // WIDTH
    cols = tl.arange(0, BLOCK_N // WIDTH)
    mask_n = cols * WIDTH < limit_n
    x, magnitudes = (), ()
    for i in tl.static_range(4):
        x += (_load_rows(x_ptr, row, corner_col, rows[i], cols, limit, mask_n, x_stride_m, x_stride_n,
                         X_MAJOR, UNIT, EVEN_N, SHAPE),)  # fmt: skip
    for i in tl.static_range(4):
        magnitudes += (_magnitude(x[i], HARDWARE),)

    inv_rows = ()
    if ROWS == "token":
        amax_rows = ()
        for i in tl.static_range(4):
            amax_rows += (_amax_of_all(magnitudes[i], 3, DTYPE, PAIRS, HARDWARE),)
        for i in tl.static_range(4):
            _, inv_row = _group_sf(amax_rows[i], USE_UE8M0, HARDWARE)
            inv_rows += ((inv_row, inv_row) if PAIRS else (inv_row,),)
        _store_token_sf(sf_ptr, amax_rows, row, col, limit, n, sf_stride_m, sf_stride_n, GRAN_K, USE_UE8M0, HARDWARE)
    if ROWS != "token" or COLUMNS != "":
        larger0 = _larger(magnitudes[0], magnitudes[1], PAIRS, HARDWARE)
        larger1 = _larger(magnitudes[2], magnitudes[3], PAIRS, HARDWARE)
        larger = _largest(_larger(larger0, larger1, PAIRS, HARDWARE), 1, PAIRS, HARDWARE)
        # [GROUPS_M, 1, GROUPS_N, columns or pairs of a group, or 1]
        if ROWS == "block":
            SF_N: tl.constexpr = GROUPS_N
            amax = _amax_of_all(larger, 3, DTYPE, PAIRS, HARDWARE)
            sf_limit = (limit_n + (GRAN_K - 1)) // GRAN_K
            sf_col = tile_n.to(tl.int64) * GROUPS_N
            _, inv_group = _group_sf(amax, USE_UE8M0, HARDWARE)
            inv = (inv_group, inv_group) if PAIRS else (inv_group,)
        else:
            SF_N: tl.constexpr = BLOCK_N
            sf_limit = limit_n
            sf_col = col
            amaxes = _amax(larger, DTYPE, PAIRS)
            inv = ()
            for i in tl.static_range(WIDTH):
                _, inv_column = _group_sf(amaxes[i], USE_UE8M0, HARDWARE)
                inv += (inv_column,)
            if PAIRS:
                amax = tl.join(amaxes[0], amaxes[1])
            else:
                amax = amaxes[0]
        sf, _ = _group_sf(tl.reshape(amax, [GROUPS_M, SF_N]), USE_UE8M0, HARDWARE)
        sf_m, sf_n = tl.arange(0, GROUPS_M), tl.arange(0, SF_N)
        sf_mask = (sf_n < sf_limit)[None, :]
        if not GROUPS:
            sf_mask = sf_mask & (sf_m * GRAN_K < limit)[:, None]
        sf_m = (tile_m.to(tl.int64) * GROUPS_M + sf_m)[:, None]
        sf_n = (sf_col + sf_n)[None, :]
        if ROWS == "block" or ROWS == "channel":
            tl.store(sf_ptr + (sf_m * sf_stride_m + sf_n * sf_stride_n), sf, mask=sf_mask)
        if COLUMNS != "":
            tl.store(sf_t_ptr + (sf_m * sf_t_stride_m + sf_n * sf_t_stride_n), sf, mask=sf_mask)
        if ROWS == "block" or ROWS == "channel":
            inv_rows = (inv, inv, inv, inv)
    columns = ()
    for i in tl.static_range(4):
        columns += (_columns(x[i], DTYPE, HARDWARE),)
    if ROWS != "":
        for i in tl.static_range(4):
            _store_rows(out_ptr, columns[i], inv_rows[i], row, corner_col, rows[i], cols, limit, mask_n,
                        out_stride_m, out_stride_n, OUT_MAJOR, PAYLOAD_UNIT, HARDWARE, SATURATE, EVEN_N)  # fmt: skip
    if COLUMNS != "":
        if TWICE and PAIRS and HARDWARE and DTYPE == tl.bfloat16 and ROWS != "":
            columns = ()
            for i in tl.static_range(4):
                columns += (_columns_again(x[i]),)
        words = to_e4m3_words(
            columns[0][0], columns[1][0], columns[2][0], columns[3][0], inv[0], HARDWARE, SATURATE
        )
        if PAIRS:
            odd = to_e4m3_words(
                columns[0][1], columns[1][1], columns[2][1], columns[3][1], inv[1], HARDWARE, SATURATE
            )
            words = tl.join(words, odd)
        words = tl.reshape(words, [BLOCK_M // 4, BLOCK_N])
        if GROUPS:
            k_blocks = (k + (K_ALIGNMENT - 1)) // K_ALIGNMENT
            t_stride_n = k_blocks.to(tl.int64)
            limit = BLOCK_M
            corner = n * (blocks.to(tl.int64) * K_ALIGNMENT) + col * (k_blocks * K_ALIGNMENT) + row_t
        else:
            t_stride_n = t_stride_n.to(tl.int64)
            corner = col * (t_stride_n * T_UNIT_N) + row * t_stride_m * T_UNIT_M
        if T_WORDS:
            _store_words(out_t_ptr + corner, words, limit, limit_n, t_stride_n * (T_UNIT_N // 4))
        else:
            t_stride_m = t_stride_m.to(tl.int64) * T_UNIT_M
            _store_bytes(out_t_ptr + corner, words, limit, limit_n, t_stride_n * T_UNIT_N, t_stride_m)
