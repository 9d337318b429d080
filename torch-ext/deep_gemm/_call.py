"""What every public function does around its launch: refuse bad arguments, know a tracer, remember its plan."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._C import _increment_version as increment_version  # so that autograd notices what a kernel writes
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from ._memory import extent, overlap, overlaps_itself
from .utils.math import ceil_div

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
_Tensor = torch.Tensor
_pointer = torch.Tensor.data_ptr
# Memory of tensors is hardly ever below, and never that of a GPU; offsets into freed storage are.
_LOW = 2**32


def is_traced(tensor) -> bool:
    """Whether a call has to go through a registered op: under torch.compile, a dispatch mode or for a tensor subclass.

    An op costs an eager call more than a small kernel does, so all others launch directly.
    """
    cls = type(tensor)
    return (
        is_compiling()
        or _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
        or (cls is not _Tensor and getattr(cls, "__torch_dispatch__", _PLAIN_DISPATCH) is not _PLAIN_DISPATCH)
    )


def served_by_triton(device: torch.device) -> bool:
    """Whether kernels run on the device; the PyTorch reference serves the others."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


class Spec(NamedTuple):
    """An output that a call makes where it is given none: row-major, unless it says strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None

    def empty(self, device: torch.device) -> torch.Tensor:
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def empty_like(self, x: torch.Tensor) -> torch.Tensor:
        """On x's device and of x's class, for tracers and tensor subclasses."""
        if self.stride is None:
            return x.new_empty(self.shape, dtype=self.dtype)
        return x.new_empty_strided(self.shape, self.stride, dtype=self.dtype)


def allocate(outputs, specs, x: torch.Tensor) -> tuple:
    """The outputs of a traced call, made like x where none is given; a spec of None is an output that is not wanted."""
    return tuple([spec and (spec.empty_like(x) if out is None else out) for out, spec in zip(outputs, specs)])


def placeholders(outputs, specs) -> tuple:
    """The outputs, and tensors without memory where none is given, for code that asks for strides alone."""
    return tuple([spec and (spec.empty("meta") if out is None else out) for out, spec in zip(outputs, specs)])


class Plan:
    """What follows from dtypes, shapes, strides and options alone: worked out once, kept for calls that repeat them.

    `launch` takes `(*inputs, *outputs)` and their pointers; where it is None `reference(*inputs)` gives the outputs.
    With `empty` outputs nothing runs.
    """

    __slots__ = (
        "specs", "launch", "reference", "empty", "given", "missing", "absent", "lazy_sign", "pairs", "apart", "fits"
    )  # fmt: skip

    def __init__(self, inputs, outputs, specs, launch, reference, empty):
        self.specs, self.launch, self.reference = specs, launch, reference
        self.empty = empty or inputs[0].is_meta
        self.missing = any(tensor is None for tensor in outputs)
        self.given = any(tensor is not None for tensor in outputs)
        self.absent = any(tensor is None for tensor in inputs)
        # Real views of conjugated complex tensors have a sign yet to be applied, which only PyTorch's own kernels do.
        tensors = inputs + outputs
        self.lazy_sign = [
            i for i, t in enumerate(tensors) if t is not None and t.dtype in (torch.float32, torch.float16)
        ]
        # What could overlap: an output that is given, and an input or another such output.
        given = [(i, extent(tensor)) for i, tensor in enumerate(tensors) if tensor is not None]
        self.pairs = [(i, j, a, b) for i, a in given if i >= len(inputs) for j, b in given if j < i]
        self.apart = None
        self.fits = _fits_nothing

    def check_overlap(self, names, tensors, pointers):
        for i, j, i_bytes, j_bytes in self.pairs:
            if pointers[i] < pointers[j] + j_bytes and pointers[j] < pointers[i] + i_bytes:
                if overlap(tensors[i], tensors[j]):
                    raise ValueError(f"{names[i]} overlaps {names[j]} in memory")
        self.apart = pointers

    def remember(self, tensors, again):
        """Let `fits` know later tensors of the same type, dtype, device, sizes, strides, gradient and dispatch keys.

        That takes a fifth of the time of the key below, and says too that no sign is yet to be applied. again: whether
        it was asked and did not know these, for instance since inference mode began.
        """
        if TensorGuards and (again or self.fits is _fits_nothing):
            shapes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
            self.fits = TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


def _fits_nothing(*tensors) -> bool:
    return False


class Planned:
    """A function of tensors that runs one kernel, launched with as little work on the host as its arguments allow.

    `make(inputs, outputs, *options)` checks the arguments and returns their `Plan`; `names` are those of inputs and
    outputs, for messages. Inputs may be None where `make` allows it.
    """

    _MAX_PLANS = 4096

    def __init__(self, make, names: tuple[str, ...]):
        self.make, self.names = make, names
        self.plans: dict[tuple, Plan] = {}
        # The latest plan by options, sizes of the first and last input, and whether outputs are given: all or none.
        self.latest: dict[tuple, Plan] = {}

    def _name(self, tensor, tensors) -> str:
        return next(name for name, other in zip(self.names, tensors) if other is tensor)

    def _check_memory(self, tensors, pointers):
        for name, tensor, pointer in zip(self.names, tensors, pointers):
            if tensor is None or tensor.is_meta or not tensor.numel():
                continue
            # A view of freed storage still has its offset for an address.
            if pointer == tensor.storage_offset() * tensor.element_size():
                raise ValueError(f"{name} has no memory: freed storage, or a wrapper such as functorch's")

    def __call__(self, inputs: tuple, outputs: tuple, *options) -> tuple:
        missing = outputs[0] is None
        try:
            plan = self.latest.get((options, missing, inputs[0].numel(), inputs[-1].numel()))
            fits = plan is not None and (
                plan.fits(*inputs) and all([out is None for out in outputs])
                if missing
                else plan.fits(*inputs, *outputs)
            )
        except (AttributeError, RuntimeError, TypeError):  # no tensor, one without a size, an unhashable option
            fits = False
        if not fits:
            return self._run(inputs, outputs, options)
        if missing:
            device = inputs[0].device
            outputs = tuple([spec.empty(device) for spec in plan.specs])
        tensors = inputs + outputs
        pointers = tuple(map(_pointer, tensors))
        if min(pointers) < _LOW:
            self._check_memory(tensors, pointers)
        if not missing:
            if pointers != plan.apart:
                plan.check_overlap(self.names, tensors, pointers)
            increment_version(outputs)
        plan.launch(tensors, pointers)
        return outputs

    def _run(self, inputs: tuple, outputs: tuple, options: tuple) -> tuple:
        tensors = inputs + outputs
        try:
            # Sizes are spelled out, for a torch.Size takes long to hash.
            key = (options, *[None if t is None else (t.dtype, *t.shape, *t.stride(), t.device) for t in tensors])
            plan = self.plans.get(key)
        except (AttributeError, RuntimeError, TypeError):  # no tensor, one without strides, an unhashable option
            plan = None
        known = plan is not None
        if not known:
            plan = self.make(inputs, outputs, *options)
        if plan.missing:
            device = inputs[0].device
            outputs = tuple([spec.empty(device) if out is None else out for out, spec in zip(outputs, plan.specs)])
            tensors = inputs + outputs
        # Not before its outputs could be made, which options of a wrong type prevent.
        if not known:
            if len(self.plans) >= self._MAX_PLANS:
                self.plans.pop(next(iter(self.plans)), None)
            self.plans[key] = plan
        if plan.empty:
            return outputs
        pointers = tuple([0 if t is None else t.data_ptr() for t in tensors])
        if any([pointer < _LOW for t, pointer in zip(tensors, pointers) if t is not None]):
            self._check_memory(tensors, pointers)
        if plan.given:
            for t in outputs:
                if t.requires_grad:
                    raise ValueError(f"{self._name(t, tensors)} requires grad, and what is written into it has none")
            if pointers != plan.apart:
                plan.check_overlap(self.names, tensors, pointers)
        if plan.launch is None or (plan.lazy_sign and any([tensors[i].is_neg() for i in plan.lazy_sign])):
            for out, value in zip(outputs, plan.reference(*inputs)):
                out.copy_(value)
            return outputs
        if plan.given:
            increment_version(outputs)
        if not plan.absent and plan.given != plan.missing:
            latest = (options, plan.missing, inputs[0].numel(), inputs[-1].numel())
            plan.remember(inputs if plan.missing else tensors, again=self.latest.get(latest) is plan)
            if len(self.latest) >= self._MAX_PLANS:
                self.latest.clear()
            self.latest[latest] = plan
        plan.launch(tensors, pointers)
        return outputs


def check_matrix(name: str, tensor, *dtypes: torch.dtype) -> None:
    """Refuse what is not a 2-D tensor of one of the dtypes."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if tensor.dim() != 2:
        raise ValueError(f"{name} must be 2-D, got shape {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(str(dtype) for dtype in dtypes)}, got {tensor.dtype}")


