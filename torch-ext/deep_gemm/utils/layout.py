"""Layouts of scale factors (`sf`) as the GEMMs read them, in plain PyTorch.

MN-major and TMA-aligned: a logical [mn, k] (or [groups, mn, k]) with strides (1, t) (or (t * k, 1, t)), where t is mn
rounded up to 16 bytes. The rows from mn to t of each column are padding with undefined contents, never consumed.
Layouts and names follow DeepGEMM.
"""

import torch
import torch.nn.functional as F

from .._runtime import (
    get_k_alignment_for_contiguous_layout,
    get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout,
    get_theoretical_mk_alignment_for_contiguous_layout,
    is_sm100,
    set_mk_alignment_for_contiguous_layout,
)
from .math import align, ceil_div, pack_ue8m0_to_int

__all__ = [
    "get_col_major_tma_aligned_tensor",
    "get_k_alignment_for_contiguous_layout",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "set_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout",
]


def get_tma_aligned_size(mn: int, element_size: int) -> int:
    """mn rounded up so that mn elements of `element_size` bytes fill whole 16-byte units.

    Raises ValueError for an element_size that does not divide 16.
    """
    if element_size not in (1, 2, 4, 8, 16):
        raise ValueError(f"element_size must divide 16, got {element_size}")
    return align(mn, 16 // element_size)


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """sf in the MN-major, TMA-aligned layout of this module.

    sf: fp32 [mn, k] or [groups, mn, k], any strides. Returns the same shape and values; sf itself, without a copy, if
    its strides are already those. Raises ValueError for another dtype or rank.
    """
    _check_fp32(sf)
    if sf.stride() == _mn_major_strides(sf):
        return sf
    return _to_mn_major(sf)


get_col_major_tma_aligned_tensor = get_mn_major_tma_aligned_tensor


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: torch.Tensor) -> torch.Tensor:
    """The exponents of sf, four to a word along k, in the MN-major, TMA-aligned layout of this module.

    sf: fp32 [mn, k] or [groups, mn, k], powers of two, any strides. Returns int32 [.., mn, ceil(k / 4)]: byte j
    (little endian) of word i is the biased exponent of column 4 * i + j, 0 past the last column. Sign and mantissa are
    dropped. Raises ValueError for another dtype or rank.
    """
    _check_fp32(sf)
    return _to_mn_major(pack_ue8m0_to_int(F.pad(sf, (0, -sf.shape[-1] % 4))))


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: torch.Tensor, ks_tensor: torch.Tensor, ks: list[int], gran_k: int
) -> torch.Tensor:
    """The exponents of sf for groups that follow each other along K, four to a word; each group starts a new word row.

    sf: fp32 [sum over g of ceil(ks[g] / gran_k), mn], contiguous, powers of two, mn a multiple of 4. ks: the K sizes
    of 1 to 128 groups; ks_tensor: the same as an int32 tensor, which is not read. gran_k: 32 or 128.
    Returns int32 [sum over g of ceil(ks[g] / (4 * gran_k)), mn], contiguous: byte j (little endian) of a group's word
    row i is the biased exponent of its row 4 * i + j, 0 past the group's last row.
    Raises ValueError for anything else.
    """
    rows = _check_k_grouped(sf, ks_tensor, ks, gran_k)
    return torch.cat([pack_ue8m0_to_int(F.pad(group.T, (0, -group.shape[0] % 4))).T for group in sf.split(rows)])


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, ...],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """sf of an [mn, k] operand (or num_groups of them) in the layout that the GEMM of sf's device reads.

    recipe: (gran_m, gran_n, gran_k) with is_sfa, or (gran_mn, gran_k) without.
    sf: fp32 [.., ceil(mn / gran_mn), ceil(k / gran_k)], or int32 with four exponents of powers of two to a word.
    Compute capability 10.x, gran_k 32 or 128: fp32 is repeated to mn rows and packed as by
    `get_mn_major_tma_aligned_packed_ue8m0_tensor`; int32 with gran_mn 1 has to be in that layout and comes back as is.
    Anywhere else, or with disable_ue8m0_cast: fp32 of granularity (1, 128) goes through
    `get_mn_major_tma_aligned_tensor`; (128, 128) has to be contiguous, or its transpose, and comes back as is.
    Raises ValueError for everything else.
    """
    gran_mn, gran_k = _granularity(recipe, is_sfa)
    _check_sf_shape(sf, mn, k, gran_mn, gran_k, num_groups)
    on_sm100 = is_sm100(sf.device)
    if sf.dtype == torch.float32:
        if on_sm100 and not disable_ue8m0_cast and gran_k in (32, 128):
            return get_mn_major_tma_aligned_packed_ue8m0_tensor(sf.repeat_interleave(gran_mn, dim=-2)[..., :mn, :])
        if (not on_sm100 or disable_ue8m0_cast) and (gran_mn, gran_k) == (1, 128):
            return get_mn_major_tma_aligned_tensor(sf)
        if (not on_sm100 or disable_ue8m0_cast) and (gran_mn, gran_k) == (128, 128):
            if not sf.is_contiguous() and not sf.mT.is_contiguous():
                raise ValueError(f"sf must be contiguous or the transpose of that, got strides {sf.stride()}")
            return sf
    elif on_sm100 and gran_mn == 1 and gran_k in (32, 128):
        expected = _mn_major_strides(sf)
        # One row has no stride.
        if mn == 1:
            expected = (*expected[:-2], sf.stride(-2), expected[-1])
        if sf.stride() != expected:
            raise ValueError(f"sf must be MN-major and TMA-aligned, strides {expected}, got {sf.stride()}")
        return sf
    raise ValueError(
        f"sf of {sf.dtype} with gran_mn = {gran_mn}, gran_k = {gran_k} and disable_ue8m0_cast = {disable_ue8m0_cast} "
        f"has no layout on {'compute capability 10.x' if on_sm100 else 'this device'}"
    )


