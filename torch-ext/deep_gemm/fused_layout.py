"""Scale factors into the layouts of `utils.layout`, each one Triton kernel; the functions there are the references."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ._call import Plan, Planned, Spec, is_traced, served_by_triton
from ._ops import add_op_namespace_prefix, ops
from ._runtime import is_sm100
from ._tiles import layout, tile_pointers
from ._triton import Launch, jit, tl
from .utils import layout as reference
from .utils.layout import get_tma_aligned_size
from .utils.math import ceil_div


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """`sf` as the GEMM reads it: MN-major, each column at a multiple of 16 bytes.

    Args:
        sf: fp32 `[mn, k]` or `[groups, mn, k]`, any strides.
    Returns:
        The same shape and values with strides `(1, t)` or `(t * k, 1, t)`, `t` being mn rounded up to a multiple of 4;
        `sf` itself, without a copy, where its strides are already those. What lies between mn and t is undefined. No
        host sync; works in CUDA graphs and under torch.compile. Layout and name follow DeepGEMM.
    Raises:
        ValueError: another dtype or rank.
    """
    reference._check_fp32(sf)
    if sf.stride() == reference._mn_major_strides(sf):
        return sf
    if is_traced(sf):
        return ops.get_mn_major_tma_aligned_tensor(sf.detach())
    return _transpose((sf,), (None,))[0]


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: torch.Tensor) -> torch.Tensor:
    """The exponents of `sf`, four to a word along k, MN-major with each column at a multiple of 16 bytes.

    Args:
        sf: fp32 `[mn, k]` or `[groups, mn, k]`, powers of two, any strides.
    Returns:
        int32 `[.., mn, ceil(k / 4)]` with strides `(1, t)` or `(t * ceil(k / 4), 1, t)`, `t` being mn rounded up to a
        multiple of 4: byte j (little endian) of word i is `(bits >> 23) & 255` of column `4 * i + j`, 0 past the last
        column. Nothing of sign and mantissa is kept. Layout and name follow DeepGEMM.
    Raises:
        ValueError: another dtype or rank.
    """
    reference._check_fp32(sf)
    return _packed(sf, sf.shape[-2], 1)


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: torch.Tensor, ks_tensor: torch.Tensor, ks: list[int], gran_k: int
) -> torch.Tensor:
    """The exponents of `sf` for groups that follow each other along K, four to a word; a group starts a new word row.

    Args:
        sf: fp32 `[sum of ceil(ks[g] / gran_k), mn]`, contiguous, powers of two, mn a multiple of 4.
        ks, ks_tensor: the K sizes of 1 to 128 groups, as a list, which gives the shape of the result, and as int32,
            which the kernel reads where it is on sf's device: nothing is copied or waited for.
        gran_k: 32 or 128.
    Returns:
        int32 `[sum of ceil(ks[g] / (4 * gran_k)), mn]`, contiguous: byte j (little endian) of a group's word row i is
        the exponent of its row `4 * i + j`, 0 past the group's last row. Layout and name follow DeepGEMM.
    Raises:
        ValueError: anything else.
    """
    if is_traced(sf):
        reference._check_k_grouped(sf, ks_tensor, ks, gran_k)
        return ops.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf.detach(), ks_tensor, ks, gran_k)
    return _pack_k_grouped((sf, ks_tensor), (None,), tuple(ks), gran_k)[0]


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, ...],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """`sf` of an `[mn, k]` operand (or `num_groups` of them) in the layout that the GEMM of sf's device reads.

    `utils.transform_sf_into_required_layout`, which lists what is accepted and what comes back, with one kernel where
    it copies: `get_mn_major_tma_aligned_tensor`, or on compute capability 10.x the packed form of rows repeated to mn.

    Args:
        sf: fp32 `[.., ceil(mn / gran_mn), ceil(k / gran_k)]`, or int32 with four exponents to a word.
        recipe: `(gran_m, gran_n, gran_k)` with `is_sfa`, or `(gran_mn, gran_k)` without.
    Raises:
        ValueError: a shape, dtype or recipe without such a layout.
    """
    gran_mn, gran_k = reference._granularity(recipe, is_sfa)
    reference._check_sf_shape(sf, mn, k, gran_mn, gran_k, num_groups)
    if sf.dtype == torch.float32:
        packs = is_sm100(sf.device) and not disable_ue8m0_cast
        if packs and gran_k in (32, 128):
            return _packed(sf, mn, gran_mn)
        if not packs and (gran_mn, gran_k) == (1, 128):
            return get_mn_major_tma_aligned_tensor(sf)
    return reference.transform_sf_into_required_layout(sf, mn, k, recipe, num_groups, is_sfa, disable_ue8m0_cast)


def _packed(sf, mn, gran_mn):
    if is_traced(sf):
        return ops.pack_fp32_into_ue8m0(sf.detach(), mn, gran_mn)
    return _pack((sf,), (None,), mn, gran_mn)[0]


@torch.library.custom_op(add_op_namespace_prefix("get_mn_major_tma_aligned_tensor"), mutates_args=())
def _transpose_op(sf: torch.Tensor) -> torch.Tensor:
    return _transpose((sf,), (None,))[0]


@torch.library.register_fake(add_op_namespace_prefix("get_mn_major_tma_aligned_tensor"))
def _(sf):
    return _MnMajor(tuple(sf.shape), torch.float32).empty(sf.device)


@torch.library.custom_op(add_op_namespace_prefix("pack_fp32_into_ue8m0"), mutates_args=())
def _pack_op(sf: torch.Tensor, mn: int, gran_mn: int) -> torch.Tensor:
    return _pack((sf,), (None,), mn, gran_mn)[0]


@torch.library.register_fake(add_op_namespace_prefix("pack_fp32_into_ue8m0"))
def _(sf, mn, gran_mn):
    return _packed_spec(sf, mn).empty(sf.device)


@torch.library.custom_op(
    add_op_namespace_prefix("get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"), mutates_args=()
)
def _pack_k_grouped_op(sf: torch.Tensor, ks_tensor: torch.Tensor, ks: list[int], gran_k: int) -> torch.Tensor:
    return _pack_k_grouped((sf, ks_tensor), (None,), tuple(ks), gran_k)[0]


@torch.library.register_fake(add_op_namespace_prefix("get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"))
def _(sf, ks_tensor, ks, gran_k):
    return _k_grouped_spec(sf, ks, gran_k).empty(sf.device)


class _MnMajor(Spec):
    """An output in the MN-major, TMA-aligned layout, with the padding of its last column too."""

    def empty(self, device):
        *groups, mn, k = self.shape
        aligned = get_tma_aligned_size(mn, 4)
        storage = torch.empty(math.prod(groups) * k * aligned, dtype=self.dtype, device=device)
        return storage.as_strided(self.shape, (aligned * k, 1, aligned)[-len(self.shape) :])


def _packed_spec(sf, mn):
    return _MnMajor((*sf.shape[:-2], mn, ceil_div(sf.shape[-1], 4)), torch.int32)


def _k_grouped_spec(sf, ks, gran_k):
    return Spec((sum(ceil_div(k, 4 * gran_k) for k in ks), sf.shape[1]), torch.int32)


def _make_transpose(inputs, outputs) -> Plan:
    (sf,) = inputs
    launch = bind_transpose(sf) if sf.numel() and served_by_triton(sf.device) else None
    spec = _MnMajor(tuple(sf.shape), torch.float32)
    return Plan(inputs, outputs, (spec,), launch, lambda sf: (reference._to_mn_major(sf),), not sf.numel())


def _make_pack(inputs, outputs, mn, gran_mn) -> Plan:
    (sf,) = inputs
    launch = bind_pack(sf, mn, gran_mn) if sf.numel() and served_by_triton(sf.device) else None

    def pack(sf):
        rows = sf if gran_mn == 1 else sf.repeat_interleave(gran_mn, dim=-2)[..., :mn, :]
        return (reference.get_mn_major_tma_aligned_packed_ue8m0_tensor(rows),)

    return Plan(inputs, outputs, (_packed_spec(sf, mn),), launch, pack, not sf.numel())


def _make_pack_k_grouped(inputs, outputs, ks, gran_k) -> Plan:
    sf, ks_tensor = inputs
    reference._check_k_grouped(sf, ks_tensor, ks, gran_k)
    launch = None
    if sf.numel() and served_by_triton(sf.device) and ks_tensor.device == sf.device:
        launch = bind_pack_k_grouped(sf, ks_tensor, ks, gran_k)

    def pack(sf, ks_tensor):
        return (reference.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, ks_tensor, list(ks), gran_k),)

    return Plan(inputs, outputs, (_k_grouped_spec(sf, ks, gran_k),), launch, pack, not sf.numel())


_transpose = Planned(_make_transpose, ("sf",))
_pack = Planned(_make_pack, ("sf",))
_pack_k_grouped = Planned(_make_pack_k_grouped, ("sf", "ks_tensor"))


@dataclass(frozen=True)
class LayoutConfig:
    block_mn: int
    block_k: int
    num_warps: int


def transpose_config() -> LayoutConfig:
    """Tile and warps of the transpose: small tiles, so that a matrix of a few MB has work for every SM."""
    return LayoutConfig(32, 64, 4)


def pack_config() -> LayoutConfig:
    """Tile and warps of the packing; `block_k` counts columns of `sf`, four to a word."""
    return LayoutConfig(32, 64, 4)


def pack_k_grouped_config() -> LayoutConfig:
    """Tile and warps of the k-grouped packing, one word row (four rows of `sf`) in a tile."""
    return LayoutConfig(1024, 4, 4)


def bind_transpose(sf) -> Launch | None:
    """The kernel for a tensor of this shape and these strides; None where its grid would be too large."""
    return _bind(transpose_sf_kernel, transpose_config(), sf, sf.shape[-2])


def bind_pack(sf, mn, gran_mn) -> Launch | None:
    """The kernel for a tensor of this shape and these strides; None where its grid would be too large."""
    return _bind(pack_fp32_into_ue8m0_kernel, pack_config(), sf, mn, int(gran_mn))


def _bind(kernel, config, sf, mn, *constants):
    k = sf.shape[-1]
    groups, stride_g = (sf.shape[0], sf.stride(0)) if sf.dim() == 3 else (1, 0)
    major, unit, *strides = layout(sf[0] if sf.dim() == 3 else sf, k)
    g_unit, k_unit = math.gcd(16, stride_g), math.gcd(16, k)
    grid = (ceil_div(mn, config.block_mn), ceil_div(k, config.block_k), groups)
    if max(grid[1:]) > 65535:
        return None
    args = (
        mn, k // k_unit, stride_g // g_unit, *strides, get_tma_aligned_size(mn, 4) // 4,
        k_unit, g_unit, major, unit, *constants, config.block_mn, config.block_k,
    )  # fmt: skip
    return Launch(kernel, grid, args, config.num_warps, sf.device.index if sf.is_cuda else -1)


def bind_pack_k_grouped(sf, ks_tensor, ks, gran_k) -> Launch | None:
    """The kernel for a tensor of this shape; None where its grid would be too large."""
    rows, mn = sf.shape
    config = pack_k_grouped_config()
    grid = (_k_grouped_spec(sf, ks, gran_k).shape[0], ceil_div(mn, config.block_mn), 1)
    if grid[1] > 65535:
        return None
    # 128 whatever the number of groups, so that it does not recompile.
    args = (rows, mn // 4, len(ks), ks_tensor.stride(0), gran_k, 128, config.block_mn)
    device = sf.device.index if sf.is_cuda else -1
    return Launch(pack_fp32_into_ue8m0_k_grouped_kernel, grid, args, config.num_warps, device)


@jit
def sf_tile(
    sf_ptr, mn, k, stride_g, stride_mn, stride_k, rows, cols, row, col,
    G_UNIT: tl.constexpr, MAJOR: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """fp32 [rows, cols] of this program's group, zero outside [mn, k]."""
    mask = (rows < mn - row)[:, None] & (cols < k - col)[None, :]
    ptr = sf_ptr + tl.program_id(2).to(tl.int64) * stride_g * G_UNIT
    return tl.load(tile_pointers(ptr, row, col, rows, cols, stride_mn, stride_k, MAJOR, UNIT), mask=mask, other=0.0)


