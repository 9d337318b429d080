"""SwiGLU with the cast: the references against NumPy, the kernels byte for byte against the references."""

import math

import numpy as np
import pytest
import torch
from casting import bf16_patterns, each_dtype, gpu
from generators import DEVICE, deep_gemm
from swiglu import OPTIONS, RECIPES, SHAPES, activation, assert_close_dweight, assert_same, flat, inputs, oracle, packs
from views import Guarded, same_values, with_stride

forward = deep_gemm.fused_swiglu_cast_to_fp8
masked = deep_gemm.fused_swiglu_cast_to_fp8_masked
with_transpose = deep_gemm.fused_swiglu_cast_to_fp8_with_transpose
backward = deep_gemm.fused_swiglu_backward_cast_to_fp8
cast_back = deep_gemm.utils.cast_back_from_fp8
assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal
E4M3 = torch.float8_e4m3fn
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)
each_option = pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)


def check(x, recipe, limit=None, weight=None, rows=None, dy=None, label=""):
    """All three functions on the same input, byte for byte; what the backward returns."""
    args = (*recipe, limit, weight, rows)
    assert_same(forward(x, *args), activation.swiglu_cast_to_fp8(x, *args), f"{label} forward")
    if not packs(*x.shape, recipe):
        return None
    expected = activation.swiglu_cast_to_fp8_with_transpose(x, *args)
    assert_same(with_transpose(x, *args), expected, f"{label} with transpose")
    if dy is None:
        return None
    result = backward(dy, x, *args)
    assert_same(result[:2], activation.swiglu_backward_cast_to_fp8(dy, x, *args)[:2], f"{label} backward")
    return result


@each_recipe
@each_dtype
def test_shapes(recipe, dtype):
    for m, h in (*SHAPES, (512, 512)):
        if recipe[2] and h // recipe[1] % 4:
            continue
        dy, x, *_ = inputs(m, h, dtype)
        check(x, recipe, dy=dy, label=f"{m}x{h}")


@each_option
@each_dtype
def test_options(option, dtype):
    limit, with_weight, skipped = option
    for m, h in ((5, 256), (130, 384), (512, 512)):
        dy, x, weight, rows = inputs(m, h, dtype, with_weight, skipped)
        for recipe in RECIPES[:1] + RECIPES[3:]:
            if recipe[2] and h // recipe[1] % 4:
                continue
            result = check(x, recipe, limit, weight, rows, dy, f"{m}x{h} {recipe}")
            if result is not None:
                assert (result[2] is None) == (weight is None)
                if weight is not None:
                    assert_close_dweight(result[2], dy, x, limit, rows)


@pytest.mark.parametrize("h", [1, 31, 127, 129, 1000])
def test_partial_groups(h):
    _, x, *_ = inputs(70, h)
    for recipe in RECIPES[:4]:
        check(x, recipe, label=str(recipe))


@each_option
def test_against_numpy(option):
    limit, with_weight, skipped = option
    dy, x, weight, rows = inputs(65, 256, torch.float32, with_weight, skipped)
    for ue8m0 in (False, True):
        want = oracle(x, limit, weight, rows)
        (payload, sf), (payload_t, sf_t) = with_transpose(x, ue8m0, limit=limit, weight=weight, grouped_layout=rows)
        for y, scale, truth in ((payload, sf, want), (payload_t, sf_t, want.T)):
            error = (cast_back(y, scale).double().cpu() - truth).abs()
            # Half of e4m3's last place, relative or of the smallest step.
            step = scale.double().cpu().repeat_interleave(128, 1)[:, : truth.shape[1]]
            assert (error <= truth.abs() * 2**-4 * 1.001 + step * 2**-10).all()


