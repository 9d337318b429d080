"""RMSNorm with the cast to FP8 behind it, and its backward.

The bits are those of `rms_norm` and `rms_norm_backward` below. All arithmetic is IEEE fp32 without fused multiply-adds,
and a sum over a row has one order whatever the tile, so that PyTorch and Triton agree: column j goes to lane j % 1024,
a lane adds its columns in ascending order, then neighbouring lanes add in pairs until one is left. Columns that a row
lacks count as zero. Each step adds two numbers, which commutes, so that no layout of threads changes it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ._call import (
    Plan,
    Planned,
    Spec,
    allocate,
    check_matrix,
    check_output,
    is_traced,
    placeholders,
    served_by_triton,
    sf_spec,
)
from ._ops import add_op_namespace_prefix, ops
from ._quant import converts_in_hardware, group_sf, max_abs_bits, to_e4m3, to_e4m3_inf_to_nan, to_fp32, torch_saturates
from ._tiles import layout, tile_pointers
from ._triton import Launch, jit, tl
from .utils.math import ceil_div, per_token_cast_to_fp8

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LANES = 1024
# Rows r, r + 256, r + 512, ... make one partial sum of dweight: two programs for each of an H200's 132 SMs.
_PARTIALS = 256
# Beyond, the backward's row and its share of dweight leave the registers.
_MAX_BACKWARD_N = 16384


class RMSNormCast(NamedTuple):
    """What `fused_rms_norm_cast_to_fp8` returns; None where it was not asked for."""

    out: torch.Tensor
    out_sf: torch.Tensor
    residual: torch.Tensor | None
    norm: torch.Tensor | None
    rstd: torch.Tensor | None
    transposed: torch.Tensor | None
    transposed_sf: torch.Tensor | None


@torch.no_grad()
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm in plain PyTorch, the reference of `fused_rms_norm_cast_to_fp8`.

        h = x + residual    rstd = 1 / sqrt(sum(h^2) / N + eps)    y = h * rstd * weight, from left to right

    x, residual: `[M, N]` bf16, fp16 or fp32. weight: `[N]` of any of them. Returns `(y, h, rstd)`: y and h in x's dtype,
    each rounded once from fp32 (h before it is normalised), rstd fp32 `[M]`.
    """
    h = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    h_fp32 = h.float()
    # PyTorch's fp32 square root is not always the nearest number on CPUs; through fp64 it is.
    rstd = 1.0 / (_row_mean(h_fp32 * h_fp32) + eps).double().sqrt().float()
    return (h_fp32 * rstd[:, None] * weight.float()).to(x.dtype), h, rstd


