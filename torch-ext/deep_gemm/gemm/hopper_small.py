"""FP8 GEMM of few tokens for compute capability 9.0, in Gluon: made to stream weights.

The tensor cores multiply 64 tokens by a few rows of the weights, so that even a small N has a tile for each SM. The
consumers of a program, four warps each, split the 64-row parts of its tile, or K: every PARTS_K-th block of K is one's
own, and their sums are added in a fixed order. `full` barriers say that TMA has filled a stage of shared memory,
`empty` ones that all who read it are done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .._triton import Launch, jit, tl
from ..utils.math import ceil_div
from . import portable
from ._tma import (
    Tma, TmaLaunch, fence_async_shared, gl, gluon_jit, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait,
)  # fmt: skip
from .reference import Gran

_FP8 = Gran(1, 128, 128, 128)
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


def fp8_config(m: int, n: int, k: int, itemsize: int, num_sms: int) -> SmallConfig:
    """Tile with tokens as rows, weights as columns: the fastest by L2, an SM's share of it, tensor cores and latency.

    itemsize: bytes of an element of d, or of a sum that is added to it.
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
        parts_k = (4 if cols <= 32 else 2) // parts
        stages = _fp8_stages(parts, cols, parts_k, 4 if splits > 1 else itemsize)
        return SmallConfig(parts, cols, parts_k, stages, splits)

    splits = [s for s in (1, 2, 4) if s == 1 or blocks >= 16 * s]
    return min((config(cols, s) for s in splits for cols in (128, 64, 32, 16)), key=clocks)


def _fp8_stages(parts, cols, parts_k, itemsize):
    stage = (64 * parts + cols) * _BLOCK_K
    free = _SHARED_BYTES - _epilogue_bytes(parts, cols, parts_k, itemsize)
    return min(_MAX_STAGES, free // stage) // parts_k * parts_k


def _epilogue_bytes(parts, cols, parts_k, itemsize):
    """Sums of all consumers but the first of a part, and each part's tile on its way to another layout."""
    return parts * 64 * cols * (4 * (parts_k - 1) + itemsize)


def bind(a, sfa, b, sfb, d, gran: Gran, accumulate: bool, num_sms: int) -> TmaLaunch | _SplitLaunch | None:
    """What launches the GEMM, called with (a, sfa, b, sfb, d) and their pointers; None where it serves no such tensors.

    It serves at most 128 rows of K-major FP8 with fp32 scale factors for 1x128 by K-major FP8 with those for 128x128.
    """
    (m, n), k = d.shape, a.shape[1]
    if gran != _FP8 or m > 128 or {sfa.dtype, sfb.dtype} != {torch.float32}:
        return None
    if (d.stride(1) != 1 and n > 1) or not all(map(_is_k_major, (a, b))):
        return None
    config = fp8_config(m, n, k, 4 if accumulate else d.itemsize, num_sms)
    operands = (_box(0, a, 64), _box(2, b, config.cols), 4, 1, 3)
    tiles = ceil_div(m, 64 * config.parts) * ceil_div(n, config.cols) * config.splits
    split = config.splits > 1
    d_stride = n if split else d.stride(0)
    unit = math.gcd(8, n, d_stride)  # so that d's rows are written 16 bytes at a time
    args = (
        m, n // unit, k, *sfa.stride(), *sfb.stride(), d_stride // unit,
        unit, accumulate and not split, config.parts, config.cols, config.parts_k, config.stages, config.splits,
    )  # fmt: skip
    grid, device = (min(tiles, num_sms), 1, 1), a.device.index if a.is_cuda else -1
    unaligned = portable.bind(a, sfa, b, sfb, d, gran, accumulate)
    if split:
        # A call whose operands TMA cannot take goes there with all of its tensors.
        launch = TmaLaunch(fp8_small_gemm_kernel, grid, operands, args, 4, device)
        return _SplitLaunch(launch, unaligned, d, accumulate, config.splits, device)
    return TmaLaunch(fp8_small_gemm_kernel, grid, operands, args, 4, device, lambda: unaligned)


def _is_k_major(data) -> bool:
    """Whether TMA can read its rows."""
    rows, columns = data.shape
    return data.stride(1) == 1 and (rows == 1 or (data.stride(0) % 16 == 0 and data.stride(0) >= columns))


def _box(index, data, rows):
    """Rows of a block of K, as TMA loads them."""
    (mn, k), stride = data.shape, data.stride(0)
    layout = gl.NVMMASharedLayout.get_default_for([rows, _BLOCK_K], gl.float8e4nv)
    # The stride of a single row may be anything.
    return Tma(index, (mn, k), (stride if mn > 1 else ceil_div(k, 16) * 16, 1), (rows, _BLOCK_K), layout)


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
def _store(d_ptr, acc, row, col, m, n, d_stride, UNIT: tl.constexpr, ACCUMULATE: tl.constexpr):
    """Round the tile, or its sum with what is there, into d."""
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = acc.shape[1]
    WIDE: tl.constexpr = 128 // d_ptr.dtype.element_ty.primitive_bitwidth
    LANES: tl.constexpr = min(32, COLS // WIDE)
    layout: tl.constexpr = gl.BlockedLayout([1, WIDE], [32 // LANES, LANES], [4, 1], [1, 0])
    # Sums are rounded after, all else before it goes through shared memory.
    acc = gl.convert_layout(acc if ACCUMULATE else acc.to(d_ptr.dtype.element_ty), layout)
    rows, cols = gl.arange(0, ROWS, gl.SliceLayout(1, layout)), gl.arange(0, COLS, gl.SliceLayout(0, layout))
    n, d_stride = n * UNIT, d_stride.to(gl.int64) * UNIT
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
            _store(d_split, acc, row, col, m, n, d_stride, UNIT, ACCUMULATE)


@gluon_jit
def _prefetch(pointers):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(gl.int64)], gl.int32, is_pure=False, pack=1
    )


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
