"""FP8 GEMM of few tokens and FP4-weight GEMM for compute capability 9.0, in Gluon: made to stream weights.

The tensor cores multiply 64 rows of one operand by a few rows of the other. FP8 weights take the narrow side, so that
even a small N has a tile for each SM; FP4 weights the 64 rows, where one thread expands the 32 values of a group.
The consumers of a program, four warps each, split the 64-row parts of its tile, or K: every PARTS_K-th block of K is
one's own, and their sums are added in a fixed order. `full` barriers say that TMA has filled a stage of shared memory,
`empty` ones that all who read it are done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .._runtime import get_num_sms
from .._triton import Launch, jit, tl
from ..utils.math import ceil_div
from . import portable
from ._tma import (
    Tma, TmaLaunch, fence_async_shared, gl, gluon_jit, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait,
)  # fmt: skip
from .reference import Gran, num_k, packed_dim

# Triton 3.9 renames it.
_Shared = getattr(gl, "shared_memory_descriptor", None)
reinterpret = getattr(_Shared, "reinterpret", None) or getattr(_Shared, "_reinterpret", None)

_FP8, _FP4 = Gran(1, 128, 128, 128), Gran(1, 1, 128, 32)
_BLOCK_K = 128
_SHARED_BYTES = 225 * 1024  # of 227 KiB; barriers and scale factors take the rest
_MAX_STAGES = 24
# Bytes a clock that an H200 moves from L2, to all SMs and to one.
_L2_RATE, _SM_RATE = 4600, 60
_CHAIN_CLOCKS = 150  # from one block of a consumer to its next, besides the tensor cores
_LAUNCH_CLOCKS = 4000


@dataclass(frozen=True)
class SmallConfig:
    """A tile: parts of 64 rows by `cols`, consumers for each part, stages of a block of K, programs that share K."""

    parts: int
    cols: int
    parts_k: int
    stages: int
    splits: int = 1


def fp8_config(m: int, n: int, k: int, itemsize: int, num_sms: int, invariant: bool = False) -> SmallConfig:
    """Tile with tokens as rows, weights as columns: the fastest by L2, an SM's share of it, tensor cores and latency.

    itemsize: bytes of an element of d, or of a sum that is added to it. invariant: sum block by block of K for every m.
    """
    # Few different tiles, for each is compiled.
    m = 1 if m <= 8 else 64 if m <= 64 else 128
    parts, blocks = (1 if m <= 64 else 2), ceil_div(k, _BLOCK_K)

    def clocks(config):
        tiles = ceil_div(n, config.cols) * config.splits
        steps = ceil_div(blocks, config.splits)
        serial = ceil_div(tiles, num_sms) * steps
        step_bytes = (m + config.cols) * _BLOCK_K
        tensor = 2 * config.cols
        add_up = (config.splits > 1) * (_LAUNCH_CLOCKS + config.splits * 8 * m * n / _L2_RATE)
        return add_up + max(
            tiles * steps * step_bytes / _L2_RATE,
            serial * max(step_bytes / _SM_RATE, tensor * parts, (tensor + _CHAIN_CLOCKS) / config.parts_k),
        )

    def config(cols, splits):
        parts_k = 1 if invariant else (4 if cols <= 32 else 2) // parts
        stages = _fp8_stages(parts, cols, parts_k, 4 if splits > 1 else itemsize)
        return SmallConfig(parts, cols, parts_k, stages, splits)

    splits = [s for s in (1, 2, 4) if s == 1 or (not invariant and blocks >= 16 * s)]
    return min((config(cols, s) for s in splits for cols in (128, 64, 32, 16)), key=clocks)


def fp4_config(m: int, itemsize: int, invariant: bool = False) -> SmallConfig:
    """Tile with weights as rows, tokens as columns: as few as hold the tokens, up to 128.

    itemsize: bytes of an element of d, or of a sum that is added to it. invariant: sum block by block of K for every m.
    """
    cols = next((cols for cols in (16, 32, 64) if m <= cols), 128)
    parts, parts_k = (2, 1) if invariant or cols == 128 else (1, 4 if cols < 64 else 3)
    return SmallConfig(parts, cols, parts_k, _fp4_stages(parts, cols, parts_k, itemsize))


def _fp8_stages(parts, cols, parts_k, itemsize):
    stage = (64 * parts + cols) * _BLOCK_K
    free = _SHARED_BYTES - _epilogue_bytes(parts, cols, parts_k, itemsize)
    return min(_MAX_STAGES, free // stage) // parts_k * parts_k


def _fp4_stages(parts, cols, parts_k, itemsize):
    stage = (64 * parts // 2 + cols) * _BLOCK_K
    # What a consumer expands, and the groups that it adds one by one.
    scratch = parts * parts_k * (64 * _BLOCK_K + (64 + cols) * 32 + cols * 4)
    free = _SHARED_BYTES - _epilogue_bytes(parts, cols, parts_k, itemsize) - scratch
    return min(_MAX_STAGES, free // stage) // parts_k * parts_k


def _epilogue_bytes(parts, cols, parts_k, itemsize):
    """Sums of all consumers but the first of a part, and each part's tile on its way to another layout."""
    return parts * 64 * cols * (4 * (parts_k - 1) + itemsize)


