"""Tile choice of the Hopper FP8 GEMM: a pure function of the problem and the device's number of SMs."""

from __future__ import annotations

from dataclasses import dataclass

from ..utils.math import ceil_div

BLOCK_N, BLOCK_K = 128, 128
GROUP = 8  # tiles of M that run side by side, to share B in L2
SHARED_MEMORY = 227 * 1024

# Rows of a tile -> clocks of a block of K, of which the tensor cores take 4 a row at best, and of a tile's start and
# end. Fitted to an H200 at 1.5 GHz: (M, N, K) of 4096 x (576 to 32768) x (512 to 16384), bf16 output.
_CLOCKS = {256: (1140, 3100), 192: (920, 2000), 128: (660, 1100)}


@dataclass(frozen=True)
class Fp8Config:
    """consumers: warp groups that own block_m / consumers rows each; registers: of their threads and the producer's."""

    block_m: int
    consumers: int
    stages: int
    registers: tuple[int, int]
    d_buffers: int  # of 64 rows, to stage d, for each consumer; none where d is written without TMA


def fp8_config(
    m: int, n: int, k: int, d_bytes: int, d_by_tma: bool, sf_per_column: bool, accumulate: bool, num_sms: int
) -> Fp8Config:
    """The tile (`block_m` x 128) that takes the fewest clocks, by waves of tiles; the same bits come out of each.

    A tile of more rows reads less from L2 for its work, and one of fewer wastes less in the last wave and at the edge.
    256 rows are for two consumers that own two blocks of 64 each, 192 for three that own one, 128 for two. Scale
    factors for each column of B, or reading d without TMA, take the registers of larger ones.
    """
    tiles = (128,) if sf_per_column or (accumulate and not d_by_tma) else (256, 192, 128)
    block_m = min(tiles, key=lambda block_m: _clocks(block_m, m, n, k, num_sms))
    consumers = 3 if block_m == 192 else 2
    # Where d is read first, its next 64 rows follow once those before are out.
    d_buffers = (2 if block_m == 256 and d_bytes == 2 and not accumulate else 1) if d_by_tma else 0
    used = consumers * d_buffers * 64 * BLOCK_N * d_bytes + 256  # and barriers
    stage = (block_m + BLOCK_N) * BLOCK_K + 4 * block_m + (4 * BLOCK_N if sf_per_column else 0)
    stages = min(5, (SHARED_MEMORY - used) // stage)
    return Fp8Config(block_m, consumers, stages, (160, 24) if consumers == 3 else (240, 24), d_buffers)


def _clocks(block_m, m, n, k, num_sms):
    waves = ceil_div(ceil_div(m, block_m) * ceil_div(n, BLOCK_N), num_sms)
    block, tile = _CLOCKS[block_m]
    return waves * (ceil_div(k, BLOCK_K) * block + tile)
