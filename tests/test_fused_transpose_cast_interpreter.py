"""The kernel of the casts by block and by channel in Triton's interpreter, on CPU tensors."""

import os

import pytest
import torch
from casting import distinct
from generators import deep_gemm
from tile_casting import CASTS, assert_bitwise_equal, check_grouped, flat, powers
from views import Guarded, with_stride

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]

tile_cast = deep_gemm._tile_cast
GROUPS = {
    "block": ("block", ""),
    "block, transposed": ("block", "block"),
    "channel": ("channel", ""),
    "transposed": ("", "channel"),
    "both": ("token", "channel"),
}
each_cast = pytest.mark.parametrize("name", GROUPS)
each_recipe = pytest.mark.parametrize("use_ue8m0, gran_k", [(False, 128), (True, 32)])


def launch(name, x, use_ue8m0, gran_k, ks=None, alignment=1, places=None):
    rows, columns = GROUPS[name]
    specs = tile_cast._CASTS[rows, columns]._check(x, ks, (None,) * 4, use_ue8m0, gran_k, True, alignment)
    guards = []
    for spec in specs:
        stride = spec.stride or torch.empty(spec.shape, device="meta").stride()
        stride, offset = places(tuple(spec.shape)) if places else (stride, 0)
        guards.append(Guarded(spec.shape, stride, spec.dtype, offset, "cpu"))
    outputs = [guard.view for guard in guards]
    tensors = (x, *(() if ks is None else (ks,)), *outputs)
    bound = tile_cast.bind_tile_cast(x, ks, rows, columns, outputs, use_ue8m0, gran_k, alignment)
    bound(tensors, tuple(tensor.data_ptr() for tensor in tensors))
    for guard in guards:
        guard.assert_untouched(name)
    return outputs


def check(name, x, use_ue8m0, gran_k, label="", **options):
    for got, want in zip(launch(name, x, use_ue8m0, gran_k, **options), flat(CASTS[name][1](x, use_ue8m0, gran_k))):
        assert_bitwise_equal(got, want, f"{name} {label}")


@each_cast
@each_recipe
@pytest.mark.parametrize("make", [distinct, powers])
def test_shapes(name, use_ue8m0, gran_k, make):
    for m, n in ((1, 5), (128, 160), (131, 129)):
        m = -(-m // gran_k) * gran_k if name == "channel" else m
        check(name, make(m, n, device="cpu"), use_ue8m0, gran_k, f"{m}x{n}")


@each_cast
def test_dtypes_and_strides(name):
    for dtype in (torch.float16, torch.float32):
        x = distinct(128, 40, dtype, device="cpu")
        # The last two: pairs of columns that start where an int32 may, and where it may not.
        for stride, offset in (((67, 1), 3), ((1, 144), 16), ((100, 2), 0), ((48, 1), 2), ((48, 1), 1)):
            check(name, with_stride(x, stride, offset), True, 128, f"{dtype} {stride}")


@each_cast
def test_infinity(name):
    x = distinct(128, 40, device="cpu")
    x[3, 5], x[70, 30] = torch.inf, -torch.inf
    check(name, x, True, 128)


@each_cast
@pytest.mark.parametrize("place", [
    lambda shape: ((-(-shape[1] // 16) * 16 + 16, 1), 16),
    lambda shape: ((-(-shape[1] // 16) * 16 + 16, 1), 1),
    lambda shape: ((shape[1] + 3, 1), 2),
    lambda shape: ((1, shape[0] + 5), 0),
    lambda shape: ((2 * shape[1] + 1, 2), 0),
])  # fmt: skip
def test_output_views(name, place):
    check(name, distinct(128 if name == "channel" else 134, 40, device="cpu"), False, 128, places=place)


@pytest.mark.parametrize("name", ["transposed", "both"])
@pytest.mark.parametrize("alignment", [1, 64])
@pytest.mark.parametrize("ks", [[100, 28, 130, 126], [0, 128, 0, 1], [5] * 17], ids=str)
def test_groups(name, ks, alignment):
    x = distinct(sum(-(-k // alignment) * alignment for k in ks) + 2, 40, device="cpu")
    *rows, out, sf = launch(name, x, True, 128, torch.tensor(ks, dtype=torch.int32), alignment)
    check_grouped(x, ks, True, 128, alignment, (out, sf), rows or None)