def bind(a, sfa, b, sfb, d, gran: Gran, accumulate: bool, invariant: bool = False, config: SmallConfig | None = None):
    """What launches the GEMM, called with (a, sfa, b, sfb, d) and their pointers; None where it serves no such tensors.

    It serves K-major FP8 activations with scale factors for 1x128: at most 128 rows of them by FP8 weights with a scale
    factor for 128x128, any number by FP4 weights packed along K with one for 1x32.
    """
    (m, n), k, fp4 = d.shape, num_k(a, d.shape[0]), packed_dim(b, d.shape[1])
    if gran != (_FP4 if fp4 else _FP8) or fp4 == "mn" or a.dtype == torch.int8 or (m > 128 and not fp4):
        return None
    if sfa.dtype != torch.float32 or (sfb.dtype != torch.float32 and not fp4) or (d.stride(1) != 1 and n > 1):
        return None
    if (fp4 and k % 32) or not all(map(_is_k_major, (a, b))):
        return None
    num_sms = get_num_sms() or 132
    if config is None:
        itemsize = 4 if accumulate else d.itemsize
        config = fp4_config(m, itemsize, invariant) if fp4 else fp8_config(m, n, k, itemsize, num_sms, invariant)
    rows, cols, pointers, strides = a, b, (), ()
    if fp4:
        rows, cols, pointers, strides = b, a, (2, 0), (b.stride(0) // 16, a.stride(0) // 16)
    operands = (_box(2 if fp4 else 0, rows, 64), _box(0 if fp4 else 2, cols, config.cols), 4, 1, 3, *pointers)
    tiles = ceil_div(rows.shape[0], 64 * config.parts) * ceil_div(cols.shape[0], config.cols) * config.splits
    split = config.splits > 1
    d_stride = n if split else d.stride(0)
    unit = math.gcd(8, n, d_stride)  # so that d's rows are written 16 bytes at a time
    args = (
        m, n // unit, k, *sfa.stride(), *sfb.stride(), d_stride // unit, *strides,
        unit, accumulate and not split, config.parts, config.cols, config.parts_k, config.stages, config.splits,
    )  # fmt: skip
    device = a.device.index if a.is_cuda else -1
    kernel = fp8_fp4_small_gemm_kernel if fp4 else fp8_small_gemm_kernel
    unaligned = portable.bind(a, sfa, b, sfb, d, gran, accumulate)
    if split:
        # A call whose operands TMA cannot take goes there with all of its tensors.
        launch = TmaLaunch(kernel, (min(tiles, num_sms), 1, 1), operands, args, 4, device)
        return _SplitLaunch(launch, unaligned, d, accumulate, config.splits, device)
    return TmaLaunch(kernel, (min(tiles, num_sms), 1, 1), operands, args, 4, device, lambda: unaligned)


def _is_k_major(data) -> bool:
    """Whether TMA can read its rows."""
    rows, columns = data.shape
    return data.stride(1) == 1 and (rows == 1 or (data.stride(0) % 16 == 0 and data.stride(0) >= columns))


def _box(index, data, rows):
    """Rows of a block of K, as TMA loads them."""
    (mn, k), stride = data.shape, data.stride(0)
    fp4 = data.dtype == torch.int8
    width = _BLOCK_K // 2 if fp4 else _BLOCK_K
    layout = gl.NVMMASharedLayout.get_default_for([rows, width], gl.int8 if fp4 else gl.float8e4nv)
    # The stride of a single row may be anything.
    return Tma(index, (mn, k), (stride if mn > 1 else ceil_div(k, 16) * 16, 1), (rows, width), layout)


class _SplitLaunch:
    """A launch into an fp32 matrix for each part of K, and one that adds them up in their order."""

    _BLOCK = 1024

    def __init__(self, launch, unaligned, d, accumulate, splits, device):
        (m, n), self.launch, self.unaligned, self.splits = d.shape, launch, unaligned, splits
        args = (m * n, n, d.stride(0), splits, accumulate, self._BLOCK)
        self.add = Launch(add_splits_kernel, (ceil_div(m * n, self._BLOCK), 1, 1), args, 4, device)

    def __call__(self, tensors, pointers):
        if (pointers[0] | pointers[2]) % 16:
            self.unaligned(tensors, pointers)
            return
        d = tensors[-1]
        partial = torch.empty((self.splits, *d.shape), dtype=torch.float32, device=d.device)
        pointer = partial.data_ptr()
        self.launch((*tensors[:-1], partial), (*pointers[:-1], pointer))
        self.add((partial, d), (pointer, pointers[-1]))


@jit(do_not_specialize=("size", "n", "d_stride"))
def add_splits_kernel(
    partial_ptr, d_ptr, size, n, d_stride, SPLITS: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    acc = tl.load(partial_ptr + index, mask=mask)
    for split in tl.static_range(1, SPLITS):
        acc += tl.load(partial_ptr + split * tl.cast(size, tl.int64) + index, mask=mask)
    d_ptr += index // n * d_stride + index % n
    if ACCUMULATE:
        acc = tl.load(d_ptr, mask=mask).to(tl.float32) + acc
    tl.store(d_ptr, acc.to(d_ptr.dtype.element_ty), mask=mask)


@gluon_jit
def _tile(tile, tiles_row, tiles_col, blocks, PARTS_K: tl.constexpr, SPLITS: tl.constexpr):
    """Row and column of a tile among tiles, its first block of K, how many steps of PARTS_K blocks, which split."""
    GROUP: tl.constexpr = 8
    split, tile = tile % SPLITS, tile // SPLITS
    top = tile // (GROUP * tiles_col) * GROUP
    height = gl.minimum(tiles_row - top, GROUP)
    within = tile % (GROUP * tiles_col)
    per_split = gl.cdiv(gl.cdiv(blocks, PARTS_K), SPLITS)
    steps = gl.minimum(gl.cdiv(blocks, PARTS_K) - split * per_split, per_split)
    return top + within % height, within // height, split * per_split * PARTS_K, steps, split


@gluon_jit
def _produce(arguments, TILE: tl.constexpr):
    x_desc, y_desc, x_bufs, y_bufs, full, empty, tiles_row, tiles_col, blocks = arguments
    PARTS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    PARTS_K: tl.constexpr = TILE[2]
    STAGES: tl.constexpr = TILE[3]
    SPLITS: tl.constexpr = TILE[4]
    X_BYTES: tl.constexpr = x_desc.block_type.shape[1]
    Y_BYTES: tl.constexpr = y_desc.block_type.shape[1]
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), tiles_row * tiles_col * SPLITS, gl.num_programs(0)):
        row, col, first, steps, split = _tile(tile, tiles_row, tiles_col, blocks, PARTS_K, SPLITS)
        for block in range(first, first + steps * PARTS_K):
            mbarrier.wait(empty.index(stage), phase)
            filled = full.index(stage)
            mbarrier.expect(filled, 64 * PARTS * X_BYTES + COLS * Y_BYTES)
            for part in gl.static_range(PARTS):
                x_row = (row * PARTS + part) * 64
                tma_load(x_desc, [x_row, block * X_BYTES], filled, x_bufs.index(stage * PARTS + part))
            tma_load(y_desc, [col * COLS, block * Y_BYTES], filled, y_bufs.index(stage))
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ 1