def check_output(name: str, tensor, x: torch.Tensor, spec: Spec) -> None:
    """Refuse an output, where one is given, that is not as specified and on x's device, or overlaps itself."""
    if tensor is None:
        return
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor or None, got {type(tensor).__name__}")
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != tuple(spec.shape) or tensor.device != x.device:
        raise ValueError(
            f"{name} must be {spec.dtype} of shape {tuple(spec.shape)} on {x.device}, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} on {tensor.device}"
        )
    if tensor.requires_grad:
        raise ValueError(f"{name} requires grad, and what is written into it has none")
    # A tracer cannot follow the search for overlaps; the op it records repeats all checks.
    if tensor.layout is not torch.strided or (not is_compiling() and overlaps_itself(tensor)):
        raise ValueError(f"{name} must have memory of its own for each element, got strides {tensor.stride()}")


def check_outputs(names, outputs, x: torch.Tensor, specs):
    """`check_output` of each; the specs."""
    for name, output, spec in zip(names, outputs, specs):
        check_output(name, output, x, spec)
    return specs


def check_gran_k(gran_k) -> None:
    """Refuse group sizes that no kernel has."""
    if gran_k not in (32, 128):
        raise ValueError(f"gran_k must be 32 or 128, got {gran_k!r}")


def sf_spec(rows: tuple[int, ...], columns: int, use_ue8m0, gran_k, use_packed_ue8m0) -> Spec:
    """Scale factors of rows, or of a batch of them, in groups of `gran_k` columns; refuses recipes that have none."""
    check_gran_k(gran_k)
    groups = ceil_div(columns, gran_k)
    if not use_packed_ue8m0:
        return Spec((*rows, groups), torch.float32)
    if not use_ue8m0:
        raise ValueError("use_packed_ue8m0 needs use_ue8m0=True: only powers of two pack into UE8M0 bytes")
    if groups % 4:
        raise ValueError(f"use_packed_ue8m0 needs a multiple of 4 groups of {gran_k} columns, got {groups}")
    return Spec((*rows, groups // 4), torch.int32)
