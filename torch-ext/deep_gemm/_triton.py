"""Triton: where it is missing, how its versions differ, and launches that cost the host little."""

import contextlib
import functools
import importlib
import os
import shutil
import sysconfig
import threading
from pathlib import Path

import torch

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError as error:
    _IMPORT_ERROR = error
    triton = tl = None

    def jit(fn=None, **_):
        """Stands in for `triton.jit`, so that kernels can be defined, though not launched, without Triton."""
        return jit if fn is None else None

    def constexpr(value):
        return value


# Versions whose launcher `_direct` knows how to call; others take the ordinary launch.
_VERSION = triton and ".".join(triton.__version__.split(".")[:2])
_DIRECT_VERSIONS = ("3.6", "3.7", "3.8", "3.9")


def _require_triton():
    if triton is None:
        raise ImportError(
            "deep_gemm needs Triton 3.6 or newer for CUDA tensors; it comes with torch's CUDA wheels: pip install triton"
        ) from _IMPORT_ERROR


def _missing_build_tools() -> str:
    compiler = os.environ.get("CC") or "gcc"
    if not any(shutil.which(name) for name in (compiler, "gcc", "clang")):
        return "a C compiler (Debian, Ubuntu: apt install gcc; or point CC at one)"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if headers.exists() else f"Python's headers ({headers}; Debian, Ubuntu: apt install python3-dev)"


class Launch:
    """A kernel with everything bound but the tensors, for one device.

    `args` are the kernel's arguments after its pointers, scalars and constexprs alike. The first call with pointers of a
    given alignment goes through Triton's own launch, which compiles; later ones call the compiled kernel directly,
    which takes the host a quarter of the time. Profiler hooks and Triton versions not known take the ordinary launch every time.
    """

    __slots__ = ("kernel", "grid", "args", "num_warps", "device", "compiled", "last")

    def __init__(self, kernel, grid: tuple, args: tuple, num_warps: int, device: int):
        _require_triton()
        self.kernel, self.grid, self.args, self.num_warps, self.device = kernel, grid, args, num_warps, device
        self.compiled, self.last = {}, (None, None)

    def __call__(self, tensors: tuple, pointers: tuple) -> None:
        last, launch = self.last
        if pointers != last:
            # Triton specialises on each pointer's alignment to 16 bytes.
            launch = self.compiled.get(tuple([pointer & 15 == 0 for pointer in pointers]))
            self.last = (pointers, launch)
        if launch is None or _launch_is_hooked():
            return self._launch_by_triton(tensors, pointers)
        stream = _current_stream(self.device)
        if _current_device() == self.device:
            launch(self.grid, stream, pointers + self.args)
        else:
            with torch.cuda.device(self.device):
                launch(self.grid, stream, pointers + self.args)

    def _launch_by_triton(self, tensors, pointers):
        # Triton knows no e4m3 below sm_89: kernels see e4m3 memory as bytes.
        tensors = [t.view(torch.uint8) if t.dtype is torch.float8_e4m3fn else t for t in tensors]
        try:
            with torch.cuda.device(self.device):
                if self.device >= 0:
                    _prepare()
                # Fused multiply-adds would skip a rounding of the reference; Triton's default for them changes in 3.10.
                compiled = self.kernel[self.grid](
                    *tensors, *self.args, num_warps=self.num_warps, enable_fp_fusion=False
                )
        except Exception as error:
            if not self.compiled and (missing := _missing_build_tools()):
                raise RuntimeError(f"Triton could not compile its launcher; it needs {missing}") from error
            raise
        if self.device >= 0 and _VERSION in _DIRECT_VERSIONS:
            self.compiled[tuple([pointer & 15 == 0 for pointer in pointers])] = direct = _direct(compiled)
            self.last = (pointers, direct)


# What torch.cuda.current_stream and current_device read, without building a Stream.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)


def _direct(compiled):
    """The C function behind a kernel without scratch memory, as `launch(grid, stream, args)`."""
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    launch = launcher.launch
    if _VERSION == "3.6":

        def direct(grid, stream, args):
            launch(*grid, stream, function, False, False, None, None, metadata, None, None, None, *args)

    else:
        annotations, signature = launcher.arg_annotations, launcher.kernel_signature

        def direct(grid, stream, args):
            launch(
                *grid, stream, function, False, False, metadata, None, None, None, None, None, annotations, signature, args
            )  # fmt: skip

    return direct


def _launch_is_hooked() -> bool:
    runtime = triton.knobs.runtime
    try:
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:  # not the chains of hooks that Triton sets up
        return True


@functools.cache
def _prepare():
    """The slow parts of what Triton does once in a process, side by side, before its first launch needs them."""

    def load_compiler():
        with contextlib.suppress(ImportError):
            importlib.import_module("triton.experimental.gluon")

    hash_triton = getattr(triton.runtime.cache, "triton_key", lambda: None)
    threads = [threading.Thread(target=task) for task in (hash_triton, load_compiler)]
    for thread in threads:
        thread.start()
    triton.runtime.driver.active.get_current_target()  # Triton 3.6 compiles the C part of its driver here
    for thread in threads:
        thread.join()