@gluon_jit
def _add_up(acc, sums, summed, free, phase, PART: tl.constexpr, PART_K: tl.constexpr, PARTS_K: tl.constexpr):
    """The sum of a part's consumers, in their order, in the first of them; phase is that of the tile."""
    if PARTS_K > 1:
        OTHERS: tl.constexpr = PARTS_K - 1
        if PART_K == 0:
            for other in gl.static_range(OTHERS):
                mbarrier.wait(summed.index(PART * OTHERS + other), phase)
                acc += sums.index(PART * OTHERS + other).load(acc.type.layout)
                mbarrier.arrive(free.index(PART * OTHERS + other), count=1)
        else:
            mbarrier.wait(free.index(PART * OTHERS + PART_K - 1), phase ^ 1)
            sums.index(PART * OTHERS + PART_K - 1).store(acc)
            mbarrier.arrive(summed.index(PART * OTHERS + PART_K - 1), count=1)
    return acc


@gluon_jit
def _store(d_ptr, acc, row, col, m, n, d_stride, UNIT: tl.constexpr, ACCUMULATE: tl.constexpr, SWAPPED: tl.constexpr):
    """Round the tile, or its sum with what is there, into d; swapped: its rows are d's columns."""
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = acc.shape[1]
    WIDE: tl.constexpr = 128 // d_ptr.dtype.element_ty.primitive_bitwidth
    if SWAPPED:
        layout: tl.constexpr = gl.BlockedLayout([WIDE, 1], [8, 4], [1, 4], [0, 1])
    else:
        LANES: tl.constexpr = min(32, COLS // WIDE)
        layout: tl.constexpr = gl.BlockedLayout([1, WIDE], [32 // LANES, LANES], [4, 1], [1, 0])
    # Sums are rounded after, all else before it goes through shared memory.
    acc = gl.convert_layout(acc if ACCUMULATE else acc.to(d_ptr.dtype.element_ty), layout)
    rows, cols = gl.arange(0, ROWS, gl.SliceLayout(1, layout)), gl.arange(0, COLS, gl.SliceLayout(0, layout))
    n, d_stride = n * UNIT, d_stride.to(gl.int64) * UNIT
    if SWAPPED:
        pointers = d_ptr + (col * d_stride + row) + (rows[:, None] + (cols * d_stride)[None, :])
        mask = (rows < n - row)[:, None] & (cols < m - col)[None, :]
    else:
        pointers = d_ptr + (row * d_stride + col) + ((rows * d_stride)[:, None] + cols[None, :])
        mask = (rows < m - row)[:, None] & (cols < n - col)[None, :]
    if ACCUMULATE:
        acc += gl.load(pointers, mask=mask, other=0.0).to(gl.float32)
    gl.store(pointers, acc.to(d_ptr.dtype.element_ty), mask=mask)


@gluon_jit
def _consume_fp8(arguments, UNIT: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr, WHICH: tl.constexpr):
    (
        d_ptr, sfa_ptr, sfb_ptr, x_bufs, y_bufs, sums, full, empty, summed, free, m, n, blocks,
        sfa_stride_m, sfa_stride_k, sfb_stride_n, sfb_stride_k, d_stride, tiles_row, tiles_col,
    ) = arguments  # fmt: skip
    PARTS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    PARTS_K: tl.constexpr = TILE[2]
    STAGES: tl.constexpr = TILE[3]
    SPLITS: tl.constexpr = TILE[4]
    PART: tl.constexpr = WHICH // PARTS_K
    PART_K: tl.constexpr = WHICH % PARTS_K
    layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    zero = gl.zeros([64, COLS], gl.float32, layout)
    stage, phase, turn = PART_K, 0, 0
    for tile in range(gl.program_id(0), tiles_row * tiles_col * SPLITS, gl.num_programs(0)):
        row, col, block, steps, split = _tile(tile, tiles_row, tiles_col, blocks, PARTS_K, SPLITS)
        row, col, block = (row * PARTS + PART) * 64, col * COLS, block + PART_K
        # Rows past the last are computed from it and not stored.
        rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, layout)), m - 1)
        sfa_row = sfa_ptr + rows.to(gl.int64) * sfa_stride_m
        sfb_row = sfb_ptr + (col // 128).to(gl.int64) * sfb_stride_n
        # The weights' come from far: to L2 at once.
        far = gl.minimum(block + 8 * gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])), blocks - 1)
        _prefetch(sfb_row + far.to(gl.int64) * sfb_stride_k)
        sfa = gl.load(sfa_row + block.to(gl.int64) * sfa_stride_k, mask=block < blocks, other=0.0)
        sfb = gl.load(sfb_row + block.to(gl.int64) * sfb_stride_k, mask=block < blocks, other=0.0)
        acc = gl.zeros([64, COLS], gl.float32, layout)
        for _ in range(steps):
            mbarrier.wait(full.index(stage), phase)
            product = warpgroup_mma(
                x_bufs.index(stage * PARTS + PART), y_bufs.index(stage).permute((1, 0)), zero, use_acc=False,
                is_async=True,
            )  # fmt: skip
            # The next block's scale factors are on their way while the tensor cores work.
            scale = sfa * sfb
            block += PARTS_K
            sfa = gl.load(sfa_row + block.to(gl.int64) * sfa_stride_k, mask=block < blocks, other=0.0)
            sfb = gl.load(sfb_row + block.to(gl.int64) * sfb_stride_k, mask=block < blocks, other=0.0)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(stage), count=1)
            acc += product * scale[:, None]
            stage += PARTS_K
            if stage >= STAGES:
                stage, phase = stage - STAGES, phase ^ 1
        acc = _add_up(acc, sums, summed, free, turn, PART, PART_K, PARTS_K)
        turn ^= 1
        if PART_K == 0:
            d_split = d_ptr + split * (m.to(gl.int64) * n * UNIT)
            _store(d_split, acc, row, col, m, n, d_stride, UNIT, ACCUMULATE, False)