def _granularity(recipe, is_sfa):
    if len(recipe) == 3:
        if is_sfa is None:
            raise ValueError("is_sfa must be given with a recipe of 3")
        return recipe[0 if is_sfa else 1], recipe[2]
    if len(recipe) != 2:
        raise ValueError(f"recipe must be (gran_m, gran_n, gran_k) or (gran_mn, gran_k), got {recipe}")
    if is_sfa is not None:
        raise ValueError(f"is_sfa must be None with a recipe of 2, got {is_sfa}")
    return recipe


def _check_sf_shape(sf, mn, k, gran_mn, gran_k, num_groups):
    if sf.dtype not in (torch.float32, torch.int32):
        raise ValueError(f"sf must be float32 or int32, got {sf.dtype}")
    if gran_mn < 1 or gran_k < 1:
        raise ValueError(f"recipe must be positive, got gran_mn = {gran_mn}, gran_k = {gran_k}")
    groups = () if num_groups is None else (num_groups,)
    shape = (*groups, ceil_div(mn, gran_mn), ceil_div(k, gran_k if sf.dtype == torch.float32 else 4 * gran_k))
    if sf.shape != shape:
        raise ValueError(f"sf must have shape {shape}, got {tuple(sf.shape)}")


def _check_k_grouped(sf, ks_tensor, ks, gran_k):
    """The rows of sf in each group."""
    if sf.dtype != torch.float32 or sf.dim() != 2 or not sf.is_contiguous() or sf.shape[1] % 4 != 0:
        raise ValueError(
            "sf must be float32 [k, mn], contiguous, with mn a multiple of 4, "
            f"got {sf.dtype} {tuple(sf.shape)} with strides {sf.stride()}"
        )
    if gran_k not in (32, 128):
        raise ValueError(f"gran_k must be 32 or 128, got {gran_k}")
    if not 1 <= len(ks) <= 128 or min(ks) < 0:
        raise ValueError(f"ks must hold 1 to 128 sizes of at least 0, got {list(ks)}")
    if ks_tensor.dtype != torch.int32 or ks_tensor.shape != (len(ks),):
        raise ValueError(f"ks_tensor must be int32 [{len(ks)}], got {ks_tensor.dtype} {tuple(ks_tensor.shape)}")
    rows = [ceil_div(k, gran_k) for k in ks]
    if sf.shape[0] != sum(rows):
        raise ValueError(f"sf must have {sum(rows)} rows for ks = {list(ks)} and gran_k = {gran_k}, got {sf.shape[0]}")
    return rows


def _check_fp32(sf):
    if sf.dtype != torch.float32 or sf.dim() not in (2, 3):
        raise ValueError(f"sf must be float32 [mn, k] or [groups, mn, k], got {sf.dtype} {tuple(sf.shape)}")


def _mn_major_strides(sf):
    mn, k = sf.shape[-2:]
    aligned = get_tma_aligned_size(mn, sf.element_size())
    return (aligned * k, 1, aligned)[-sf.dim() :]


def _to_mn_major(sf):
    strides = _mn_major_strides(sf)
    # Whole columns are allocated, so that the padding of the last one is there too.
    storage = sf.new_empty(sf.shape[:-2].numel() * sf.shape[-1] * strides[-1])
    return storage.as_strided(sf.shape, strides).copy_(sf)
