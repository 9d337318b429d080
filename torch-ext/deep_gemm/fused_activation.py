"""SwiGLU with the cast to FP8, forward and backward, each one Triton kernel.

The functions without `fused_` are the references: the operation in fp32, rounded to the input dtype, then the reference
cast. A kernel's bytes equal those of its reference on the same CUDA device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ._call import (
    Plan,
    Planned,
    Spec,
    allocate,
    check_gran_k,
    check_outputs,
    is_traced,
    placeholders,
    served_by_triton,
    sf_spec,
)
from ._ops import add_op_namespace_prefix, ops
from ._quant import converts_in_hardware, group_sf, max_abs_bits, to_e4m3, to_e4m3_inf_to_nan, torch_saturates
from ._tiles import layout, tile_pointers
from ._triton import Launch, constexpr, jit, tl
from .utils.math import align, ceil_div, per_token_cast_to_fp8


def fused_swiglu_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
    limit: float | None = None,
    weight: torch.Tensor | None = None,
    grouped_layout: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU of `x = [gate | up]`, cast by rows to e4m3 in groups of `gran_k` columns.

        y = silu(min(gate, limit)) * clamp(up, -limit, limit) * weight     in fp32, in this order, then in x's dtype
        out, sf = per_token_cast_to_fp8(y)                                 bytes of `swiglu_cast_to_fp8` on that device

    Args:
        x: `[M, 2 * H]` bf16, fp16 or fp32, any strides.
        limit: above 0, or None for no clamp.
        weight: fp32 `[M]`, the routing weight of each row, or None for 1.
        grouped_layout: int32 `[M]`, or None. Rows with a negative id are not read and count as zeros: payload 0.
        use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf: as `fused_per_token_cast_to_fp8` takes them for `[M, H]`.
    Returns:
        `(out, sf)`, without gradient. No host sync; works in CUDA graphs and under torch.compile.
    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape or device, or an output that overlaps another
            tensor. Nothing is written then.
    """
    options = (use_ue8m0, gran_k, use_packed_ue8m0, limit)
    if is_traced(x):
        outputs = allocate((out, out_sf), _check_forward(x, weight, grouped_layout, (out, out_sf), *options), x)
        ops.fused_swiglu_cast_to_fp8(x.detach(), _detach(weight), grouped_layout, *options, *outputs)
        return outputs
    return _forward((x, weight, grouped_layout), (out, out_sf), *options)