@gluon_jit
def _expand(words, exponent, kept):
    """e4m3 bytes, four to a word, of e2m1 values times 2 ** (exponent - 6), exact for 1 to 12; zero unless kept.

    words: eight values each, [rows, groups, 4]; exponent, kept: [rows, groups]. Returns the words of the first and of
    the last four values of each word.
    """
    # The e4m3 codes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 times 2 ** -6, but 0.5 without its exponent; then exponents.
    low = gl.where(kept, exponent * 0x08080800 + 0x0C080000, 0)
    high = gl.where(kept, exponent * 0x08080808 + 0x1C181410, 0)
    low, _ = gl.broadcast(gl.expand_dims(low, 2), words)
    high, _ = gl.broadcast(gl.expand_dims(high, 2), words)
    magnitude, sign = words & 0x77777777, (words >> 1) & 0x44444444
    return _look_up(low, high, magnitude, sign), _look_up(low, high, magnitude >> 16, sign >> 16)


@gluon_jit
def _look_up(low, high, magnitude, sign):
    # A byte permutation looks up four nibbles at a time.
    value = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, magnitude], gl.int32, is_pure=True, pack=1
    )
    bit = gl.inline_asm_elementwise(
        "prmt.b32 $0, 0, 0x80808080, $1;", "=r,r", [sign], gl.int32, is_pure=True, pack=1
    )
    return value | bit


