"""The RMSNorm kernels themselves on CPU tensors, under Triton's interpreter, against their references.

Run as `TRITON_INTERPRET=1 pytest -m interpreter`. The interpreter rounds neither to e4m3 nor to bf16 to nearest even, so
the kernels round in integers here.
"""

import os
from dataclasses import replace

import pytest
import torch
from casting import distinct, each_dtype, each_recipe, sf_spec, specials
from generators import deep_gemm, forget
from norming import NOTHING, backward_inputs, check_backward, check_forward, fused_norm, weight
from views import guarded, same_values

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning"),  # NumPy, at Inf * 0
]
FLOAT, PACKED = (False, 128, False), (True, 32, True)


@pytest.fixture(autouse=True)
def kernel_on_the_cpu(monkeypatch):
    """Send CPU tensors to the kernels, and prove that they went there."""
    pytest.importorskip("triton")
    launches = []
    launch = deep_gemm._triton.Launch.__call__
    monkeypatch.setattr(fused_norm, "served_by_triton", lambda device: True)
    monkeypatch.setattr(
        deep_gemm._triton.Launch, "__call__", lambda self, *args: (launches.append(self), launch(self, *args))
    )
    fused_norm._planned_forward.cache_clear()
    forget(fused_norm._backward)
    yield launches
    fused_norm._planned_forward.cache_clear()
    forget(fused_norm._backward)
    assert launches


@each_dtype
@each_recipe
def test_forward(recipe, dtype):
    for m, n in ((5, 385), (2, 512), (1, 1025)):
        if sf_spec(m, n, recipe):
            x, residual = (distinct(m, n, dtype, seed, "cpu") for seed in (5, 6))
            check_forward(x, weight(n, dtype, "cpu"), recipe, residual, label=f"{m}x{n}")


def test_forward_shapes():
    for m, n in ((1, 1), (3, 33), (3, 129), (3, 1000), (2, 1024), (1, 2100)):
        x = distinct(m, n, torch.bfloat16, device="cpu")
        check_forward(x, weight(n, device="cpu"), FLOAT, label=f"{m}x{n}")


@pytest.mark.parametrize("recipe", [FLOAT, PACKED], ids=["fp32-128", "packed-32"])
def test_forward_without_extras(recipe):
    x = distinct(3, 1024, torch.bfloat16, device="cpu")
    check_forward(x, weight(1024, torch.float32, "cpu"), recipe, wanted=NOTHING)


def test_forward_reads_a_long_row_twice(monkeypatch):
    x, residual = (distinct(2, 2500, torch.bfloat16, seed, "cpu") for seed in (5, 6))
    config = fused_norm.norm_config
    monkeypatch.setattr(fused_norm, "norm_config", lambda *args: replace(config(*args), one_read=False))
    check_forward(x, weight(2500, torch.bfloat16, "cpu"), FLOAT, residual)


def test_forward_transposed_over_several_groups():
    x = distinct(259, 70, torch.bfloat16, device="cpu")
    check_forward(x, weight(70, torch.bfloat16, "cpu"), FLOAT, wanted=(False, False, False, True))


@each_dtype
def test_forward_special_values(dtype):
    x = specials(dtype, "cpu")
    for recipe in (FLOAT, PACKED):
        check_forward(x, weight(512, dtype, "cpu"), recipe)


def test_forward_strided():
    m, n = 3, 160
    residual, w = distinct(m, n, seed=6, device="cpu"), weight(2 * n, device="cpu")[::2]
    for name, x in same_values(distinct(m, n, device="cpu")).items():
        check_forward(x, w, FLOAT, residual, label=name)
    x = distinct(m, n, device="cpu")
    for name, out in guarded(m, n, torch.float8_e4m3fn).items():
        sf, h, norm = guarded(m, 2, torch.float32)[name], *(guarded(m, n, x.dtype)[name] for _ in range(2))
        outputs = {"out": out, "out_sf": sf, "out_residual": h, "out_norm": norm}
        check_forward(x, w, FLOAT, residual, label=name, **{key: value.view for key, value in outputs.items()})
        for key, value in outputs.items():
            value.assert_untouched(f"{name} {key}")


@each_dtype
def test_backward(dtype):
    for m, n in ((1, 1), (3, 33), (2, 1025)):
        *inputs, dresidual = backward_inputs(m, n, dtype, device="cpu")
        check_backward(*inputs, label=f"{m}x{n}")
        check_backward(*inputs, dresidual, label=f"{m}x{n} with dresidual")


def test_backward_adds_rows_of_a_partial_sum():
    *inputs, dresidual = backward_inputs(259, 40, device="cpu")
    check_backward(*inputs, dresidual)


def test_backward_strided():
    dy, h, w, rstd, dresidual = backward_inputs(3, 160, torch.bfloat16, torch.float32, "cpu")
    for name, view in same_values(dy).items():
        check_backward(view, h, w.repeat_interleave(2)[::2], rstd, same_values(dresidual)[name], label=name)
