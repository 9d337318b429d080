"""The kernels of SwiGLU with the cast in Triton's interpreter, on CPU tensors.

The interpreter's exp is NumPy's and torch's on the CPU is another, so that the references take NumPy's here; on the GPU
both are CUDA's.
"""

import os

import numpy as np
import pytest
import torch
from swiglu import activation, assert_bitwise_equal, assert_close_dweight, flat, inputs
from views import Guarded

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def numpy_exp(monkeypatch):
    def sigmoid(x):
        with np.errstate(over="ignore"):
            return 1 / (1 + torch.from_numpy(np.exp(-x.numpy())))

    def silu(x):
        with np.errstate(over="ignore"):
            return x / (1 + torch.from_numpy(np.exp(-x.numpy())))

    monkeypatch.setattr(activation.F, "silu", silu)
    monkeypatch.setattr(activation.torch, "sigmoid", sigmoid)
    monkeypatch.setattr(activation, "served_by_triton", lambda device: True)


def launch(planned, tensors, options, place=None):
    """Outputs of a kernel, each in a buffer of sentinels of its own."""
    plan = planned.make(tensors, (None,) * 7, *options)
    guards, outputs = [], []
    for spec in plan.specs:
        if isinstance(spec, activation._Zeros):
            outputs.append(spec.empty("cpu"))
            continue
        stride, offset = place(*spec.shape) if place and len(spec.shape) == 2 else (spec.empty("meta").stride(), 0)
        guards.append(Guarded(spec.shape, stride, spec.dtype, offset, "cpu"))
        outputs.append(guards[-1].view)
    plan = planned.make(tensors, tuple(outputs), *options)
    every = tensors + tuple(outputs)
    plan.launch(every, tuple(0 if tensor is None else tensor.data_ptr() for tensor in every))
    for guard in guards:
        guard.assert_untouched()
    return outputs


def check(dy, x, weight, rows, recipe, limit, label, place=None):
    options = (*recipe, limit)
    for got, want in zip(
        launch(activation._forward, (x, weight, rows), options, place),
        activation.swiglu_cast_to_fp8(x, *options, weight, rows),
    ):
        assert_bitwise_equal(got, want, f"{label} forward")
    for got, want in zip(
        launch(activation._with_transpose, (x, weight, rows), options, place),
        flat(activation.swiglu_cast_to_fp8_with_transpose(x, *options, weight, rows)),
    ):
        assert_bitwise_equal(got, want, f"{label} with transpose")
    made = launch(activation._backward, (dy, x, weight, rows), options, place)
    expected = flat(activation.swiglu_backward_cast_to_fp8(dy, x, *options, weight, rows)[:2])
    for got, want in zip(made[:4], expected):
        assert_bitwise_equal(got, want, f"{label} backward")
    if weight is not None:
        assert_close_dweight(made[4], dy, x, limit, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", [(False, 128, False), (True, 32, False)], ids=str)
def test_kernels(recipe, dtype):
    check(*inputs(5, 128, dtype, device="cpu"), recipe, None, "plain")
    check(*inputs(131, 128, dtype, True, True, "cpu"), recipe, 1.5, "all options")


def test_packed():
    check(*inputs(128, 128, weight=True, device="cpu"), (True, 32, True), None, "packed")


def test_output_views():
    for place in (lambda m, n: ((n + 3, 1), 5), lambda m, n: ((1, m + (-m) % 4), 0), lambda m, n: ((2 * n + 1, 2), 1)):
        check(*inputs(9, 128, device="cpu"), (False, 128, False), None, "views", place)


def test_inf():
    _, x, *_ = inputs(4, 128, device="cpu")
    # -Inf in gate would make a NaN, whose sign is the platform's.
    x[0, 3], x[1, 128 + 5], x[2, 128 + 9], x[3, 3] = torch.inf, -torch.inf, torch.inf, 6e4
    for limit in (None, 7.0):
        check(torch.ones_like(x[:, :128]), x, None, None, (True, 32, False), limit, f"limit {limit}")


@pytest.mark.parametrize("weighted", [False, True])
def test_masked(weighted):
    e, t, h = 4, 5, 128
    _, x, weight, _ = inputs(e * t, h, weight=weighted, device="cpu")
    x, weight = x.view(e, t, 2 * h), weight.view(e, t) if weighted else None
    masked_m = torch.tensor([0, 5, 2, 9], dtype=torch.int32)
    valid = torch.arange(t) < masked_m[:, None]
    x[~valid] = torch.nan
    options = (True, 32, True, 2.0)
    outputs = launch(activation._masked, (x, weight, masked_m), options)
    expected = activation.swiglu_cast_to_fp8_masked(x, masked_m, *options, weight)
    for got, want in zip(outputs, expected):
        assert_bitwise_equal(got[valid].contiguous(), want[valid].contiguous())
        raw = got.view(torch.uint8) if got.element_size() == 1 else got.view(torch.int32)
        assert (raw[~valid] == (255 if got.element_size() == 1 else -1)).all()