@gluon_jit
def _load_exponents(sfb_row, groups, block, k, sfb_stride_k):
    """Scale factors of a block of K as they lie in memory: a word for four groups, or fp32 [rows, groups]."""
    if sfb_row.dtype.element_ty == gl.int32:
        return gl.load(sfb_row + block.to(gl.int64) * sfb_stride_k, mask=block * 128 < k, other=0)
    else:
        group = block * 4 + groups
        mask = (group * 32 < k)[None, :]
        return gl.load(sfb_row + (group.to(gl.int64) * sfb_stride_k)[None, :], mask=mask, other=0.0)


@gluon_jit
def _exponents(sf, groups, block, k):
    """Biased exponents, [rows, groups]; negative where a scale factor is no power of two."""
    if sf.dtype == gl.int32:
        # Bytes past the last group may hold anything.
        return gl.where((block * 128 + groups * 32 < k)[None, :], (sf >> (groups * 8)[None, :]) & 0xFF, 0)
    else:
        bits = sf.to(gl.int32, bitcast=True)
        return gl.where((bits & -0x7F800001) == 0, bits >> 23, -1000)


@gluon_jit
def _prefetch(pointers):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(gl.int64)], gl.int32, is_pure=False, pack=1
    )


@gluon_jit
def _add_missed(
    acc, a_ptr, b_ptr, sfa_ptr, sfb_ptr, x_buf, y_buf, row, col, block, steps, m, n, k,
    a_stride, b_stride, sfa_stride_m, sfa_stride_k, sfb_stride_n, sfb_stride_k, PARTS_K: tl.constexpr,
):  # fmt: skip
    """Add the groups whose scale factors did not fit beside their neighbours', each by itself; slow, and rare."""
    COLS: tl.constexpr = acc.shape[1]
    layout: tl.constexpr = acc.type.layout
    x_layout: tl.constexpr = gl.BlockedLayout([1, 1, 1], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    y_layout: tl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0])
    rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, x_layout))), n - 1)
    x_rows = gl.expand_dims(gl.expand_dims(rows.to(gl.int64) * b_stride * 4, 1), 2)
    words = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, x_layout)))
    words = gl.expand_dims(gl.expand_dims(words, 0), 1)
    y_rows = gl.minimum(col + gl.arange(0, COLS, gl.SliceLayout(1, y_layout)), m - 1)
    y_cols = gl.arange(0, 32, gl.SliceLayout(0, y_layout))
    d_rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, layout)), n - 1)
    d_cols = gl.minimum(col + gl.arange(0, COLS, gl.BlockedLayout([1], [32], [4], [0])), m - 1)
    zero = gl.zeros([64, COLS], gl.float32, layout)
    sfb_x = sfb_ptr + (rows.to(gl.int64) * sfb_stride_n)[:, None]
    num_groups, blocks = gl.cdiv(k, 32), gl.cdiv(k, 128)
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, x_layout)))
    for _ in range(steps):
        exponent = _exponents(_load_exponents(sfb_x, four, block, k, sfb_stride_k), four, block, k)
        top = gl.maximum(gl.max(exponent, axis=1), -500)
        missed = top[:, None] - exponent > 11
        for i in range(4):
            group = block * 4 + i
            mine = gl.max((missed & (four == i)[None, :]).to(gl.int32), axis=1)
            x_ptrs = b_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (x_rows + group * 4 + words)
            word = gl.load(x_ptrs, mask=group < num_groups, other=0)
            mine = mine[:, None]
            first, last = _expand(word, gl.zeros_like(mine) + 12, mine > 0)
            x_buf.store(gl.join(first, last).reshape([64, 8]))
            y_ptrs = a_ptr.to(gl.pointer_type(gl.int8), bitcast=True) + (y_rows.to(gl.int64) * a_stride * 16)[:, None]
            y_ptrs += (group * 32 + y_cols)[None, :]
            y_buf.store(gl.load(y_ptrs, mask=group < num_groups, other=0))
            fence_async_shared()
            x = reinterpret(x_buf, gl.float8e4nv, [64, 32], gl.NVMMASharedLayout(32, 8))
            y = reinterpret(y_buf, gl.float8e4nv, [COLS, 32], gl.NVMMASharedLayout(32, 8))
            product = warpgroup_mma(x, y.permute((1, 0)), zero, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            sfa = gl.load(
                sfa_ptr + d_cols.to(gl.int64) * sfa_stride_m + block.to(gl.int64) * sfa_stride_k,
                mask=block < blocks, other=0.0,
            )  # fmt: skip
            sfb_row = sfb_ptr + d_rows.to(gl.int64) * sfb_stride_n
            if sfb_ptr.dtype.element_ty == gl.int32:
                word = gl.load(sfb_row + block.to(gl.int64) * sfb_stride_k, mask=block < blocks, other=0)
                sfb = (((word >> (i * 8)) & 0xFF) << 23).to(gl.float32, bitcast=True)
            else:
                sfb = gl.load(sfb_row + group.to(gl.int64) * sfb_stride_k, mask=group < num_groups, other=0.0)
            acc += product * (sfb[:, None] * gl.convert_layout(sfa, gl.SliceLayout(0, layout))[None, :])
        block += PARTS_K
    return acc


@gluon_jit
def _consume_fp4(arguments, UNIT: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr, WHICH: tl.constexpr):
    (
        d_ptr, sfa_ptr, sfb_ptr, b_ptr, a_ptr, x_bufs, y_bufs, expanded, sfa_bufs, x_narrow, y_narrow, sums, full,
        empty, summed, free, m, n, k, sfa_stride_m, sfa_stride_k, sfb_stride_n, sfb_stride_k, d_stride, b_stride,
        a_stride, tiles_row, tiles_col,
    ) = arguments  # fmt: skip
    PARTS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    PARTS_K: tl.constexpr = TILE[2]
    STAGES: tl.constexpr = TILE[3]
    SPLITS: tl.constexpr = TILE[4]
    PART: tl.constexpr = WHICH // PARTS_K
    PART_K: tl.constexpr = WHICH % PARTS_K
    layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    # A thread has the rows that it has of the accumulator, and of each the 32 values of one group.
    threads: tl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4],
    )  # fmt: skip
    flat: tl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
    of_group: tl.constexpr = gl.SliceLayout(2, threads)
    line: tl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    groups = gl.arange(0, 4, gl.SliceLayout(0, of_group))
    zero = gl.zeros([64, COLS], gl.float32, layout)
    FAR: tl.constexpr = 8
    SF_PER_BLOCK: tl.constexpr = 1 if sfb_ptr.dtype.element_ty == gl.int32 else 4
    blocks = gl.cdiv(k, 128)
    stage, phase, turn = PART_K, 0, 0
    for tile in range(gl.program_id(0), tiles_row * tiles_col * SPLITS, gl.num_programs(0)):
        row, col, first, steps, split = _tile(tile, tiles_row, tiles_col, blocks, PARTS_K, SPLITS)
        row, col, first = (row * PARTS + PART) * 64, col * COLS, first + PART_K
        block = first
        rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, of_group)), n - 1)
        cols = gl.minimum(col + gl.arange(0, COLS, line), m - 1)
        sfa_row = sfa_ptr + cols.to(gl.int64) * sfa_stride_m
        sfa = gl.load(sfa_row + block.to(gl.int64) * sfa_stride_k, mask=block < blocks, other=0.0)
        sfb_row = sfb_ptr + (rows.to(gl.int64) * sfb_stride_n)[:, None]
        # Scale factors come from far: two steps ahead to registers, more to L2.
        for ahead in gl.static_range(FAR):
            far = gl.minimum(block + ahead * PARTS_K, blocks - 1).to(gl.int64) * SF_PER_BLOCK
            _prefetch(sfb_row + far * sfb_stride_k)
        following = _load_exponents(sfb_row, groups, block, k, sfb_stride_k)
        after = _load_exponents(sfb_row, groups, block + PARTS_K, k, sfb_stride_k)
        acc = gl.zeros([64, COLS], gl.float32, layout)
        missed = _exponents(following, groups, block, k) < -2000
        for _ in range(steps):
            # Scale factors within 2 ** 11 of a row's largest go into the values, exactly.
            exponent = _exponents(following, groups, block, k)
            top = gl.maximum(gl.max(exponent, axis=1), -500)
            below = top[:, None] - exponent
            kept = below <= 11
            missed = missed | (below > 11)
            sfb = gl.convert_layout(
                (gl.maximum(top, 0) << 23).to(gl.float32, bitcast=True), gl.SliceLayout(1, layout), assert_trivial=True
            )
            mbarrier.wait(full.index(stage), phase)
            packed = reinterpret(x_bufs.index(stage * PARTS + PART), gl.int32, [64, 16], gl.NVMMASharedLayout(64, 32))
            words = gl.convert_layout(packed.load(flat).reshape([64, 4, 4]), threads, assert_trivial=True)
            low, high = _expand(words, 12 - below, kept)
            sfa_bufs.index(WHICH).store(sfa)
            expanded.index(WHICH).store(gl.join(low, high).reshape([64, 32]))
            fence_async_shared()
            x = reinterpret(expanded.index(WHICH), gl.float8e4nv, [64, 128], gl.NVMMASharedLayout(128, 8))
            product = warpgroup_mma(x, y_bufs.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            following, after = after, _load_exponents(sfb_row, groups, block + 2 * PARTS_K, k, sfb_stride_k)
            far = gl.minimum(block + FAR * PARTS_K, blocks - 1).to(gl.int64) * SF_PER_BLOCK
            _prefetch(sfb_row + far * sfb_stride_k)
            block += PARTS_K
            scale = sfb[:, None] * sfa_bufs.index(WHICH).load(gl.SliceLayout(0, layout))[None, :]
            sfa = gl.load(sfa_row + block.to(gl.int64) * sfa_stride_k, mask=block < blocks, other=0.0)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(stage), count=1)
            acc += product * scale
            stage += PARTS_K
            if stage >= STAGES:
                stage, phase = stage - STAGES, phase ^ 1
        if gl.max(gl.max(missed.to(gl.int32), axis=1), axis=0) > 0:
            acc = _add_missed(
                acc, a_ptr, b_ptr, sfa_ptr, sfb_ptr, x_narrow.index(WHICH), y_narrow.index(WHICH), row, col, first,
                steps, m, n, k, a_stride, b_stride, sfa_stride_m, sfa_stride_k, sfb_stride_n, sfb_stride_k, PARTS_K,
            )  # fmt: skip
        acc = _add_up(acc, sums, summed, free, turn, PART, PART_K, PARTS_K)
        turn ^= 1
        if PART_K == 0:
            d_split = d_ptr + split * (m.to(gl.int64) * n * UNIT)
            # 2 ** 6 is what _expand multiplies by.
            _store(d_split, acc * 0.015625, row, col, m, n, d_stride, UNIT, ACCUMULATE, True)


