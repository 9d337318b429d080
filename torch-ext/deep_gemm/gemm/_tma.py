"""Gluon on Hopper: where it is missing, how Triton's versions name it, and launches of kernels that use TMA."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch

from .._triton import (
    _VERSION,
    Launch,
    _c_entry,
    _current_device,
    _current_stream,
    _launch_is_hooked,
    _naming_build_tools,
    _prepare,
    jit,
    tl,
)

try:
    from triton.backends.nvidia import driver
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    driver = gluon = gl = mbarrier = tma = None
    fence_async_shared = warpgroup_mma = warpgroup_mma_wait = TensorDescriptor = None

gluon_jit = gluon.jit if gluon else jit
# Triton 3.8 renames these, 3.9 has the new names alone.
tma_load = getattr(tma, "async_load", None) or getattr(tma, "async_copy_global_to_shared", None)
tma_store = getattr(tma, "async_store", None) or getattr(tma, "async_copy_shared_to_global", None)


class Tma(NamedTuple):
    """A kernel argument: tensor `index` of a call, as TMA moves it between memory and blocks in shared memory.

    shape, strides: in elements, the last stride 1, the others multiples of 16 bytes; outside of shape TMA reads zeros
    and writes nothing. They may differ from the tensor's, for a transposed view.
    """

    index: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: object  # NVMMASharedLayout of a block


def is_written_by_tma(d) -> bool:
    """Whether TMA writes an output of these strides and nothing else.

    It clips at multiples of 16 bytes: behind a row that ends elsewhere it writes up to 12 bytes of zeros.
    """
    (m, n), unit = d.shape, 16 // d.element_size()
    return n % unit == 0 and d.stride(1) == 1 and (m == 1 or (d.stride(0) % unit == 0 and d.stride(0) >= n))


class TmaLaunch(Launch):
    """`Launch` for kernels that read or write tensors by TMA.

    `operands` are the kernel's first arguments, each a `Tma` or the index of a tensor passed as a pointer; `args`
    follow. Tensor maps are encoded once for each address. A call with an address that TMA cannot take (no multiple of
    16 bytes) goes to `unaligned()`, the launch of another kernel with the same call.
    """

    __slots__ = ("operands", "unaligned", "tma_indices", "maps")

    _MAX_MAPS = 1024

    def __init__(self, kernel, grid, operands, args, num_warps, device, unaligned=None, **options):
        # Promotion of FP8 products is a multiplication and an addition for each element.
        super().__init__(kernel, grid, args, num_warps, device, **{"enable_fp_fusion": True, **options})
        self.operands, self.unaligned = operands, unaligned
        self.tma_indices = {operand.index for operand in operands if isinstance(operand, Tma)}
        self.maps: dict[tuple, list] = {}

    def __call__(self, tensors: tuple, pointers: tuple) -> None:
        last_pointers, last_stream, entry, args = self.last
        stream = _current_stream(self.device) if self.device >= 0 else None
        if pointers != last_pointers or stream != last_stream or _launch_is_hooked():
            alignment = tuple([pointer & 15 == 0 for pointer in pointers])
            if not all([alignment[i] for i in self.tma_indices]):
                self.unaligned()(tensors, pointers)
                return
            if self.device < 0 or _launch_is_hooked():
                self._launch_by_triton(tensors)
                return
            if alignment not in self.entries:
                self.entries[alignment] = _tma_entry(self._launch_by_triton(tensors))
                return
            if self.entries[alignment] is None:
                self._launch_by_triton(tensors)
                return
            entry, bind, encode = self.entries[alignment]
            args = bind(self.grid, stream, (*self._encoded(encode, pointers), *self.args))
            self.last = (pointers, stream, entry, args)
        if _current_device() == self.device:
            entry(*args)
        else:
            with torch.cuda.device(self.device):
                entry(*args)

    def _encoded(self, encode, pointers):
        """The operands as the C entry takes them."""
        args, nth = [], 0
        for operand in self.operands:
            if not isinstance(operand, Tma):
                args.append(pointers[operand])
                continue
            key = nth, pointers[operand.index]
            if key not in self.maps:
                if len(self.maps) >= self._MAX_MAPS:
                    self.maps.clear()
                self.maps[key] = encode(nth, operand, pointers[operand.index])
            args += self.maps[key]
            nth += 1
        return args

    def _launch_by_triton(self, tensors):
        operands = [_descriptor(tensors, o) if isinstance(o, Tma) else tensors[o] for o in self.operands]
        with _naming_build_tools(), torch.cuda.device(self.device):
            if self.device >= 0:
                _prepare()
            return self.kernel[self.grid](*operands, *self.args, **self.options)


def _descriptor(tensors, operand):
    index, *description, layout = operand
    return TensorDescriptor(tensors[index], *map(list, description), layout)


class _Address(NamedTuple):
    """What Triton's encoder asks a `TensorDescriptor` for."""

    pointer: int
    shape: list[int]
    strides: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    @property
    def base(self):
        return self

    def data_ptr(self):
        return self.pointer


def _tma_entry(compiled):
    """The C function behind Triton's launcher, what makes its arguments, and what encodes operands for it; or None.

    Triton's launcher encodes every tensor map again at each launch. Its closure holds the one that takes them encoded.
    """
    if compiled is None or (found := _c_entry(compiled)) is None or not inspect.isfunction(found[0]):
        return None
    entry = inspect.getclosurevars(found[0]).nonlocals.get("launcher")
    metas = getattr(compiled.metadata, "tensordesc_meta", None)
    encode_by_triton = getattr(driver, "make_tensordesc_arg", None)
    if not callable(entry) or not metas or None in metas or encode_by_triton is None:
        return None
    base_args = () if _VERSION == "3.6" else ((),)

    def encode(nth, operand, pointer):
        return encode_by_triton(_Address(pointer, list(operand.shape), list(operand.strides)), metas[nth], *base_args)

    return entry, found[1], encode
