"""Comparing and measuring tensors."""

import torch

__all__ = ["assert_bitwise_equal", "calc_diff", "count_bytes"]


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | float:
    """Relative difference 1 - 2 * sum(x * y) / sum(x^2 + y^2), in fp64.

    x and y: same shape, any dtype. Returns a 0-D tensor; the float 0.0 if both are all zero; NaN if either has one.
    It is |x - y|^2 / (|x|^2 + |y|^2), which does not depend on the scale of the values.
    """
    x, y = x.double(), y.double()
    denominator = (x * x + y * y).sum()
    if denominator == 0:
        return 0.0
    return 1 - 2 * (x * y).sum() / denominator


def count_bytes(*tensors) -> int:
    """Bytes of the elements of all tensors, through nested tuples and lists; None counts as nothing."""
    total = 0
    for t in tensors:
        if isinstance(t, (tuple, list)):
            total += count_bytes(*t)
        elif t is not None:
            total += t.numel() * t.element_size()
    return total


def assert_bitwise_equal(x: torch.Tensor, y: torch.Tensor, label: str = "") -> None:
    """Raise AssertionError unless x and y have the same dtype, shape and bytes.

    Any dtype and any strides; the devices may differ. NaN equals NaN if the bits do, and +0 differs from -0. The
    message starts with `label` and gives the number of differing elements and the coordinate and bytes of the first.
    """
    prefix = f"{label}: " if label else ""
    if x.dtype != y.dtype or x.shape != y.shape:
        raise AssertionError(f"{prefix}{x.dtype} {list(x.shape)} != {y.dtype} {list(y.shape)}")
    x_bytes, y_bytes = _bytes(x), _bytes(y).to(x.device)
    if torch.equal(x_bytes, y_bytes):
        return
    differing = (x_bytes != y_bytes).any(-1).nonzero()
    first = tuple(differing[0].tolist())
    raise AssertionError(
        f"{prefix}{len(differing)} of {x.numel()} elements differ, first at {list(first)}: "
        f"{_hex(x_bytes[first])} != {_hex(y_bytes[first])}"
    )


def _bytes(x):
    """uint8 [*x.shape, element size]"""
    return x.detach().resolve_conj().resolve_neg().contiguous().unsqueeze(-1).view(torch.uint8)


def _hex(element):
    return "0x" + bytes(reversed(element.tolist())).hex()