@torch.no_grad()
def rms_norm_backward(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dresidual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of RMSNorm in plain PyTorch, the reference of `fused_rms_norm_backward`; formulas and shapes there.

    dweight sums rows r, r + 256, r + 512, ... in ascending order, then neighbouring ones of the 256 sums in pairs.
    """
    m, n = h.shape
    dy_fp32, normed = dy.float(), h.float() * rstd[:, None]
    g = dy_fp32 * weight.float()
    dx = (g - normed * _row_mean(g * normed)[:, None]) * rstd[:, None]
    if dresidual is not None:
        dx = dx + dresidual.float()
    partials = h.new_zeros(_PARTIALS, n, dtype=torch.float32)
    for row in range(0, m, _PARTIALS):
        partials[: m - row] += dy_fp32[row : row + _PARTIALS] * normed[row : row + _PARTIALS]
    return dx.to(h.dtype), _add_neighbours(partials.T).to(weight.dtype)


def _row_mean(x):
    """Mean of each row, in the order that this module defines."""
    m, n = x.shape
    lanes = x.new_zeros(m, _LANES)
    for column in range(0, n, _LANES):
        lanes[:, : n - column] += x[:, column : column + _LANES]
    # A tensor, as PyTorch multiplies by the reciprocal of a number.
    return _add_neighbours(lanes) / torch.full_like(lanes[:, 0], n)


def _add_neighbours(x):
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x[:, 0]


def fused_rms_norm_cast_to_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    use_ue8m0: bool,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
    residual: torch.Tensor | None = None,
    with_norm: bool = False,
    with_rstd: bool = False,
    with_transposed: bool = False,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
    out_residual: torch.Tensor | None = None,
    out_norm: torch.Tensor | None = None,
    out_rstd: torch.Tensor | None = None,
    out_transposed: torch.Tensor | None = None,
    out_transposed_sf: torch.Tensor | None = None,
) -> RMSNormCast:
    """RMSNorm and `utils.per_token_cast_to_fp8` of the result in one kernel, with the residual addition before it.

        h = x + residual    y = h / sqrt(mean(h^2) + eps) * weight    (out, out_sf) = cast(y)

    Every byte equals that of the cast of `rms_norm`'s y, which is rounded to x's dtype, on the same device.

    Args:
        x, residual: `[M, N]` bf16, fp16 or fp32, both of one dtype, any strides. weight: `[N]` of any of the three.
        use_ue8m0, gran_k, use_packed_ue8m0: as in `fused_per_token_cast_to_fp8`.
        with_norm, with_rstd, with_transposed: what else to return; an output given for it asks for it too.
        out, ...: written in place and returned where given, with any strides. Else new, row-major.
            Rows are fastest next to each other in memory; other strides are right, but slow.
    Returns:
        `RMSNormCast`, without gradient: `out` `[M, N]` e4m3 and `out_sf`; with a residual `residual`, the h of the next
        layer and of the backward, in x's dtype; `norm`, y in x's dtype; `rstd` `[M]` fp32; for wgrad `transposed`, the
        cast of y.T `[N, M]` e4m3, and `transposed_sf` `[N, ceil(M / 128)]` fp32 for groups of 128 rows. As such a group
        spans rows that each need their whole statistics first, the transposed copy is a second launch, which reads h
        and, though not returned unless asked for, rstd. CPU tensors take the reference.
    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape or device, or an output that overlaps an input,
            itself or another output. Nothing is written then.
    """
    wanted = (
        residual is not None,
        with_norm or out_norm is not None,
        with_rstd or out_rstd is not None,
        with_transposed or out_transposed is not None or out_transposed_sf is not None,
    )
    inputs = (x, weight, residual)
    outputs = (out, out_sf, out_residual, out_norm, out_rstd, out_transposed, out_transposed_sf)
    if out_residual is not None and residual is None:
        raise ValueError("out_residual needs residual: without it the sum is x itself")
    recipe = (eps, use_ue8m0, gran_k, use_packed_ue8m0)
    if is_traced(x) or is_traced(weight):
        specs = _check_forward(wanted, inputs, outputs, *recipe)
        outputs = allocate(outputs, specs, x)
        ops.fused_rms_norm_cast_to_fp8(*(t if t is None else t.detach() for t in inputs), *recipe, *outputs)
        return RMSNormCast(*outputs)
    return _run_forward(wanted, inputs, outputs, recipe)


@torch.library.custom_op(
    add_op_namespace_prefix("fused_rms_norm_cast_to_fp8"),
    mutates_args=("out", "out_sf", "out_residual", "out_norm", "out_rstd", "out_transposed", "out_transposed_sf"),
)
def _forward_op(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None,
    eps: float, use_ue8m0: bool, gran_k: int, use_packed_ue8m0: bool,
    out: torch.Tensor, out_sf: torch.Tensor, out_residual: torch.Tensor | None, out_norm: torch.Tensor | None,
    out_rstd: torch.Tensor | None, out_transposed: torch.Tensor | None, out_transposed_sf: torch.Tensor | None,
) -> None:  # fmt: skip
    wanted = tuple(given is not None for given in (residual, out_norm, out_rstd, out_transposed))
    outputs = (out, out_sf, out_residual, out_norm, out_rstd, out_transposed, out_transposed_sf)
    _run_forward(wanted, (x, weight, residual), outputs, (eps, use_ue8m0, gran_k, use_packed_ue8m0))


@torch.library.register_fake(add_op_namespace_prefix("fused_rms_norm_cast_to_fp8"))
def _(*_):
    return None


def _run_forward(wanted, inputs, outputs, recipe) -> RMSNormCast:
    slots, planned = _planned_forward(wanted)
    results = [None] * len(outputs)
    for slot, made in zip(slots, planned(inputs, tuple([outputs[slot] for slot in slots]), *recipe)):
        results[slot] = made
    return RMSNormCast(*results)


@functools.cache
def _planned_forward(wanted):
    """Which outputs there are, and the function that makes them."""
    residual, norm, rstd, transposed = wanted
    present = (True, True, residual, norm, rstd, transposed, transposed)
    slots = [slot for slot, is_there in enumerate(present) if is_there]
    names = ("out", "out_sf", "out_residual", "out_norm", "out_rstd", "out_transposed", "out_transposed_sf")
    make = functools.partial(_plan_forward, wanted, slots)
    return slots, Planned(make, ("x", "weight", "residual", *(names[slot] for slot in slots)))


def _check_forward(wanted, inputs, outputs, eps, use_ue8m0, gran_k, use_packed_ue8m0) -> list[Spec | None]:
    """Refuse what types, dtypes, shapes and strides say is wrong; what each output is to be, None where not wanted."""
    x, weight, residual = inputs
    _, norm, rstd, transposed = wanted
    check_matrix("x", x, *_DTYPES)
    m, n = x.shape
    _check_like("weight", weight, x, (n,), *_DTYPES)
    if residual is not None:
        _check_like("residual", residual, x, (m, n), x.dtype)
    if not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a number, got {type(eps).__name__}")
    specs = [
        Spec((m, n), torch.float8_e4m3fn),
        sf_spec((m,), n, use_ue8m0, gran_k, use_packed_ue8m0),
        Spec((m, n), x.dtype) if residual is not None else None,
        Spec((m, n), x.dtype) if norm else None,
        Spec((m,), torch.float32) if rstd else None,
        Spec((n, m), torch.float8_e4m3fn) if transposed else None,
        Spec((n, ceil_div(m, 128)), torch.float32) if transposed else None,
    ]
    for name, given, spec in zip(RMSNormCast._fields, outputs, specs):
        if given is not None:
            check_output(name if name.startswith("out") else f"out_{name}", given, x, spec)
    return specs


def _check_like(name, tensor, x, shape, *dtypes):
    """Refuse an input that is not of the shape, of one of the dtypes and on x's device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in dtypes or tensor.device != x.device:
        raise ValueError(
            f"{name} must be {' or '.join(map(str, dtypes))} of shape {tuple(shape)} on {x.device}, got {tensor.dtype} "
            f"of shape {tuple(tensor.shape)} on {tensor.device}"
        )


def _plan_forward(wanted, slots, inputs, given, *recipe) -> Plan:
    x, weight, residual = inputs
    outputs = [None] * 7
    for slot, tensor in zip(slots, given):
        outputs[slot] = tensor
    specs = _check_forward(wanted, inputs, outputs, *recipe)
    empty, launch = x.numel() == 0, None
    if empty and any(wanted[1:]):
        empty = False  # 0 columns still have an rstd, and 0 rows none: the reference knows
    elif not empty and served_by_triton(x.device):
        launch = _bind_forward(inputs, placeholders(outputs, specs), slots, *recipe)

    def reference(*inputs):
        results = _forward_reference(wanted, *inputs, *recipe)
        return [results[slot] for slot in slots]

    return Plan(inputs, given, [specs[slot] for slot in slots], launch, reference, empty)


@torch.no_grad()
def _forward_reference(wanted, x, weight, residual, eps, use_ue8m0, gran_k, use_packed_ue8m0):
    y, h, rstd = rms_norm(x, weight, eps, residual)
    cast = per_token_cast_to_fp8(y, use_ue8m0, gran_k, use_packed_ue8m0)
    transposed = per_token_cast_to_fp8(y.T, use_ue8m0) if wanted[3] else (None, None)
    return (*cast, h, y, rstd, *transposed)


class _Sequence:
    """Launches one after another, each with some of a call's tensors and of what `scratch` allocates behind them."""

    __slots__ = ("steps", "scratch")

    def __init__(self, steps, scratch: Spec | None, device):
        self.steps, self.scratch = steps, scratch and functools.partial(scratch.empty, device)

    def __call__(self, tensors, pointers):
        if self.scratch:
            scratch = self.scratch()
            tensors, pointers = (*tensors, scratch), (*pointers, scratch.data_ptr())
        for launch, index in self.steps:
            launch(tuple([tensors[i] for i in index]), tuple([pointers[i] for i in index]))


@dataclass(frozen=True)
class NormConfig:
    block_m: int
    block_n: int
    num_warps: int
    one_read: bool


def norm_config(n: int, itemsize: int) -> NormConfig:
    """Rows a program, lanes, warps, and whether a row of n columns stays in registers from its sum to its cast.

    A thread has as many neighbouring columns as make one 16-byte store of the widest output, whose elements have
    `itemsize` bytes, but at most 128 columns of a row. Configurations differ in speed only.
    """
    block_n = 128
    while block_n < min(n, _LANES):
        block_n *= 2
    num_warps = 2 * itemsize
    while num_warps < 8 and num_warps * 4096 < n:
        num_warps *= 2
    return NormConfig(_LANES // block_n, block_n, num_warps, n <= 16384)


@dataclass(frozen=True)
class TransposeConfig:
    block_n: int
    num_warps: int


def transpose_config() -> TransposeConfig:
    """Columns and warps of the transposed cast; its tiles are a group of 128 rows high."""
    return TransposeConfig(64, 8)


@dataclass(frozen=True)
class BackwardConfig:
    num_warps: int
    reduce_n: int


def backward_config(n: int) -> BackwardConfig:
    """Warps of the row kernel, and columns a program of the kernel that adds up the partial sums of dweight."""
    return BackwardConfig(4 if n <= 2048 else 8, 32)


def _matrix(tensor):
    """(strides, constants) of a 2-D view, those of an absent one being anything."""
    if tensor is None:
        return (0, 0), ("", 1)
    major, unit, *strides = layout(tensor, tensor.shape[1])
    return tuple(strides), (major, unit)


def _bind_forward(inputs, outputs, slots, eps, use_ue8m0, gran_k, use_packed_ue8m0) -> _Sequence:
    """The kernels for tensors of these dtypes, shapes and strides."""
    x, weight, residual = inputs
    out, out_sf, out_residual, norm, rstd, transposed, transposed_sf = outputs
    m, n = x.shape
    # Where each tensor of a launch stands among inputs, outputs and scratch; x stands for one that is absent.
    index = {"x": 0, "weight": 1, "residual": 0 if residual is None else 2}
    index |= {f: 0 for f in ("out_residual", "norm", "rstd", "transposed", "transposed_sf")}
    names = ("out", "out_sf", "out_residual", "norm", "rstd", "transposed", "transposed_sf")
    index |= {names[slot]: len(inputs) + position for position, slot in enumerate(slots)}
    scratch = None
    if transposed is not None and rstd is None:
        scratch = Spec((m,), torch.float32)
        rstd, index["rstd"] = scratch.empty("meta"), len(inputs) + len(slots)

    device = x.device.index if x.is_cuda else -1
    # With fp32 scale factors Inf meets a zero reciprocal and is NaN before the rounding.
    cast = (bool(use_ue8m0), converts_in_hardware(device), torch_saturates() or not use_ue8m0)
    config = norm_config(n, x.element_size() if residual is not None or norm is not None else 1)
    strides, constants = zip(*map(_matrix, (x, residual, out, out_residual, norm)))
    rstd_stride = 0 if rstd is None else rstd.stride(0)
    scalars = (m, *sum(strides, ()), *out_sf.stride(), rstd_stride)
    constants = (
        n, float(eps), weight.stride(0), *sum(constants, ()), residual is not None, norm is not None, rstd is not None,
        int(gran_k), bool(use_packed_ue8m0), *cast, config.one_read, config.block_m, config.block_n,
    )  # fmt: skip
    grid = (ceil_div(m, config.block_m), 1, 1)
    launch = Launch(rms_norm_cast_kernel, grid, scalars + constants, config.num_warps, device)
    order = ("x", "weight", "residual", "out", "out_sf", "out_residual", "norm", "rstd")
    steps = [(launch, [index[name] for name in order])]

    if transposed is not None:
        h, h_name = (x, "x") if residual is None else (out_residual, "out_residual")
        config = transpose_config()
        strides, constants = zip(*map(_matrix, (h, transposed)))
        m_unit = math.gcd(16, m)
        scalars = (m // m_unit, *sum(strides, ()), *transposed_sf.stride(), rstd_stride)
        constants = (m_unit, n, weight.stride(0), *sum(constants, ()), *cast, config.block_n)
        # Neighbouring programs share rows; axis y ends at 65535.
        tiles_m = ceil_div(m, 128)
        grid = (ceil_div(n, config.block_n), min(tiles_m, 65535), ceil_div(tiles_m, 65535))
        launch = Launch(rms_norm_transposed_cast_kernel, grid, scalars + constants, config.num_warps, device)
        order = (h_name, "weight", "rstd", "transposed", "transposed_sf")
        steps.append((launch, [index[name] for name in order]))
    return _Sequence(steps, scratch, x.device)


def fused_rms_norm_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dresidual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dweight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of RMSNorm: `rms_norm_backward` in one kernel and a small one that adds up dweight.

        dx = (dy * weight - normed * mean(dy * weight * normed)) * rstd + dresidual,  normed = h * rstd
        dweight = sum over rows of dy * normed

    Every byte equals the reference's on the same device: sums have a fixed order, so that dweight repeats bit for bit.

    Args:
        dy, h, dresidual: `[M, N]` bf16, fp16 or fp32, all of one dtype, any strides; h is what the forward normalised,
            `residual` of its result or x, dresidual the gradient that reaches it past the norm.
        weight: `[N]` of any of the three. rstd: `[M]` fp32, of the forward.
        out, out_dweight: written in place and returned where given, with any strides. Else new.
    Returns:
        `(dx, dweight)`: `[M, N]` in h's dtype, which is the gradient of x and of the residual alike, and `[N]` in
        weight's dtype; both are sums in fp32 that are rounded once. No rows give zeros for dweight. CPU tensors, and
        N above 16384, take the reference.
    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape or device, or an output that overlaps an input,
            itself or the other output. Nothing is written then.
    """
    inputs, outputs = (dy, h, weight, rstd, dresidual), (out, out_dweight)
    if is_traced(dy) or is_traced(weight):
        specs = _check_backward(inputs, outputs)
        outputs = allocate(outputs, specs, dy)
        ops.fused_rms_norm_backward(*(t if t is None else t.detach() for t in inputs), *outputs)
        return outputs
    return _backward(inputs, outputs)


@torch.library.custom_op(add_op_namespace_prefix("fused_rms_norm_backward"), mutates_args=("out", "out_dweight"))
def _backward_op(
    dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dresidual: torch.Tensor | None,
    out: torch.Tensor, out_dweight: torch.Tensor,
) -> None:  # fmt: skip
    _backward((dy, h, weight, rstd, dresidual), (out, out_dweight))


@torch.library.register_fake(add_op_namespace_prefix("fused_rms_norm_backward"))
def _(*_):
    return None


def _check_backward(inputs, outputs) -> tuple[Spec, Spec]:
    dy, h, weight, rstd, dresidual = inputs
    check_matrix("dy", dy, *_DTYPES)
    m, n = dy.shape
    _check_like("h", h, dy, (m, n), dy.dtype)
    _check_like("weight", weight, dy, (n,), *_DTYPES)
    _check_like("rstd", rstd, dy, (m,), torch.float32)
    if dresidual is not None:
        _check_like("dresidual", dresidual, dy, (m, n), dy.dtype)
    specs = Spec((m, n), dy.dtype), Spec((n,), weight.dtype)
    check_output("out", outputs[0], dy, specs[0])
    check_output("out_dweight", outputs[1], dy, specs[1])
    return specs


def _plan_backward(inputs, outputs) -> Plan:
    dy, h, weight, _, _ = inputs
    specs = _check_backward(inputs, outputs)
    launch = None
    if dy.numel() and dy.shape[1] <= _MAX_BACKWARD_N and served_by_triton(dy.device):
        launch = _bind_backward(inputs, placeholders(outputs, specs))
    # Not even without rows is there nothing to do: dweight is zero then.
    return Plan(inputs, outputs, specs, launch, rms_norm_backward, empty=weight.numel() == 0)


_backward = Planned(_plan_backward, ("dy", "h", "weight", "rstd", "dresidual", "out", "out_dweight"))


def _bind_backward(inputs, outputs) -> _Sequence:
    """The kernels for tensors of these dtypes, shapes and strides."""
    (dy, h, weight, rstd, dresidual), (dx, dweight) = inputs, outputs
    m, n = dy.shape
    device = dy.device.index if dy.is_cuda else -1
    config, hardware = backward_config(n), converts_in_hardware(device)
    strides, constants = zip(*map(_matrix, (dy, h, dresidual, dx)))
    scalars = (m, *sum(strides, ()), rstd.stride(0))
    constants = (n, weight.stride(0), *sum(constants, ()), dresidual is not None, hardware, norm_config(n, 4).block_n)
    partials = min(m, _PARTIALS)
    rows = Launch(rms_norm_backward_kernel, (partials, 1, 1), scalars + constants, config.num_warps, device)
    args = (partials, n, dweight.stride(0), hardware, _PARTIALS, config.reduce_n)
    add = Launch(add_partials_kernel, (ceil_div(n, config.reduce_n), 1, 1), args, 8, device)
    # dy, h, weight, rstd, dresidual, dx, dweight, then the partial sums.
    steps = [(rows, [0, 1, 2, 3, 0 if dresidual is None else 4, 5, 7]), (add, [7, 6])]
    return _Sequence(steps, Spec((partials, n), torch.float32), dy.device)


@jit
def _widen(x, HARDWARE: tl.constexpr):
    """`to_fp32`, by integers for bf16 where hardware may not, as Triton's interpreter loses subnormals."""
    if x.dtype == tl.bfloat16 and not HARDWARE:
        return (x.to(tl.uint16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return to_fp32(x, HARDWARE)


@jit
def _round_to(x, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """fp32 to DTYPE, to nearest even; integers do bf16 where hardware may not, as Triton's interpreter truncates."""
    if DTYPE == tl.bfloat16 and not HARDWARE:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@jit
def _add_neighbouring_lanes(x, BLOCK_M: tl.constexpr):
    """[BLOCK_M, lanes] -> [BLOCK_M], in pairs."""
    for _ in tl.static_range(10):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [BLOCK_M, x.shape[1] // 2, 2]), axis=2)
    return tl.reshape(x, [BLOCK_M])


@jit
def _cast_groups(
    x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GRAN_K: tl.constexpr,
    USE_UE8M0: tl.constexpr, HARDWARE: tl.constexpr, SATURATE: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """e4m3 bytes [BLOCK_M, BLOCK_N] and scale factors [BLOCK_M, groups] of an fp32 tile.

    A NaN-propagating maximum takes fewer instructions, and belongs in no kernel that stores a transposed copy.
    """
    groups = tl.reshape(x, [BLOCK_M, BLOCK_N // GRAN_K, GRAN_K])
    amax_bits = max_abs_bits(groups, HARDWARE and not TRANSPOSED)
    sf, inv = group_sf(amax_bits, USE_UE8M0, HARDWARE)
    scaled = tl.reshape(groups * inv[:, :, None], [BLOCK_M, BLOCK_N])
    if SATURATE:
        byte = to_e4m3(scaled, HARDWARE)
    else:
        amax_bits = tl.broadcast_to(amax_bits[:, :, None], [BLOCK_M, BLOCK_N // GRAN_K, GRAN_K])
        byte = to_e4m3_inf_to_nan(scaled, tl.reshape(amax_bits, [BLOCK_M, BLOCK_N]), HARDWARE)
    return byte, sf


@jit
def _load_h(
    x_ptr, residual_ptr, row, col, rows, lanes, mask,
    x_stride_m, x_stride_n, residual_stride_m, residual_stride_n,
    X_MAJOR: tl.constexpr, X_UNIT: tl.constexpr, RESIDUAL_MAJOR: tl.constexpr, RESIDUAL_UNIT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A tile of x + residual, rounded to x's dtype."""
    # What is read once leaves the caches to the weight.
    x_tile = tile_pointers(x_ptr, row, col, rows, lanes, x_stride_m, x_stride_n, X_MAJOR, X_UNIT)
    x = tl.load(x_tile, mask=mask, other=0.0, eviction_policy="evict_first")
    if HAS_RESIDUAL:
        residual_tile = tile_pointers(
            residual_ptr, row, col, rows, lanes, residual_stride_m, residual_stride_n, RESIDUAL_MAJOR, RESIDUAL_UNIT
        )
        residual = tl.load(residual_tile, mask=mask, other=0.0, eviction_policy="evict_first")
        return _round_to(_widen(x, HARDWARE) + _widen(residual, HARDWARE), x.dtype, HARDWARE)
    else:
        return x


@jit(
    do_not_specialize=(
        "m", "x_stride_m", "x_stride_n", "residual_stride_m", "residual_stride_n", "out_stride_m", "out_stride_n",
        "h_stride_m", "h_stride_n", "norm_stride_m", "norm_stride_n", "sf_stride_m", "sf_stride_n", "rstd_stride",
    ),
    do_not_specialize_on_alignment=("sf_ptr", "rstd_ptr"),
)  # fmt: skip
def rms_norm_cast_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    sf_ptr,
    h_ptr,
    norm_ptr,
    rstd_ptr,
    m,
    x_stride_m,
    x_stride_n,
    residual_stride_m,
    residual_stride_n,
    out_stride_m,
    out_stride_n,
    h_stride_m,
    h_stride_n,
    norm_stride_m,
    norm_stride_n,
    sf_stride_m,
    sf_stride_n,
    rstd_stride,
    N: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    X_MAJOR: tl.constexpr,
    X_UNIT: tl.constexpr,
    RESIDUAL_MAJOR: tl.constexpr,
    RESIDUAL_UNIT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    H_MAJOR: tl.constexpr,
    H_UNIT: tl.constexpr,
    NORM_MAJOR: tl.constexpr,
    NORM_UNIT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RSTD: tl.constexpr,
    GRAN_K: tl.constexpr,
    PACKED: tl.constexpr,
    USE_UE8M0: tl.constexpr,
    HARDWARE: tl.constexpr,
    SATURATE: tl.constexpr,
    ONE_READ: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # A row's last lanes may be left out where they are zero.
    tl.static_assert(BLOCK_N == 1024 or (BLOCK_N < 1024 and N <= BLOCK_N))
    tl.static_assert(BLOCK_N % GRAN_K == 0)
    GROUPS: tl.constexpr = BLOCK_N // GRAN_K
    row = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_N)
    row_mask = tl.full([BLOCK_M, 1], True, tl.int1)
    if BLOCK_M > 1:
        row_mask = (rows < m - row)[:, None]

    kept = ()
    squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if ONE_READ:
        for begin in tl.static_range(0, N, BLOCK_N):
            at = tl.full([], begin, tl.int64)
            inside = row_mask
            if begin + BLOCK_N > N:
                inside = inside & (lanes < N - begin)[None, :]
            value = _load_h(
                x_ptr, residual_ptr, row, at, rows, lanes, inside,
                x_stride_m, x_stride_n, residual_stride_m, residual_stride_n,
                X_MAJOR, X_UNIT, RESIDUAL_MAJOR, RESIDUAL_UNIT, HAS_RESIDUAL, HARDWARE,
            )  # fmt: skip
            kept = kept + (value,)
            value = _widen(value, HARDWARE)
            squares += value * value
    else:
        for begin in range(0, N, BLOCK_N):
            at = tl.cast(begin, tl.int64)
            inside = row_mask & (lanes < N - begin)[None, :]
            value = _load_h(
                x_ptr, residual_ptr, row, at, rows, lanes, inside,
                x_stride_m, x_stride_n, residual_stride_m, residual_stride_n,
                X_MAJOR, X_UNIT, RESIDUAL_MAJOR, RESIDUAL_UNIT, HAS_RESIDUAL, HARDWARE,
            )  # fmt: skip
            value = _widen(value, HARDWARE)
            squares += value * value
    mean = tl.div_rn(_add_neighbouring_lanes(squares, BLOCK_M), N * 1.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + EPS))  # [BLOCK_M]
    if HAS_RSTD:
        tl.store(rstd_ptr + (row + rows[:, None]) * rstd_stride, rstd[:, None], mask=row_mask)

    # One turn where the row is in registers.
    for outer in range(0, N, N if ONE_READ else BLOCK_N):
        for start in tl.static_range(0, N if ONE_READ else BLOCK_N, BLOCK_N):
            col = tl.cast(outer, tl.int64) + start
            mask = row_mask
            if not ONE_READ or start + BLOCK_N > N:
                mask = mask & (lanes < N - col)[None, :]
            if ONE_READ:
                h = kept[start // BLOCK_N]
            else:
                h = _load_h(
                    x_ptr, residual_ptr, row, col, rows, lanes, mask,
                    x_stride_m, x_stride_n, residual_stride_m, residual_stride_n,
                    X_MAJOR, X_UNIT, RESIDUAL_MAJOR, RESIDUAL_UNIT, HAS_RESIDUAL, HARDWARE,
                )  # fmt: skip
            if HAS_RESIDUAL:
                h_tile = tile_pointers(h_ptr, row, col, rows, lanes, h_stride_m, h_stride_n, H_MAJOR, H_UNIT)
                tl.store(h_tile, h, mask=mask)
            # As a tile of x's shape it comes in x's layout.
            weight_tile = weight_ptr + ((col + lanes) * WEIGHT_STRIDE)[None, :] + (rows * 0)[:, None]
            weight = tl.load(weight_tile, mask=mask, other=0.0, eviction_policy="evict_last")
            y = _widen(h, HARDWARE) * rstd[:, None] * _widen(weight, HARDWARE)
            y = _round_to(y, h.dtype, HARDWARE)
            if not ONE_READ or start + BLOCK_N > N:
                y = tl.where(mask, y, 0.0)
            if HAS_NORM:
                norm_tile = tile_pointers(
                    norm_ptr, row, col, rows, lanes, norm_stride_m, norm_stride_n, NORM_MAJOR, NORM_UNIT
                )
                tl.store(norm_tile, y, mask=mask)
            byte, sf = _cast_groups(_widen(y, HARDWARE), BLOCK_M, BLOCK_N, GRAN_K, USE_UE8M0, HARDWARE, SATURATE)
            out_tile = tile_pointers(out_ptr, row, col, rows, lanes, out_stride_m, out_stride_n, OUT_MAJOR, OUT_UNIT)
            tl.store(out_tile, byte, mask=mask)

            group = col // GRAN_K + tl.arange(0, GROUPS)
            sf_mask = row_mask & (group * GRAN_K < N)[None, :]
            sf_row = (row + rows) * sf_stride_m
            if PACKED:
                # Bytes of a word: the first group is the lowest.
                sf_bytes = sf_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
                sf_tile = sf_bytes + (sf_row[:, None] + (group // 4 * sf_stride_n)[None, :]) * 4 + (group % 4)[None, :]
                tl.store(sf_tile, (sf.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=sf_mask)
            else:
                tl.store(sf_ptr + (sf_row[:, None] + (group * sf_stride_n)[None, :]), sf, mask=sf_mask)


@jit(
    do_not_specialize=(
        "m", "h_stride_m", "h_stride_n", "out_stride_m", "out_stride_n", "sf_stride_m", "sf_stride_n", "rstd_stride"
    ),
    do_not_specialize_on_alignment=("sf_ptr", "rstd_ptr"),
)  # fmt: skip
def rms_norm_transposed_cast_kernel(
    h_ptr,
    weight_ptr,
    rstd_ptr,
    out_ptr,
    sf_ptr,
    m,
    h_stride_m,
    h_stride_n,
    out_stride_m,
    out_stride_n,
    sf_stride_m,
    sf_stride_n,
    rstd_stride,
    M_UNIT: tl.constexpr,
    N: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    H_MAJOR: tl.constexpr,
    H_UNIT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    USE_UE8M0: tl.constexpr,
    HARDWARE: tl.constexpr,
    SATURATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    col = tl.program_id(0).to(tl.int64) * BLOCK_N
    row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * 128
    rows = tl.arange(0, 128)
    cols = tl.arange(0, BLOCK_N)
    row_mask = rows < m.to(tl.int64) * M_UNIT - row
    col_mask = cols < N - col

    mask = row_mask[:, None] & col_mask[None, :]
    h_tile = tile_pointers(h_ptr, row, col, rows, cols, h_stride_m, h_stride_n, H_MAJOR, H_UNIT)
    h = tl.load(h_tile, mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + (row + rows) * rstd_stride, mask=row_mask, other=0.0)
    weight = tl.load(weight_ptr + (col + cols) * WEIGHT_STRIDE, mask=col_mask, other=0.0)
    y = _widen(h, HARDWARE) * rstd[:, None] * _widen(weight, HARDWARE)[None, :]
    y = tl.where(mask, _round_to(y, h.dtype, HARDWARE), 0.0)
    # Transposed before the cast: FP8 tiles that change layout have come out corrupted on Hopper.
    y = _widen(tl.trans(y), HARDWARE)  # [BLOCK_N, 128]
    byte, sf = _cast_groups(y, BLOCK_N, 128, 128, USE_UE8M0, HARDWARE, SATURATE, True)
    out_tile = tile_pointers(out_ptr, col, row, cols, rows, out_stride_m, out_stride_n, OUT_MAJOR, OUT_UNIT)
    tl.store(out_tile, byte, mask=col_mask[:, None] & row_mask[None, :])
    sf_tile = sf_ptr + ((col + cols) * sf_stride_m + row // 128 * sf_stride_n)[:, None]
    tl.store(sf_tile, sf, mask=col_mask[:, None])


@jit(
    do_not_specialize=(
        "m", "dy_stride_m", "dy_stride_n", "h_stride_m", "h_stride_n", "dresidual_stride_m", "dresidual_stride_n",
        "dx_stride_m", "dx_stride_n", "rstd_stride",
    ),
    do_not_specialize_on_alignment=("rstd_ptr",),
)  # fmt: skip
def rms_norm_backward_kernel(
    dy_ptr,
    h_ptr,
    weight_ptr,
    rstd_ptr,
    dresidual_ptr,
    dx_ptr,
    partial_ptr,
    m,
    dy_stride_m,
    dy_stride_n,
    h_stride_m,
    h_stride_n,
    dresidual_stride_m,
    dresidual_stride_n,
    dx_stride_m,
    dx_stride_n,
    rstd_stride,
    N: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    DY_MAJOR: tl.constexpr,
    DY_UNIT: tl.constexpr,
    H_MAJOR: tl.constexpr,
    H_UNIT: tl.constexpr,
    DRESIDUAL_MAJOR: tl.constexpr,
    DRESIDUAL_UNIT: tl.constexpr,
    DX_MAJOR: tl.constexpr,
    DX_UNIT: tl.constexpr,
    HAS_DRESIDUAL: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    one = tl.arange(0, 1)
    lanes = tl.arange(0, BLOCK_N)
    partials = ()
    for start in tl.static_range(0, N, BLOCK_N):
        partials = partials + (tl.zeros([1, BLOCK_N], tl.float32),)

    row = tl.program_id(0).to(tl.int64)
    while row < m:
        rstd = tl.load(rstd_ptr + row * rstd_stride)
        kept = ()
        products = tl.zeros([1, BLOCK_N], tl.float32)
        for start in tl.static_range(0, N, BLOCK_N):
            col = tl.full([], start, tl.int64)
            mask = (lanes < N - start)[None, :]
            dy_tile = tile_pointers(dy_ptr, row, col, one, lanes, dy_stride_m, dy_stride_n, DY_MAJOR, DY_UNIT)
            h_tile = tile_pointers(h_ptr, row, col, one, lanes, h_stride_m, h_stride_n, H_MAJOR, H_UNIT)
            dy = tl.load(dy_tile, mask=mask, other=0.0, eviction_policy="evict_first")
            h = tl.load(h_tile, mask=mask, other=0.0, eviction_policy="evict_first")
            weight_tile = weight_ptr + (col + lanes)[None, :] * WEIGHT_STRIDE
            weight = tl.load(weight_tile, mask=mask, other=0.0, eviction_policy="evict_last")
            kept = kept + ((dy, h),)
            g = _widen(dy, HARDWARE) * _widen(weight, HARDWARE)
            product = g * (_widen(h, HARDWARE) * rstd)
            if start + BLOCK_N > N:
                product = tl.where(mask, product, 0.0)  # 0 * Inf
            products += product
        mean = tl.div_rn(_add_neighbouring_lanes(products, 1), N * 1.0)[:, None]

        sums = ()
        for start in tl.static_range(0, N, BLOCK_N):
            col = tl.full([], start, tl.int64)
            mask = (lanes < N - start)[None, :]
            dy, h = kept[start // BLOCK_N]
            # Again, from a cache, as registers are scarce.
            weight_tile = weight_ptr + (col + lanes)[None, :] * WEIGHT_STRIDE
            weight = tl.load(weight_tile, mask=mask, other=0.0, eviction_policy="evict_last")
            normed = _widen(h, HARDWARE) * rstd
            dx = (_widen(dy, HARDWARE) * _widen(weight, HARDWARE) - normed * mean) * rstd
            if HAS_DRESIDUAL:
                dresidual_tile = tile_pointers(
                    dresidual_ptr, row, col, one, lanes, dresidual_stride_m, dresidual_stride_n,
                    DRESIDUAL_MAJOR, DRESIDUAL_UNIT,
                )  # fmt: skip
                dresidual = tl.load(dresidual_tile, mask=mask, other=0.0, eviction_policy="evict_first")
                dx += _widen(dresidual, HARDWARE)
            dx_tile = tile_pointers(dx_ptr, row, col, one, lanes, dx_stride_m, dx_stride_n, DX_MAJOR, DX_UNIT)
            tl.store(dx_tile, _round_to(dx, h.dtype, HARDWARE), mask=mask)
            sums = sums + (partials[start // BLOCK_N] + _widen(dy, HARDWARE) * normed,)
        partials = sums
        row += tl.num_programs(0)

    for start in tl.static_range(0, N, BLOCK_N):
        partial_tile = partial_ptr + (tl.program_id(0).to(tl.int64) * N + start + lanes)[None, :]
        tl.store(partial_tile, partials[start // BLOCK_N], mask=(lanes < N - start)[None, :])


@jit(do_not_specialize=("partials", "n", "dweight_stride"), do_not_specialize_on_alignment=("dweight_ptr",))
def add_partials_kernel(
    partial_ptr,
    dweight_ptr,
    partials,
    n,
    dweight_stride,
    HARDWARE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, PARTIALS)
    mask = (rows < partials)[:, None] & (cols < n)[None, :]
    tile = tl.load(partial_ptr + rows[:, None].to(tl.int64) * n + cols[None, :], mask=mask, other=0.0)
    for _ in tl.static_range(8):
        tile = tl.sum(tl.reshape(tile, [tile.shape[0] // 2, 2, BLOCK_N]), axis=1)
    dweight = _round_to(tl.reshape(tile, [BLOCK_N]), dweight_ptr.dtype.element_ty, HARDWARE)
    tl.store(dweight_ptr + cols * dweight_stride, dweight, mask=cols < n)
