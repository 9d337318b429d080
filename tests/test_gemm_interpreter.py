"""The portable GEMM kernels on CPU tensors, under Triton's interpreter: exact on exactly known operands.

Run as `TRITON_INTERPRET=1 pytest -m interpreter`. e4m3 is expanded to fp16 here, as on sm_80, unless a test says so.
"""

import os

import numpy as np
import pytest
import torch
from gemming import (
    BF16,
    FP32,
    RECIPES,
    Operand,
    addend,
    assert_product,
    bf16_operand,
    each_recipe,
    nan,
    operand,
    product,
)
from generators import deep_gemm, forget
from views import guarded, with_stride

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]
dense, portable = deep_gemm.gemm.dense, deep_gemm.gemm.portable
SHAPES = [(1, 33, 16), (65, 130, 130), (130, 257, 1), (3, 7, 288)]
each_shape = pytest.mark.parametrize("m, n, k", SHAPES)


def clear_plans():
    for planned in (*dense._FP8, *dense._BF16):
        forget(planned)


def widened(tensor):
    """bf16, which the interpreter keeps as its bits and multiplies as such, as fp32."""
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    if tensor.dtype.scalar != tl.bfloat16:
        return tensor
    return TensorHandle((tensor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@pytest.fixture(autouse=True)
def kernel_on_the_cpu(monkeypatch):
    """Send CPU tensors to the kernel, prove that they went there, and mend what the interpreter lacks."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    launches = []
    by_triton = deep_gemm._triton.Launch._launch_by_triton
    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        # As the bound of a range; NumPy converts no array to int any more.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *args: create_dot(self, widened(a), widened(b), *args),
    )
    monkeypatch.setattr(dense, "served_by_triton", lambda device: True)
    monkeypatch.setattr(
        deep_gemm._triton.Launch,
        "_launch_by_triton",
        lambda self, *args: (launches.append(self), by_triton(self, *args))[1],
    )
    clear_plans()
    yield
    clear_plans()
    assert launches


def check(a, b, recipe, d, label=""):
    """The product, then the product added to it."""
    options = {"recipe_a": recipe[0], "recipe_b": recipe[1]}
    deep_gemm.fp8_gemm_nt(a.pair, b.pair, d, **options)
    assert_product(d, product(a, b), label)
    deep_gemm.fp8_gemm_nt(a.pair, b.pair, d, d, **options)
    assert_product(d, 2 * product(a, b), f"{label} c is d")
    c = addend(*d.shape, d.dtype, device="cpu")
    deep_gemm.fp8_gemm_nt(a.pair, b.pair, d, c, **options)
    assert_product(d, c.double() + product(a, b), f"{label} c")


def pairs(m, n, k, recipe, packed=(False, False), fp4=(False, False)):
    grans = zip((m, n), recipe, (1, 2), packed, fp4)
    return [operand(mn, k, *rest, device="cpu") for mn, *rest in grans]


@each_shape
@each_recipe
def test_recipes(m, n, k, recipe):
    for packed in ((False, False), (True, False), (False, True)):
        check(*pairs(m, n, k, recipe, packed), recipe, nan(m, n, device="cpu"), f"packed {packed}")


@each_shape
def test_fp4(m, n, k):
    recipe, k = RECIPES["1x128 by 1x32"], k + k % 2
    for fp4 in ((False, True), (True, False), (True, True)):
        check(*pairs(m, n, k, recipe, (True, True), fp4), recipe, nan(m, n, device="cpu"), f"fp4 {fp4}")


def test_fp4_packed_along_rows():
    recipe, transpose = RECIPES["1x32 by 1x32"], deep_gemm.utils.transpose_packed_fp4
    for m, n, k in ((6, 130, 66), (66, 34, 258)):
        a, b = pairs(m, n, k, recipe, fp4=(True, True))
        a, b = [Operand(transpose(o.data).T, o.sf, o.values) for o in (a, b)]
        check(a, b, recipe, nan(m, n, device="cpu"))


@pytest.mark.parametrize("hardware", [False, True])
def test_every_value(hardware, monkeypatch):
    """All e4m3 bytes by all e2m1 codes, as fp16 and as e4m3."""
    monkeypatch.setattr(portable, "converts_in_hardware", lambda device: hardware)
    a = torch.zeros(256, 32, dtype=torch.uint8)
    a[:, 0] = torch.arange(256)
    b = torch.zeros(16, 16, dtype=torch.uint8)
    b[:, 0] = torch.arange(16)
    a, b, one, d = a.view(torch.float8_e4m3fn), b.view(torch.int8), torch.ones(256, 1), nan(256, 16, device="cpu")
    finite = ~a[:, 0].float().isnan() if hardware else slice(None)  # the interpreter takes an e4m3 NaN for 480
    deep_gemm.fp8_gemm_nt((a, one), (b, one[:16]), d, recipe=(1, 1, 32))
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = a.float()[:, :1] * torch.cat([magnitudes, -magnitudes])
    torch.testing.assert_close(d[finite], expected[finite], rtol=0, atol=0, equal_nan=True)


def test_strides():
    """Every memory layout of operands, scale factors and d."""
    m, n, k = 66, 34, 144
    recipe = RECIPES["1x128 by 1x128"]
    a, b = pairs(m, n, k, recipe)
    places = [((k + 3, 1), 5), ((k + 16, 1), 16), ((1, 80), 0), ((1, 81), 3)]
    outputs = list(guarded(m, n, FP32).items())
    for i, place in enumerate(places):
        first = Operand(with_stride(a.data, *place), with_stride(a.sf, ((1, 68), (7, 3))[i % 2]), a.values)
        for j, other in enumerate(places):
            second = Operand(with_stride(b.data, *other), with_stride(b.sf, ((3, 1), (1, 36))[i % 2]), b.values)
            name, d = outputs[(4 * i + j) % len(outputs)]
            check(first, second, recipe, d.view, f"{place} {other} {name}")
            d.assert_untouched(name)


@each_shape
def test_bf16(m, n, k):
    a, b = bf16_operand(m, k, 1, device="cpu"), bf16_operand(n, k, 2, device="cpu")
    for first in (a.data, a.data.T.contiguous().T):
        for second in (b.data, b.data.T.contiguous().T):
            d = nan(m, n, device="cpu")
            deep_gemm.bf16_gemm_nt(first, second, d)
            assert_product(d, product(a, b))
            deep_gemm.bf16_gemm_nt(first, second, d, d)
            assert_product(d, 2 * product(a, b))


def test_bf16_output():
    """Values that bf16 holds, for the interpreter does not round to it to nearest."""
    a, b = bf16_operand(5, 1, 1, device="cpu"), bf16_operand(33, 1, 2, device="cpu")
    d = nan(5, 33, BF16, device="cpu")
    deep_gemm.bf16_gemm_nt(a.data, b.data, d)
    assert_product(d, product(a, b))


def test_tiles_cover_the_output():
    """More rows of tiles than share a group."""
    a, b = bf16_operand(64 * 9 + 1, 8, 1, device="cpu"), bf16_operand(300, 8, 2, device="cpu")
    d = nan(577, 300, device="cpu")
    deep_gemm.bf16_gemm_nt(a.data, b.data, d)
    assert_product(d, product(a, b))
