"""From tokens to the rows of grouped GEMMs and back: routing, gather + cast, weighted combine, and their backward.

    grouped_layout, row_map = fused_moe_route(topk_ids, num_experts)
    x_fp8, sf = fused_moe_gather_cast_to_fp8(x, row_map, len(grouped_layout), use_ue8m0)
    ...                                                            grouped GEMMs over grouped_layout: x_fp8 to y
    out = fused_moe_combine(y, row_map, topk_weights)
    dy, dweights = fused_moe_combine_backward(dout, y, row_map, topk_weights)
    ...                                                            and back: dy to dx_rows
    dx = fused_moe_combine(dx_rows, row_map)

`row_map` alone ties tokens to rows: every kernel works token by token, so that what a token's slots share is read once.
Nothing waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ._call import (
    Plan,
    Planned,
    Spec,
    allocate,
    check_matrix,
    check_output,
    check_outputs,
    is_traced,
    placeholders,
    served_by_triton,
    sf_spec,
)
from ._ops import add_op_namespace_prefix, ops
from ._quant import converts_in_hardware, group_sf, to_e4m3, to_e4m3_inf_to_nan, torch_saturates
from ._runtime import get_mk_alignment_for_contiguous_layout
from ._tiles import layout, tile_pointers
from ._triton import Launch, jit, tl
from .utils.math import ceil_div, per_token_cast_to_fp8

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_MAX_EXPERTS = 4096


def get_num_rows_for_contiguous_layout(
    num_tokens: int, topk: int, num_experts: int, alignment: int | None = None
) -> int:
    """The most rows that `num_tokens * topk` slots can take with each expert's padded to a multiple of `alignment`.

    `S + min(S, num_experts) * (alignment - 1)` for S slots, rounded down to a multiple of `alignment`: what is used
    always is one. `alignment` defaults to `get_mk_alignment_for_contiguous_layout()`.
    """
    if alignment is None:
        alignment = get_mk_alignment_for_contiguous_layout()
    slots = num_tokens * topk
    return (slots + min(slots, num_experts) * (alignment - 1)) // alignment * alignment


def fused_moe_route(
    topk_ids: torch.Tensor, num_experts: int, alignment: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give each slot of each token a row, sorted by expert, each expert's first row at a multiple of `alignment`.

    A counting sort: the rows of an expert follow the order of the slots `t * K + k`, in every run.

    Args:
        topk_ids: `[T, K]` int32 or int64, any strides; an id outside `0 .. num_experts - 1` takes no row (expert
            parallelism marks slots of other ranks so).
        num_experts: 1 to 4096. alignment: by default `get_mk_alignment_for_contiguous_layout()`.
    Returns:
        `(grouped_layout, row_map)`, int32: `[get_num_rows_for_contiguous_layout(T, K, num_experts, alignment)]` with
        each row's expert, -1 for padding, as `m_grouped_fp8_gemm_nt_contiguous` takes it; and `[T, K]` with each slot's
        row, -1 for none. Three small kernels, one for up to 128 slots; no host sync.
    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape or range.
    """
    if alignment is None:
        alignment = get_mk_alignment_for_contiguous_layout()
    if is_traced(topk_ids):
        specs = _check_route(topk_ids, num_experts, alignment)
        grouped_layout, row_map = allocate((None, None), specs, topk_ids)
        ops.fused_moe_route(topk_ids, num_experts, alignment, grouped_layout, row_map)
        return grouped_layout, row_map
    return _route((topk_ids,), (None, None), num_experts, alignment)