def fused_swiglu_cast_to_fp8_masked(
    x: torch.Tensor,
    masked_m: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
    limit: float | None = None,
    weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_swiglu_cast_to_fp8` of the first `masked_m[e]` rows of each expert, as the masked grouped GEMM reads them.

    Args:
        x: `[E, T, 2 * H]` bf16, fp16 or fp32, any strides. Rows from `masked_m[e]` on are not read.
        masked_m: int32 `[E]` on x's device, read by the kernel only; values past T count as T.
        weight: fp32 `[E, T]` or None.
        The other options as in `fused_swiglu_cast_to_fp8`.
        out, out_sf: `[E, T, H]` e4m3 and `[E, T, ceil(H / gran_k)]` fp32 (packed: a quarter of them, int32), any strides.
    Returns:
        `(out, sf)`, without gradient; undefined in rows from `masked_m[e]` on, which the kernel leaves as they are. Its
        time follows the valid rows.
    Raises:
        TypeError, ValueError: as `fused_swiglu_cast_to_fp8`.
    """
    options = (use_ue8m0, gran_k, use_packed_ue8m0, limit)
    if is_traced(x):
        outputs = allocate((out, out_sf), _check_masked(x, weight, masked_m, (out, out_sf), *options), x)
        ops.fused_swiglu_cast_to_fp8_masked(x.detach(), _detach(weight), masked_m, *options, *outputs)
        return outputs
    return _masked((x, weight, masked_m), (out, out_sf), *options)


def fused_swiglu_cast_to_fp8_with_transpose(
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
    limit: float | None = None,
    weight: torch.Tensor | None = None,
    grouped_layout: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
    out_t: torch.Tensor | None = None,
    out_sf_t: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """`fused_swiglu_cast_to_fp8` and, from the same read, the cast of the transposed result, for the weight gradient.

    Args:
        As `fused_swiglu_cast_to_fp8`, and for `y^T [H, M]` in groups of `gran_k` rows of x:
        out_t: `[H, M]` e4m3, any strides; a new one is K-major with rows at multiples of 16 bytes.
        out_sf_t: `[H, ceil(M / gran_k)]` fp32 or, packed, `[H, ceil(M / gran_k) / 4]` int32, any strides.
    Returns:
        `((out, sf), (out_t, sf_t))`, without gradient.
    Raises:
        TypeError, ValueError: as `fused_swiglu_cast_to_fp8`.
    """
    options, given = (use_ue8m0, gran_k, use_packed_ue8m0, limit), (out, out_sf, out_t, out_sf_t)
    if is_traced(x):
        made = allocate(given, _check_with_transpose(x, weight, grouped_layout, given, *options), x)
        ops.fused_swiglu_cast_to_fp8_with_transpose(x.detach(), _detach(weight), grouped_layout, *options, *made)
    else:
        made = _with_transpose((x, weight, grouped_layout), given, *options)
    return made[:2], made[2:]


def fused_swiglu_backward_cast_to_fp8(
    dy: torch.Tensor,
    x: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
    limit: float | None = None,
    weight: torch.Tensor | None = None,
    grouped_layout: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
    out_t: torch.Tensor | None = None,
    out_sf_t: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """Gradients of `fused_swiglu_cast_to_fp8` before its cast: that of x, cast in both orientations, and of `weight`.

    In fp32, in this order, with gate and up clamped as in the forward and s = 1 / (1 + exp(-gate)), then in x's dtype:

        dgate = (dy * weight) * up * (s * (1 + gate * (1 - s)))    0 where gate was clamped
        dup = (dy * weight) * (gate * s)                           0 where up was clamped
        dweight[m] = sum over h of dy * (gate * s) * up            fp32, in an order that is the same every time

    Args:
        dy: `[M, H]`, x: `[M, 2 * H]`, of one dtype, any strides; H a multiple of `gran_k`.
        limit, weight, grouped_layout: as in the forward. Rows with a negative id are not read and count as zeros.
        out, out_sf, out_t, out_sf_t: of the gradient `[M, 2 * H]`, as `fused_swiglu_cast_to_fp8_with_transpose` takes
            them; dweight: fp32 `[M]`, any stride, only with `weight`.
    Returns:
        `((out, sf), (out_t, sf_t), dweight)`, dweight None without `weight`. Bitwise repeatable; all but dweight, whose
        sum has another order, are the bytes of `swiglu_backward_cast_to_fp8` on that device.
    Raises:
        TypeError, ValueError: as `fused_swiglu_cast_to_fp8`.
    """
    options, given = (use_ue8m0, gran_k, use_packed_ue8m0, limit), (out, out_sf, out_t, out_sf_t)
    if weight is not None:
        given += (dweight, None, None)
    elif dweight is not None:
        raise ValueError("dweight needs weight: without one there is no gradient of it")
    if is_traced(x):
        made = allocate(given, _check_backward(dy, x, weight, grouped_layout, given, *options), x)
        inputs = dy.detach(), x.detach(), _detach(weight), grouped_layout
        ops.fused_swiglu_backward_cast_to_fp8(*inputs, *options, *(made + (None,) * 3)[:7])
    else:
        made = _backward((dy, x, weight, grouped_layout), given, *options)
    return made[:2], made[2:4], made[4] if weight is not None else None


@torch.no_grad()
def swiglu_cast_to_fp8(x, use_ue8m0, gran_k=128, use_packed_ue8m0=False, limit=None, weight=None, grouped_layout=None):
    """Reference of `fused_swiglu_cast_to_fp8`, same arguments without the outputs; no host sync."""
    y = _swiglu(*_zero_skipped(grouped_layout, x, weight), limit)
    return per_token_cast_to_fp8(y, use_ue8m0, gran_k, use_packed_ue8m0)


@torch.no_grad()
def swiglu_cast_to_fp8_masked(x, masked_m, use_ue8m0, gran_k=128, use_packed_ue8m0=False, limit=None, weight=None):
    """Reference of `fused_swiglu_cast_to_fp8_masked`; rows from `masked_m[e]` on are casts of zeros."""
    e, t, _ = x.shape
    rows = torch.where(torch.arange(t, device=x.device) < masked_m[:, None], 0, -1).flatten()
    weight = None if weight is None else weight.reshape(e * t)
    out, sf = swiglu_cast_to_fp8(x.reshape(e * t, -1), use_ue8m0, gran_k, use_packed_ue8m0, limit, weight, rows)
    return out.view(e, t, -1), sf.view(e, t, -1)


@torch.no_grad()
def swiglu_cast_to_fp8_with_transpose(
    x, use_ue8m0, gran_k=128, use_packed_ue8m0=False, limit=None, weight=None, grouped_layout=None
):
    """Reference of `fused_swiglu_cast_to_fp8_with_transpose`, same arguments without the outputs."""
    y = _swiglu(*_zero_skipped(grouped_layout, x, weight), limit)
    return tuple(per_token_cast_to_fp8(z, use_ue8m0, gran_k, use_packed_ue8m0) for z in (y, y.T))


@torch.no_grad()
def swiglu_backward_cast_to_fp8(
    dy, x, use_ue8m0, gran_k=128, use_packed_ue8m0=False, limit=None, weight=None, grouped_layout=None
):
    """Reference of `fused_swiglu_backward_cast_to_fp8`, same arguments without the outputs."""
    dy, x, weight = _zero_skipped(grouped_layout, dy, x, weight)
    gate, up, gate_passes, up_passes = _halves(x, limit)
    s = torch.sigmoid(gate)
    silu = gate * s
    dy = dy.float()
    dz = dy if weight is None else dy * weight[:, None]
    dgate = torch.where(gate_passes, dz * up * (s * (1 + gate * (1 - s))), 0.0)
    dup = torch.where(up_passes, dz * silu, 0.0)
    dx = torch.cat((dgate, dup), dim=1).to(x.dtype)
    dweight = None if weight is None else (dy * silu * up).sum(1)
    return *(per_token_cast_to_fp8(z, use_ue8m0, gran_k, use_packed_ue8m0) for z in (dx, dx.T)), dweight


def _zero_skipped(grouped_layout, *tensors):
    """The tensors with zeros in the rows whose id is negative."""
    if grouped_layout is None:
        return tensors
    keep = grouped_layout >= 0
    return tuple(t if t is None else torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, 0) for t in tensors)


def _halves(x, limit):
    """Gate and up in fp32, clamped, and where their gradients pass; NaN stays NaN."""
    gate, up = x.float().chunk(2, dim=1)
    if limit is None:
        limit = math.inf
    return gate.clamp(max=limit), up.clamp(-limit, limit), ~(gate > limit), ~(up.abs() > limit)


def _swiglu(x, weight, limit):
    gate, up, _, _ = _halves(x, limit)
    y = F.silu(gate) * up
    if weight is not None:
        y = y * weight[:, None]
    return y.to(x.dtype)


@torch.library.custom_op(add_op_namespace_prefix("fused_swiglu_cast_to_fp8"), mutates_args=("out", "out_sf"))
def _forward_op(
    x: torch.Tensor, weight: torch.Tensor | None, grouped_layout: torch.Tensor | None,
    use_ue8m0: bool, gran_k: int, use_packed_ue8m0: bool, limit: float | None,
    out: torch.Tensor, out_sf: torch.Tensor,
) -> None:  # fmt: skip
    _forward((x, weight, grouped_layout), (out, out_sf), use_ue8m0, gran_k, use_packed_ue8m0, limit)


@torch.library.custom_op(add_op_namespace_prefix("fused_swiglu_cast_to_fp8_masked"), mutates_args=("out", "out_sf"))
def _masked_op(
    x: torch.Tensor, weight: torch.Tensor | None, masked_m: torch.Tensor,
    use_ue8m0: bool, gran_k: int, use_packed_ue8m0: bool, limit: float | None,
    out: torch.Tensor, out_sf: torch.Tensor,
) -> None:  # fmt: skip
    _masked((x, weight, masked_m), (out, out_sf), use_ue8m0, gran_k, use_packed_ue8m0, limit)


@torch.library.custom_op(
    add_op_namespace_prefix("fused_swiglu_cast_to_fp8_with_transpose"),
    mutates_args=("out", "out_sf", "out_t", "out_sf_t"),
)
def _with_transpose_op(
    x: torch.Tensor, weight: torch.Tensor | None, grouped_layout: torch.Tensor | None,
    use_ue8m0: bool, gran_k: int, use_packed_ue8m0: bool, limit: float | None,
    out: torch.Tensor, out_sf: torch.Tensor, out_t: torch.Tensor, out_sf_t: torch.Tensor,
) -> None:  # fmt: skip
    outputs = (out, out_sf, out_t, out_sf_t)
    _with_transpose((x, weight, grouped_layout), outputs, use_ue8m0, gran_k, use_packed_ue8m0, limit)


@torch.library.custom_op(
    add_op_namespace_prefix("fused_swiglu_backward_cast_to_fp8"),
    mutates_args=("out", "out_sf", "out_t", "out_sf_t", "dweight", "partial", "arrived"),
)
def _backward_op(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, grouped_layout: torch.Tensor | None,
    use_ue8m0: bool, gran_k: int, use_packed_ue8m0: bool, limit: float | None,
    out: torch.Tensor, out_sf: torch.Tensor, out_t: torch.Tensor, out_sf_t: torch.Tensor,
    dweight: torch.Tensor | None, partial: torch.Tensor | None, arrived: torch.Tensor | None,
) -> None:  # fmt: skip
    outputs = (out, out_sf, out_t, out_sf_t) + (() if weight is None else (dweight, partial, arrived))
    _backward((dy, x, weight, grouped_layout), outputs, use_ue8m0, gran_k, use_packed_ue8m0, limit)


@torch.library.register_fake(add_op_namespace_prefix("fused_swiglu_cast_to_fp8"))
def _(*args, **kwargs):
    return None


@torch.library.register_fake(add_op_namespace_prefix("fused_swiglu_cast_to_fp8_masked"))
def _(*args, **kwargs):
    return None


@torch.library.register_fake(add_op_namespace_prefix("fused_swiglu_cast_to_fp8_with_transpose"))
def _(*args, **kwargs):
    return None


@torch.library.register_fake(add_op_namespace_prefix("fused_swiglu_backward_cast_to_fp8"))
def _(*args, **kwargs):
    return None


def _detach(tensor):
    return None if tensor is None else tensor.detach()


class _Zeros(Spec):
    """An output that starts at zero."""

    __slots__ = ()

    def empty(self, device):
        return super().empty(device).zero_()

    def empty_like(self, x):
        return super().empty_like(x).zero_()


def _check_input(name, tensor, dims, *dtypes):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must be {dims}-D, got shape {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(str(dtype) for dtype in dtypes)}, got {tensor.dtype}")


def _check_beside(name, tensor, x, shape, dtype):
    """Refuse an input of other dtype, shape or device than x asks for."""
    _check_input(name, tensor, len(shape), dtype)
    if tensor.shape != shape or tensor.device != x.device:
        raise ValueError(
            f"{name} must have shape {tuple(shape)} on {x.device}, got {tuple(tensor.shape)} on {tensor.device}"
        )


def _check_x(x, dims, weight, gran_k, limit):
    _check_input("x", x, dims, torch.bfloat16, torch.float16, torch.float32)
    if x.shape[-1] % 2:
        raise ValueError(f"x must have an even number of columns, gate | up, got shape {tuple(x.shape)}")
    check_gran_k(gran_k)
    if limit is not None:
        if not isinstance(limit, (int, float)) or isinstance(limit, bool):
            raise TypeError(f"limit must be a number or None, got {type(limit).__name__}")
        if not limit > 0:
            raise ValueError(f"limit must be above 0, or None for no clamp, got {limit}")
    if weight is not None:
        _check_beside("weight", weight, x, x.shape[:-1], torch.float32)


def _cast_specs(m, n, *recipe):
    """Both orientations of `[m, n]`; TMA reads rows that start at multiples of 16 bytes."""
    return (
        Spec((m, n), torch.float8_e4m3fn),
        sf_spec((m,), n, *recipe),
        Spec((n, m), torch.float8_e4m3fn, (align(m, 16), 1)),
        sf_spec((n,), m, *recipe),
    )


_NAMES = ("out", "out_sf", "out_t", "out_sf_t", "dweight", "partial", "arrived")


def _check_forward(x, weight, grouped_layout, outputs, use_ue8m0, gran_k, use_packed_ue8m0, limit):
    _check_x(x, 2, weight, gran_k, limit)
    m, h = x.shape[0], x.shape[1] // 2
    if grouped_layout is not None:
        _check_beside("grouped_layout", grouped_layout, x, (m,), torch.int32)
    return check_outputs(_NAMES, outputs, x, _cast_specs(m, h, use_ue8m0, gran_k, False)[:1] + (
        sf_spec((m,), h, use_ue8m0, gran_k, use_packed_ue8m0),
    ))  # fmt: skip


def _check_masked(x, weight, masked_m, outputs, use_ue8m0, gran_k, use_packed_ue8m0, limit):
    _check_x(x, 3, weight, gran_k, limit)
    e, t, h = x.shape[0], x.shape[1], x.shape[2] // 2
    _check_beside("masked_m", masked_m, x, (e,), torch.int32)
    if e > 65535:
        raise ValueError(f"x must have at most 65535 experts, got {e}")
    sf = sf_spec((e, t), h, use_ue8m0, gran_k, use_packed_ue8m0)
    return check_outputs(_NAMES, outputs, x, (Spec((e, t, h), torch.float8_e4m3fn), sf))


def _check_with_transpose(x, weight, grouped_layout, outputs, use_ue8m0, gran_k, use_packed_ue8m0, limit):
    _check_forward(x, weight, grouped_layout, (), use_ue8m0, gran_k, use_packed_ue8m0, limit)
    specs = _cast_specs(x.shape[0], x.shape[1] // 2, use_ue8m0, gran_k, use_packed_ue8m0)
    return check_outputs(_NAMES, outputs, x, specs)


def _check_backward(dy, x, weight, grouped_layout, outputs, use_ue8m0, gran_k, use_packed_ue8m0, limit):
    _check_forward(x, weight, grouped_layout, (), use_ue8m0, gran_k, False, limit)
    m, h = x.shape[0], x.shape[1] // 2
    _check_beside("dy", dy, x, (m, h), x.dtype)
    if h % gran_k:
        raise ValueError(f"x must have halves of a multiple of gran_k = {gran_k} columns, got {h}: no group spans both")
    specs = _cast_specs(m, 2 * h, use_ue8m0, gran_k, use_packed_ue8m0)
    if weight is not None:
        config = backward_config(gran_k)
        specs += (
            Spec((m,), torch.float32),
            Spec((ceil_div(h, config.block_n), m), torch.float32),
            _Zeros((ceil_div(m, config.block_m),), torch.int32),
        )
    return check_outputs(_NAMES, outputs, x, specs)


def _planner(check, bind, reference):
    def make(inputs, outputs, *options) -> Plan:
        specs = check(*inputs, outputs, *options)
        device = inputs[0].device
        # dweight is 0, not empty, where H is.
        empty, launch = not any(math.prod(spec.shape) for spec in specs), None
        if inputs[0].numel() and served_by_triton(device):
            launch = bind(inputs, placeholders(outputs, specs), *options)
        return Plan(inputs, outputs, specs, launch, lambda *tensors: reference(*tensors, *options), empty)

    return make


_forward = Planned(
    _planner(
        _check_forward,
        lambda inputs, outputs, *options: bind_swiglu_cast(inputs, outputs, False, *options),
        lambda x, weight, rows, *options: swiglu_cast_to_fp8(x, *options, weight, rows),
    ),
    ("x", "weight", "grouped_layout", "out", "out_sf"),
)
_masked = Planned(
    _planner(
        _check_masked,
        lambda inputs, outputs, *options: bind_swiglu_cast(inputs, outputs, True, *options),
        lambda x, weight, masked_m, *options: swiglu_cast_to_fp8_masked(x, masked_m, *options, weight),
    ),
    ("x", "weight", "masked_m", "out", "out_sf"),
)
_with_transpose = Planned(
    _planner(
        _check_with_transpose,
        lambda inputs, outputs, *options: bind_swiglu_cast_with_transpose(inputs, outputs, *options),
        lambda x, weight, rows, *options: sum(swiglu_cast_to_fp8_with_transpose(x, *options, weight, rows), ()),
    ),
    ("x", "weight", "grouped_layout", *_NAMES[:4]),
)


def _flat_backward_reference(dy, x, weight, rows, *options):
    row_wise, column_wise, dweight = swiglu_backward_cast_to_fp8(dy, x, *options, weight, rows)
    return *row_wise, *column_wise, dweight


_backward = Planned(
    _planner(_check_backward, lambda *args: bind_swiglu_backward_cast(*args), _flat_backward_reference),
    ("dy", "x", "weight", "grouped_layout", *_NAMES),
)


@dataclass(frozen=True)
class ActivationConfig:
    block_m: int
    block_n: int
    num_warps: int
    ahead: int = 4  # quarters of a tile that are loaded before the first is stored


def swiglu_config(x_major: str) -> ActivationConfig:
    """Tile and warps of the forward; 16 elements a thread make one 16-byte store."""
    return ActivationConfig(64, 128, 8) if x_major == "m" else ActivationConfig(2, 1024, 4)


def masked_programs(experts: int, t: int, h: int, config: ActivationConfig) -> int:
    """Programs that share the rows of an expert: enough to fill a GPU, few enough that idle ones cost nothing."""
    tiles = experts * ceil_div(h, config.block_n)
    return max(1, min(ceil_div(t, config.block_m), 65535, 16384 // tiles))


def with_transpose_config(gran_k: int) -> ActivationConfig:
    """Tile and warps of the forward in both orientations: whole groups both ways, two programs to an SM."""
    return ActivationConfig(128, 128, 8)


def backward_config(gran_k: int) -> ActivationConfig:
    """Tile and warps of the backward: whole groups both ways, without spills in bf16."""
    return ActivationConfig(64, 64, 4, 1) if gran_k == 32 else ActivationConfig(128, 128, 16)


def bind_swiglu_cast(inputs, outputs, masked, use_ue8m0, gran_k, use_packed_ue8m0, limit) -> Launch:
    """The forward kernel for tensors of these dtypes, shapes and strides."""
    x, weight, rows = inputs
    out, out_sf = outputs
    if not masked:
        x, out, out_sf = x[None], out[None], out_sf[None]
        weight = None if weight is None else weight[None]
    experts, m, h = out.shape
    x_major, x_unit, *x_strides = _batched_layout(x, 2 * h)
    out_major, out_unit, *out_strides = _batched_layout(out, h)
    config = swiglu_config(x_major)
    h_unit = math.gcd(16, h)
    scalars = (
        m, h // h_unit, *x_strides, *((0, 0) if weight is None else weight.stride()),
        0 if rows is None else rows.stride(0), *out_strides, *out_sf.stride(), _fp32(limit),
    )  # fmt: skip
    constants = (
        masked, h_unit, x_major, x_unit, out_major, out_unit, *_recipe(x, use_ue8m0, gran_k, use_packed_ue8m0),
        h % config.block_n == 0, config.block_m, config.block_n,
    )  # fmt: skip
    if masked:
        grid = (ceil_div(h, config.block_n), masked_programs(experts, m, h, config), experts)
    else:
        grid = _tile_grid(m, h, config)
    return Launch(swiglu_cast_kernel, grid, scalars + constants, config.num_warps, _index(x))


def bind_swiglu_cast_with_transpose(inputs, outputs, use_ue8m0, gran_k, use_packed_ue8m0, limit) -> Launch:
    """The forward kernel of both orientations for tensors of these dtypes, shapes and strides."""
    x, weight, rows = inputs
    out, out_sf, out_t, out_sf_t = outputs
    m, h = out.shape
    config = with_transpose_config(gran_k)
    x_major, x_unit, *x_strides = layout(x, 2 * h)
    out_major, out_unit, *out_strides = layout(out, h)
    t_major, t_unit, *t_strides = layout(out_t, align(m, 16))
    h_unit = math.gcd(16, h)
    scalars = (
        m, h // h_unit, *x_strides, *(0 if t is None else t.stride(0) for t in (weight, rows)),
        *out_strides, *out_sf.stride(), *t_strides, *out_sf_t.stride(), _fp32(limit),
    )  # fmt: skip
    constants = (
        h_unit, x_major, x_unit, out_major, out_unit, t_major, t_unit,
        *_recipe(x, use_ue8m0, gran_k, use_packed_ue8m0), h % config.block_n == 0, config.ahead,
        config.block_m, config.block_n,
    )  # fmt: skip
    kernel, grid = swiglu_cast_with_transpose_kernel, _tile_grid(m, h, config)
    return Launch(kernel, grid, scalars + constants, config.num_warps, _index(x))


def bind_swiglu_backward_cast(inputs, outputs, use_ue8m0, gran_k, use_packed_ue8m0, limit) -> Launch:
    """The backward kernel for tensors of these dtypes, shapes and strides."""
    dy, x, weight, rows = inputs
    out, out_sf, out_t, out_sf_t, *_ = outputs
    m, h = dy.shape
    config = backward_config(gran_k)
    dy_major, dy_unit, *dy_strides = layout(dy, h)
    x_major, x_unit, *x_strides = layout(x, 2 * h)
    out_major, out_unit, *out_strides = layout(out, 2 * h)
    t_major, t_unit, *t_strides = layout(out_t, align(m, 16))
    h_unit = math.gcd(16, h)
    scalars = (
        m, h // h_unit, *dy_strides, *x_strides, *(0 if t is None else t.stride(0) for t in (weight, rows)),
        *out_strides, *out_sf.stride(), *t_strides, *out_sf_t.stride(),
        0 if weight is None else outputs[4].stride(0), _fp32(limit),
    )  # fmt: skip
    constants = (
        h_unit, dy_major, dy_unit, x_major, x_unit, out_major, out_unit, t_major, t_unit,
        *_recipe(x, use_ue8m0, gran_k, use_packed_ue8m0), h % config.block_n == 0, config.ahead,
        config.block_m, config.block_n,
    )  # fmt: skip
    launch = Launch if weight is not None else _LaunchWithoutWeight
    grid = _tile_grid(m, h, config)
    return launch(swiglu_backward_cast_kernel, grid, scalars + constants, config.num_warps, _index(x))


class _LaunchWithoutWeight(Launch):
    """The backward's launch without dweight and the memory that its sum takes."""

    __slots__ = ()

    def __call__(self, tensors, pointers):
        super().__call__(tensors + (None,) * 3, pointers + (0,) * 3)


def _batched_layout(tensor, n_when_one_row):
    """`layout` of the matrices of a batch, with the stride between them, which the unit divides too."""
    major, unit, stride_m, stride_n = layout(tensor[0], n_when_one_row)
    stride_e = tensor.stride(0) if tensor.shape[0] > 1 else 0
    common = math.gcd(unit, stride_e)
    if major == "n":
        stride_m *= unit // common
    elif major == "m":
        stride_n *= unit // common
    return major, common, stride_e // common, stride_m, stride_n


def _recipe(x, use_ue8m0, gran_k, use_packed_ue8m0):
    # With fp32 scale factors Inf meets a zero reciprocal and is NaN before the rounding.
    saturate = torch_saturates() or not use_ue8m0
    hardware = converts_in_hardware(_index(x))
    return int(gran_k), bool(use_ue8m0), bool(use_packed_ue8m0), x.is_cuda, hardware, saturate


def _tile_grid(m, h, config):
    tiles_m = ceil_div(m, config.block_m)
    # Axes y and z end at 65535.
    return ceil_div(h, config.block_n), min(tiles_m, 65535), ceil_div(tiles_m, 65535)


def _fp32(limit):
    return None if limit is None else float(limit)


def _index(x):
    return x.device.index if x.is_cuda else -1


# PTX of lane i. d = 1 + exp(-x), with the exp of CUDA's libdevice and torch's kernels, instruction by instruction, but for
# its last multiplication by a power of two, which is exact, so that the addition can take it along.
_ONE_PLUS_EXP = """
    fma.rn.ftz.sat.f32 t{i}, {x}, 0fBBBB989D, 0f3F000000;
    fma.rm.ftz.f32 t{i}, t{i}, 0f437C0000, 0f4B400001;
    sub.rn.f32 e{i}, 0f4B40007F, t{i};
    fma.rn.ftz.f32 f{i}, {x}, 0fBFB8AA3B, e{i};
    fma.rn.ftz.f32 f{i}, {x}, 0fB2A57060, f{i};
    ex2.approx.ftz.f32 f{i}, f{i};
    shl.b32 t{i}, t{i}, 23;
    fma.rn.f32 d{i}, f{i}, t{i}, 0f3F800000;
    abs.f32 e{i}, {x};
    setp.geu.or.f32 far, e{i}, 0f42AE0000, far;"""
# What div.rn does where neither quotient nor reciprocal leaves the normal range; lanes with |x| >= 87 are `far` from it.
_INVERSE = """
    rcp.approx.ftz.f32 q{i}, d{i};
    neg.f32 n{i}, d{i};
    fma.rn.f32 e{i}, n{i}, q{i}, 0f3F800000;
    fma.rn.f32 q{i}, q{i}, e{i}, q{i};"""
# The remainder of -0 is +0, which takes its sign.
_QUOTIENT = """
    mul.rn.f32 f{i}, {x}, q{i};
    fma.rn.f32 e{i}, n{i}, f{i}, {x};
    fma.rn.f32 q{i}, e{i}, q{i}, f{i};
    lop3.b32 q{i}, {x}, 0x80000000, q{i}, 0xEA;"""
_NEAR_SILU = """
    mul.rn.f32 f{i}, {x}, 0fBFB8AA3B;
    ex2.approx.ftz.f32 f{i}, f{i};
    add.rn.f32 d{i}, f{i}, 0f3F800000;
    rcp.approx.ftz.f32 q{i}, d{i};
    mul.rn.f32 q{i}, {x}, q{i};
    setp.leu.or.f32 unsure, {x}, 0fC1300000, unsure;"""
_TIMES_UP = "mul.rn.f32 q{i}, q{i}, {b};"
_TIMES_WEIGHT = "mul.rn.f32 q{i}, q{i}, {c};"
# Next to 0 and to Inf, 2^-100 and 2^127 being the ends, a rounding may count for more after the product with a weight.
_ORDINARY = """
    and.b32 e{i}, q{i}, 0x7FFFFFFF;
    sub.u32 e{i}, e{i}, 0x0D800000;
    setp.ge.or.u32 unsure, e{i}, 0x71800000, unsure;"""
_FROM_TIE = "mad.lo.u32 t{i}, q{i}, 0x10000, 0x80200000; min.u32 nearest, nearest, t{i};"
_RESULT = "mov.b32 {out}, q{i};"


def _asm(inputs, *blocks, lanes=4):
    """PTX of blocks, each for every lane, and its registers: the results, then those of each input."""
    names = [f"{name}{i}" for name in "tfdneq" for i in range(lanes)]
    lines = [f".reg .b32 {', '.join(names)}, nearest, pair;", ".reg .pred far, unsure;"]
    lines += ["setp.ne.u32 far, 0, 0;", "setp.ne.u32 unsure, 0, 0;", "mov.u32 nearest, -1;"]
    for block in blocks:
        for i in range(lanes if "{" in block else 1):
            registers = {name: f"${(position + 1) * lanes + i}" for position, name in enumerate(inputs)}
            lines.append(block.format(i=i, out=f"${i}", **registers))
    return constexpr("\n".join(["{", *lines, "}"])), constexpr(",".join(["=&r"] * lanes + ["r"] * lanes * len(inputs)))


def _swiglu_asm(*inputs):
    """silu(x) * b, and times c where that is an input, rounded to bf16.

    A quick value is within 27 * 2^-24 of what is to be rounded: 12 from exp (as x > -11) and 2 from the reciprocal,
    which are approximate, 5 from the exp that they replace, and 1 from each rounding of 1 + exp, the quotient and the
    products, here and there. Its lower half says how far it is from a tie; where that is more than 32 both round alike,
    and elsewhere, for a thousandth of values, the slow way is taken. Extremes agree: exp is exact from where it is 0 or
    1 on, and so are the reciprocals of 1 and 2.
    """
    weighted = (_TIMES_WEIGHT,) if "c" in inputs else ()
    return _asm(
        inputs, _NEAR_SILU, _TIMES_UP, *((_ORDINARY, *weighted) if weighted else ()), _FROM_TIE,
        "setp.le.or.u32 unsure, nearest, 0x400000, unsure; @!unsure bra round;",
        _ONE_PLUS_EXP, _INVERSE, _QUOTIENT, "@!far bra multiply;", "div.rn.f32 q{i}, {x}, d{i};",
        "multiply:", _TIMES_UP, *weighted,
        "round:",
        "cvt.rn.bf16x2.f32 pair, q1, q0; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000;",
        "cvt.rn.bf16x2.f32 pair, q3, q2; shl.b32 $2, pair, 16; and.b32 $3, pair, 0xffff0000;",
    )  # fmt: skip


_SILU, _SILU_REGISTERS = _asm(
    "x", _ONE_PLUS_EXP, _INVERSE, _QUOTIENT, "@!far bra done;", "div.rn.f32 q{i}, {x}, d{i};", "done:", _RESULT
)
_SIGMOID, _SIGMOID_REGISTERS = _asm(
    "x", _ONE_PLUS_EXP, _INVERSE, "@!far bra done;", "div.rn.f32 q{i}, 0f3F800000, d{i};", "done:", _RESULT
)
_SWIGLU, _SWIGLU_REGISTERS = _swiglu_asm("x", "b")
_WEIGHTED_SWIGLU, _WEIGHTED_SWIGLU_REGISTERS = _swiglu_asm("x", "b", "c")


@jit
def _silu(x, CUDA: tl.constexpr):
    """x / (1 + exp(-x)), rounded after exp, after the sum and after the quotient, as torch's kernels do it."""
    if CUDA:
        y = tl.inline_asm_elementwise(_SILU, _SILU_REGISTERS, args=[x], dtype=tl.float32, is_pure=True, pack=4)
    else:
        y = tl.div_rn(x, 1.0 + tl.exp(-x))
    return y


@jit
def _sigmoid(x, CUDA: tl.constexpr):
    """1 / (1 + exp(-x)), likewise."""
    if CUDA:
        y = tl.inline_asm_elementwise(_SIGMOID, _SIGMOID_REGISTERS, args=[x], dtype=tl.float32, is_pure=True, pack=4)
    else:
        y = tl.div_rn(1.0, 1.0 + tl.exp(-x))
    return y


@jit
def _round_to(y, DTYPE: tl.constexpr, CUDA: tl.constexpr):
    """fp32 values rounded to a dtype, to nearest even."""
    if DTYPE == tl.bfloat16 and CUDA:
        # A conversion of one value instead of two takes as long as an exponential.
        y = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000;
            }""",
            "=r,=r,r,r",
            args=[y],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    elif DTYPE == tl.bfloat16:
        # The interpreter truncates.
        bits = y.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, rounded)
        y = (rounded & -0x10000).to(tl.float32, bitcast=True)
    else:
        y = y.to(DTYPE).to(tl.float32)
    return y


@jit
def _widen(x, CUDA: tl.constexpr):
    """fp32 of x."""
    if x.dtype == tl.bfloat16 and CUDA:
        # One instruction a value, where Triton's conversion takes two for every other one.
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", args=[x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        y = x.to(tl.float32)
    return y


@jit
def _magnitude(y):
    # Bits of non-negative floats order like integers, with NaN on top.
    return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _clamp(gate, up, limit):
    # Comparisons keep NaN, and need no NaN-propagating minimum.
    if limit is not None:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up


@jit
def _valid_rows(rows_ptr, row, rows, row_mask, stride):
    """The rows that are read: those of the tile whose id is not negative."""
    if rows_ptr is not None:
        row_mask = tl.load(rows_ptr + (row + rows) * stride, mask=row_mask, other=-1) >= 0
    return row_mask


@jit
def _load_halves(
    x_ptr, row, col, h, rows, cols, mask, stride_m, stride_n, MAJOR: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    gate_tile = tile_pointers(x_ptr, row, col, rows, cols, stride_m, stride_n, MAJOR, UNIT)
    up_tile = tile_pointers(x_ptr, row, col + h, rows, cols, stride_m, stride_n, MAJOR, UNIT)
    return tl.load(gate_tile, mask=mask, other=0.0), tl.load(up_tile, mask=mask, other=0.0)


@jit
def _load_weight(weight_ptr, row, rows, valid, stride):
    return tl.load(weight_ptr + (row + rows) * stride, mask=valid, other=0.0)[:, None]


@jit
def _swiglu_rows(gate, up, weight_ptr, row, rows, valid, weight_stride, limit, CUDA: tl.constexpr):
    """silu(gate) * up * weight, rounded to their dtype, in fp32."""
    DTYPE: tl.constexpr = gate.dtype
    gate, up = _clamp(_widen(gate, CUDA), _widen(up, CUDA), limit)
    if weight_ptr is not None:
        weight = _load_weight(weight_ptr, row, rows, valid, weight_stride)
    if DTYPE == tl.bfloat16 and CUDA:
        if weight_ptr is None:
            y = tl.inline_asm_elementwise(
                _SWIGLU, _SWIGLU_REGISTERS, args=[gate, up], dtype=tl.float32, is_pure=True, pack=4
            )
        else:
            weight = tl.broadcast_to(weight, gate.shape)
            y = tl.inline_asm_elementwise(
                _WEIGHTED_SWIGLU, _WEIGHTED_SWIGLU_REGISTERS, args=[gate, up, weight], dtype=tl.float32, is_pure=True,
                pack=4,
            )  # fmt: skip
    else:
        y = _silu(gate, CUDA) * up
        if weight_ptr is not None:
            y = y * weight
        y = _round_to(y, DTYPE, CUDA)
    return y


@jit
def _pack(a, b, DTYPE: tl.constexpr, CUDA: tl.constexpr):
    """Two fp32 tensors with values of DTYPE, in one register each pair where that is possible."""
    # Not pure, so that nothing moves it behind the next rows and keeps both values until then.
    if DTYPE == tl.bfloat16 and CUDA:
        a = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", args=[a, b], dtype=tl.int32, is_pure=False, pack=1
        )
        b = a
    elif DTYPE == tl.float16 and CUDA:
        a = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", args=[a, b], dtype=tl.int32, is_pure=False, pack=1
        )
        b = a
    return a, b


@jit
def _first(pair, DTYPE: tl.constexpr, CUDA: tl.constexpr):
    a = pair[0]
    if DTYPE == tl.bfloat16 and CUDA:
        a = (a << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float16 and CUDA:
        a = a.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return a


@jit
def _second(pair, DTYPE: tl.constexpr, CUDA: tl.constexpr):
    b = pair[1]
    if DTYPE == tl.bfloat16 and CUDA:
        b = (b & -0x10000).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float16 and CUDA:
        b = (b >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return b


@jit
def _store_sf(sf_ptr, sf, index, group, mask, stride, group_stride, PACKED: tl.constexpr):
    """Scale factors to [index, group], or their exponents to byte group % 4 of a word."""
    if PACKED:
        sf_bytes = sf_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        pointers = sf_bytes + (index * stride + group // 4 * group_stride) * 4 + group % 4
        tl.store(pointers, (sf.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=mask)
    else:
        tl.store(sf_ptr + (index * stride + group * group_stride), sf, mask=mask)


@jit
def _store_cast(
    y, out_ptr, row, col, rows, cols, row_mask, col_mask, stride_m, stride_n, MAJOR: tl.constexpr, UNIT: tl.constexpr,
    GRAN_K: tl.constexpr, USE_UE8M0: tl.constexpr, HARDWARE: tl.constexpr, SATURATE: tl.constexpr,
    ALONE: tl.constexpr = False,
):  # fmt: skip
    """Cast y by rows and store it at (row, col); its scale factors [BLOCK_M, groups].

    A NaN-propagating maximum takes fewer instructions, and belongs in no kernel that also stores a transposed copy.
    """
    BLOCK_M: tl.constexpr = y.shape[0]
    BLOCK_N: tl.constexpr = y.shape[1]
    GROUPS: tl.constexpr = BLOCK_N // GRAN_K
    groups = tl.reshape(y, [BLOCK_M, GROUPS, GRAN_K])
    amax_bits = max_abs_bits(groups, ALONE)
    sf, inv = group_sf(amax_bits, USE_UE8M0, HARDWARE)
    scaled = tl.reshape(groups * inv[:, :, None], [BLOCK_M, BLOCK_N])
    if SATURATE:
        byte = to_e4m3(scaled, HARDWARE)
    else:
        amax_bits = tl.broadcast_to(amax_bits[:, :, None], [BLOCK_M, GROUPS, GRAN_K])
        byte = to_e4m3_inf_to_nan(scaled, tl.reshape(amax_bits, [BLOCK_M, BLOCK_N]), HARDWARE)
    tile = tile_pointers(out_ptr, row, col, rows, cols, stride_m, stride_n, MAJOR, UNIT)
    tl.store(tile, byte, mask=row_mask[:, None] & col_mask)
    return sf


@jit
def _store_row_sf(sf_ptr, sf, row, col, limit_m, limit_n, stride_m, stride_n, GRAN_K: tl.constexpr, PACKED: tl.constexpr):
    """Scale factors of a tile's rows to those of (row, col) on."""
    rows = tl.arange(0, sf.shape[0])
    group = tl.arange(0, sf.shape[1])
    mask = (rows < limit_m)[:, None] & (group * GRAN_K < limit_n)[None, :]
    group = group.to(tl.int64) + col // GRAN_K
    _store_sf(sf_ptr, sf, (row + rows)[:, None], group[None, :], mask, stride_m, stride_n, PACKED)


@jit
def _interleave(t0, t1, t2, t3):
    """[4 * R, C] whose rows 4j + i are row j of the i-th [R, C]."""
    joined = tl.permute(tl.join(tl.join(t0, t2), tl.join(t1, t3)), [0, 2, 3, 1])
    return tl.reshape(joined, [4 * t0.shape[0], t0.shape[1]])


@jit
def _to_words(y0, y1, y2, y3, amax_bits, HARDWARE: tl.constexpr, SATURATE: tl.constexpr):
    """Four e4m3 bytes to a word, y0 the lowest."""
    if HARDWARE:
        word = tl.inline_asm_elementwise(
            """{
            .reg .b16 lo, hi;
            cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
            mov.b32 $0, {lo, hi};
            }""",
            "=r,r,r,r,r",
            args=[y0, y1, y2, y3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        word = (
            to_e4m3(y0, False).to(tl.int32)
            | (to_e4m3(y1, False).to(tl.int32) << 8)
            | (to_e4m3(y2, False).to(tl.int32) << 16)
            | (to_e4m3(y3, False).to(tl.int32) << 24)
        )
    if not SATURATE:
        # In a group with an Inf only the Infs are 0x7e; the next code is NaN.
        word |= tl.where(amax_bits >= 0x7F800000, ((word << 1) & word & 0x40404040) >> 6, 0)
    return word


@jit
def _store_transposed(words, ptr, limit_m, limit_n, stride_n, stride_m, MAJOR: tl.constexpr, UNIT: tl.constexpr):
    """Words [BLOCK_M / 4, BLOCK_N], four rows in each, to bytes [BLOCK_N, BLOCK_M] at ptr.

    A word crosses shared memory four times faster than bytes do, and Triton never sees an FP8 tile stored both ways,
    which it gets wrong on Hopper (triton-lang/triton#11111).
    """
    words = tl.trans(words)
    cols = tl.arange(0, words.shape[0])
    j = tl.arange(0, words.shape[1])
    mask = (cols < limit_n)[:, None]
    cols = cols.to(tl.int64)[:, None]
    whole = limit_m >= 4 * words.shape[1]
    if MAJOR == "n" and UNIT % 4 == 0:
        whole = whole & (ptr.to(tl.int64) % 4 == 0)
        if whole:
            word_ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            tl.store(word_ptr + (cols * stride_n * (UNIT // 4) + j[None, :]), words, mask=mask)
    else:
        whole = whole & False
    if not whole:
        for i in range(4):
            row = (4 * j + i).to(tl.int64)[None, :]
            if MAJOR == "n":
                pointers = ptr + (cols * stride_n * UNIT + row)
            elif MAJOR == "m":
                pointers = ptr + (cols + row * stride_m * UNIT)
            else:
                pointers = ptr + (cols * stride_n + row * stride_m)
            tl.store(pointers, (words >> (8 * i)).to(tl.uint8), mask=mask & (4 * j + i < limit_m)[None, :])


@jit
def _store_cast_transposed(
    y0, y1, y2, y3, out_t_ptr, sf_t_ptr, row, col, limit_m, limit_n,
    stride_n, stride_m, sf_stride_n, sf_stride_m, MAJOR: tl.constexpr, UNIT: tl.constexpr,
    GRAN_K: tl.constexpr, USE_UE8M0: tl.constexpr, PACKED: tl.constexpr,
    HARDWARE: tl.constexpr, SATURATE: tl.constexpr,
):  # fmt: skip
    """Cast a tile by columns, given as its rows 4j, 4j + 1, 4j + 2, 4j + 3; the result goes to (col, row) on."""
    WORDS: tl.constexpr = y0.shape[0]
    BLOCK_N: tl.constexpr = y0.shape[1]
    GROUPS: tl.constexpr = WORDS * 4 // GRAN_K
    amax = tl.maximum(tl.maximum(_magnitude(y0), _magnitude(y1)), tl.maximum(_magnitude(y2), _magnitude(y3)))
    amax = tl.max(tl.reshape(amax, [GROUPS, WORDS // GROUPS, BLOCK_N]), axis=1)
    sf, inv = group_sf(amax, USE_UE8M0, HARDWARE)  # [GROUPS, BLOCK_N]
    inv = tl.reshape(tl.broadcast_to(inv[:, None, :], [GROUPS, WORDS // GROUPS, BLOCK_N]), [WORDS, BLOCK_N])
    amax = tl.reshape(tl.broadcast_to(amax[:, None, :], [GROUPS, WORDS // GROUPS, BLOCK_N]), [WORDS, BLOCK_N])
    words = _to_words(y0 * inv, y1 * inv, y2 * inv, y3 * inv, amax, HARDWARE, SATURATE)
    if MAJOR == "n":
        corner = col * stride_n * UNIT + row
    elif MAJOR == "m":
        corner = col + row * stride_m * UNIT
    else:
        corner = col * stride_n + row * stride_m
    _store_transposed(words, out_t_ptr + corner, limit_m, limit_n, stride_n, stride_m, MAJOR, UNIT)

    group = tl.arange(0, GROUPS)
    cols = tl.arange(0, BLOCK_N)
    mask = (group * GRAN_K < limit_m)[:, None] & (cols < limit_n)[None, :]
    group = group.to(tl.int64) + row // GRAN_K
    _store_sf(sf_t_ptr, sf, (col + cols)[None, :], group[:, None], mask, sf_stride_n, sf_stride_m, PACKED)


@jit
def _swiglu_cast_tile(
    x_ptr, weight_ptr, out_ptr, sf_ptr, row, col, h, rows, cols, valid, row_mask, col_mask, limit_m,
    x_stride_m, x_stride_n, weight_stride, out_stride_m, out_stride_n, sf_stride_m, sf_stride_n, limit,
    X_MAJOR: tl.constexpr, X_UNIT: tl.constexpr, OUT_MAJOR: tl.constexpr, OUT_UNIT: tl.constexpr,
    GRAN_K: tl.constexpr, USE_UE8M0: tl.constexpr, PACKED: tl.constexpr, CUDA: tl.constexpr,
    HARDWARE: tl.constexpr, SATURATE: tl.constexpr,
):  # fmt: skip
    gate, up = _load_halves(x_ptr, row, col, h, rows, cols, valid[:, None] & col_mask,
                            x_stride_m, x_stride_n, X_MAJOR, X_UNIT)  # fmt: skip
    y = _swiglu_rows(gate, up, weight_ptr, row, rows, valid, weight_stride, limit, CUDA)
    sf = _store_cast(y, out_ptr, row, col, rows, cols, row_mask, col_mask, out_stride_m, out_stride_n,
                     OUT_MAJOR, OUT_UNIT, GRAN_K, USE_UE8M0, HARDWARE, SATURATE, HARDWARE)  # fmt: skip
    _store_row_sf(sf_ptr, sf, row, col, limit_m, h - col, sf_stride_m, sf_stride_n, GRAN_K, PACKED)


@jit(
    do_not_specialize=(
        "m", "h", "x_stride_e", "x_stride_m", "x_stride_n", "weight_stride_e", "weight_stride_m", "rows_stride",
        "out_stride_e", "out_stride_m", "out_stride_n", "sf_stride_e", "sf_stride_m", "sf_stride_n",
    ),
    do_not_specialize_on_alignment=("weight_ptr", "rows_ptr", "sf_ptr"),
)  # fmt: skip
def swiglu_cast_kernel(
    x_ptr,
    weight_ptr,
    rows_ptr,
    out_ptr,
    sf_ptr,
    m,
    h,
    x_stride_e,
    x_stride_m,
    x_stride_n,
    weight_stride_e,
    weight_stride_m,
    rows_stride,
    out_stride_e,
    out_stride_m,
    out_stride_n,
    sf_stride_e,
    sf_stride_m,
    sf_stride_n,
    limit,
    MASKED: tl.constexpr,
    H_UNIT: tl.constexpr,
    X_MAJOR: tl.constexpr,
    X_UNIT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    GRAN_K: tl.constexpr,
    USE_UE8M0: tl.constexpr,
    PACKED: tl.constexpr,
    CUDA: tl.constexpr,
    HARDWARE: tl.constexpr,
    SATURATE: tl.constexpr,
    EVEN_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tl.static_assert(BLOCK_N % GRAN_K == 0)
    h = h.to(tl.int64) * H_UNIT
    col = tl.program_id(0).to(tl.int64) * BLOCK_N
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    col_mask = (cols < h - col)[None, :] if not EVEN_H else tl.full([1, BLOCK_N], True, tl.int1)
    if MASKED:
        e = tl.program_id(2).to(tl.int64)
        m = tl.minimum(tl.load(rows_ptr + e * rows_stride), m)
        x_ptr += e * x_stride_e * X_UNIT
        out_ptr += e * out_stride_e * OUT_UNIT
        sf_ptr += e * sf_stride_e
        if weight_ptr is not None:
            weight_ptr += e * weight_stride_e
    if MASKED:
        # Programs take every num_programs-th tile, so that the rows of a short expert are spread too.
        row = tl.program_id(1).to(tl.int64) * BLOCK_M
        while row < m:
            row_mask = rows < m - row
            _swiglu_cast_tile(
                x_ptr, weight_ptr, out_ptr, sf_ptr, row, col, h, rows, cols, row_mask, row_mask, col_mask, m - row,
                x_stride_m, x_stride_n, weight_stride_m, out_stride_m, out_stride_n, sf_stride_m, sf_stride_n, limit,
                X_MAJOR, X_UNIT, OUT_MAJOR, OUT_UNIT, GRAN_K, USE_UE8M0, PACKED, CUDA, HARDWARE, SATURATE,
            )  # fmt: skip
            row += tl.num_programs(1) * BLOCK_M
    else:
        row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * BLOCK_M
        row_mask = rows < m - row
        valid = _valid_rows(rows_ptr, row, rows, row_mask, rows_stride)
        _swiglu_cast_tile(
            x_ptr, weight_ptr, out_ptr, sf_ptr, row, col, h, rows, cols, valid, row_mask, col_mask, m - row,
            x_stride_m, x_stride_n, weight_stride_m, out_stride_m, out_stride_n, sf_stride_m, sf_stride_n, limit,
            X_MAJOR, X_UNIT, OUT_MAJOR, OUT_UNIT, GRAN_K, USE_UE8M0, PACKED, CUDA, HARDWARE, SATURATE,
        )  # fmt: skip


@jit(
    do_not_specialize=(
        "m", "h", "x_stride_m", "x_stride_n", "weight_stride", "rows_stride", "out_stride_m", "out_stride_n",
        "sf_stride_m", "sf_stride_n", "t_stride_n", "t_stride_m", "sf_t_stride_n", "sf_t_stride_m",
    ),
    do_not_specialize_on_alignment=("weight_ptr", "rows_ptr", "sf_ptr", "sf_t_ptr"),
)  # fmt: skip
def swiglu_cast_with_transpose_kernel(
    x_ptr,
    weight_ptr,
    rows_ptr,
    out_ptr,
    sf_ptr,
    out_t_ptr,
    sf_t_ptr,
    m,
    h,
    x_stride_m,
    x_stride_n,
    weight_stride,
    rows_stride,
    out_stride_m,
    out_stride_n,
    sf_stride_m,
    sf_stride_n,
    t_stride_n,
    t_stride_m,
    sf_t_stride_n,
    sf_t_stride_m,
    limit,
    H_UNIT: tl.constexpr,
    X_MAJOR: tl.constexpr,
    X_UNIT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    T_MAJOR: tl.constexpr,
    T_UNIT: tl.constexpr,
    GRAN_K: tl.constexpr,
    USE_UE8M0: tl.constexpr,
    PACKED: tl.constexpr,
    CUDA: tl.constexpr,
    HARDWARE: tl.constexpr,
    SATURATE: tl.constexpr,
    EVEN_H: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tl.static_assert(BLOCK_M % GRAN_K == 0 and BLOCK_N % GRAN_K == 0)
    h = h.to(tl.int64) * H_UNIT
    col = tl.program_id(0).to(tl.int64) * BLOCK_N
    row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * BLOCK_M
    cols = tl.arange(0, BLOCK_N)
    col_mask = (cols < h - col)[None, :] if not EVEN_H else tl.full([1, BLOCK_N], True, tl.int1)
    limit_m = tl.minimum(m - row, BLOCK_M).to(tl.int32)
    limit_n = tl.minimum(h - col, BLOCK_N).to(tl.int32)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    inputs, ys, sfs = (), (), ()
    for i in tl.static_range(4):
        # Loads cannot pass a store: those of AHEAD quarters come first.
        for j in tl.static_range(i + AHEAD - 1 if i else 0, min(i + AHEAD, 4)):
            rows = tl.arange(0, BLOCK_M // 4) * 4 + j
            valid = _valid_rows(rows_ptr, row, rows, rows < limit_m, rows_stride)
            gate, up = _load_halves(x_ptr, row, col, h, rows, cols, valid[:, None] & col_mask,
                                    x_stride_m, x_stride_n, X_MAJOR, X_UNIT)  # fmt: skip
            inputs = inputs + ((gate, up, valid),)
        rows = tl.arange(0, BLOCK_M // 4) * 4 + i
        gate, up, valid = inputs[i]
        y = _swiglu_rows(gate, up, weight_ptr, row, rows, valid, weight_stride, limit, CUDA)
        sf = _store_cast(y, out_ptr, row, col, rows, cols, rows < limit_m, col_mask, out_stride_m, out_stride_n,
                         OUT_MAJOR, OUT_UNIT, GRAN_K, USE_UE8M0, HARDWARE, SATURATE)  # fmt: skip
        ys, sfs = ys + (y,), sfs + (sf,)
        if i % 2 == 1:
            ys = ys[:-2] + (_pack(ys[-2], ys[-1], DTYPE, CUDA),)
    sf = _interleave(sfs[0], sfs[1], sfs[2], sfs[3])
    _store_row_sf(sf_ptr, sf, row, col, limit_m, limit_n, sf_stride_m, sf_stride_n, GRAN_K, PACKED)
    y0, y1 = _first(ys[0], DTYPE, CUDA), _second(ys[0], DTYPE, CUDA)
    y2, y3 = _first(ys[1], DTYPE, CUDA), _second(ys[1], DTYPE, CUDA)
    _store_cast_transposed(y0, y1, y2, y3, out_t_ptr, sf_t_ptr, row, col, limit_m, limit_n,
                           t_stride_n, t_stride_m, sf_t_stride_n, sf_t_stride_m, T_MAJOR, T_UNIT,
                           GRAN_K, USE_UE8M0, PACKED, HARDWARE, SATURATE)  # fmt: skip


@jit
def _swiglu_backward_rows(dy, gate, up, weight_ptr, row, rows, valid, weight_stride, limit, CUDA: tl.constexpr):
    """Gradients of gate and up, rounded to their dtype, in fp32, and each row's sum for that of the weight."""
    DTYPE: tl.constexpr = gate.dtype
    dy, raw_gate, raw_up = _widen(dy, CUDA), _widen(gate, CUDA), _widen(up, CUDA)
    gate, up = _clamp(raw_gate, raw_up, limit)
    s = _sigmoid(gate, CUDA)
    silu = gate * s
    dot = tl.sum(dy * silu * up, axis=1)
    if weight_ptr is not None:
        dy = dy * _load_weight(weight_ptr, row, rows, valid, weight_stride)
    dgate = dy * up * (s * (1.0 + gate * (1.0 - s)))
    dup = dy * silu
    if limit is not None:
        dgate = tl.where(raw_gate > limit, 0.0, dgate)
        dup = tl.where(tl.abs(raw_up) > limit, 0.0, dup)
    return _round_to(dgate, DTYPE, CUDA), _round_to(dup, DTYPE, CUDA), dot


@jit
def _sum_partial(dweight_ptr, partial_ptr, arrived_ptr, row, m, stride, BLOCK_M: tl.constexpr):
    """The program that finishes a block of rows last adds its partial sums up, in the order of the columns."""
    CHUNK: tl.constexpr = 32
    tiles = tl.num_programs(0)
    # Every thread's partial sums come before the arrival.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row // BLOCK_M, 1, sem="acq_rel", scope="gpu") == tiles - 1:
        rows = row + tl.arange(0, BLOCK_M)
        total = tl.zeros([BLOCK_M], tl.float32)
        start = 0
        while start < tiles:
            tile = start + tl.arange(0, CHUNK)
            mask = (tile < tiles)[:, None] & (rows < m)[None, :]
            # Past L1, which may hold a line from before the arrival.
            part = tl.load(partial_ptr + (tile.to(tl.int64)[:, None] * m + rows[None, :]), mask=mask, other=0.0,
                           cache_modifier=".cg")  # fmt: skip
            total += tl.sum(part, axis=0)
            start += CHUNK
        tl.store(dweight_ptr + rows * stride, total, mask=rows < m)


@jit(
    do_not_specialize=(
        "m", "h", "dy_stride_m", "dy_stride_n", "x_stride_m", "x_stride_n", "weight_stride", "rows_stride",
        "out_stride_m", "out_stride_n", "sf_stride_m", "sf_stride_n", "t_stride_n", "t_stride_m", "sf_t_stride_n",
        "sf_t_stride_m", "dweight_stride",
    ),
    do_not_specialize_on_alignment=(
        "weight_ptr", "rows_ptr", "sf_ptr", "sf_t_ptr", "dweight_ptr", "partial_ptr", "arrived_ptr"
    ),
)  # fmt: skip
def swiglu_backward_cast_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rows_ptr,
    out_ptr,
    sf_ptr,
    out_t_ptr,
    sf_t_ptr,
    dweight_ptr,
    partial_ptr,
    arrived_ptr,
    m,
    h,
    dy_stride_m,
    dy_stride_n,
    x_stride_m,
    x_stride_n,
    weight_stride,
    rows_stride,
    out_stride_m,
    out_stride_n,
    sf_stride_m,
    sf_stride_n,
    t_stride_n,
    t_stride_m,
    sf_t_stride_n,
    sf_t_stride_m,
    dweight_stride,
    limit,
    H_UNIT: tl.constexpr,
    DY_MAJOR: tl.constexpr,
    DY_UNIT: tl.constexpr,
    X_MAJOR: tl.constexpr,
    X_UNIT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    T_MAJOR: tl.constexpr,
    T_UNIT: tl.constexpr,
    GRAN_K: tl.constexpr,
    USE_UE8M0: tl.constexpr,
    PACKED: tl.constexpr,
    CUDA: tl.constexpr,
    HARDWARE: tl.constexpr,
    SATURATE: tl.constexpr,
    EVEN_H: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tl.static_assert(BLOCK_M % GRAN_K == 0 and BLOCK_N % GRAN_K == 0)
    h = h.to(tl.int64) * H_UNIT
    col = tl.program_id(0).to(tl.int64) * BLOCK_N
    row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * BLOCK_M
    cols = tl.arange(0, BLOCK_N)
    col_mask = (cols < h - col)[None, :] if not EVEN_H else tl.full([1, BLOCK_N], True, tl.int1)
    limit_m = tl.minimum(m - row, BLOCK_M).to(tl.int32)
    limit_n = tl.minimum(h - col, BLOCK_N).to(tl.int32)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    inputs, gates, ups, gate_sfs, up_sfs, dots = (), (), (), (), (), ()
    for i in tl.static_range(4):
        # Loads cannot pass a store: those of AHEAD quarters come first.
        for j in tl.static_range(i + AHEAD - 1 if i else 0, min(i + AHEAD, 4)):
            rows = tl.arange(0, BLOCK_M // 4) * 4 + j
            valid = _valid_rows(rows_ptr, row, rows, rows < limit_m, rows_stride)
            mask = valid[:, None] & col_mask
            dy_tile = tile_pointers(dy_ptr, row, col, rows, cols, dy_stride_m, dy_stride_n, DY_MAJOR, DY_UNIT)
            dy = tl.load(dy_tile, mask=mask, other=0.0)
            gate, up = _load_halves(x_ptr, row, col, h, rows, cols, mask, x_stride_m, x_stride_n, X_MAJOR, X_UNIT)
            inputs = inputs + ((dy, gate, up, valid),)
        rows = tl.arange(0, BLOCK_M // 4) * 4 + i
        dy, gate, up, valid = inputs[i]
        dgate, dup, dot = _swiglu_backward_rows(
            dy, gate, up, weight_ptr, row, rows, valid, weight_stride, limit, CUDA
        )  # fmt: skip
        gate_sf = _store_cast(dgate, out_ptr, row, col, rows, cols, rows < limit_m, col_mask, out_stride_m, out_stride_n,
                              OUT_MAJOR, OUT_UNIT, GRAN_K, USE_UE8M0, HARDWARE, SATURATE)  # fmt: skip
        up_sf = _store_cast(dup, out_ptr, row, col + h, rows, cols, rows < limit_m, col_mask, out_stride_m, out_stride_n,
                            OUT_MAJOR, OUT_UNIT, GRAN_K, USE_UE8M0, HARDWARE, SATURATE)  # fmt: skip
        gates, ups, dots = gates + (dgate,), ups + (dup,), dots + (dot[:, None],)
        if i % 2 == 1:
            gates = gates[:-2] + (_pack(gates[-2], gates[-1], DTYPE, CUDA),)
            ups = ups[:-2] + (_pack(ups[-2], ups[-1], DTYPE, CUDA),)
        gate_sfs, up_sfs = gate_sfs + (gate_sf,), up_sfs + (up_sf,)
    gate_sf = _interleave(gate_sfs[0], gate_sfs[1], gate_sfs[2], gate_sfs[3])
    _store_row_sf(sf_ptr, gate_sf, row, col, limit_m, limit_n, sf_stride_m, sf_stride_n, GRAN_K, PACKED)
    up_sf = _interleave(up_sfs[0], up_sfs[1], up_sfs[2], up_sfs[3])
    _store_row_sf(sf_ptr, up_sf, row, col + h, limit_m, limit_n, sf_stride_m, sf_stride_n, GRAN_K, PACKED)
    if weight_ptr is not None:
        dot = tl.reshape(_interleave(dots[0], dots[1], dots[2], dots[3]), [BLOCK_M])
        rows = tl.arange(0, BLOCK_M)
        tl.store(partial_ptr + (tl.program_id(0).to(tl.int64) * m + row) + rows, dot, mask=rows < limit_m)
    for half in tl.static_range(2):
        # Gradients of up go to the rows from h on.
        low, high = (gates, ups)[half]
        y0, y1 = _first(low, DTYPE, CUDA), _second(low, DTYPE, CUDA)
        y2, y3 = _first(high, DTYPE, CUDA), _second(high, DTYPE, CUDA)
        _store_cast_transposed(y0, y1, y2, y3, out_t_ptr, sf_t_ptr, row, col + half * h, limit_m, limit_n,
                               t_stride_n, t_stride_m, sf_t_stride_n, sf_t_stride_m, T_MAJOR, T_UNIT,
                               GRAN_K, USE_UE8M0, PACKED, HARDWARE, SATURATE)  # fmt: skip
    if weight_ptr is not None:
        _sum_partial(dweight_ptr, partial_ptr, arrived_ptr, row, m, dweight_stride, BLOCK_M)
