"""Casts to FP8 along the other dimension, stored transposed: the operands of a weight gradient (wgrad)."""

from __future__ import annotations

import torch

from ._tile_cast import TileCast


def fused_per_channel_cast_to_fp8_transposed(
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    mn_major_sf: bool = False,
    ks: torch.Tensor | None = None,
    alignment: int = 1,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast each column of `x` to e4m3 in groups of `gran_k` rows, stored transposed: K-major for wgrad, where K is M.

    The bytes of `utils.per_channel_cast_to_fp8` of x, filled up with zero rows, transposed; one kernel.

    Args:
        x: `[M, N]` bf16, fp16 or fp32, any strides.
        gran_k: 32 or 128; the last group of a column may be partial.
        mn_major_sf: new scale factors get strides `(1, t)`, t being N rounded up to 16 bytes, as TMA reads them.
        ks, alignment: int32 or int64 `[G]` on x's device: the rows of x are G groups (experts) of ks[g] >= 0 rows, one
            after the other, each starting at a multiple of `alignment`; their sum is at most M. Scale groups start
            at each group's first row. Nothing waits for the device.
        out, out_sf: written in place and returned where given, `out_sf` with any strides, `out` too without `ks`.
    Returns:
        `(xT_fp8, sf)`: `[N, M]` e4m3 with rows at multiples of 16 bytes and fp32 `[N, ceil(M / gran_k)]`, row-major.
        With `ks`, as `k_grouped_fp8_gemm_nt_contiguous` reads them: k_g is ks[g] rounded up to 128, xT_fp8 is flat, the
        row-major `[N, k_g]` of the groups one after the other, zero behind ks[g]; sf is `[N, sum of k_g / gran_k]`,
        MN-major. Both are as long as M and G allow, `k_max = (M + 127 * min(G, M)) // 128 * 128` for the sum of k_g;
        what lies behind the last group is undefined.
    Raises:
        TypeError, ValueError: as `fused_per_token_cast_to_fp8`, and for ks of another dtype, rank or device.
    """
    return _TRANSPOSED(x, ks, (out, out_sf), use_ue8m0, gran_k, mn_major_sf, alignment)


def fused_per_token_and_channel_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    mn_major_sf: bool = False,
    ks: torch.Tensor | None = None,
    alignment: int = 1,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
    out_t: torch.Tensor | None = None,
    out_sf_t: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Both casts of an activation or gradient from one read: by rows for forward and dgrad, by columns for wgrad.

    Args:
        x, use_ue8m0, gran_k: as in `fused_per_token_cast_to_fp8`.
        mn_major_sf, ks, alignment: as in `fused_per_channel_cast_to_fp8_transposed`; both scale factors are MN-major
            then. Rows of x that belong to no group of `ks` are neither read nor are their outputs written.
        out, out_sf, out_t, out_sf_t: written in place and returned where given.
    Returns:
        `((x_fp8, sf), (xT_fp8, sfT))`: the results of `fused_per_token_cast_to_fp8` and of
        `fused_per_channel_cast_to_fp8_transposed`, byte for byte.
    Raises:
        TypeError, ValueError: as those two.
    """
    out, out_sf, out_t, out_sf_t = _BOTH(
        x, ks, (out, out_sf, out_t, out_sf_t), use_ue8m0, gran_k, mn_major_sf, alignment
    )
    return (out, out_sf), (out_t, out_sf_t)


_TRANSPOSED = TileCast("", "channel", ("out", "out_sf"))
_BOTH = TileCast("token", "channel", ("out", "out_sf", "out_t", "out_sf_t"))