@gluon_jit
def _barriers(COUNT: tl.constexpr, ARRIVALS: tl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon_jit
def _sums(PARTS: tl.constexpr, COLS: tl.constexpr, PARTS_K: tl.constexpr):
    """Where the consumers of a part but the first leave their sums, and barriers: it is written, it is read."""
    OTHERS: tl.constexpr = PARTS * (PARTS_K - 1) if PARTS_K > 1 else 1
    layout: tl.constexpr = gl.NVMMASharedLayout.get_default_for([64, COLS if PARTS_K > 1 else 8], gl.float32)
    sums = gl.allocate_shared_memory(gl.float32, [OTHERS, 64, COLS if PARTS_K > 1 else 8], layout)
    return sums, _barriers(OTHERS, 1), _barriers(OTHERS, 1)


@gluon_jit(
    do_not_specialize=(
        "m", "n", "k", "sfa_stride_m", "sfa_stride_k", "sfb_stride_n", "sfb_stride_k", "d_stride"
    ),
    do_not_specialize_on_alignment=("sfa_ptr", "sfb_ptr"),
)  # fmt: skip
def fp8_small_gemm_kernel(
    a_desc,
    b_desc,
    d_ptr,
    sfa_ptr,
    sfb_ptr,
    m,
    n,
    k,
    sfa_stride_m,
    sfa_stride_k,
    sfb_stride_n,
    sfb_stride_k,
    d_stride,
    UNIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PARTS: tl.constexpr,
    COLS: tl.constexpr,
    PARTS_K: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    gl.static_assert(STAGES % PARTS_K == 0 and 128 % COLS == 0)
    TILE: tl.constexpr = (PARTS, COLS, PARTS_K, STAGES, SPLITS)
    x_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * PARTS, 64, 128], a_desc.layout)
    y_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, COLS, 128], b_desc.layout)
    sums, summed, free = _sums(PARTS, COLS, PARTS_K)
    full, empty = _barriers(STAGES, 1), _barriers(STAGES, PARTS)
    fence_async_shared()
    tiles_row, tiles_col, blocks = gl.cdiv(m, 64 * PARTS), gl.cdiv(n * UNIT, COLS), gl.cdiv(k, 128)
    produce = (a_desc, b_desc, x_bufs, y_bufs, full, empty, tiles_row, tiles_col, blocks)
    consume = (
        d_ptr, sfa_ptr, sfb_ptr, x_bufs, y_bufs, sums, full, empty, summed, free, m, n, blocks,
        sfa_stride_m, sfa_stride_k, sfb_stride_n, sfb_stride_k, d_stride, tiles_row, tiles_col,
    )  # fmt: skip
    if PARTS * PARTS_K == 1:
        gl.warp_specialize(
            [
                (_consume_fp8, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(0))),
                (_produce, (produce, TILE)),
            ],
            [1], [24],
        )  # fmt: skip
    elif PARTS * PARTS_K == 2:
        gl.warp_specialize(
            [
                (_consume_fp8, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(0))),
                (_consume_fp8, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(1))),
                (_produce, (produce, TILE)),
            ],
            [4, 1], [232, 24],
        )  # fmt: skip
    elif PARTS * PARTS_K == 3:
        gl.warp_specialize(
            [
                (_consume_fp8, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(0))),
                (_consume_fp8, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(1))),
                (_consume_fp8, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(2))),
                (_produce, (produce, TILE)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume_fp8, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(0))),
                (_consume_fp8, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(1))),
                (_consume_fp8, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(2))),
                (_consume_fp8, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(3))),
                (_produce, (produce, TILE)),
            ],
            [4, 4, 4, 1], [112, 112, 112, 24],
        )  # fmt: skip


