"""GEMMs for compute capability 9.0: which kernel takes a problem, and operands brought into the layout it reads."""

from __future__ import annotations

import torch

from .._runtime import _settings
from .._triton import Launch, jit, tl
from ..fused_layout import get_mn_major_tma_aligned_tensor
from ..utils.layout import get_tma_aligned_size
from ..utils.math import align, ceil_div
from . import hopper_fp8, hopper_small, portable
from ._tma import gl, is_written_by_tma
from .config import fp8_config
from .reference import Gran

_FORWARD, _WGRAD = Gran(1, 128, 128, 128), Gran(1, 1, 128, 128)


def bind(a, sfa, b, sfb, d, gran: Gran, accumulate: bool):
    """What launches the FP8 GEMM, called with (a, sfa, b, sfb, d) and their pointers; None where `portable` has to."""
    if not _is_served(d) or torch.int8 in (a.dtype, b.dtype):
        return None
    arguments = a, sfa, b, sfb, d, gran, accumulate, _num_sms(d.device)
    return hopper_small.bind(*arguments) or bind_fp8(*arguments)


def bind_bf16(a, b, d, accumulate: bool):
    """None: `portable` serves BF16."""
    return None


def bind_fp8(a, sfa, b, sfb, d, gran: Gran, accumulate: bool, num_sms: int):
    """`bind` with the kernel for many rows, and copies of the operands that are not in its layout; None likewise.

    It reads FP8 with scale factors for 1x128 by 128x128 or 1x128. Copies are made of operands that are not K-major or
    have no rows at multiples of 16 bytes, and of scale factors that are packed or, for 1x128, not MN-major.
    """
    (m, n), k = d.shape, a.shape[1]
    if gran not in (_FORWARD, _WGRAD) or not is_written_by_tma(d) or max(m, n, k) >= 2**31 - 256:
        return None
    per_column = gran == _WGRAD
    convert = (
        _k_major(a), _mn_major_sf(sfa, m, k), _k_major(b), _mn_major_sf(sfb, n, k) if per_column else _fp32_sf(sfb, k)
    )  # fmt: skip
    like = [t if c is None else c.like for t, c in zip((a, sfa, b, sfb), convert)]
    config = fp8_config(m, n, k, d.element_size(), per_column, accumulate, num_sms)
    # Bound now, for a plan that binds later would keep the tensors.
    unaligned = portable.bind(a, sfa, b, sfb, d, gran, accumulate)
    launch = hopper_fp8.bind(*like, d, per_column, accumulate, config, num_sms, lambda: unaligned)
    return _Converting(convert, launch) if any(convert) else launch


def _is_served(d) -> bool:
    return gl is not None and d.is_cuda and torch.cuda.get_device_capability(d.device) == (9, 0)


def _num_sms(device) -> int:
    if _settings.num_sms or device.type != "cuda":
        return _settings.num_sms or 132
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Converting:
    """A launch of which some tensors are converted first."""

    __slots__ = ("convert", "launch", "as_they_are")

    def __init__(self, convert, launch):
        self.convert, self.launch = (*convert, None), launch
        self.as_they_are = [i for i, c in enumerate(self.convert) if c is None and i in launch.tma_indices]

    @torch.no_grad()
    def __call__(self, tensors, pointers):
        if any([pointers[i] & 15 for i in self.as_they_are]):
            self.launch.unaligned()(tensors, pointers)
            return
        # The allocator gives a tensor that is freed here to no other stream, and to this one in order.
        tensors = tuple([t if convert is None else convert(t) for t, convert in zip(tensors, self.convert)])
        self.launch(tensors, tuple([t.data_ptr() for t in tensors]))


class _Conversion:
    """A kernel that writes a tensor into another of the shape and strides of `like`."""

    __slots__ = ("like", "launch")

    def __init__(self, like, launch):
        self.like, self.launch = like, launch

    def __call__(self, tensor):
        like = self.like
        out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=tensor.device)
        self.launch((tensor, out), (tensor.data_ptr(), out.data_ptr()))
        return out