@each_option
def test_gradient_against_autograd(option):
    limit, with_weight, skipped = option
    dy, x, weight, rows = inputs(66, 128, torch.float32, with_weight, skipped)
    keep = torch.ones(66, dtype=torch.bool, device=DEVICE) if rows is None else rows >= 0
    leaf = torch.where(keep[:, None], x, 0).double().requires_grad_()
    w = None if weight is None else torch.where(keep, weight, 0).double().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    y = torch.nn.functional.silu(gate) * up
    y = y if w is None else y * w[:, None]
    y.backward(torch.where(keep[:, None], dy, 0).double())
    (payload, sf), _, dweight = backward(dy, x, False, limit=limit, weight=weight, grouped_layout=rows)
    error = (cast_back(payload, sf).double() - leaf.grad).abs()
    assert (error <= leaf.grad.abs() * 2**-4 * 1.001 + sf.double().repeat_interleave(128, 1) * 2**-10).all()
    if w is not None:
        torch.testing.assert_close(dweight.double(), torch.where(keep, w.grad, 0), rtol=1e-4, atol=1e-4)


def test_limit():
    """gate has no lower clamp; up has both."""
    for gate, up, want in ((20.0, -20.0, 10 / (1 + math.exp(-10)) * -10), (-20.0, 20.0, -20 / (1 + math.exp(20)) * 10)):
        x = torch.tensor([gate] * 128 + [up] * 128, device=DEVICE)[None]
        payload, sf = forward(x, False, limit=10.0)
        assert cast_back(payload, sf)[0, 0].item() == pytest.approx(want, rel=1e-3, abs=1e-6)
    dx = cast_back(*backward(torch.ones_like(x[:, :128]), x, False, limit=10.0)[0])
    assert dx[0, 0] != 0 and dx[0, 128] == 0


@each_dtype
def test_special_values(dtype):
    info = torch.finfo(dtype)
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, info.max, -info.max, info.tiny, -info.tiny, 87.0, -87.5, -89.0, -104.0]
    gate = torch.tensor(values, device=DEVICE).repeat_interleave(len(values))
    up = torch.tensor(values, device=DEVICE).repeat(len(values))
    # A pair in a group of its own, so that one NaN does not hide the others.
    x = torch.zeros(len(gate), 2, 128, device=DEVICE)
    x[:, 0, 3], x[:, 1, 3] = gate, up
    x = x.flatten(1).to(dtype)
    for recipe in RECIPES[:4]:
        check(x, recipe, dy=torch.ones_like(x[:, :128]), label=str(recipe))
        check(x, recipe, limit=50.0, dy=torch.ones_like(x[:, :128]), label=f"{recipe} limit")


@each_dtype
def test_skipped_rows_are_zero(dtype):
    _, x, weight, rows = inputs(130, 256, dtype, True, True)
    (payload, sf), (payload_t, _) = with_transpose(x, False, weight=weight, grouped_layout=rows)
    assert (payload.view(torch.uint8)[rows < 0] == 0).all() and (payload_t.view(torch.uint8)[:, rows < 0] == 0).all()
    assert not sf.isnan().any()
    rows.fill_(-1)
    payload, sf = forward(x, False, weight=weight, grouped_layout=rows)
    assert (payload.view(torch.uint8) == 0).all() and not sf.isnan().any()


@each_recipe
@pytest.mark.parametrize("h", [256, 512, 1152])
def test_masked(recipe, h):
    if recipe[2] and h // recipe[1] % 4:
        pytest.skip("groups do not pack")
    e, t = 7, 50
    _, x, weight, _ = inputs(e * t, h, weight=True)
    x, weight = x.view(e, t, 2 * h), weight.view(e, t)
    masked_m = torch.tensor([0, 1, 3, t, t - 1, 17, t + 9], dtype=torch.int32, device=DEVICE)
    valid = torch.arange(t, device=DEVICE) < masked_m[:, None]
    x[~valid], weight[~valid] = torch.nan, torch.nan
    for limit, w in ((None, None), (2.0, weight)):
        expected = activation.swiglu_cast_to_fp8_masked(x, masked_m, *recipe, limit, w)
        guards = [Guarded(want.shape, want.stride(), want.dtype) for want in expected]
        outputs = [guard.view for guard in guards]
        assert all(a is b for a, b in zip(masked(x, masked_m, *recipe, limit, w, *outputs), outputs))
        for got, want, guard in zip(outputs, expected, guards):
            assert_bitwise_equal(got[valid].contiguous(), want[valid].contiguous(), f"{recipe} {limit}")
            if DEVICE == "cuda":
                raw = got.view(torch.uint8) if got.dtype == E4M3 else got.view(torch.int32)
                assert (raw[~valid] == (255 if got.dtype == E4M3 else -1)).all(), "wrote a row past masked_m"
            guard.assert_untouched()