@gluon_jit(
    do_not_specialize=(
        "m", "n", "k", "sfa_stride_m", "sfa_stride_k", "sfb_stride_n", "sfb_stride_k", "d_stride", "b_stride",
        "a_stride",
    ),
    do_not_specialize_on_alignment=("sfa_ptr", "sfb_ptr"),
)  # fmt: skip
def fp8_fp4_small_gemm_kernel(
    b_desc,
    a_desc,
    d_ptr,
    sfa_ptr,
    sfb_ptr,
    b_ptr,
    a_ptr,
    m,
    n,
    k,
    sfa_stride_m,
    sfa_stride_k,
    sfb_stride_n,
    sfb_stride_k,
    d_stride,
    b_stride,
    a_stride,
    UNIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PARTS: tl.constexpr,
    COLS: tl.constexpr,
    PARTS_K: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    gl.static_assert(STAGES % PARTS_K == 0)
    TILE: tl.constexpr = (PARTS, COLS, PARTS_K, STAGES, SPLITS)
    x_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES * PARTS, 64, 64], b_desc.layout)
    y_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, COLS, 128], a_desc.layout)
    CONSUMERS: tl.constexpr = PARTS * PARTS_K
    expanded = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 64, 32], gl.NVMMASharedLayout(128, 32))
    sfa_bufs = gl.allocate_shared_memory(gl.float32, [CONSUMERS, COLS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    x_narrow = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 64, 8], gl.NVMMASharedLayout(32, 32))
    y_narrow = gl.allocate_shared_memory(gl.int8, [CONSUMERS, COLS, 32], gl.NVMMASharedLayout(32, 8))
    sums, summed, free = _sums(PARTS, COLS, PARTS_K)
    full, empty = _barriers(STAGES, 1), _barriers(STAGES, PARTS)
    fence_async_shared()
    tiles_row, tiles_col, blocks = gl.cdiv(n * UNIT, 64 * PARTS), gl.cdiv(m, COLS), gl.cdiv(k, 128)
    produce = (b_desc, a_desc, x_bufs, y_bufs, full, empty, tiles_row, tiles_col, blocks)
    consume = (
        d_ptr, sfa_ptr, sfb_ptr, b_ptr, a_ptr, x_bufs, y_bufs, expanded, sfa_bufs, x_narrow, y_narrow, sums, full,
        empty, summed, free, m, n, k, sfa_stride_m, sfa_stride_k, sfb_stride_n, sfb_stride_k, d_stride, b_stride,
        a_stride, tiles_row, tiles_col,
    )  # fmt: skip
    if PARTS * PARTS_K == 1:
        gl.warp_specialize(
            [
                (_consume_fp4, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(0))),
                (_produce, (produce, TILE)),
            ],
            [1], [24],
        )  # fmt: skip
    elif PARTS * PARTS_K == 2:
        gl.warp_specialize(
            [
                (_consume_fp4, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(0))),
                (_consume_fp4, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(1))),
                (_produce, (produce, TILE)),
            ],
            [4, 1], [232, 24],
        )  # fmt: skip
    elif PARTS * PARTS_K == 3:
        gl.warp_specialize(
            [
                (_consume_fp4, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(0))),
                (_consume_fp4, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(1))),
                (_consume_fp4, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(2))),
                (_produce, (produce, TILE)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume_fp4, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(0))),
                (_consume_fp4, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(1))),
                (_consume_fp4, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(2))),
                (_consume_fp4, (consume, UNIT, ACCUMULATE, TILE, gl.constexpr(3))),
                (_produce, (produce, TILE)),
            ],
            [4, 4, 4, 1], [112, 112, 112, 24],
        )  # fmt: skip
