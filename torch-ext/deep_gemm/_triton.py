"""Triton: where it is missing, how its versions differ, and launches that cost the host little."""

import atexit
import contextlib
import functools
import importlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import warnings
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
            "deep_gemm needs Triton 3.6 or newer for CUDA tensors; torch's CUDA wheels bring it: pip install triton"
        ) from _IMPORT_ERROR


def _missing_build_tools() -> str:
    compiler = os.environ.get("CC") or "gcc"
    if not any(shutil.which(name) for name in (compiler, "gcc", "clang")):
        return "a C compiler (Debian, Ubuntu: apt install gcc; or point CC at one)"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if headers.exists() else f"Python's headers ({headers}; Debian, Ubuntu: apt install python3-dev)"


class Launch:
    """A kernel with everything bound but the tensors, for one device.

    `args` are the kernel's arguments after its pointers, scalars and constexprs alike; `options` the compiler's. The
    first call with pointers of a given alignment goes through Triton's own launch, which compiles; later ones call the
    compiled kernel's C entry, which takes the host a quarter of the time. Profiler hooks and unknown Triton versions
    take the ordinary launch.
    """

    __slots__ = ("kernel", "grid", "args", "options", "device", "entries", "last")

    def __init__(self, kernel, grid: tuple, args: tuple, num_warps: int, device: int, **options):
        _require_triton()
        self.kernel, self.grid, self.args, self.device = kernel, grid, args, device
        # Fused multiply-adds would skip a rounding of the reference; Triton's default for them changes in 3.10.
        self.options = {"num_warps": num_warps, "enable_fp_fusion": False, **options}
        self.entries: dict[tuple, tuple] = {}
        self.last = (None, None, None, None)

    def __call__(self, tensors: tuple, pointers: tuple) -> None:
        if self.device < 0 or _launch_is_hooked():
            return self._launch_by_triton(tensors)
        stream = _current_stream(self.device)
        last_pointers, last_stream, entry, args = self.last
        if pointers != last_pointers or stream != last_stream:
            # Triton specialises on each pointer's alignment to 16 bytes.
            alignment = tuple([pointer & 15 == 0 for pointer in pointers])
            if alignment not in self.entries:
                self.entries[alignment] = _c_entry(self._launch_by_triton(tensors))
                return
            if self.entries[alignment] is None:
                self._launch_by_triton(tensors)
                return
            entry, bind = self.entries[alignment]
            args = bind(self.grid, stream, pointers + self.args)
            self.last = (pointers, stream, entry, args)
        if _current_device() == self.device:
            entry(*args)
        else:
            with torch.cuda.device(self.device):
                entry(*args)

    def _launch_by_triton(self, tensors):
        # Triton knows no e4m3 below sm_89: kernels see e4m3 memory as bytes.
        tensors = [t.view(torch.uint8) if t is not None and t.dtype is torch.float8_e4m3fn else t for t in tensors]
        with _naming_build_tools(), torch.cuda.device(self.device):
            if self.device >= 0:
                if not self.entries:
                    _build_launcher(self.kernel, *tensors, *self.args)
                _prepare()
            return self.kernel[self.grid](*tensors, *self.args, **self.options)


@contextlib.contextmanager
def _naming_build_tools():
    """Errors of a launch by Triton say what is missing to build it."""
    try:
        yield
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        # Triton up to 3.7 builds C code: without a compiler it says so, without headers the compiler does.
        building = not isinstance(error, RuntimeError) or "C compiler" in str(error)
        if building and (missing := _missing_build_tools()):
            raise RuntimeError(f"Triton could not compile its launcher; it needs {missing}") from error
        raise


# What torch.cuda.current_stream and current_device read, without building a Stream.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)


def _c_entry(compiled):
    """The C function that launches a kernel, and what makes its arguments; None where the ordinary launch has to."""
    if _VERSION not in _DIRECT_VERSIONS or compiled is None:
        return None
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    needs = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "gsan_enabled")
    if any(getattr(launcher, need, 0) for need in needs) or not hasattr(launcher, "launch"):
        return None
    if _VERSION == "3.6":

        def bind(grid, stream, args):
            return (*grid, stream, function, False, False, None, None, metadata, None, None, None, *args)

    elif not hasattr(launcher, "arg_annotations") or not hasattr(launcher, "kernel_signature"):
        return None
    else:
        signature = (launcher.arg_annotations, launcher.kernel_signature)

        def bind(grid, stream, args):
            return (*grid, stream, function, False, False, metadata, None, None, None, None, None, *signature, args)

    return launcher.launch, bind


def _launch_is_hooked(runtime=getattr(getattr(triton, "knobs", None), "runtime", None)) -> bool:
    try:
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:  # not the chains of hooks that Triton sets up
        return True


def _build_launcher(kernel, *args):
    """Let the C compiler start on what launches the kernel, which Triton 3.6 leaves for when the kernel is compiled."""
    if _VERSION != "3.6":
        return
    with contextlib.suppress(Exception):  # Triton itself says what is wrong
        types = [
            "constexpr" if parameter.is_constexpr else triton.runtime.jit.mangle_type(arg)
            for parameter, arg in zip(kernel.params, args)
        ]
        _start_launcher_build(tuple(types))


@functools.cache
def _start_launcher_build(types):
    from triton.backends.nvidia import driver

    def build():
        with contextlib.suppress(Exception):
            driver.compile_module_from_src(
                src=driver.make_launcher({}, dict(enumerate(types)), None), name="__triton_launcher",
                library_dirs=driver.library_dirs(), include_dirs=driver.include_dirs, libraries=driver.libraries,
            )  # fmt: skip

    threading.Thread(target=build).start()


_preparing = threading.Lock()


def _prepare():
    with _preparing:
        _prepare_once()


@functools.cache
def _prepare_once():
    """The slow parts of what Triton does once in a process, side by side, before its first launch needs them."""
    cache = triton.knobs.cache
    try:
        os.makedirs(cache.dir, exist_ok=True)
        tempfile.TemporaryFile(dir=cache.dir).close()
    except OSError as error:
        warnings.warn(f"Triton cannot write to its cache ({error}); this process compiles into a temporary folder")
        cache.dir = tempfile.mkdtemp(prefix="triton-cache-")
        atexit.register(_remove_in, os.getpid(), cache.dir)

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


def _remove_in(process: int, folder: str) -> None:
    if os.getpid() == process:  # and not in a fork of it
        shutil.rmtree(folder, ignore_errors=True)
