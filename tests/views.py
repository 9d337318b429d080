"""Matrices in every memory layout: inputs with the same values, outputs with guarded surroundings."""

import torch
from generators import DEVICE

# As e4m3 and as fp32 all ones are NaN, so that what is not written shows too.
SENTINEL = -1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Guarded:
    """A strided view in a buffer of its own that is filled with sentinel bytes."""

    def __init__(self, shape, stride, dtype, offset=0, device=DEVICE):
        integer = _INTEGERS[dtype.itemsize]
        end = offset + sum((size - 1) * step for size, step in zip(shape, stride) if size > 0) + 1
        self.region = (shape, stride, offset)
        self.buffer = torch.full((end + 64,), SENTINEL, dtype=integer, device=device)
        self.view = self.buffer.view(dtype).as_strided(*self.region)

    def assert_untouched(self, label=""):
        """Raise unless every element outside the view still holds the sentinel."""
        rest = self.buffer.clone()
        rest.as_strided(*self.region).fill_(SENTINEL)
        if (rest != SENTINEL).any():
            written = (rest != SENTINEL).nonzero()
            first = written[0].item()
            raise AssertionError(
                f"{label}: wrote {len(written)} elements outside of the view (shape, stride, offset) {self.region}, "
                f"first element {first} of the buffer, now {rest[first].item():#x}"
            )

    def assert_unwritten(self, label=""):
        """Raise unless the whole buffer still holds the sentinel."""
        assert (self.buffer == SENTINEL).all(), f"{label}: wrote to the output"


def strides(m, n):
    """Name -> (stride, offset in elements) of layouts in which no two elements of [m, n] share memory."""
    aligned_m, aligned_n = -(-m // 16) * 16, -(-n // 16) * 16
    return {
        "row-major": ((n, 1), 0),
        "column slice": ((aligned_n + 32, 1), 16),
        "unaligned column slice": ((n + 3, 1), 5),
        "every other row": ((2 * n, 1), n),
        "column-major, padded to 4": ((1, -(-m // 4) * 4), 0),
        "column-major, padded to 16": ((1, aligned_m + 16), 16),
        "column-major, unaligned": ((1, m + 1), 3),
        "every other column": ((2 * n + 1, 2), 1),
        "every third row of every other column": ((3, 6 * m + 1), 2),
    }


def guarded(m, n, dtype):
    """Name -> `Guarded` of `strides`."""
    return {name: Guarded((m, n), stride, dtype, offset) for name, (stride, offset) in strides(m, n).items()}


def with_stride(x, stride, offset=0):
    """A view with x's values; what lies between them is NaN."""
    view = Guarded(x.shape, stride, x.dtype, offset, x.device).view
    view.copy_(x)
    return view


def same_values(x):
    """Name -> a view with x's values."""
    m, n = x.shape
    views = {name: with_stride(x, *place) for name, place in strides(m, n).items()}
    qkv = x.new_full((m, 3 * n), torch.nan)
    qkv[:, n : 2 * n] = x
    views["k of a fused qkv"] = qkv.split(n, dim=1)[1]
    views["transposed"] = x.t().contiguous().t()
    return views


def other_values(x):
    """Name -> a view of x with values or a shape of its own, elements shared between indices among them."""
    m, n = x.shape
    return {
        "expanded rows": x[:1].expand(m, n),
        "expanded columns": x[:, :1].expand(m, n),
        "one element": x[0, 0].expand(m, n),
        "overlapping rows": x.as_strided((m, n), (1, 1)),
        "overlapping windows": x.as_strided((m, n // 2), (n // 4 + 1, 2)),
        "one row, odd strides": x.as_strided((1, n), (3, 1)),
        "one row of a transpose": x.t().contiguous().t()[:1],
        "one column, odd strides": x.as_strided((m, 1), (n, 77)),
        "one column of a transpose": x.t().contiguous().t()[:, 1:2],
        "one element, odd strides": x.as_strided((1, 1), (5, 7), 1),
        "diagonal": x.as_strided((min(m, n), 1), (n + 1, 1)),
    }
