"""Tile choice of the Hopper FP8 GEMM: a pure function of the problem and the device's number of SMs."""

from __future__ import annotations

from dataclasses import dataclass

from ..utils.math import ceil_div

BLOCK_N, BLOCK_K = 128, 128
SHARED_MEMORY = 227 * 1024

# Clocks of an SM, at which a tile's K blocks go by: 64x128x128 takes the tensor cores 256, and 56 bytes a clock come
# from L2. Scale factors for each column of B double the promotion, which then bounds a tile of two consumers.
_MMA, _L2_BYTES = 256, 56
# A tile that starts: the first blocks' latency, and its rows on the way out.
_START, _STORE = 900, 5


@dataclass(frozen=True)
class Fp8Config:
    """consumers: warp groups that own block_m / consumers rows each; registers: of their threads and the producer's."""

    block_m: int
    consumers: int
    stages: int
    group: int  # tiles of M that run side by side, to share B in L2
    registers: tuple[int, int]
    d_buffers: int  # of 64 rows, to stage d, for each consumer


def fp8_config(m: int, n: int, k: int, d_bytes: int, sf_per_column: bool, accumulate: bool, num_sms: int) -> Fp8Config:
    """The tile (`block_m` x 128) that takes the fewest clocks by this model; the same bits come out of each.

    A tile of more rows reads less from L2 for its work, and one of fewer wastes less in the last wave and at the edge.
    256 rows are for two consumers that own two blocks of 64 each, 192 for three that own one, 128 for two.
    """
    tiles = (256, 128) if sf_per_column or (accumulate and d_bytes == 4) else (256, 192, 128)
    block_m = min(tiles, key=lambda block_m: _clocks(block_m, m, n, k, d_bytes, num_sms))
    consumers = 3 if block_m == 192 else 2
    # Where d is read first, its next 64 rows follow once those before are out.
    d_buffers = 2 if block_m == 256 and d_bytes == 2 and not accumulate else 1
    used = consumers * d_buffers * 64 * BLOCK_N * d_bytes + 256  # and barriers
    stage = (block_m + BLOCK_N) * BLOCK_K + 4 * block_m + (4 * BLOCK_N if sf_per_column else 0)
    stages = min(5, (SHARED_MEMORY - used) // stage)
    group = min(8, ceil_div(m, block_m))
    return Fp8Config(block_m, consumers, stages, group, (160, 24) if consumers == 3 else (240, 24), d_buffers)


def _clocks(block_m, m, n, k, d_bytes, num_sms):
    waves = ceil_div(ceil_div(m, block_m) * ceil_div(n, BLOCK_N), num_sms)
    block = max(block_m // 64 * _MMA, (block_m + BLOCK_N) * BLOCK_K / _L2_BYTES)
    return waves * (ceil_div(k, BLOCK_K) * block + _START + _STORE * d_bytes * block_m)
