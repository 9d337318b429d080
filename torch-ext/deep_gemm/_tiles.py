"""Strided matrices as kernels address them."""

from __future__ import annotations

import math

from ._triton import jit, tl


def layout(tensor, n_when_one_row: int) -> tuple[str, int, int, int]:
    """How a 2-D view lies in memory: `(major, unit, stride_m / unit, stride_n / unit)`.

    `major` is the dimension whose elements are next to each other, "n", "m" or "" for neither; the other stride is a
    multiple of `unit`, a power of two up to 16. Kernels take `major` and `unit` as constexprs, so that Triton knows the
    alignment without a recompilation for each stride. A matrix of one row counts as having rows of `n_when_one_row`.
    """
    (m, n), (stride_m, stride_n) = tensor.shape, tensor.stride()
    # Strides of size-1 dimensions are never used and may hold anything.
    stride_m, stride_n = (stride_m if m > 1 else n_when_one_row), (stride_n if n > 1 else 1)
    if stride_n == 1:
        unit = math.gcd(16, stride_m)
        return "n", unit, stride_m // unit, 1
    if stride_m == 1:
        unit = math.gcd(16, stride_n)
        return "m", unit, 1, stride_n // unit
    return "", 1, stride_m, stride_n


@jit
def tile_pointers(ptr, row, col, rows, cols, stride_m, stride_n, MAJOR: tl.constexpr, UNIT: tl.constexpr):
    """Pointers of a tile whose corner is (row, col), with the alignment that Triton needs for wide accesses."""
    rows = rows.to(tl.int64)[:, None]
    if MAJOR == "n":
        return ptr + (row * stride_m * UNIT + col) + (rows * stride_m * UNIT + cols[None, :])
    elif MAJOR == "m":
        return ptr + (row + col * stride_n * UNIT) + (rows + cols.to(tl.int64)[None, :] * stride_n * UNIT)
    else:
        return ptr + (row * stride_m + col * stride_n) + (rows * stride_m + cols.to(tl.int64)[None, :] * stride_n)