def test_masked_strides():
    e, t, h = 3, 20, 256
    _, x, *_ = inputs(e * t, h)
    masked_m = torch.tensor([20, 5, 11], dtype=torch.int32, device=DEVICE)
    x = x.view(e, t, 2 * h)
    valid = torch.arange(t, device=DEVICE) < masked_m[:, None]
    want = masked(x.contiguous(), masked_m, False)
    views = {
        "experts inside rows": x.transpose(0, 1).contiguous().transpose(0, 1),
        "column-major": x.transpose(1, 2).contiguous().transpose(1, 2),
        "padded": torch.nn.functional.pad(x, (5, 6, 1, 2))[:, 1 : 1 + t, 5 : 5 + 2 * h],
    }
    for label, view in views.items():
        out = torch.empty(t, e, h, dtype=E4M3, device=DEVICE).transpose(0, 1)
        sf = torch.empty(e, h // 128, t, device=DEVICE).transpose(1, 2)
        for got, expected in zip(masked(view, masked_m, False, out=out, out_sf=sf), want):
            assert_bitwise_equal(got[valid].contiguous(), expected[valid].contiguous(), label)


def test_strided_inputs():
    dy, x, weight, rows = inputs(130, 128, weight=True, skipped=True)
    weight, rows = weight.repeat_interleave(2)[::2], rows.repeat_interleave(3)[::3]
    for label, view in same_values(x).items():
        check(view, RECIPES[0], None, weight, rows, dy, label)
    for label, view in same_values(dy).items():
        check(x, RECIPES[0], None, weight, rows, view, label)
    for offset in range(9):
        check(with_stride(x, (x.shape[1] + 32, 1), offset), RECIPES[0], dy=dy, label=f"offset {offset}")


@pytest.mark.parametrize("m", [1, 127, 128, 130, 256])
@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[3]], ids=str)
def test_output_views(m, recipe):
    h, gran_k = 256, recipe[1]
    dy, x, weight, rows = inputs(m, h, weight=True, skipped=True)
    places = {
        "unaligned": lambda a, b: ((b + 3, 1), 5),
        "padded": lambda a, b: ((b + (-b) % 16 + 32, 1), 16),
        "MN-major": lambda a, b: ((1, a + (-a) % 4), 0),
        "every other": lambda a, b: ((2 * b + 1, 2), 1),
    }
    for label, place in places.items():
        for function, n, args in ((with_transpose, h, (x,)), (backward, 2 * h, (dy, x))):
            shapes = ((m, n), (m, -(-n // gran_k)), (n, m), (n, -(-m // gran_k)))
            guards = [Guarded(s, *place(*s)[:1], t, place(*s)[1]) for s, t in zip(shapes, (E4M3, torch.float32) * 2)]
            names = ("out", "out_sf", "out_t", "out_sf_t")
            outputs = {name: guard.view for name, guard in zip(names, guards)}
            result = function(*args, *recipe, None, weight, rows, **outputs)
            assert all(a is b for a, b in zip(flat(result), outputs.values()))
            reference = getattr(activation, function.__name__.removeprefix("fused_"))
            assert_same(result[:2], reference(*args, *recipe, None, weight, rows)[:2], f"{label} {function.__name__}")
            for guard in guards:
                guard.assert_untouched(label)


def test_strides_of_what_is_allocated():
    _, x, *_ = inputs(130, 256)
    (out, sf), (out_t, sf_t) = with_transpose(x, False)
    assert (out.stride(), sf.stride(), out_t.stride(), sf_t.stride()) == ((256, 1), (2, 1), (144, 1), (2, 1))


@pytest.mark.parametrize("m, h", [(0, 0), (0, 256), (5, 0)])
def test_empty(m, h):
    dy, x, weight, rows = inputs(m, h, weight=True, skipped=True)
    for recipe in RECIPES[:4]:
        check(x, recipe, 1.0, weight, rows)
    *_, dweight = backward(dy, x, False, weight=weight)
    assert dweight.shape == (m,) and (dweight == 0).all()
    masked_m = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert masked(x.new_empty(3, m, 2 * h), masked_m, False)[0].shape == (3, m, h)
    assert masked(x.new_empty(0, m, 2 * h), masked_m[:0], False)[0].shape == (0, m, h)


ERRORS = {
    "x must be 2-D": dict(x=torch.zeros(2, 3, 256)),
    "x must be a tensor": dict(x=[1.0]),
    "x must be torch.bfloat16": dict(x=torch.zeros(2, 256, dtype=torch.float64)),
    "even number of columns": dict(x=torch.zeros(2, 255)),
    "gran_k must be": dict(gran_k=64),
    "use_packed_ue8m0 needs use_ue8m0": dict(use_packed_ue8m0=True),
    "multiple of 4 groups": dict(use_ue8m0=True, use_packed_ue8m0=True),
    "limit must be above 0": dict(limit=0.0),
    "limit must be above": dict(limit=math.nan),
    "limit must be a number": dict(limit="10"),
    "weight must be torch.float32": dict(weight=torch.zeros(2, dtype=torch.bfloat16)),
    "weight must have shape": dict(weight=torch.zeros(3)),
    "grouped_layout must be torch.int32": dict(grouped_layout=torch.zeros(2, dtype=torch.int64)),
    "grouped_layout must have shape": dict(grouped_layout=torch.zeros(1, dtype=torch.int32)),
    "out must be torch.float8_e4m3fn of shape": dict(out=torch.zeros(2, 128)),
    "out_sf must be torch.float32 of shape": dict(out_sf=torch.zeros(1, 2)),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    arguments = dict(x=torch.zeros(2, 256), use_ue8m0=False) | ERRORS[message]
    arguments = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    for function in (forward, with_transpose):
        with pytest.raises((TypeError, ValueError), match=message):
            function(**arguments)


def test_errors_of_the_others():
    x, dy = torch.zeros(2, 256, device=DEVICE), torch.zeros(2, 128, device=DEVICE)
    masked_m = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="x must be 3-D"):
        masked(x, masked_m, False)
    with pytest.raises(ValueError, match="masked_m must have shape"):
        masked(x[None].expand(2, -1, -1), masked_m, False)
    with pytest.raises(ValueError, match="weight must be 2-D"):
        masked(x[None], masked_m, False, weight=torch.zeros(2, device=DEVICE))
    with pytest.raises(ValueError, match="dy must have shape"):
        backward(x, x, False)
    with pytest.raises(ValueError, match="dy must be torch.float32"):
        backward(dy.bfloat16(), x, False)
    with pytest.raises(ValueError, match="dweight needs weight"):
        backward(dy, x, False, dweight=torch.zeros(2, device=DEVICE))
    with pytest.raises(ValueError, match="no group spans both"):
        backward(dy[:, :100], x[:, :200], False)


def test_overlap():
    x = torch.zeros(128, 512, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="overlaps"):
        forward(x, False, out=x.view(E4M3)[:, :256])
    shared = torch.empty(256, 128, dtype=E4M3, device=DEVICE)
    with pytest.raises(ValueError, match="overlaps"):
        with_transpose(x, False, out=shared.view(128, 256), out_t=shared)
    assert (x == 0).all()


@pytest.mark.parametrize("function", [forward, with_transpose, backward], ids=lambda f: f.__name__)
def test_compile(function):
    dy, x, weight, rows = inputs(130, 256, weight=True, skipped=True)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (130, 7, 64):
        args = (x[:m],) if function is not backward else (dy[:m], x[:m])
        args += (True, 32, False, 3.0, weight[:m], rows[:m])
        assert_same(compiled(*args)[:2], function(*args)[:2], function.__name__)


def test_opcheck(monkeypatch):
    allclose = torch.allclose

    def allclose_of_bytes(a, b, **options):
        """torch has none for e4m3, with which opcheck finds out what an op changes."""
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dtype is E4M3 else allclose(a, b, **options)

    monkeypatch.setattr(torch, "allclose", allclose_of_bytes)
    dy, x, weight, rows = inputs(130, 256, weight=True, skipped=True)
    dy, x, weight = torch.nan_to_num(dy), torch.nan_to_num(x), torch.nan_to_num(weight)
    ops, options = deep_gemm._ops.ops, (False, 128, False, 1.0)
    made = flat(with_transpose(x, False))
    torch.library.opcheck(ops.fused_swiglu_cast_to_fp8.default, (x, weight, rows, *options, *made[:2]))
    torch.library.opcheck(ops.fused_swiglu_cast_to_fp8_with_transpose.default, (x, None, rows, *options, *made))
    made = flat(backward(dy, x, False)[:2])
    torch.library.opcheck(ops.fused_swiglu_backward_cast_to_fp8.default, (dy, x, None, rows, *options, *made, None, None, None))


@gpu
def test_every_bf16_gate():
    """silu has the bits of torch's for all gates, with ups and weights that leave the normal range."""
    gate = bf16_patterns().flatten()
    for up in (1.0, -0.7109375, 3.0e38, 1.5e-38, 1e27, -2.0**100):
        x = torch.stack((gate, torch.full_like(gate, up)), dim=1)
        # A group for each gate.
        x = torch.nn.functional.pad(x.T[:, :, None], (0, 31)).permute(1, 0, 2).reshape(65536, 64)
        for recipe in ((False, 32, False), (True, 32, False)):
            check(x, recipe, dy=torch.ones_like(x[:, :32]), label=f"up {up}")
        for weight in (0.7, 2.0**-100, -(2.0**120)):
            weight = torch.full((65536,), weight, device="cuda")
            check(x, RECIPES[2], weight=weight, dy=torch.ones_like(x[:, :32]), label=f"up {up}, weight {weight[0]}")


@gpu
@pytest.mark.parametrize("limit", [None, 7.3])
def test_random_bf16_gates(limit):
    """Millions of products, thousands of them next to a tie, where the quick value does not do."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.rand(4096, generator=generator, device="cuda")
    for scale in (0.1, 1.0, 4.0, 20.0):
        x = (torch.randn(4096, 4096, generator=generator, device="cuda") * scale).bfloat16()
        check(x, RECIPES[2], limit, label=f"scale {scale}")
        check(x, RECIPES[2], limit, weight, label=f"scale {scale}, weighted")


@gpu
def test_random_fp32_gates():
    generator = torch.Generator("cuda").manual_seed(0)
    for scale in (1.0, 10.0, 60.0, 100.0):
        x = torch.randn(4096, 4096, generator=generator, device="cuda") * scale
        check(x, RECIPES[0], dy=torch.ones_like(x[:, :2048]), label=f"scale {scale}")


@gpu
@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[1], RECIPES[4]], ids=str)
def test_hundred_launches(recipe):
    """Both orientations of powers of two from one kernel (triton-lang/triton#11111), with NaN beside them."""
    m, h = 1024, 1024
    row, col = torch.arange(m, device="cuda")[:, None], torch.arange(2 * h, device="cuda")[None, :]
    x = torch.exp2(((row * 5 + col * 3) % 15 - 7).float()).bfloat16()
    x[5, 7], x[300, h + 700] = torch.nan, torch.inf
    dy, weight = torch.exp2((row % 3 - col[:, :h] % 4).float()).bfloat16(), torch.exp2((row[:, 0] % 5).float())
    args = (*recipe, None, weight)
    expected = activation.swiglu_cast_to_fp8_with_transpose(x, *args)
    expected_gradient = activation.swiglu_backward_cast_to_fp8(dy, x, *args)
    first = backward(dy, x, *args)[2].clone()
    for i in range(100):
        made = with_transpose(x, *args)
        gradient = backward(dy, x, *args)
        assert_same(made, expected, f"launch {i}")
        assert_same(gradient[:2], expected_gradient[:2], f"launch {i} backward")
        assert_bitwise_equal(gradient[2], first, f"launch {i} dweight")


@gpu
def test_graph():
    dy, x, weight, rows = inputs(512, 512, weight=True, skipped=True)
    masked_m = torch.tensor([3, 128, 0, 77], dtype=torch.int32, device="cuda")
    x3 = x.view(4, 128, 1024)
    calls = {
        "forward": lambda: forward(x, True, 32, True, 4.0, weight, rows),
        "with transpose": lambda: with_transpose(x, False, 128, False, None, weight, rows),
        "backward": lambda: backward(dy, x, False, 128, False, None, weight, rows),
        "masked": lambda: masked(x3, masked_m, False),
    }
    stream = torch.cuda.Stream()
    for label, call in calls.items():
        with torch.cuda.stream(stream):
            call()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                result = flat(call())
        for _ in range(3):
            for tensor in result:
                tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int32).fill_(-1 if tensor.element_size() > 1 else 255)
            graph.replay()
            torch.cuda.synchronize()
            for got, want in zip(result, flat(call())):
                if label == "masked":
                    keep = torch.arange(128, device="cuda") < masked_m[:, None]
                    got, want = got[keep].contiguous(), want[keep].contiguous()
                assert_bitwise_equal(got, want, label)


@gpu
def test_masked_reads_no_sync():
    x, masked_m = torch.randn(8, 64, 512, device="cuda", dtype=torch.bfloat16), torch.full((8,), 5, device="cuda", dtype=torch.int32)
    masked(x, masked_m, False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        masked(x, masked_m, False)
        forward(x[0], False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_offsets_past_2_31():
    m, h = 524416, 2048
    x = torch.randn(1024, 2 * h, device="cuda", dtype=torch.bfloat16).repeat(m // 1024 + 1, 1)[:m]
    last = x[-128:].clone()
    assert_same(tuple(t[-128:] for t in forward(x, False)), forward(last, False), "forward")
    (payload, sf), (payload_t, sf_t) = with_transpose(x, False)
    (want, want_sf), (want_t, want_sf_t) = with_transpose(last, False)
    ends = ((payload[-128:], sf[-128:]), (payload_t[:, -128:].contiguous(), sf_t[:, -1:].contiguous()))
    assert_same(ends, ((want, want_sf), (want_t.contiguous(), want_sf_t)), "with transpose")


def test_configs():
    for gran_k in (32, 128):
        for config in (activation.with_transpose_config(gran_k), activation.backward_config(gran_k)):
            assert config.block_m % gran_k == 0 and config.block_n % gran_k == 0 and config.block_m % 4 == 0
    config = activation.swiglu_config("n")
    for experts, t, h in ((1, 1, 128), (256, 512, 7168), (8, 8192, 4096), (70000, 4, 128)):
        programs = activation.masked_programs(experts, t, h, config)
        assert 1 <= programs <= min(65535, -(-t // config.block_m))
    assert np.log2(config.block_n) % 1 == 0