def fused_moe_gather_cast_to_fp8(
    x: torch.Tensor,
    row_map: torch.Tensor,
    num_rows: int,
    use_ue8m0: bool,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast each token to e4m3 and write it to the rows of all its slots: read once, written up to K times.

    Row `row_map[t, k]` is `utils.per_token_cast_to_fp8(x)` of token t, byte for byte. Rows without a slot are
    padding: undefined, and their scale factors too. The backward is `fused_moe_combine(dx_rows, row_map)`.

    Args:
        x: `[T, H]` bf16, fp16 or fp32, any strides.
        row_map, num_rows: `[T, K]` int32 and the length of `grouped_layout`, from `fused_moe_route`.
        use_ue8m0, gran_k, use_packed_ue8m0: as in `fused_per_token_cast_to_fp8`.
        out, out_sf: written in place where given, with any strides, MN-major for one: `[num_rows, H]` e4m3, and
            `[num_rows, ceil(H / gran_k)]` fp32 or, packed, a quarter of the columns in int32. Else new, row-major.
    Returns:
        `(x_fp8, sf)`, without gradient. CPU tensors take the reference. No host sync; works in CUDA graphs and under
        torch.compile.
    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape or device, or outputs that overlap.
    """
    if is_traced(x):
        specs = _check_gather_cast(x, row_map, num_rows, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf)
        out, out_sf = allocate((out, out_sf), specs, x)
        recipe = (use_ue8m0, gran_k, use_packed_ue8m0)
        ops.fused_moe_gather_cast_to_fp8(x.detach(), row_map, num_rows, *recipe, out, out_sf)
        return out, out_sf
    return _gather_cast((x, row_map), (out, out_sf), num_rows, use_ue8m0, gran_k, use_packed_ue8m0)


def fused_moe_combine(
    y: torch.Tensor,
    row_map: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add up the rows of each token's slots: `out[t] = sum over k of topk_weights[t, k] * y[row_map[t, k]]`.

    In fp32, product and sum each rounded, slots in order, one rounding to y's dtype at the end. Slots without a row add
    exactly 0, whatever y and the weights hold. Without weights it is the backward of the gather.

    Args:
        y: `[M, H]` bf16, fp16 or fp32, any strides; rows of padding are not read.
        row_map: `[T, K]` int32, contiguous, from `fused_moe_route`.
        topk_weights: `[T, K]` fp32, bf16 or fp16, any strides; None for 1.
        out: `[T, H]` of y's dtype with any strides, written in place where given; else new.
    Returns:
        `out`, without gradient. CPU tensors take the reference. No host sync; works in CUDA graphs and under
        torch.compile.
    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape or device, or an output that overlaps.
    """
    if is_traced(y):
        specs = _check_combine(y, row_map, topk_weights, out)
        (out,) = allocate((out,), specs, y)
        ops.fused_moe_combine(y.detach(), row_map, None if topk_weights is None else topk_weights.detach(), out)
        return out
    return _run_combine(y, row_map, topk_weights, out)


def fused_moe_combine_backward(
    dout: torch.Tensor,
    y: torch.Tensor,
    row_map: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dweights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backward of `fused_moe_combine`: `dy[row] = w * dout[t]` and `dweights[t, k] = <dout[t], y[row]>`.

    `dy` is the fp32 product rounded once to dout's dtype. The dot product is summed in fp32 in an order that depends on
    H and K alone, so that every run gives the same bits; its error is below `2^-19 * sum |dout * y|` for H up to 2^17.
    Slots
    without a row have `dweights` 0; rows of `dy` without a slot are padding, undefined.

    Args:
        dout: `[T, H]`; y: `[M, H]` of the same dtype, bf16, fp16 or fp32, any strides.
        row_map, topk_weights: `[T, K]`, as in `fused_moe_combine`.
        out, out_dweights: `[M, H]` of dout's dtype and `[T, K]` fp32 with any strides, written in place where given.
    Returns:
        `(dy, dweights)`. CPU tensors take the reference. No host sync; works in CUDA graphs and under torch.compile.
    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape or device, or outputs that overlap.
    """
    if is_traced(dout):
        specs = _check_combine_backward(dout, y, row_map, topk_weights, out, out_dweights)
        out, out_dweights = allocate((out, out_dweights), specs, dout)
        ops.fused_moe_combine_backward(dout.detach(), y.detach(), row_map, topk_weights.detach(), out, out_dweights)
        return out, out_dweights
    return _run_backward(dout, y, row_map, topk_weights, out, out_dweights)


def fused_moe_combine_backward_cast_to_fp8(
    dout: torch.Tensor,
    y: torch.Tensor,
    row_map: torch.Tensor,
    topk_weights: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
    out_dweights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`fused_moe_combine_backward` with `dy` cast to e4m3 for the dgrad GEMM instead of written in dout's dtype.

    Rows of `dy_fp8` and `sf` are `utils.per_token_cast_to_fp8` of dy's, byte for byte; those of padding are undefined.

    Args:
        dout, y, row_map, topk_weights, out_dweights: as in `fused_moe_combine_backward`.
        use_ue8m0, gran_k, use_packed_ue8m0: as in `fused_per_token_cast_to_fp8`.
        out, out_sf: `[M, H]` e4m3, and `[M, ceil(H / gran_k)]` fp32 or, packed, a quarter of the columns in int32, with
            any strides, written in place where given.
    Returns:
        `(dy_fp8, sf, dweights)`. CPU tensors take the reference. No host sync; works in CUDA graphs and under
        torch.compile.
    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape or device, or outputs that overlap.
    """
    recipe = (use_ue8m0, gran_k, use_packed_ue8m0)
    if is_traced(dout):
        specs = _check_combine_backward_cast(dout, y, row_map, topk_weights, *recipe, out, out_sf, out_dweights)
        out, out_sf, out_dweights = allocate((out, out_sf, out_dweights), specs, dout)
        ops.fused_moe_combine_backward_cast_to_fp8(
            dout.detach(), y.detach(), row_map, topk_weights.detach(), *recipe, out, out_sf, out_dweights
        )
        return out, out_sf, out_dweights
    return _run_backward_cast(dout, y, row_map, topk_weights, *recipe, out, out_sf, out_dweights)


def _run_combine(y, row_map, topk_weights, out):
    weighted = topk_weights is not None
    # An unused pointer still has to be one.
    return _combine((y, row_map, topk_weights if weighted else row_map), (out,), weighted)[0]


def _run_backward(dout, y, row_map, topk_weights, out, out_dweights):
    return _combine_backward((dout, y, row_map, topk_weights, topk_weights), (out, out_dweights))


def _run_backward_cast(
    dout, y, row_map, topk_weights, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf, out_dweights
):  # fmt: skip
    inputs, outputs = (dout, y, row_map, topk_weights), (out_sf, out, out_dweights)
    sf, dy_fp8, dweights = _combine_backward_cast(inputs, outputs, use_ue8m0, gran_k, use_packed_ue8m0)
    return dy_fp8, sf, dweights


@torch.library.custom_op(add_op_namespace_prefix("fused_moe_route"), mutates_args=("grouped_layout", "row_map"))
def _route_op(
    topk_ids: torch.Tensor, num_experts: int, alignment: int, grouped_layout: torch.Tensor, row_map: torch.Tensor
) -> None:
    _route((topk_ids,), (grouped_layout, row_map), num_experts, alignment)


@torch.library.register_fake(add_op_namespace_prefix("fused_moe_route"))
def _(topk_ids, num_experts, alignment, grouped_layout, row_map):
    return None


@torch.library.custom_op(add_op_namespace_prefix("fused_moe_gather_cast_to_fp8"), mutates_args=("out", "out_sf"))
def _gather_cast_op(
    x: torch.Tensor,
    row_map: torch.Tensor,
    num_rows: int,
    use_ue8m0: bool,
    gran_k: int,
    use_packed_ue8m0: bool,
    out: torch.Tensor,
    out_sf: torch.Tensor,
) -> None:
    _gather_cast((x, row_map), (out, out_sf), num_rows, use_ue8m0, gran_k, use_packed_ue8m0)


@torch.library.register_fake(add_op_namespace_prefix("fused_moe_gather_cast_to_fp8"))
def _(x, row_map, num_rows, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf):
    return None


@torch.library.custom_op(add_op_namespace_prefix("fused_moe_combine"), mutates_args=("out",))
def _combine_op(y: torch.Tensor, row_map: torch.Tensor, topk_weights: torch.Tensor | None, out: torch.Tensor) -> None:
    _run_combine(y, row_map, topk_weights, out)


@torch.library.register_fake(add_op_namespace_prefix("fused_moe_combine"))
def _(y, row_map, topk_weights, out):
    return None


@torch.library.custom_op(add_op_namespace_prefix("fused_moe_combine_backward"), mutates_args=("out", "out_dweights"))
def _combine_backward_op(
    dout: torch.Tensor,
    y: torch.Tensor,
    row_map: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    out_dweights: torch.Tensor,
) -> None:
    _run_backward(dout, y, row_map, topk_weights, out, out_dweights)


@torch.library.register_fake(add_op_namespace_prefix("fused_moe_combine_backward"))
def _(dout, y, row_map, topk_weights, out, out_dweights):
    return None


@torch.library.custom_op(
    add_op_namespace_prefix("fused_moe_combine_backward_cast_to_fp8"), mutates_args=("out", "out_sf", "out_dweights")
)
def _combine_backward_cast_op(
    dout: torch.Tensor,
    y: torch.Tensor,
    row_map: torch.Tensor,
    topk_weights: torch.Tensor,
    use_ue8m0: bool,
    gran_k: int,
    use_packed_ue8m0: bool,
    out: torch.Tensor,
    out_sf: torch.Tensor,
    out_dweights: torch.Tensor,
) -> None:
    recipe = (use_ue8m0, gran_k, use_packed_ue8m0)
    _run_backward_cast(dout, y, row_map, topk_weights, *recipe, out, out_sf, out_dweights)


@torch.library.register_fake(add_op_namespace_prefix("fused_moe_combine_backward_cast_to_fp8"))
def _(dout, y, row_map, topk_weights, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf, out_dweights):
    return None


def _check_route(topk_ids, num_experts, alignment, *outputs):
    check_matrix("topk_ids", topk_ids, torch.int32, torch.int64)
    if not isinstance(num_experts, int) or not 1 <= num_experts <= _MAX_EXPERTS:
        raise ValueError(f"num_experts must be an int in 1..{_MAX_EXPERTS}, got {num_experts!r}")
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment must be a positive int, got {alignment!r}")
    rows = get_num_rows_for_contiguous_layout(*topk_ids.shape, num_experts, alignment)
    if rows >= 2**31:
        raise ValueError(f"topk_ids must lead to fewer than 2^31 rows, got {rows} for {tuple(topk_ids.shape)} slots")
    specs = (Spec((rows,), torch.int32), Spec(tuple(topk_ids.shape), torch.int32))
    for name, output, spec in zip(("grouped_layout", "row_map"), outputs, specs):
        check_output(name, output, topk_ids, spec)
    return specs


def _check_row_map(row_map, tokens, like):
    check_matrix("row_map", row_map, torch.int32)
    if tokens is not None and row_map.shape[0] != tokens or not row_map.is_contiguous():
        raise ValueError(
            f"row_map must be contiguous with {tokens} rows, got shape {tuple(row_map.shape)} with strides "
            f"{row_map.stride()}"
        )
    _check_device("row_map", row_map, like)


def _check_device(name, tensor, like):
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {tensor.device}")


def _check_weights(topk_weights, row_map):
    check_matrix("topk_weights", topk_weights, *_FLOATS)
    if topk_weights.shape != row_map.shape:
        raise ValueError(f"topk_weights must have shape {tuple(row_map.shape)}, got {tuple(topk_weights.shape)}")
    _check_device("topk_weights", topk_weights, row_map)


def _cast_specs(m, n, *recipe):
    return Spec((m, n), torch.float8_e4m3fn), sf_spec((m,), n, *recipe)


def _check_gather_cast(x, row_map, num_rows, use_ue8m0, gran_k, use_packed_ue8m0, *outputs):
    check_matrix("x", x, *_FLOATS)
    _check_row_map(row_map, x.shape[0], x)
    if num_rows < 0:
        raise ValueError(f"num_rows must not be negative, got {num_rows}")
    specs = _cast_specs(num_rows, x.shape[1], use_ue8m0, gran_k, use_packed_ue8m0)
    return check_outputs(("out", "out_sf"), outputs, x, specs)


def _check_combine(y, row_map, topk_weights, *outputs):
    check_matrix("y", y, *_FLOATS)
    _check_row_map(row_map, None, y)
    if topk_weights is not None:
        _check_weights(topk_weights, row_map)
    return check_outputs(("out",), outputs, y, (Spec((row_map.shape[0], y.shape[1]), y.dtype),))


def _check_backward_inputs(dout, y, row_map, topk_weights):
    check_matrix("dout", dout, *_FLOATS)
    check_matrix("y", y, dout.dtype)
    if y.shape[1] != dout.shape[1]:
        raise ValueError(f"y must have {dout.shape[1]} columns like dout, got shape {tuple(y.shape)}")
    _check_device("y", y, dout)
    _check_row_map(row_map, dout.shape[0], dout)
    _check_weights(topk_weights, row_map)


def _check_combine_backward(dout, y, row_map, topk_weights, *outputs):
    _check_backward_inputs(dout, y, row_map, topk_weights)
    specs = (Spec(tuple(y.shape), y.dtype), Spec(tuple(row_map.shape), torch.float32))
    return check_outputs(("out", "out_dweights"), outputs, dout, specs)


def _check_combine_backward_cast(dout, y, row_map, topk_weights, use_ue8m0, gran_k, use_packed_ue8m0, *outputs):
    _check_backward_inputs(dout, y, row_map, topk_weights)
    specs = _cast_specs(*y.shape, use_ue8m0, gran_k, use_packed_ue8m0)
    specs += (Spec(tuple(row_map.shape), torch.float32),)
    return check_outputs(("out", "out_sf", "out_dweights"), outputs, dout, specs)


def route_reference(topk_ids, num_experts, alignment):
    """`fused_moe_route` in PyTorch."""
    expert = topk_ids.flatten().long()
    valid = (expert >= 0) & (expert < num_experts)
    # What takes no row is sorted behind the last expert.
    expert = torch.where(valid, expert, num_experts)
    count = torch.bincount(expert, minlength=num_experts + 1)
    padded = (count + alignment - 1) // alignment * alignment
    padding = (padded - count).cumsum(0) - (padded - count)  # rows of padding before each expert
    by_expert, order = torch.sort(expert, stable=True)
    row = torch.empty_like(expert)
    row[order] = torch.arange(expert.numel(), device=expert.device) + padding[by_expert]
    row = torch.where(valid, row, -1)
    rows = get_num_rows_for_contiguous_layout(*topk_ids.shape, num_experts, alignment)
    grouped_layout = torch.full((rows,), -1, dtype=torch.int32, device=expert.device)
    grouped_layout[row[valid]] = expert[valid].int()
    return grouped_layout, row.view(topk_ids.shape).int()


def gather_cast_reference(x, row_map, num_rows, *recipe):
    """`fused_moe_gather_cast_to_fp8` in PyTorch, with zeros for padding."""
    return tuple(_scatter(value, row_map, num_rows) for value in per_token_cast_to_fp8(x, *recipe))


def combine_reference(y, row_map, topk_weights=None):
    """`fused_moe_combine` in PyTorch."""
    total = torch.zeros(row_map.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for k, (row, valid) in enumerate(_slots(row_map, y.shape[0])):
        term = y.new_zeros(total.shape, dtype=torch.float32)
        term[valid] = y[row[valid]].float()
        if topk_weights is not None:
            term[valid] *= topk_weights[valid, k].float()[:, None]
        total = total + term
    return total.to(y.dtype)


def combine_backward_reference(dout, y, row_map, topk_weights):
    """`fused_moe_combine_backward` in PyTorch, with zeros for padding; the dot products are summed in fp64."""
    dy = torch.zeros_like(y, memory_format=torch.contiguous_format)
    dweights = torch.zeros(row_map.shape, dtype=torch.float32, device=y.device)
    for k, (row, valid) in enumerate(_slots(row_map, y.shape[0])):
        dy[row[valid]] = (topk_weights[valid, k].float()[:, None] * dout[valid].float()).to(y.dtype)
        dweights[valid, k] = (dout[valid].double() * y[row[valid]].double()).sum(dim=1).float()
    return dy, dweights


def combine_backward_cast_reference(dout, y, row_map, topk_weights, *recipe):
    """`fused_moe_combine_backward_cast_to_fp8` in PyTorch."""
    dy, dweights = combine_backward_reference(dout, y, row_map, topk_weights)
    return (*per_token_cast_to_fp8(dy, *recipe), dweights)


def _slots(row_map, num_rows):
    """For each k, the rows of all tokens and which of them are rows."""
    return [(row.long(), (row >= 0) & (row < num_rows)) for row in row_map.unbind(1)]


def _scatter(values, row_map, num_rows):
    # Bytes, because indexing knows no e4m3.
    values_bytes = values.view(torch.uint8) if values.dtype is torch.float8_e4m3fn else values
    out = values_bytes.new_zeros(num_rows, values.shape[1])
    for row, valid in _slots(row_map, num_rows):
        out[row[valid]] = values_bytes[valid]
    return out.view(values.dtype)


def _make_route(inputs, outputs, num_experts, alignment) -> Plan:
    (topk_ids,) = inputs
    specs = _check_route(topk_ids, num_experts, alignment, *outputs)
    empty, launch = topk_ids.numel() == 0, None
    if not empty and served_by_triton(topk_ids.device):
        launch = bind_route(topk_ids, num_experts, alignment)
    return Plan(inputs, outputs, specs, launch, lambda ids: route_reference(ids, num_experts, alignment), empty)


def _make_gather_cast(inputs, outputs, num_rows, *recipe) -> Plan:
    x, row_map = inputs
    specs = _check_gather_cast(*inputs, num_rows, *recipe, *outputs)
    empty, launch = x.numel() == 0 or row_map.numel() == 0, None
    if not empty and served_by_triton(x.device):
        launch = bind_gather_cast(x, row_map, num_rows, *recipe, *placeholders(outputs, specs))
    return Plan(inputs, outputs, specs, launch, lambda *args: gather_cast_reference(*args, num_rows, *recipe), empty)


def _make_combine(inputs, outputs, weighted) -> Plan:
    y, row_map, topk_weights = inputs
    specs = _check_combine(y, row_map, topk_weights if weighted else None, *outputs)
    empty, launch = row_map.shape[0] == 0 or y.shape[1] == 0, None
    if not empty and served_by_triton(y.device):
        launch = bind_combine(*inputs, weighted, *placeholders(outputs, specs))

    def combine(y, row_map, topk_weights):
        return (combine_reference(y, row_map, topk_weights if weighted else None),)

    return Plan(inputs, outputs, specs, launch, combine, empty)


def _make_combine_backward(inputs, outputs) -> Plan:
    _, y, row_map, _ = inputs[:4]
    specs = _check_combine_backward(*inputs[:4], *outputs)
    empty, launch = row_map.numel() == 0, None
    if not empty and served_by_triton(y.device):
        launch = bind_combine_backward(*inputs[:4], *placeholders(outputs, specs))
    return Plan(inputs, outputs, specs, launch, lambda *args: combine_backward_reference(*args[:4]), empty)


def _make_combine_backward_cast(inputs, outputs, *recipe) -> Plan:
    out_sf, out, out_dweights = outputs
    specs = _check_combine_backward_cast(*inputs, *recipe, out, out_sf, out_dweights)
    empty, launch = inputs[2].numel() == 0, None
    if not empty and served_by_triton(inputs[0].device):
        out, out_sf, out_dweights = placeholders((out, out_sf, out_dweights), specs)
        launch = bind_combine_backward(*inputs, out, out_dweights, out_sf, recipe)

    def backward(*inputs):
        dy_fp8, sf, dweights = combine_backward_cast_reference(*inputs, *recipe)
        return sf, dy_fp8, dweights

    return Plan(inputs, outputs, (specs[1], specs[0], specs[2]), launch, backward, empty)


_route = Planned(_make_route, ("topk_ids", "grouped_layout", "row_map"))
_gather_cast = Planned(_make_gather_cast, ("x", "row_map", "out", "out_sf"))
_combine = Planned(_make_combine, ("y", "row_map", "topk_weights", "out"))
_BACKWARD_INPUTS = ("dout", "y", "row_map", "topk_weights")
# In the order of the kernel's pointers, where the plain backward has the weights once more for scale factors.
_combine_backward = Planned(_make_combine_backward, (*_BACKWARD_INPUTS, "topk_weights", "out", "out_dweights"))
_combine_backward_cast = Planned(_make_combine_backward_cast, (*_BACKWARD_INPUTS, "out_sf", "out", "out_dweights"))


@dataclass(frozen=True)
class MoeConfig:
    block_m: int
    block_n: int
    num_warps: int
    tokens_first: bool = False


def gather_cast_config(mn_major_sf: bool) -> MoeConfig:
    """Tokens and columns of a tile, warps, and order of the tiles; 16 elements a thread make one 16-byte store.

    Going down the tokens first fills a sector of MN-major scale factors, 8 rows of one expert, while it is in L2.
    """
    return MoeConfig(2, 1024, 4, mn_major_sf)


def combine_config(topk: int) -> MoeConfig:
    """Tokens and columns of a tile, and warps; eight elements a thread leave registers for the loads of all slots."""
    return MoeConfig(1, 1024, 4)


def combine_backward_config(topk: int) -> MoeConfig:
    """Columns of a step, and warps, of the one token that a program has; more than 32 elements a thread spill."""
    slots = 1 << (topk - 1).bit_length()
    return MoeConfig(1, max(128, min(1024, 4096 // slots)), 4)


@dataclass(frozen=True)
class RouteConfig:
    block_slots: int
    block_blocks: int
    scan_warps: int


def route_config() -> RouteConfig:
    """Slots a program of the first and last kernel, one a thread; counts a step of the scan, and its warps.

    With fewer slots than threads Triton reloads them all in each thread that compares them.
    """
    return RouteConfig(128, 512, 8)


class bind_route:
    """The kernels of the routing: count, scan and assign, or assign alone where one block holds all slots."""

    def __init__(self, topk_ids, num_experts, alignment):
        config = route_config()
        tokens, topk = topk_ids.shape
        slots = tokens * topk
        rows = get_num_rows_for_contiguous_layout(tokens, topk, num_experts, alignment)
        blocks, block_e = ceil_div(slots, config.block_slots), max(16, 1 << (num_experts - 1).bit_length())
        self.one_block = blocks == 1
        self.table_shape = (blocks + 1, block_e)
        device, num_warps = (topk_ids.device.index if topk_ids.is_cuda else -1), config.block_slots // 32
        ids, sizes = (slots, num_experts, *topk_ids.stride()), (topk, config.block_slots, block_e)
        self.count = Launch(count_slots_kernel, (blocks, 1, 1), ids + sizes, num_warps, device)
        scan_args = (blocks, config.block_blocks, block_e, 8)
        self.scan = Launch(scan_counts_kernel, (block_e // 8, 1, 1), scan_args, config.scan_warps, device)
        assign_args = (*ids, blocks, rows, alignment, *sizes, block_e.bit_length() - 1, self.one_block)
        grid = (ceil_div(max(rows, slots), config.block_slots), 1, 1)
        self.assign = Launch(assign_rows_kernel, grid, assign_args, num_warps, device)

    def __call__(self, tensors, pointers):
        if self.one_block:
            # An unused pointer still has to be one.
            self.assign((*tensors, tensors[-1]), (*pointers, pointers[-1]))
            return
        table = torch.empty(self.table_shape, dtype=torch.int32, device=tensors[0].device)
        table_pointer = table.data_ptr()
        self.count((tensors[0], table), (pointers[0], table_pointer))
        self.scan((table,), (table_pointer,))
        self.assign((*tensors, table), (*pointers, table_pointer))


def _token_grid(n, m, config):
    tiles_m = ceil_div(m, config.block_m)
    # Axes y and z end at 65535.
    return (ceil_div(n, config.block_n), min(tiles_m, 65535), ceil_div(tiles_m, 65535))


def _cast_constants(device, use_ue8m0, gran_k, use_packed_ue8m0):
    # With fp32 scale factors Inf meets a zero reciprocal and is NaN before the rounding.
    saturate = torch_saturates() or not use_ue8m0
    return int(gran_k), bool(use_ue8m0), bool(use_packed_ue8m0), converts_in_hardware(device), saturate


def bind_gather_cast(x, row_map, num_rows, use_ue8m0, gran_k, use_packed_ue8m0, out, out_sf) -> Launch:
    """The kernel for tensors of these dtypes, shapes and strides."""
    (m, n), topk = x.shape, row_map.shape[1]
    # Axis y ends at 65535.
    config = gather_cast_config(out_sf.stride(0) == 1 and n <= 2**25)
    x_major, x_unit, *x_strides = layout(x, n)
    out_major, out_unit, *out_strides = layout(out, n)
    n_unit = math.gcd(16, n)
    device = x.device.index if x.is_cuda else -1
    scalars = (m, n // n_unit, num_rows, *x_strides, *out_strides, *out_sf.stride())
    constants = (
        topk, n_unit, x_major, x_unit, out_major, out_unit,
        *_cast_constants(device, use_ue8m0, gran_k, use_packed_ue8m0),
        n % config.block_n == 0, config.tokens_first, config.block_m, config.block_n,
    )  # fmt: skip
    grid = _token_grid(n, m, config)
    if config.tokens_first:
        grid = (ceil_div(m, config.block_m), ceil_div(n, config.block_n), 1)
    return Launch(gather_cast_kernel, grid, scalars + constants, config.num_warps, device)


def bind_combine(y, row_map, topk_weights, weighted, out) -> Launch:
    """The kernel for tensors of these dtypes, shapes and strides."""
    (m, topk), n = row_map.shape, y.shape[1]
    config = combine_config(topk)
    y_major, y_unit, *y_strides = layout(y, n)
    out_major, out_unit, *out_strides = layout(out, n)
    n_unit = math.gcd(16, n)
    device = y.device.index if y.is_cuda else -1
    scalars = (m, n // n_unit, y.shape[0], *y_strides, *topk_weights.stride(), *out_strides)
    constants = (
        topk, n_unit, y_major, y_unit, out_major, out_unit, weighted,
        n % config.block_n == 0, config.block_m, config.block_n,
    )  # fmt: skip
    return Launch(combine_kernel, _token_grid(n, m, config), scalars + constants, config.num_warps, device)


def bind_combine_backward(dout, y, row_map, topk_weights, out, out_dweights, out_sf=None, recipe=None) -> Launch:
    """The kernel for tensors of these dtypes, shapes and strides; a recipe makes it cast to e4m3 and `out_sf`."""
    tokens, topk = row_map.shape
    n = dout.shape[1]
    config = combine_backward_config(topk)
    dout_major, dout_unit, *dout_strides = layout(dout, n)
    y_major, y_unit, *y_strides = layout(y, n)
    out_major, out_unit, *out_strides = layout(out, n)
    n_unit = math.gcd(16, n)
    device = y.device.index if y.is_cuda else -1
    scalars = (
        n // n_unit, y.shape[0], *dout_strides, *y_strides, *topk_weights.stride(),
        *(out_sf.stride() if recipe else (0, 0)), *out_strides, *out_dweights.stride(),
    )  # fmt: skip
    constants = (
        topk, 1 << (topk - 1).bit_length(), n_unit, dout_major, dout_unit, y_major, y_unit, out_major, out_unit,
        recipe is not None, *_cast_constants(device, *(recipe or (False, 128, False))),
        n % config.block_n == 0, config.block_n,
    )  # fmt: skip
    return Launch(combine_backward_kernel, (tokens, 1, 1), scalars + constants, config.num_warps, device)


@jit
def load_experts(ids_ptr, slots, num_slots, num_experts, stride_t, stride_k, TOPK: tl.constexpr):
    """int32 expert of each slot, -1 for none."""
    token, k = slots // TOPK, slots % TOPK
    ptr = ids_ptr + token.to(tl.int64) * stride_t + k.to(tl.int64) * stride_k
    expert = tl.load(ptr, mask=slots < num_slots, other=-1)
    return tl.where((expert >= 0) & (expert < num_experts), expert, -1).to(tl.int32)


@jit
def count_slots(expert, BLOCK_E: tl.constexpr):
    """How many of these slots each expert has."""
    return tl.histogram(tl.maximum(expert, 0), BLOCK_E, mask=expert >= 0)


@jit(do_not_specialize=("num_slots", "num_experts", "stride_t", "stride_k"))
def count_slots_kernel(
    ids_ptr,
    table_ptr,
    num_slots,
    num_experts,
    stride_t,
    stride_k,
    TOPK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """table[b, e]: how many slots of block b expert e has."""
    block = tl.program_id(0)
    slots = block * BLOCK_S + tl.arange(0, BLOCK_S)
    expert = load_experts(ids_ptr, slots, num_slots, num_experts, stride_t, stride_k, TOPK)
    tl.store(table_ptr + block.to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E), count_slots(expert, BLOCK_E))


@jit(do_not_specialize=("num_blocks",))
def scan_counts_kernel(
    table_ptr, num_blocks, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """table[b, e] becomes the sum over the blocks before b, table[num_blocks, e] the sum over all."""
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    start = 0
    while start < num_blocks:
        blocks = start + tl.arange(0, BLOCK_B)
        tile = table_ptr + blocks.to(tl.int64)[:, None] * BLOCK_E + experts[None, :]
        mask = (blocks < num_blocks)[:, None]
        count = tl.load(tile, mask=mask, other=0)
        tl.store(tile, before[None, :] + tl.cumsum(count, axis=0) - count, mask=mask)
        before += tl.sum(count, axis=0)
        start += BLOCK_B
    tl.store(table_ptr + num_blocks.to(tl.int64) * BLOCK_E + experts, before)


@jit(do_not_specialize=("num_slots", "num_experts", "stride_t", "stride_k", "num_blocks", "num_rows", "alignment"))
def assign_rows_kernel(
    ids_ptr,
    grouped_layout_ptr,
    row_map_ptr,
    table_ptr,
    num_slots,
    num_experts,
    stride_t,
    stride_k,
    num_blocks,
    num_rows,
    alignment,
    TOPK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    LOG_E: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    experts, index = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_S)
    if ONE_BLOCK:
        expert = load_experts(ids_ptr, index, num_slots, num_experts, stride_t, stride_k, TOPK)
        count = count_slots(expert, BLOCK_E)
    else:
        count = tl.load(table_ptr + num_blocks.to(tl.int64) * BLOCK_E + experts)
    padded = (count + alignment - 1) // alignment * alignment
    end = tl.cumsum(padded, axis=0)
    first = end - padded

    slots = block * BLOCK_S + index
    expert = load_experts(ids_ptr, slots, num_slots, num_experts, stride_t, stride_k, TOPK)
    valid = expert >= 0
    known = tl.maximum(expert, 0)
    # Slots of the same expert that come earlier, in this block and in those before it.
    earlier = tl.sum(((expert[:, None] == expert[None, :]) & (index[:, None] < index[None, :])).to(tl.int32), axis=0)
    if not ONE_BLOCK:
        earlier += tl.load(table_ptr + block.to(tl.int64) * BLOCK_E + known, mask=valid, other=0)
    row = tl.gather(first, known, 0) + earlier
    tl.store(row_map_ptr + slots, tl.where(valid, row, -1), mask=slots < num_slots)

    # The expert of a row is the first that ends behind it.
    rows = block * BLOCK_S + index
    expert = tl.zeros([BLOCK_S], tl.int32)
    for i in tl.static_range(LOG_E):
        middle = expert + ((BLOCK_E >> (i + 1)) - 1)
        expert = tl.where(tl.gather(end, middle, 0) <= rows, middle + 1, expert)
    used = rows < tl.gather(first + count, expert, 0)
    tl.store(grouped_layout_ptr + rows, tl.where(used, expert, -1), mask=rows < num_rows)


@jit
def cast_tile(
    x,
    GRAN_K: tl.constexpr,
    USE_UE8M0: tl.constexpr,
    HARDWARE: tl.constexpr,
    SATURATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """e4m3 bytes of an fp32 tile and the scale factors [BLOCK_M, BLOCK_N / GRAN_K] of its groups."""
    tl.static_assert(BLOCK_N % GRAN_K == 0)
    GROUPS: tl.constexpr = BLOCK_N // GRAN_K
    groups = tl.reshape(x, [BLOCK_M, GROUPS, GRAN_K])
    amax_bits = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    sf, inv = group_sf(amax_bits, USE_UE8M0)
    y = tl.reshape(groups * inv[:, :, None], [BLOCK_M, BLOCK_N])
    if SATURATE:
        byte = to_e4m3(y, HARDWARE)
    else:
        amax_bits = tl.broadcast_to(amax_bits[:, :, None], [BLOCK_M, GROUPS, GRAN_K])
        byte = to_e4m3_inf_to_nan(y, tl.reshape(amax_bits, [BLOCK_M, BLOCK_N]), HARDWARE)
    return byte, sf


@jit
def store_sf(
    sf_ptr, sf, rows, valid, col, n, stride_m, stride_n,
    PACKED: tl.constexpr, GRAN_K: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Store scale factors [len(rows), GROUPS] of the columns from `col` on, where their row is valid."""
    group = tl.arange(0, GROUPS)
    mask = valid[:, None] & (group * GRAN_K < n - col)[None, :]
    group = group.to(tl.int64) + col // GRAN_K
    row = rows.to(tl.int64) * stride_m
    if PACKED:
        # Bytes of a word: the first group is the lowest.
        sf_bytes = sf_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        tile = sf_bytes + (row[:, None] + (group // 4 * stride_n)[None, :]) * 4 + (group % 4)[None, :]
        tl.store(tile, (sf.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=mask)
    else:
        tl.store(sf_ptr + (row[:, None] + (group * stride_n)[None, :]), sf, mask=mask)


@jit(
    do_not_specialize=(
        "m", "n", "num_rows", "x_stride_m", "x_stride_n", "out_stride_m", "out_stride_n", "sf_stride_m", "sf_stride_n"
    ),
    do_not_specialize_on_alignment=("row_map_ptr", "sf_ptr"),
)  # fmt: skip
def gather_cast_kernel(
    x_ptr,
    row_map_ptr,
    out_ptr,
    sf_ptr,
    m,
    n,
    num_rows,
    x_stride_m,
    x_stride_n,
    out_stride_m,
    out_stride_n,
    sf_stride_m,
    sf_stride_n,
    TOPK: tl.constexpr,
    N_UNIT: tl.constexpr,
    X_MAJOR: tl.constexpr,
    X_UNIT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    GRAN_K: tl.constexpr,
    USE_UE8M0: tl.constexpr,
    PACKED: tl.constexpr,
    HARDWARE: tl.constexpr,
    SATURATE: tl.constexpr,
    EVEN_N: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    fast = tl.program_id(0)
    slow = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    tile_m, tile_n = (fast, slow) if TOKENS_FIRST else (slow, fast)
    col = tile_n.to(tl.int64) * BLOCK_N
    token = tile_m.to(tl.int64) * BLOCK_M
    tokens, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    n = n.to(tl.int64) * N_UNIT
    token_mask = tokens < m - token

    # All loads come before the first store.
    rows = ()
    for k in tl.static_range(TOPK):
        rows += (tl.load(row_map_ptr + (token + tokens) * TOPK + k, mask=token_mask, other=-1),)
    mask = token_mask[:, None]
    if not EVEN_N:
        mask = mask & (cols < n - col)[None, :]
    x_tile = tile_pointers(x_ptr, token, col, tokens, cols, x_stride_m, x_stride_n, X_MAJOR, X_UNIT)
    x = tl.load(x_tile, mask=mask, other=0.0).to(tl.float32)
    byte, sf = cast_tile(x, GRAN_K, USE_UE8M0, HARDWARE, SATURATE, BLOCK_M, BLOCK_N)

    for k in tl.static_range(TOPK):
        valid = (rows[k] >= 0) & (rows[k] < num_rows)
        mask = valid[:, None]
        if not EVEN_N:
            mask = mask & (cols < n - col)[None, :]
        out_tile = tile_pointers(out_ptr, 0, col, rows[k], cols, out_stride_m, out_stride_n, OUT_MAJOR, OUT_UNIT)
        tl.store(out_tile, byte, mask=mask)
        store_sf(sf_ptr, sf, rows[k], valid, col, n, sf_stride_m, sf_stride_n, PACKED, GRAN_K, BLOCK_N // GRAN_K)


@jit(
    do_not_specialize=(
        "m", "n", "num_rows", "y_stride_m", "y_stride_n", "w_stride_t", "w_stride_k", "out_stride_m", "out_stride_n"
    ),
    do_not_specialize_on_alignment=("row_map_ptr", "w_ptr"),
)  # fmt: skip
def combine_kernel(
    y_ptr,
    row_map_ptr,
    w_ptr,
    out_ptr,
    m,
    n,
    num_rows,
    y_stride_m,
    y_stride_n,
    w_stride_t,
    w_stride_k,
    out_stride_m,
    out_stride_n,
    TOPK: tl.constexpr,
    N_UNIT: tl.constexpr,
    Y_MAJOR: tl.constexpr,
    Y_UNIT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    col = tl.program_id(0).to(tl.int64) * BLOCK_N
    token = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * BLOCK_M
    tokens, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    n = n.to(tl.int64) * N_UNIT
    token_mask = tokens < m - token
    col_mask = cols < n - col

    # Rows and weights first, so that the loads of y follow each other without a wait.
    rows = ()
    weights = ()
    for k in tl.static_range(TOPK):
        row = tl.load(row_map_ptr + (token + tokens) * TOPK + k, mask=token_mask, other=-1)
        rows += (tl.where(row < num_rows, row, -1),)
        if WEIGHTED:
            w = w_ptr + (token + tokens) * w_stride_t + k * w_stride_k.to(tl.int64)
            weights += (tl.load(w, mask=token_mask, other=0.0).to(tl.float32),)

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.static_range(TOPK):
        valid = (rows[k] >= 0)[:, None]
        mask = valid
        if not EVEN_N:
            mask = mask & col_mask[None, :]
        tile = tile_pointers(y_ptr, 0, col, rows[k], cols, y_stride_m, y_stride_n, Y_MAJOR, Y_UNIT)
        term = tl.load(tile, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            # A slot without a row adds 0 even if its weight is not finite.
            term *= tl.where(valid, weights[k][:, None], 0.0)
        total += term

    mask = token_mask[:, None]
    if not EVEN_N:
        mask = mask & col_mask[None, :]
    out_tile = tile_pointers(out_ptr, token, col, tokens, cols, out_stride_m, out_stride_n, OUT_MAJOR, OUT_UNIT)
    tl.store(out_tile, total.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def load_slots(
    row_map_ptr, w_ptr, token, num_rows, w_stride_t, w_stride_k, TOPK: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """Rows, which of them are rows, and weights of a token's slots."""
    slots = tl.arange(0, SLOTS)
    rows = tl.load(row_map_ptr + token * TOPK + slots, mask=slots < TOPK, other=-1)
    valid = (rows >= 0) & (rows < num_rows)
    w = w_ptr + token * w_stride_t + slots.to(tl.int64) * w_stride_k
    return rows, valid, tl.load(w, mask=valid, other=0.0).to(tl.float32)


@jit(
    do_not_specialize=(
        "n", "num_rows", "dout_stride_m", "dout_stride_n", "y_stride_m", "y_stride_n", "w_stride_t", "w_stride_k",
        "out_stride_m", "out_stride_n", "dw_stride_t", "dw_stride_k", "sf_stride_m", "sf_stride_n",
    ),
    do_not_specialize_on_alignment=("row_map_ptr", "w_ptr", "sf_ptr", "dw_ptr"),
)  # fmt: skip
def combine_backward_kernel(
    dout_ptr,
    y_ptr,
    row_map_ptr,
    w_ptr,
    sf_ptr,
    out_ptr,
    dw_ptr,
    n,
    num_rows,
    dout_stride_m,
    dout_stride_n,
    y_stride_m,
    y_stride_n,
    w_stride_t,
    w_stride_k,
    sf_stride_m,
    sf_stride_n,
    out_stride_m,
    out_stride_n,
    dw_stride_t,
    dw_stride_k,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    N_UNIT: tl.constexpr,
    DOUT_MAJOR: tl.constexpr,
    DOUT_UNIT: tl.constexpr,
    Y_MAJOR: tl.constexpr,
    Y_UNIT: tl.constexpr,
    OUT_MAJOR: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    CAST: tl.constexpr,
    GRAN_K: tl.constexpr,
    USE_UE8M0: tl.constexpr,
    PACKED: tl.constexpr,
    HARDWARE: tl.constexpr,
    SATURATE: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    one, cols, slots = tl.arange(0, 1), tl.arange(0, BLOCK_N), tl.arange(0, SLOTS)
    n = n.to(tl.int64) * N_UNIT

    rows = tl.load(row_map_ptr + token * TOPK + slots, mask=slots < TOPK, other=-1)
    valid = (rows >= 0) & (rows < num_rows)
    w = w_ptr + token * w_stride_t + slots.to(tl.int64) * w_stride_k
    weight = tl.load(w, mask=valid, other=0.0).to(tl.float32)

    dot = tl.zeros([SLOTS, BLOCK_N], tl.float32)
    col = tl.full([], 0, tl.int64)
    while col < n:
        if EVEN_N:
            col_mask = (cols >= 0)[None, :]
            mask = valid[:, None]
        else:
            col_mask = (cols < n - col)[None, :]
            mask = valid[:, None] & col_mask
        y_tile = tile_pointers(y_ptr, 0, col, rows, cols, y_stride_m, y_stride_n, Y_MAJOR, Y_UNIT)
        dout_tile = tile_pointers(
            dout_ptr, token, col, one, cols, dout_stride_m, dout_stride_n, DOUT_MAJOR, DOUT_UNIT
        )  # fmt: skip
        dout = tl.load(dout_tile, mask=col_mask, other=0.0).to(tl.float32)  # [1, BLOCK_N]
        y = tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)  # [SLOTS, BLOCK_N]
        dot += dout * y

        dy = (weight[:, None] * dout).to(y_ptr.dtype.element_ty)
        out_tile = tile_pointers(out_ptr, 0, col, rows, cols, out_stride_m, out_stride_n, OUT_MAJOR, OUT_UNIT)
        if CAST:
            byte, sf = cast_tile(dy.to(tl.float32), GRAN_K, USE_UE8M0, HARDWARE, SATURATE, SLOTS, BLOCK_N)
            tl.store(out_tile, byte, mask=mask)
            store_sf(sf_ptr, sf, rows, valid, col, n, sf_stride_m, sf_stride_n, PACKED, GRAN_K, BLOCK_N // GRAN_K)
        else:
            tl.store(out_tile, dy, mask=mask)
        col += BLOCK_N

    # dout may be Inf or NaN where there is no row.
    dweight = tl.where(valid, tl.sum(dot, axis=1), 0.0)
    tl.store(dw_ptr + token * dw_stride_t + slots.to(tl.int64) * dw_stride_k, dweight, mask=slots < TOPK)
