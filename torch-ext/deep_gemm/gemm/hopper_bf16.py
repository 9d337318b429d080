"""BF16 GEMM for compute capability 9.0, in Gluon: persistent, with a warp that loads and groups of warps that multiply.

A program computes tiles of d one after another. A tile's rows are shared out to consumers, groups of four warps whose
tensor cores read blocks of A and B from a ring of stages in shared memory. Barriers `full` say that TMA has filled a
stage, barriers `empty` that all consumers have read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .._runtime import _settings
from .._triton import tl
from ..utils.math import ceil_div
from . import portable
from ._tma import (
    Tma,
    TmaLaunch,
    fence_async_shared,
    gl,
    gluon_jit,
    is_written_by_tma,
    mbarrier,
    store_directly,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)


_BLOCK_K = 64
_SHARED_MEMORY = 227 * 1024
_MAX_STAGES = 8
_MAX_SIZE = 2**31 - 2**10  # coordinates of tiles are 32-bit


@dataclass(frozen=True)
class Bf16Config:
    """A tile: `consumers * rows` by `cols + cols2`.

    cols, cols2: powers of two, for tensors have no other widths. chunk: columns that a consumer stores at a time,
    through one of its `buffers` in shared memory. lead: K blocks by which a consumer starts later than the one before.
    """

    consumers: int
    rows: int
    cols: int
    cols2: int = 0
    group: int = 8
    lead: int = 1

    @property
    def block_m(self) -> int:
        return self.consumers * self.rows

    @property
    def block_n(self) -> int:
        return self.cols + self.cols2

    def chunk(self, itemsize: int) -> int:
        """Columns that a consumer stores at a time, of which 16 KiB fit into its buffer."""
        return min(16384 // (self.rows * itemsize), self.cols, self.cols2 or self.cols)

    def stages(self, itemsize: int) -> int:
        """K blocks in shared memory, beside a buffer for d; itemsize: bytes of an element of d, 0 without a buffer."""
        buffers = self.block_m * self.chunk(itemsize) * itemsize if itemsize else 0
        barriers = 16 * _MAX_STAGES
        stage = (self.block_m + self.block_n) * _BLOCK_K * 2
        return min((_SHARED_MEMORY - buffers - barriers) // stage, _MAX_STAGES)


_CONFIGS = (
    Bf16Config(2, 64, 256),
    Bf16Config(2, 128, 128),
    Bf16Config(2, 64, 128, 64),
    Bf16Config(3, 64, 128),
    Bf16Config(2, 64, 128),
    Bf16Config(2, 64, 64),
    Bf16Config(1, 64, 64),
)


def config(m: int, n: int, k: int, num_sms: int) -> Bf16Config:
    """The tile with the least estimated time: waves of tiles, bound by tensor cores or by what an SM loads.

    A row of d has the same bits for all of them: each sums over K in the same order.
    """
    return min(_CONFIGS, key=lambda tile: _clocks(tile, m, n, k, num_sms))


def _clocks(tile: Bf16Config, m, n, k, num_sms):
    waves = ceil_div(ceil_div(m, tile.block_m) * ceil_div(n, tile.block_n), num_sms)
    # 2048 products a clock, and about 56 bytes.
    multiply = tile.block_m * tile.block_n * _BLOCK_K / 2048
    load = (tile.block_m + tile.block_n) * _BLOCK_K * 2 / 56
    return waves * (ceil_div(k, _BLOCK_K) * max(multiply, load) + 1500)


def bind(a, b, d, accumulate: bool) -> TmaLaunch | None:
    """What launches the kernel, called with (a, b, d) and their pointers; None where TMA can read no such a or b."""
    unaligned = portable.bind_bf16(a, b, d, accumulate)
    order = (0, 1)
    if d.stride(1) != 1 and d.shape[1] > 1:
        # d^T = b @ a^T has its columns next to each other.
        a, b, d, order = b, a, d.T, (1, 0)
    num_sms = _num_sms(a.device)
    tile = config(*d.shape, a.shape[1], num_sms)
    return bind_tile(a, b, d, accumulate, tile, num_sms, order, lambda: unaligned)


def bind_tile(
    a, b, d, accumulate, tile: Bf16Config, num_sms, order=(0, 1), unaligned=None, by_tma=True
) -> TmaLaunch | None:
    """`bind` with a tile that is given.

    order: which tensors of a call a and b are. by_tma: whether d is written so where it can.
    """
    (m, n), k = d.shape, a.shape[1]
    a_view, b_view = _View.of(a), _View.of(b)
    if a_view is None or b_view is None or (d.stride(1) != 1 and n > 1):
        return None
    if by_tma := by_tma and not accumulate and is_written_by_tma(d):
        # Where d alone has an address that TMA cannot take.
        direct = bind_tile(a, b, d, False, tile, num_sms, order, unaligned, False)
        unaligned = lambda: direct  # noqa: E731
    itemsize = d.element_size() if by_tma else 0
    chunk = tile.chunk(itemsize or 4)
    operands = (
        a_view.blocks(order[0], tile.rows, _BLOCK_K),
        b_view.blocks(order[1], tile.cols, _BLOCK_K),
        b_view.blocks(order[1], tile.cols2, _BLOCK_K) if tile.cols2 else order[1],
        _View.of(d).blocks(2, tile.rows, chunk) if by_tma else 2,
    )
    args = (
        m, n, k, d.stride(0), a_view.inner == 1, b_view.inner == 1, 1 if by_tma else math.gcd(16, d.stride(0), n),
        accumulate, tile.consumers, tile.rows, tile.cols, tile.cols2, _BLOCK_K, tile.stages(itemsize), tile.group,
        chunk, int(by_tma), tile.lead,
    )  # fmt: skip
    grid = (min(num_sms, ceil_div(m, tile.block_m) * ceil_div(n, tile.block_n)), 1, 1)
    device = a.device.index if a.is_cuda else -1
    return TmaLaunch(hopper_bf16_gemm_kernel, grid, operands, args, 4, device, unaligned)


def _num_sms(device) -> int:
    if _settings.num_sms or not device.type == "cuda":
        return _settings.num_sms or 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class _View:
    """A matrix as TMA sees it: dimension `inner` is the one whose elements are next to each other."""

    inner: int
    shape: tuple[int, int]
    stride: int
    dtype: torch.dtype

    @staticmethod
    def of(matrix) -> _View | None:
        """None where rows, or columns, are no multiples of 16 bytes apart."""
        unit = 16 // matrix.element_size()
        for inner in (1, 0):
            (outer_size, size), stride = [matrix.shape[1 - inner], matrix.shape[inner]], matrix.stride(1 - inner)
            if outer_size == 1:
                stride = ceil_div(size, unit) * unit
            contiguous = size == 1 or matrix.stride(inner) == 1
            if contiguous and stride % unit == 0 and stride >= size and max(matrix.shape) < _MAX_SIZE:
                return _View(inner, (outer_size, size), stride, matrix.dtype)
        return None

    def blocks(self, index: int, rows: int, cols: int) -> Tma:
        """Tensor `index` of a call in blocks of the matrix."""
        block = (rows, cols) if self.inner == 1 else (cols, rows)
        dtype = gl.bfloat16 if self.dtype == torch.bfloat16 else gl.float32
        layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
        return Tma(index, self.shape, (self.stride, 1), block, layout)


@gluon_jit
def _tile_corner(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Programs that run side by side share rows and columns in L2."""
    tiles_m, tiles_n = gl.cdiv(m, BLOCK_M), gl.cdiv(n, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return (first + within % height) * BLOCK_M, within // height * BLOCK_N


@gluon_jit
def _load(desc, row, col, barrier, buffer, K_MAJOR: tl.constexpr):
    if K_MAJOR:
        tma_load(desc, [row, col], barrier, buffer)
    else:
        tma_load(desc, [col, row], barrier, buffer)


@gluon_jit
def _produce(
    a, b, b2, a_bufs, b_bufs, b2_bufs, full, empty, m, n, k,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, CONSUMERS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, COLS2: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = CONSUMERS * ROWS
    BLOCK_N: tl.constexpr = COLS + COLS2
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N), gl.num_programs(0)):
        row, col = _tile_corner(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
        for step in range(gl.cdiv(k, BLOCK_K)):
            mbarrier.wait(empty.index(stage), phase)
            filled = full.index(stage)
            mbarrier.expect(filled, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            for part in gl.static_range(CONSUMERS):
                buffer = a_bufs.index(stage * CONSUMERS + part)
                _load(a, row + part * ROWS, step * BLOCK_K, filled, buffer, A_K_MAJOR)
            _load(b, col, step * BLOCK_K, filled, b_bufs.index(stage), B_K_MAJOR)
            if COLS2 > 0:
                _load(b2, col + COLS, step * BLOCK_K, filled, b2_bufs.index(stage), B_K_MAJOR)
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ 1


@gluon_jit
def _multiply(a, b, acc, A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr):
    if not A_K_MAJOR:
        a = a.permute((1, 0))
    if B_K_MAJOR:
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon_jit
def _store(
    d, acc, bufs, row, col, m, n, d_stride, FIRST: tl.constexpr, OFFSET: tl.constexpr,
    D_UNIT: tl.constexpr, ACCUMULATE: tl.constexpr, CHUNK: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    """Store the accumulator, which starts at column OFFSET of the tile, CHUNK columns at a time."""
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = acc.shape[1]
    if COLS > CHUNK:
        low, high = acc.reshape([ROWS, 2, COLS // 2]).permute(0, 2, 1).split()
        _store(d, low, bufs, row, col, m, n, d_stride, FIRST, OFFSET, D_UNIT, ACCUMULATE, CHUNK, BUFFERS)
        RIGHT: tl.constexpr = OFFSET + COLS // 2
        _store(d, high, bufs, row, col, m, n, d_stride, FIRST, RIGHT, D_UNIT, ACCUMULATE, CHUNK, BUFFERS)
    else:
        layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
        part = gl.convert_layout(acc, layout, assert_trivial=True)
        if BUFFERS > 0:
            buffer = bufs.index(FIRST + OFFSET // CHUNK % BUFFERS)
            tma.store_wait(BUFFERS - 1)
            buffer.store(part.to(bufs.dtype))
            fence_async_shared()
            tma_store(d, [row, col + OFFSET], buffer)
        else:
            store_directly(d, part, row, col + OFFSET, m, n, d_stride, D_UNIT, ACCUMULATE)


@gluon_jit
def _consume(
    d, a_bufs, b_bufs, b2_bufs, d_bufs, full, empty, m, n, k, d_stride, PART: tl.constexpr,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, D_UNIT: tl.constexpr, ACCUMULATE: tl.constexpr,
    CONSUMERS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, COLS2: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, BUFFERS: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = CONSUMERS * ROWS
    BLOCK_N: tl.constexpr = COLS + COLS2
    layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    layout2: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS2, 16])
    steps = gl.cdiv(k, BLOCK_K)
    stage, phase = 0, 0
    last = 0
    gl.static_assert(LEAD * PART < STAGES, "waits for a stage that is not there")
    if LEAD * PART > 0:
        # Consumers that are out of step multiply while others store.
        if steps > LEAD * PART:
            mbarrier.wait(full.index(LEAD * PART), 0)
    for tile in range(gl.program_id(0), gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N), gl.num_programs(0)):
        row, col = _tile_corner(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
        acc = gl.zeros([ROWS, COLS], gl.float32, layout)
        acc2 = 0
        if COLS2 > 0:
            acc2 = gl.zeros([ROWS, COLS2], gl.float32, layout2)
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a = a_bufs.index(stage * CONSUMERS + PART)
            acc = _multiply(a, b_bufs.index(stage), acc, A_K_MAJOR, B_K_MAJOR)
            if COLS2 > 0:
                acc2 = _multiply(a, b2_bufs.index(stage), acc2, A_K_MAJOR, B_K_MAJOR)
                acc, acc2 = warpgroup_mma_wait(2, deps=[acc, acc2])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            # The tensor cores work on this stage still, and are done with the one before.
            mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
            last = stage
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ 1
        if COLS2 > 0:
            acc, acc2 = warpgroup_mma_wait(0, deps=[acc, acc2])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(last), count=1)
        row += PART * ROWS
        FIRST: tl.constexpr = PART * BUFFERS
        _store(d, acc, d_bufs, row, col, m, n, d_stride, FIRST, 0, D_UNIT, ACCUMULATE, CHUNK, BUFFERS)
        if COLS2 > 0:
            _store(d, acc2, d_bufs, row, col, m, n, d_stride, FIRST, COLS, D_UNIT, ACCUMULATE, CHUNK, BUFFERS)
    if BUFFERS > 0:
        tma.store_wait(0)


@gluon_jit(do_not_specialize=("m", "n", "k", "d_stride"))
def hopper_bf16_gemm_kernel(
    a,
    b,
    b2,
    d,
    m,
    n,
    k,
    d_stride,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    D_UNIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    CONSUMERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    COLS2: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    BUFFERS: tl.constexpr,
    LEAD: tl.constexpr,
):
    """a, b, b2: tensor maps; d: one too, or with BUFFERS = 0 a pointer. b2 loads the last COLS2 columns of a tile."""
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * CONSUMERS] + a.block_type.shape, a.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + b.block_type.shape, b.layout)
    b2_bufs = b_bufs
    if COLS2 > 0:
        b2_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + b2.block_type.shape, b2.layout)
    d_bufs = b_bufs
    if BUFFERS > 0:
        d_bufs = gl.allocate_shared_memory(d.dtype, [CONSUMERS * BUFFERS, ROWS, CHUNK], d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    d, a_bufs, b_bufs, b2_bufs, d_bufs, full, empty, m, n, k, d_stride, gl.constexpr(0),
                    A_K_MAJOR, B_K_MAJOR, D_UNIT, ACCUMULATE, CONSUMERS, ROWS, COLS, COLS2, BLOCK_K, STAGES, GROUP,
                    CHUNK, BUFFERS, LEAD,
                )),
                (_produce, (
                    a, b, b2, a_bufs, b_bufs, b2_bufs, full, empty, m, n, k,
                    A_K_MAJOR, B_K_MAJOR, CONSUMERS, ROWS, COLS, COLS2, BLOCK_K, STAGES, GROUP,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    d, a_bufs, b_bufs, b2_bufs, d_bufs, full, empty, m, n, k, d_stride, gl.constexpr(0),
                    A_K_MAJOR, B_K_MAJOR, D_UNIT, ACCUMULATE, CONSUMERS, ROWS, COLS, COLS2, BLOCK_K, STAGES, GROUP,
                    CHUNK, BUFFERS, LEAD,
                )),
                (_consume, (
                    d, a_bufs, b_bufs, b2_bufs, d_bufs, full, empty, m, n, k, d_stride, gl.constexpr(1),
                    A_K_MAJOR, B_K_MAJOR, D_UNIT, ACCUMULATE, CONSUMERS, ROWS, COLS, COLS2, BLOCK_K, STAGES, GROUP,
                    CHUNK, BUFFERS, LEAD,
                )),
                (_produce, (
                    a, b, b2, a_bufs, b_bufs, b2_bufs, full, empty, m, n, k,
                    A_K_MAJOR, B_K_MAJOR, CONSUMERS, ROWS, COLS, COLS2, BLOCK_K, STAGES, GROUP,
                )),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    d, a_bufs, b_bufs, b2_bufs, d_bufs, full, empty, m, n, k, d_stride, gl.constexpr(0),
                    A_K_MAJOR, B_K_MAJOR, D_UNIT, ACCUMULATE, CONSUMERS, ROWS, COLS, COLS2, BLOCK_K, STAGES, GROUP,
                    CHUNK, BUFFERS, LEAD,
                )),
                (_consume, (
                    d, a_bufs, b_bufs, b2_bufs, d_bufs, full, empty, m, n, k, d_stride, gl.constexpr(1),
                    A_K_MAJOR, B_K_MAJOR, D_UNIT, ACCUMULATE, CONSUMERS, ROWS, COLS, COLS2, BLOCK_K, STAGES, GROUP,
                    CHUNK, BUFFERS, LEAD,
                )),
                (_consume, (
                    d, a_bufs, b_bufs, b2_bufs, d_bufs, full, empty, m, n, k, d_stride, gl.constexpr(2),
                    A_K_MAJOR, B_K_MAJOR, D_UNIT, ACCUMULATE, CONSUMERS, ROWS, COLS, COLS2, BLOCK_K, STAGES, GROUP,
                    CHUNK, BUFFERS, LEAD,
                )),
                (_produce, (
                    a, b, b2, a_bufs, b_bufs, b2_bufs, full, empty, m, n, k,
                    A_K_MAJOR, B_K_MAJOR, CONSUMERS, ROWS, COLS, COLS2, BLOCK_K, STAGES, GROUP,
                )),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
