"""Decorators and queries for test scripts."""

import functools
import os
from collections.abc import Callable

import torch

__all__ = ["get_arch_major", "ignore_env", "test_filter"]


def get_arch_major() -> int:
    """Major compute capability of the current CUDA device (9 for Hopper). Raises RuntimeError without one."""
    if not torch.cuda.is_available():
        raise RuntimeError("get_arch_major needs a CUDA device, and torch sees none")
    return torch.cuda.get_device_capability()[0]


def test_filter(condition: Callable[[], bool]):
    """Decorator: run the function if `condition()` holds at the time of the call, else say so and return None."""

    def decorator(fn):
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            if condition():
                return fn(*args, **kwargs)
            print(f"{fn.__name__}:\n > Filtered by {condition}\n")

        return wrapper

    return decorator


# The name looks like a test to pytest.
test_filter.__test__ = False


def ignore_env(name: str, condition: Callable[[], bool]):
    """Decorator: without the environment variable `name` during the call, if `condition()` holds then."""

    def decorator(fn):
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            saved = os.environ.pop(name, None) if condition() else None
            try:
                return fn(*args, **kwargs)
            finally:
                if saved is not None:
                    os.environ[name] = saved

        return wrapper

    return decorator
