"""Timing of CUDA work."""

import contextlib
import os
from collections.abc import Callable

import torch

__all__ = ["bench", "bench_kineto", "empty_suppress", "suppress_stdout_stderr"]

empty_suppress = contextlib.nullcontext


@contextlib.contextmanager
def suppress_stdout_stderr():
    """Silence sys.stdout, sys.stderr and file descriptors 1 and 2, and with them what C and C++ code prints."""
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        saved = [(fd, os.dup(fd)) for fd in (1, 2)]
        try:
            for fd, _ in saved:
                os.dup2(null.fileno(), fd)
            yield
        finally:
            for fd, original in saved:
                os.dup2(original, fd)
                os.close(original)


def bench(fn: Callable[[], object], num_warmups: int = 5, num_tests: int = 10, high_precision: bool = False) -> float:
    """Seconds per call of `fn`, as the mean of `num_tests` calls in a row between two CUDA events.

    The L2 cache is flushed once, before the warm-up. `high_precision` first occupies the GPU with a large fp32 matmul,
    so that the launches queue up behind it and the host's pace stays out of the figure.
    Raises RuntimeError without a CUDA device.
    """
    _require_cuda("bench")
    torch.cuda.synchronize()
    torch.empty(int(256e6) // 4, dtype=torch.int32, device="cuda").zero_()
    for _ in range(num_warmups):
        fn()
    if high_precision:
        x = torch.randn(8192, 8192, device="cuda")
        y = torch.randn(8192, 8192, device="cuda")
        x @ y
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_tests):
        fn()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / num_tests / 1e3


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
    barrier: Callable[[], object] | None = None,
):
    """Seconds per launch, by torch.profiler, of the kernels that `fn` launches whose names contain a string.

    kernel_names: a str gives a float, a tuple of them a tuple; 0 where no kernel matches. A string that matches
    several kernels is refused unless `with_multiple_kernels`; then the mean is over all their launches.
    Each of `num_tests` calls (after as many for warm-up) follows a zero-fill of 8 GB, or of half the free memory where
    that is less, if `flush_l2`; then about 10 ms of device sleep and `barrier()`, if given. `trace_path` gets a Chrome
    trace. With the environment variable DG_USE_NVIDIA_TOOLS set to nonzero the profiler is left to another tool:
    every time is 1 and `fn` is not called.
    Raises TypeError for other kernel_names, ValueError for an ambiguous one, RuntimeError without a CUDA device.
    """
    if not isinstance(kernel_names, (str, tuple)):
        raise TypeError(f"kernel_names must be a str or a tuple, got {type(kernel_names).__name__}")
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    if int(os.environ.get("DG_USE_NVIDIA_TOOLS", "0")):
        return 1 if isinstance(kernel_names, str) else (1,) * len(names)
    _require_cuda("bench_kineto")

    fn()
    num_flush_bytes = min(int(8e9), torch.cuda.mem_get_info()[0] // 2) if flush_l2 else 0
    cache = torch.empty(num_flush_bytes // 4, dtype=torch.int32, device="cuda")
    with suppress_stdout_stderr() if suppress_kineto_output else empty_suppress():
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA],
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        ) as profiler:
            for _ in range(2):
                for _ in range(num_tests):
                    cache.zero_()
                    if barrier is not None:
                        torch.cuda._sleep(int(2e7))
                        barrier()
                    fn()
                torch.cuda.synchronize()
                profiler.step()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)

    kernels = [e for e in profiler.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    times = tuple(_mean_time(kernels, name, with_multiple_kernels) for name in names)
    return times[0] if isinstance(kernel_names, str) else times


def _mean_time(kernels, name, with_multiple_kernels):
    matching = [e for e in kernels if name in e.key]
    if len(matching) > 1 and not with_multiple_kernels:
        raise ValueError(f"kernel_names: {name!r} matches several kernels: {[e.key for e in matching]}")
    launches = sum(e.count for e in matching)
    return sum(e.self_device_time_total for e in matching) / launches / 1e6 if launches else 0


def _require_cuda(what):
    if not torch.cuda.is_available():
        raise RuntimeError(f"{what} times CUDA work, and torch sees no CUDA device")
