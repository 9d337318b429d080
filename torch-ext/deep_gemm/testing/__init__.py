"""Helpers for tests and benchmarks of the kernels; they need nothing but torch."""

from . import bench, numeric, utils
from .bench import *  # `testing.bench` is the function from here on, as public callers expect
from .numeric import *
from .utils import *

__all__ = [
    "assert_bitwise_equal",
    "bench",
    "bench_kineto",
    "calc_diff",
    "count_bytes",
    "empty_suppress",
    "get_arch_major",
    "ignore_env",
    "suppress_stdout_stderr",
    "test_filter",
]