@jit
def store_mn_major(out_ptr, values, mn4, k, rows, cols, row, col):
    """Store a tile of this program's group in columns of `4 * mn4` elements, the padding included."""
    # With whole words of 16 bytes in the mask the stores are that wide.
    mask = (rows < mn4.to(tl.int64) * 4 - row)[:, None] & (cols < k - col)[None, :]
    ptr = out_ptr + tl.program_id(2).to(tl.int64) * k * mn4 * 4
    tl.store(tile_pointers(ptr, row, col, rows, cols, 1, mn4, "m", 4), values, mask=mask)


@jit(do_not_specialize=("mn", "k", "stride_g", "stride_mn", "stride_k", "mn4"))
def transpose_sf_kernel(
    sf_ptr,
    out_ptr,
    mn,
    k,
    stride_g,
    stride_mn,
    stride_k,
    mn4,
    K_UNIT: tl.constexpr,
    G_UNIT: tl.constexpr,
    MAJOR: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_MN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, col = tl.program_id(0).to(tl.int64) * BLOCK_MN, tl.program_id(1).to(tl.int64) * BLOCK_K
    rows, cols = tl.arange(0, BLOCK_MN), tl.arange(0, BLOCK_K)
    k = k.to(tl.int64) * K_UNIT
    sf = sf_tile(sf_ptr, mn, k, stride_g, stride_mn, stride_k, rows, cols, row, col, G_UNIT, MAJOR, UNIT)
    store_mn_major(out_ptr, sf, mn4, k, rows, cols, row, col)


@jit(do_not_specialize=("mn", "k", "stride_g", "stride_mn", "stride_k", "mn4"))
def pack_fp32_into_ue8m0_kernel(
    sf_ptr,
    out_ptr,
    mn,
    k,
    stride_g,
    stride_mn,
    stride_k,
    mn4,
    K_UNIT: tl.constexpr,
    G_UNIT: tl.constexpr,
    MAJOR: tl.constexpr,
    UNIT: tl.constexpr,
    GRAN_MN: tl.constexpr,
    BLOCK_MN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tl.static_assert(BLOCK_K % 4 == 0)
    WORDS: tl.constexpr = BLOCK_K // 4
    row, col = tl.program_id(0).to(tl.int64) * BLOCK_MN, tl.program_id(1).to(tl.int64) * BLOCK_K
    rows, cols, words = tl.arange(0, BLOCK_MN), tl.arange(0, BLOCK_K), tl.arange(0, WORDS)
    k = k.to(tl.int64) * K_UNIT
    if GRAN_MN == 1:
        sf = sf_tile(sf_ptr, mn, k, stride_g, stride_mn, stride_k, rows, cols, row, col, G_UNIT, MAJOR, UNIT)
    else:
        source = (row + rows) // GRAN_MN
        last = (mn + GRAN_MN - 1) // GRAN_MN
        sf = sf_tile(sf_ptr, last, k, stride_g, stride_mn, stride_k, source, cols, 0, col, G_UNIT, MAJOR, UNIT)
    exponent = (sf.to(tl.int32, bitcast=True) >> 23) & 0xFF
    # The first of four is the lowest byte; bytes do not meet, so that their sum is the word.
    word = tl.sum(tl.reshape(exponent, [BLOCK_MN, WORDS, 4]) << (tl.arange(0, 4) * 8)[None, None, :], axis=2)
    store_mn_major(out_ptr, word, mn4, (k + 3) // 4, rows, words, row, col // 4)


@jit(do_not_specialize=("num_rows", "mn4", "num_groups", "ks_stride"))
def pack_fp32_into_ue8m0_k_grouped_kernel(
    sf_ptr,
    ks_ptr,
    out_ptr,
    num_rows,
    mn4,
    num_groups,
    ks_stride,
    GRAN_K: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    BLOCK_MN: tl.constexpr,
):
    word_row = tl.program_id(0)
    mn = mn4.to(tl.int64) * 4
    cols = tl.program_id(1).to(tl.int64) * BLOCK_MN + tl.arange(0, BLOCK_MN)

    groups = tl.arange(0, MAX_GROUPS)
    k = tl.load(ks_ptr + groups.to(tl.int64) * ks_stride, mask=groups < num_groups, other=0)
    rows = (k + GRAN_K - 1) // GRAN_K
    words = (rows + 3) // 4
    end = tl.cumsum(words, axis=0)
    first = tl.sum(tl.where(end <= word_row, rows - 4 * words, 0), axis=0) + 4 * word_row
    last = tl.minimum(tl.sum(tl.where(end - words <= word_row, rows, 0), axis=0), num_rows)

    word = tl.zeros([BLOCK_MN], tl.int32)
    for i in tl.static_range(4):
        sf = tl.load(sf_ptr + (first + i).to(tl.int64) * mn + cols, mask=(cols < mn) & (first + i < last), other=0.0)
        word |= ((sf.to(tl.int32, bitcast=True) >> 23) & 0xFF) << (8 * i)
    tl.store(out_ptr + word_row.to(tl.int64) * mn + cols, word, mask=cols < mn)
