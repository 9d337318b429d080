"""Block-scaled FP8 GEMM for Hopper: persistent, warp-specialised, a tile of one or two blocks of 64 rows a consumer."""

from __future__ import annotations

from .._triton import constexpr, tl
from ..utils.math import ceil_div
from ._tma import (
    Tma,
    TmaLaunch,
    fence_async_shared,
    gl,
    gluon_jit,
    mbarrier,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .config import BLOCK_K, BLOCK_N, Fp8Config

_ROWS = 64  # of a wgmma


def bind(
    a, sfa, b, sfb, d, sf_per_column: bool, accumulate: bool, config: Fp8Config, num_sms: int, unaligned=None
) -> TmaLaunch:
    """What launches the kernel, called with (a, sfa, b, sfb, d) and their pointers.

    a, b: e4m3 `[M, K]`, `[N, K]`, K-major; sfa: fp32 `[M, ceil(K / 128)]`, MN-major; sfb: with `sf_per_column` the
    same for N, else `[ceil(N / 128), ceil(K / 128)]` of any strides; d: `[M, N]`, N-major. Rows (of MN-major: columns)
    are multiples of 16 bytes apart.
    """
    (m, n), k = d.shape, a.shape[1]
    lay = gl.NVMMASharedLayout.get_default_for
    data, flat = gl.float8e4nv, gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    d_dtype = gl.float32 if d.element_size() == 4 else gl.bfloat16
    operands = (
        _rows(0, a, _ROWS, BLOCK_K, lay([_ROWS, BLOCK_K], data)),
        _columns(1, sfa, _ROWS, flat),
        _rows(2, b, BLOCK_N, BLOCK_K, lay([BLOCK_N, BLOCK_K], data)),
        _columns(3, sfb, BLOCK_N, flat) if sf_per_column else 3,
        _rows(4, d, _ROWS, BLOCK_N, lay([_ROWS, BLOCK_N], d_dtype)),
    )
    args = (
        m, n, k, *sfb.stride(), sf_per_column, accumulate,
        (config.block_m, BLOCK_N, BLOCK_K, config.consumers, config.stages, config.group, config.d_buffers),
        *config.registers,
    )  # fmt: skip
    tiles = ceil_div(m, config.block_m) * ceil_div(n, BLOCK_N)
    device = d.device.index if d.is_cuda else -1
    return TmaLaunch(hopper_fp8_gemm_kernel, (min(num_sms, tiles), 1, 1), operands, args, 4, device, unaligned)


def _rows(index, tensor, rows, columns, layout):
    (m, n), stride = tensor.shape, tensor.stride(0)
    # The stride of a single row is never used and may be anything.
    aligned = ceil_div(n, 16) * 16
    return Tma(index, (m, n), (stride if m > 1 else aligned, 1), (rows, columns), layout)


def _columns(index, sf, rows, layout):
    """An MN-major matrix, transposed, in pieces of columns."""
    return _rows(index, sf.T, 1, rows, layout)


# A wgmma's sums, of which a thread has this many for 64 rows of 64 columns, in and out of a statement.
_PINNED = constexpr(",".join(["=f"] * 32 + [str(i) for i in range(32)]))


@gluon_jit
def _pinned(x):
    """x, computed by here: moved past the next wgmma, the additions would keep more of its sums in registers."""
    return gl.inline_asm_elementwise("", _PINNED, [x], dtype=gl.float32, is_pure=False, pack=32)


@gluon_jit
def _turn(KIND: gl.constexpr, CONSUMER: gl.constexpr):
    """Wait for this consumer's turn at the tensor cores ("sync"), or give it to this consumer ("arrive").

    Warps that issue wgmmas at the same time get them interleaved, and then promote at the same time as well. Hardware
    barriers, counted from the last for Triton counts from the first, have no need to gather a warp group before.
    """
    STATEMENT: gl.constexpr = f"bar.{KIND} {15 - CONSUMER}, 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(
        STATEMENT, "=r,r,~{memory}", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon_jit
def _tile_corner(tile, m, n, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """Row and column of a tile; programs that run side by side share rows and columns in L2."""
    tiles_m, tiles_n = gl.cdiv(m, BLOCK_M), gl.cdiv(n, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return (first + within % height) * BLOCK_M, within // height * BLOCK_N


@gluon_jit
def _advance(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon_jit
def _produce(arguments, SF_PER_COLUMN: tl.constexpr, TILE: tl.constexpr):
    """Load blocks of K, one a stage; what lies outside of a tensor arrives as zeros."""
    a, sfa, b, sfb, a_bufs, sfa_bufs, b_bufs, sfb_bufs, full, empty, m, n, k = arguments
    BLOCK_M: gl.constexpr = TILE[0]
    BLOCK_N: gl.constexpr = TILE[1]
    BLOCK_K: gl.constexpr = TILE[2]
    STAGES: gl.constexpr = TILE[4]
    GROUP: gl.constexpr = TILE[5]
    PIECES: gl.constexpr = BLOCK_M // 64
    SF: gl.constexpr = BLOCK_M + BLOCK_N if SF_PER_COLUMN else BLOCK_M
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N), gl.num_programs(0)):
        row, col = _tile_corner(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
        for block in range(gl.cdiv(k, BLOCK_K)):
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(arrived, (BLOCK_M + BLOCK_N) * BLOCK_K + SF * 4)
            for i in gl.static_range(PIECES):
                tma_load(a, [row + i * 64, block * BLOCK_K], arrived, a_bufs.index(stage * PIECES + i))
                tma_load(sfa, [block, row + i * 64], arrived, sfa_bufs.index(stage * PIECES + i))
            tma_load(b, [col, block * BLOCK_K], arrived, b_bufs.index(stage))
            if SF_PER_COLUMN:
                tma_load(sfb, [block, col], arrived, sfb_bufs.index(stage))
            stage, phase = _advance(stage, phase, STAGES)


@gluon_jit
def _promote(acc, raw, sfa, sfb, SF_PER_COLUMN: gl.constexpr):
    if SF_PER_COLUMN:
        sf = gl.expand_dims(sfa, 1) * gl.expand_dims(sfb, 0)
    else:
        sf = gl.expand_dims(sfa * sfb, 1)
    return _pinned(acc + sf * raw)


@gluon_jit
def _load_d(d, d_bufs, row, col, arrived, FIRST: gl.constexpr, COUNT: gl.constexpr):
    tma.store_wait(0)
    mbarrier.expect(arrived, COUNT * 64 * d.block_shape[1] * (d.dtype.primitive_bitwidth // 8))
    for i in gl.static_range(COUNT):
        tma_load(d, [row + i * 64, col], arrived, d_bufs.index(FIRST + i))


@gluon_jit
def _store_d(
    d, d_bufs, acc0, acc1, row, col, arrived, phase,
    ACCUMULATE: gl.constexpr, PARTS: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """Round the consumer's rows, or their sums with what is there, into d; stores are on their way on return."""
    for i in gl.static_range(PARTS):
        acc = acc0 if i == 0 else acc1
        d_buf = d_bufs.index(FIRST + i % COUNT)
        if ACCUMULATE:
            if i % COUNT == 0:
                if i > 0:
                    _load_d(d, d_bufs, row + i * 64, col, arrived, FIRST, COUNT)
                mbarrier.wait(arrived, phase)
                phase ^= 1
            acc = d_buf.load(acc.type.layout).to(gl.float32) + acc
        elif i % COUNT == 0:
            tma.store_wait(0)
        d_buf.store(acc.to(d.dtype))
        fence_async_shared()
        tma_store(d, [row + i * 64, col], d_buf)
    return phase


@gluon_jit
def _consume(
    arguments, SF_PER_COLUMN: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr, CONSUMER: tl.constexpr
):
    """Multiply, promote and store this consumer's rows of every tile."""
    sfb, d, a_bufs, sfa_bufs, b_bufs, sfb_bufs, d_bufs, full, empty, d_arrived, m, n, k, sfb_stride_n, sfb_stride_k = (
        arguments
    )
    BLOCK_M: gl.constexpr = TILE[0]
    BLOCK_N: gl.constexpr = TILE[1]
    BLOCK_K: gl.constexpr = TILE[2]
    CONSUMERS: gl.constexpr = TILE[3]
    STAGES: gl.constexpr = TILE[4]
    GROUP: gl.constexpr = TILE[5]
    D_BUFFERS: gl.constexpr = TILE[6]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    OF_COLS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    PIECES: gl.constexpr = BLOCK_M // 64
    PARTS: gl.constexpr = PIECES // CONSUMERS
    NEXT: gl.constexpr = (CONSUMER + 1) % CONSUMERS
    d_arrived = d_arrived.index(CONSUMER)
    blocks = gl.cdiv(k, BLOCK_K)
    stage = 0
    phase = 0
    d_phase = 0
    before = 0
    raw = gl.zeros((64, BLOCK_N), gl.float32, LAYOUT)
    if NEXT == 0:
        _turn("arrive", NEXT)
    for tile in range(gl.program_id(0), gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N), gl.num_programs(0)):
        row, col = _tile_corner(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
        row += CONSUMER * PARTS * 64
        acc0 = gl.zeros((64, BLOCK_N), gl.float32, LAYOUT)
        acc1 = gl.zeros((64, BLOCK_N), gl.float32, LAYOUT)
        if SF_PER_COLUMN:
            sfb_next = 0.0
        else:
            sfb_row = sfb + (col // 128).to(gl.int64) * sfb_stride_n
            sfb_next = gl.load(sfb_row)
        mbarrier.wait(full.index(stage), phase)
        for block in range(blocks):
            sfb_value = sfb_next
            if not SF_PER_COLUMN:
                sfb_next = gl.load(sfb_row + min(block + 1, blocks - 1).to(gl.int64) * sfb_stride_k)
            b_buf = b_bufs.index(stage).permute((1, 0))
            this = stage
            for i in gl.static_range(PARTS):
                piece = this * PIECES + CONSUMER * PARTS + i
                _turn("sync", CONSUMER)
                # The sums before are the operand, though nothing is added to them, so that these take their registers.
                product = warpgroup_mma(a_bufs.index(piece), b_buf, raw, use_acc=False, is_async=True)
                _turn("arrive", NEXT)
                # While the tensor cores are busy: what synchronises the warp group, and the wait for the next block.
                if i == 0:
                    mbarrier.arrive(empty.index(before), count=1, pred=(block > 0) | (tile != gl.program_id(0)))
                sfa_value = sfa_bufs.index(piece).reshape((64,)).load(OF_ROWS)
                if SF_PER_COLUMN:
                    sfb_value = sfb_bufs.index(this).reshape((BLOCK_N,)).load(OF_COLS)
                if i == PARTS - 1:
                    before = stage
                    stage, phase = _advance(stage, phase, STAGES)
                    mbarrier.wait(full.index(stage), phase, pred=block + 1 < blocks)
                raw = warpgroup_mma_wait(0, deps=[product])
                if i == 0:
                    acc0 = _promote(acc0, raw, sfa_value, sfb_value, SF_PER_COLUMN)
                else:
                    acc1 = _promote(acc1, raw, sfa_value, sfb_value, SF_PER_COLUMN)
                if ACCUMULATE and i == 0:
                    if block == 0:
                        _load_d(d, d_bufs, row, col, d_arrived, CONSUMER * D_BUFFERS, D_BUFFERS)
        d_phase = _store_d(
            d, d_bufs, acc0, acc1, row, col, d_arrived, d_phase, ACCUMULATE, PARTS, CONSUMER * D_BUFFERS, D_BUFFERS
        )
    tma.store_wait(0)
    if CONSUMER == 0:
        _turn("sync", 0)


@gluon_jit(do_not_specialize=("m", "n", "k", "sfb_stride_n", "sfb_stride_k"), do_not_specialize_on_alignment=("sfb",))
def hopper_fp8_gemm_kernel(
    a,
    sfa,
    b,
    sfb,
    d,
    m,
    n,
    k,
    sfb_stride_n,
    sfb_stride_k,
    SF_PER_COLUMN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TILE: tl.constexpr,
    CONSUMER_REGISTERS: tl.constexpr,
    PRODUCER_REGISTERS: tl.constexpr,
):
    BLOCK_M: gl.constexpr = TILE[0]
    BLOCK_N: gl.constexpr = TILE[1]
    BLOCK_K: gl.constexpr = TILE[2]
    CONSUMERS: gl.constexpr = TILE[3]
    STAGES: gl.constexpr = TILE[4]
    D_BUFFERS: gl.constexpr = TILE[6]
    PIECES: gl.constexpr = BLOCK_M // 64
    a_bufs = gl.allocate_shared_memory(a.dtype, [STAGES * PIECES, 64, BLOCK_K], a.layout)
    b_bufs = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK_K], b.layout)
    d_bufs = gl.allocate_shared_memory(d.dtype, [CONSUMERS * D_BUFFERS, 64, BLOCK_N], d.layout)
    sfa_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * PIECES, 1, 64], sfa.layout)
    sfb_bufs = sfa_bufs
    if SF_PER_COLUMN:
        sfb_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_N], sfb.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    d_arrived = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(d_arrived.index(i), count=1)
    fence_async_shared()
    produce = (a, sfa, b, sfb, a_bufs, sfa_bufs, b_bufs, sfb_bufs, full, empty, m, n, k)
    consume = (
        sfb, d, a_bufs, sfa_bufs, b_bufs, sfb_bufs, d_bufs, full, empty, d_arrived, m, n, k, sfb_stride_n, sfb_stride_k
    )  # fmt: skip
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consume, (consume, SF_PER_COLUMN, ACCUMULATE, TILE, gl.constexpr(0))),
                (_consume, (consume, SF_PER_COLUMN, ACCUMULATE, TILE, gl.constexpr(1))),
                (_consume, (consume, SF_PER_COLUMN, ACCUMULATE, TILE, gl.constexpr(2))),
                (_produce, (produce, SF_PER_COLUMN, TILE)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consume, SF_PER_COLUMN, ACCUMULATE, TILE, gl.constexpr(0))),
                (_consume, (consume, SF_PER_COLUMN, ACCUMULATE, TILE, gl.constexpr(1))),
                (_produce, (produce, SF_PER_COLUMN, TILE)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