def _k_major(data):
    """What makes an operand's rows contiguous, at multiples of 16 bytes; None where they are."""
    mn, k = data.shape
    if (k == 1 or data.stride(1) == 1) and (mn == 1 or (data.stride(0) % 16 == 0 and data.stride(0) >= k)):
        return None
    like = torch.empty_strided((mn, k), (align(k, 16), 1), dtype=data.dtype, device="meta")
    args = (mn, k, *data.stride(), like.stride(0), data.stride(0) == 1, 128, 128)
    return _Conversion(like, Launch(k_major_kernel, (ceil_div(mn, 128), ceil_div(k, 128), 1), args, 8, _index(data)))


def _mn_major_sf(sf, mn, k):
    """What makes scale factors for 1x128 fp32 and MN-major, at multiples of 16 bytes; None where they are."""
    stride = sf.stride(1) if sf.shape[1] > 1 else align(mn, 4)
    if sf.dtype == torch.float32 and (mn == 1 or sf.stride(0) == 1) and stride % 4 == 0 and stride >= mn:
        return None
    if sf.dtype == torch.float32:
        aligned = get_tma_aligned_size(mn, 4)
        like = torch.empty_strided(sf.shape, (1, aligned), dtype=sf.dtype, device="meta")
        return _Transposition(like)
    return _unpacking(sf, mn, k, True)


def _fp32_sf(sf, k):
    """What makes scale factors for 128x128 fp32; None where they are."""
    return None if sf.dtype == torch.float32 else _unpacking(sf, sf.shape[0], k, False)


class _Transposition:
    __slots__ = ("like",)

    def __init__(self, like):
        self.like = like

    def __call__(self, sf):
        return get_mn_major_tma_aligned_tensor(sf)


def _unpacking(sf, rows, k, mn_major):
    shape = (rows, ceil_div(k, 128))
    strides = (1, get_tma_aligned_size(rows, 4)) if mn_major else (shape[1], 1)
    like = torch.empty_strided(shape, strides, dtype=torch.float32, device="meta")
    grid = (ceil_div(rows, 128), shape[1], 1)
    return _Conversion(like, Launch(unpack_ue8m0_kernel, grid, (rows, *sf.stride(), *strides, 128), 4, _index(sf)))


def _index(tensor):
    return tensor.device.index if tensor.is_cuda else -1


@jit(do_not_specialize=("mn", "stride_mn", "stride_k", "out_stride_mn", "out_stride_k"))
def unpack_ue8m0_kernel(sf_ptr, out_ptr, mn, stride_mn, stride_k, out_stride_mn, out_stride_k, BLOCK: tl.constexpr):
    """fp32 scale factors of four exponents to a word along K."""
    column = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(sf_ptr + rows * stride_mn + column // 4 * stride_k, mask=rows < mn, other=0)
    exponent = (word >> (column % 4 * 8).to(tl.int32)) & 0xFF
    tl.store(
        out_ptr + rows * out_stride_mn + column * out_stride_k, (exponent << 23).to(tl.float32, bitcast=True), rows < mn
    )


@jit(do_not_specialize=("mn", "k", "stride_mn", "stride_k", "out_stride"))
def k_major_kernel(
    data_ptr, out_ptr, mn, k, stride_mn, stride_k, out_stride,
    MN_MAJOR: tl.constexpr, BLOCK_MN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Copy bytes into rows that are contiguous along K."""
    row, col = tl.program_id(0).to(tl.int64) * BLOCK_MN, tl.program_id(1).to(tl.int64) * BLOCK_K
    rows, cols = row + tl.arange(0, BLOCK_MN), col + tl.arange(0, BLOCK_K)
    if MN_MAJOR:
        tile = data_ptr + rows[None, :] + cols[:, None] * stride_k
        data = tl.trans(tl.load(tile, mask=(rows < mn)[None, :] & (cols < k)[:, None], other=0))
    else:
        tile = data_ptr + rows[:, None] * stride_mn + cols[None, :] * stride_k
        data = tl.load(tile, mask=(rows < mn)[:, None] & (cols < k)[None, :], other=0)
    out = out_ptr + rows[:, None] * out_stride + cols[None, :]
    tl.store(out, data, mask=(rows < mn)[:, None] & (cols < k)[None, :])
