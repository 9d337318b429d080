"""`fused_rms_norm_cast_to_fp8` and `fused_rms_norm_backward`: byte for byte their references."""

import pytest
import torch
from casting import DTYPES, E4M3, distinct, each_dtype, each_recipe, gpu, reference, sf_spec, specials
from generators import DEVICE, deep_gemm
from norming import (
    EPS,
    EVERYTHING,
    FIELDS,
    NOTHING,
    assert_same,
    backward,
    backward_inputs,
    check_backward,
    check_forward,
    expected_forward,
    forward,
    fused_norm,
    weight,
)
from views import Guarded, guarded, same_values, with_stride

assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal
FLOAT, PACKED = (False, 128, False), (True, 32, True)
# A program takes 1024 lanes of one row, or several rows that are shorter; rows beyond 16384 columns are read twice.
SHAPES = (
    (1, 1), (3, 8), (5, 127), (4, 128), (7, 129), (9, 256), (3, 385), (2, 512), (5, 513), (7, 1000), (3, 1024), (2, 1025),
    (129, 33), (127, 96), (128, 64), (2, 2880), (3, 4096), (2, 7168),
)  # fmt: skip


# The references


def oracle(x, w, eps, residual=None):
    """y, h and rstd in NumPy's fp32, added up in the documented order by indices."""
    np = pytest.importorskip("numpy")
    dtype, to_numpy = x.dtype, lambda t: t.float().cpu().numpy()
    h = to_numpy(x) if residual is None else to_numpy(torch.from_numpy(to_numpy(x) + to_numpy(residual)).to(dtype))
    m, n = h.shape
    lanes = np.zeros((m, 1024), np.float32)
    for column in range(n):
        lanes[:, column % 1024] += h[:, column] * h[:, column]
    for half in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        first = np.arange(0, 1024, 2 * half)
        lanes[:, first] += lanes[:, first + half]
    rstd = np.float32(1) / np.sqrt(lanes[:, 0] / np.float32(n) + np.float32(eps))
    y = (h * rstd[:, None]) * to_numpy(w)
    return torch.from_numpy(y).to(dtype), torch.from_numpy(h).to(dtype), torch.from_numpy(rstd)


@each_dtype
@pytest.mark.parametrize("with_residual", [False, True])
def test_reference_against_numpy(with_residual, dtype):
    for m, n in ((1, 1), (3, 100), (4, 1024), (5, 1025), (2, 3000)):
        x, residual = distinct(m, n, dtype), distinct(m, n, dtype, seed=6) if with_residual else None
        w = weight(n, dtype)
        results = fused_norm.rms_norm(x, w, EPS, residual)
        assert_same([t.cpu() for t in results], oracle(x, w, EPS, residual), ("y", "h", "rstd"), f"{m}x{n}")


@each_dtype
def test_reference_against_fp64(dtype):
    x, w = torch.randn(64, 3000, device=DEVICE).to(dtype), torch.randn(3000, device=DEVICE).to(dtype)
    y, h, rstd = fused_norm.rms_norm(x, w, EPS)
    exact = (x.double().square().mean(1) + EPS).rsqrt()
    assert h is x
    torch.testing.assert_close(rstd.double(), exact, rtol=1e-6, atol=0)
    rtol = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(y.double(), x.double() * exact[:, None] * w.double(), rtol=rtol, atol=1e-7)


@each_dtype
@pytest.mark.parametrize("with_dresidual", [False, True])
def test_backward_reference_against_autograd(with_dresidual, dtype):
    m, n = 300, 200
    h, dy, dresidual = (torch.randn(m, n, device=DEVICE).to(dtype) for _ in range(3))
    w = torch.randn(n, device=DEVICE).to(dtype)
    h64, w64 = h.double().requires_grad_(), w.double().requires_grad_()
    y = h64 * (h64.square().mean(1, keepdim=True) + EPS).rsqrt() * w64
    loss = (y * dy.double()).sum() + (h64 * dresidual.double()).sum() * with_dresidual
    loss.backward()
    rstd = fused_norm.rms_norm(h, w, EPS)[2]
    dx, dweight = fused_norm.rms_norm_backward(dy, h, w, rstd, dresidual if with_dresidual else None)
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(dx.double(), h64.grad, **tolerance)
    torch.testing.assert_close(dweight.double(), w64.grad, **tolerance)
    assert dx.dtype == dtype and dweight.dtype == dtype


# Shapes, strides and options


@each_dtype
@each_recipe
def test_forward_shapes(recipe, dtype):
    for m, n in SHAPES:
        if sf_spec(m, n, recipe):
            residual = distinct(m, n, dtype, seed=6)
            check_forward(distinct(m, n, dtype), weight(n, dtype), recipe, residual, label=f"{m}x{n}")


@each_recipe
def test_forward_options(recipe):
    """Each set of optional outputs gives the same bytes, and nothing that was not asked for."""
    x, residual, w = distinct(9, 1024), distinct(9, 1024, seed=6), weight(1024)
    for bits in range(16):
        wanted = tuple(bool(bits >> i & 1) for i in range(4))
        check_forward(x, w, recipe, residual if wanted[0] else None, wanted, label=f"{wanted}")


def test_scale_factors_are_powers_of_two_where_asked():
    for recipe in ((True, 128, False), (True, 32, False)):
        result = check_forward(distinct(32, 512), weight(512), recipe)
        for sf in (result.out_sf, result.transposed_sf):
            assert not (sf.view(torch.int32) & 0x7FFFFF).any()


@pytest.mark.parametrize("weight_dtype", DTYPES)
@each_dtype
def test_weight_dtypes(dtype, weight_dtype):
    w = weight(1000, weight_dtype)
    check_forward(distinct(5, 1000, dtype), w, FLOAT)
    check_backward(*backward_inputs(5, 1000, dtype, weight_dtype))


@pytest.mark.parametrize("eps", [0.0, 1, 1e-6, 0.5])
def test_eps(eps):
    check_forward(distinct(5, 1000), weight(1000), FLOAT, eps=eps)


@pytest.mark.parametrize("m, n", [(0, 0), (0, 512), (5, 0)])
def test_empty(m, n):
    x = torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
    w = torch.ones(n, dtype=torch.bfloat16, device=DEVICE)
    for recipe in (FLOAT, PACKED):
        for wanted in (NOTHING, EVERYTHING):
            check_forward(x, w, recipe, x if wanted[0] else None, wanted)
    dx, dweight = check_backward(x, x, w, torch.empty(m, device=DEVICE))
    assert dx.shape == (m, n) and dweight.shape == (n,) and not dweight.any()


@each_dtype
def test_strided_inputs(dtype):
    m, n = 67, 256
    x, residual = distinct(m, n, dtype), same_values(distinct(m, n, dtype, seed=6))
    w = with_stride(weight(n, dtype)[None], (7, 3))[0]
    inputs = backward_inputs(m, n, dtype)
    dy, h, dresidual = (same_values(inputs[i]) for i in (0, 1, 4))
    for name, view in same_values(x).items():
        check_forward(view, w, FLOAT, residual[name], label=name)
        check_forward(view, w, PACKED, label=name)
        rstd = inputs[3].repeat_interleave(2)[::2]
        check_backward(dy[name], h[name], w, rstd, dresidual[name], label=name)


@pytest.mark.parametrize("m", [1, 7, 130])
def test_output_views(m):
    n = 160
    x, residual, w = distinct(m, n), distinct(m, n, seed=6), weight(n)
    gradients = backward_inputs(m, n)
    for name in guarded(m, n, E4M3):
        outputs = {
            "out": guarded(m, n, E4M3)[name],
            "out_sf": guarded(m, 2, torch.float32)[name],
            "out_residual": guarded(m, n, x.dtype)[name],
            "out_norm": guarded(m, n, x.dtype)[name],
            "out_rstd": Guarded((m,), (3,), torch.float32, 2),
            "out_transposed": guarded(n, m, E4M3)[name],
            "out_transposed_sf": guarded(n, -(-m // 128), torch.float32)[name],
        }
        check_forward(x, w, FLOAT, residual, label=name, **{key: value.view for key, value in outputs.items()})
        dx, dweight = guarded(m, n, x.dtype)[name], Guarded((n,), (2,), x.dtype, 1)
        check_backward(*gradients, label=name, out=dx.view, out_dweight=dweight.view)
        for key, value in {**outputs, "dx": dx, "dweight": dweight}.items():
            value.assert_untouched(f"{name} {key}")


def test_an_output_given_asks_for_it():
    x, w = distinct(5, 512), weight(512)
    norm, transposed = torch.empty_like(x), torch.empty(512, 5, dtype=E4M3, device=DEVICE)
    result = forward(x, w, EPS, *FLOAT, out_norm=norm, out_transposed=transposed)
    assert result.norm is norm and result.transposed is transposed and result.rstd is None and result.residual is None
    assert_same(result, expected_forward((False, True, False, True), x, w, None, FLOAT), FIELDS)


def test_no_gradient():
    x, w = distinct(5, 512).requires_grad_(), torch.nn.Parameter(weight(512))
    for result in (forward(x, w, EPS, *FLOAT, with_norm=True), backward(*backward_inputs(5, 512))):
        assert not any(t.requires_grad for t in result if t is not None)


# Values


@each_dtype
@each_recipe
def test_special_values(recipe, dtype):
    x = specials(dtype)
    check_forward(x, weight(512, dtype), recipe)
    check_forward(x, weight(512, dtype), recipe, x.flip(0).contiguous())
    w = weight(512, dtype)
    w[3], w[40], w[300], w[200:210] = torch.inf, torch.nan, -torch.inf, torch.finfo(dtype).max
    check_forward(x, w, recipe, label="special weight")


@each_dtype
def test_backward_special_values(dtype):
    h, w = specials(dtype), weight(512, dtype)
    rstd = fused_norm.rms_norm(h, w, EPS)[2]
    check_backward(specials(dtype).flip(1).contiguous(), h, w, rstd)


def test_scale_factors_belong_to_their_groups():
    """Each row has one magnitude, so that its norm is the weight, and each group of the weight is a power of two."""
    m, groups = 37, 32
    exponent = torch.arange(groups) * 5 % 23 - 8
    x = torch.exp2((torch.arange(m) % 11 - 5).float())[:, None].expand(m, 32 * groups).contiguous().to(DEVICE)
    w = torch.exp2(exponent.float()).repeat_interleave(32).to(DEVICE)
    result = forward(x, w, 0.0, True, 32, True, with_norm=True)
    assert (result.norm == w).all() and (result.out.float() == 256).all()
    # 2^e / 448 lies between 2^(e - 9) and 2^(e - 8).
    expected = (exponent - 8 + 127).int().expand(m, groups)
    assert torch.equal(result.out_sf.cpu().view(torch.uint8).int(), expected)


@pytest.mark.parametrize("m", [1, 255, 256, 257, 700])
def test_dweight_partition(m):
    check_backward(*backward_inputs(m, 200), label=f"{m} rows")


# What is refused


def _refused(error, match, call, *outputs):
    with pytest.raises(error, match=match):
        call()
    for out in outputs:
        out.assert_unwritten()


def test_forward_arguments_are_refused():
    x, w = distinct(8, 512), weight(512)
    out = Guarded((8, 512), (512, 1), E4M3)
    for error, match, arguments in (
        (TypeError, "x must be a tensor", (None, w, EPS, False)),
        (ValueError, "x must be 2-D", (x[0], w, EPS, False)),
        (ValueError, "x must be torch.bfloat16", (x.double(), w, EPS, False)),
        (TypeError, "weight must be a tensor", (x, None, EPS, False)),
        (ValueError, "weight must be", (x, w[:511], EPS, False)),
        (ValueError, "weight must be", (x, w[None], EPS, False)),
        (ValueError, "weight must be", (x, w.double(), EPS, False)),
        (TypeError, "eps must be a number", (x, w, "1e-6", False)),
        (ValueError, "gran_k must be 32 or 128", (x, w, EPS, False, 64)),
        (ValueError, "needs use_ue8m0=True", (x, w, EPS, False, 128, True)),
        (ValueError, "multiple of 4 groups", (x[:, :384], w[:384], EPS, True, 128, True)),
        (TypeError, "residual must be a tensor", (x, w, EPS, False, 128, False, 1.0)),
        (ValueError, "residual must be", (x, w, EPS, False, 128, False, x.float())),
        (ValueError, "residual must be", (x, w, EPS, False, 128, False, x[:7])),
    ):
        _refused(error, match, lambda: forward(*arguments, out=out.view), out)
    _refused(ValueError, "out_residual needs residual", lambda: forward(x, w, EPS, False, out_residual=x))


def test_forward_outputs_are_refused():
    x, w = distinct(8, 512), weight(512)
    arguments = (x, w, EPS, False, 128, False, x.clone())
    for name, bad in (
        ("out", torch.empty(8, 511, device=DEVICE, dtype=E4M3)),
        ("out_sf", torch.empty(8, 3, device=DEVICE)),
        ("out_residual", torch.empty(8, 512, device=DEVICE)),
        ("out_norm", torch.empty(8, 512, device=DEVICE)),
        ("out_rstd", torch.empty(8, 1, device=DEVICE)),
        ("out_transposed", torch.empty(8, 512, device=DEVICE, dtype=E4M3)),
        ("out_transposed_sf", torch.empty(512, 8, device=DEVICE)),
        ("out_norm", x[:1].clone().expand(8, 512)),
    ):
        _refused(ValueError, f"{name} must", lambda: forward(*arguments, **{name: bad}))
        _refused(TypeError, f"{name} must", lambda: forward(*arguments, **{name: 1}))
    _refused(ValueError, "out_residual overlaps residual", lambda: forward(*arguments, out_residual=arguments[-1]))
    _refused(ValueError, "out_norm overlaps x", lambda: forward(*arguments, out_norm=x))
    norm = torch.empty_like(x)
    both = {"out_residual": norm, "out_norm": norm}
    _refused(ValueError, "out_norm overlaps out_residual", lambda: forward(*arguments, **both))


def test_backward_arguments_are_refused():
    dy, h, w, rstd, dresidual = backward_inputs(8, 512)
    for match, arguments in (
        ("dy must be", (dy.double(), h, w, rstd)),
        ("h must be", (dy, h.float(), w, rstd)),
        ("h must be", (dy, h[:7], w, rstd)),
        ("weight must be", (dy, h, w[:5], rstd)),
        ("rstd must be", (dy, h, w, rstd.bfloat16())),
        ("rstd must be", (dy, h, w, rstd[:, None])),
        ("dresidual must be", (dy, h, w, rstd, dresidual.float())),
        ("out must be", (dy, h, w, rstd, None, dy.float())),
        ("out_dweight must be", (dy, h, w, rstd, None, None, w.float())),
        ("out overlaps h", (dy, h, w, rstd, None, h)),
        ("out_dweight overlaps weight", (dy, h, w, rstd, None, None, w)),
    ):
        _refused(ValueError, match, lambda: backward(*arguments))


# Configurations


def test_configurations_cover_every_row():
    for n in (1, 127, 128, 129, 1000, 1024, 1025, 4096, 7168, 8192, 16384, 16385, 10**6):
        for itemsize in (1, 2, 4):
            config = fused_norm.norm_config(n, itemsize)
            assert config.block_n == 1024 or n <= config.block_n
            assert config.block_m * config.block_n == 1024 and config.block_n % 128 == 0
            assert config.one_read == (n <= 16384)


# Tracing


def test_opcheck():
    # Schema checks compare e4m3 tensors by allclose, which PyTorch lacks: those of the backward stand for both.
    x, w = distinct(5, 512), weight(512)
    outs = [torch.empty_like(t) for t in expected_forward(EVERYTHING, x, w, x, FLOAT)]
    op = fused_norm.ops.fused_rms_norm_cast_to_fp8
    for arguments in ((x.clone(), EPS, *FLOAT, *outs), (None, EPS, *FLOAT, *outs[:2], *[None] * 5)):
        torch.library.opcheck(op, (x, w, *arguments), test_utils="test_faketensor")
    outs = [torch.empty_like(x), torch.empty_like(w)]
    op, tests = fused_norm.ops.fused_rms_norm_backward, ("test_schema", "test_faketensor")
    torch.library.opcheck(op, (*backward_inputs(5, 512), *outs), test_utils=tests)


@pytest.mark.slow
def test_compiled():
    """One graph for every number of rows, with the bytes of the eager call."""
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def block(x, w, residual):
        result = forward(x, w, EPS, *FLOAT, residual, with_rstd=True, with_transposed=True)
        return tuple(result), backward(x, result.residual, w, result.rstd)

    w = weight(512)
    for m in (5, 130, 300):
        x, residual = distinct(m, 512), distinct(m, 512, seed=6)
        result, gradients = block(x, w, residual)
        expected = expected_forward((True, False, True, True), x, w, residual, FLOAT)
        assert_same(result, expected, FIELDS)
        assert_same(
            gradients, fused_norm.rms_norm_backward(x, expected.residual, w, expected.rstd), ("dx", "dweight")
        )


# On the GPU


@gpu
@each_dtype
@each_recipe
def test_model_shapes(recipe, dtype):
    for m, n in ((1000, 2048), (129, 2880), (513, 4096), (64, 5120), (257, 7168), (33, 8192), (20, 16384), (9, 17408)):
        if sf_spec(m, n, recipe):
            residual = distinct(m, n, dtype, seed=6)
            check_forward(distinct(m, n, dtype), weight(n, dtype), recipe, residual, label=f"{m}x{n}")
            check_forward(distinct(m, n, dtype), weight(n, dtype), recipe, wanted=NOTHING, label=f"{m}x{n} alone")


@gpu
@each_dtype
def test_backward_model_shapes(dtype):
    for m, n in ((1000, 2048), (129, 2880), (513, 4096), (64, 5120), (600, 7168), (33, 8192), (300, 16384), (9, 17408)):
        *inputs, dresidual = backward_inputs(m, n, dtype)
        check_backward(*inputs, dresidual, label=f"{m}x{n}")
        check_backward(*inputs, label=f"{m}x{n} without dresidual")


@gpu
def test_stable_over_launches():
    """Every configuration that ships: transposed FP8 stores have come out corrupted on Hopper in some of them."""
    for dtype in (torch.bfloat16, torch.float32):
        for n in (128, 512, 4096, 7168, 16384):
            for recipe in (FLOAT, (True, 128, False), PACKED):
                m = 260
                x, residual = (torch.exp2(torch.randint(-8, 8, (m, n), device=DEVICE)).to(dtype) for _ in range(2))
                x[7, n // 3] = torch.nan
                w = weight(n, dtype)
                for wanted in (NOTHING, EVERYTHING):
                    r = residual if wanted[0] else None
                    expected = expected_forward(wanted, x, w, r, recipe)
                    extras = dict(zip(("with_norm", "with_rstd", "with_transposed"), wanted[1:]))
                    for launch in range(100):
                        assert_same(forward(x, w, EPS, *recipe, r, **extras), expected, FIELDS, f"launch {launch}, {n}")


@gpu
def test_backward_is_deterministic():
    inputs = backward_inputs(1000, 7168)
    first = backward(*inputs)
    for launch in range(100):
        assert_same(backward(*inputs), first, ("dx", "dweight"), f"launch {launch}")


@gpu
def test_graph():
    x, residual, w = distinct(300, 4096), distinct(300, 4096, seed=6), weight(4096)

    def step():
        result = forward(x, w, EPS, *PACKED, residual, with_rstd=True, with_transposed=True)
        return result, backward(x, result.residual, w, result.rstd)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, gradients = step()
    x.copy_(distinct(300, 4096, seed=9))
    graph.replay()
    expected = expected_forward((True, False, True, True), x, w, residual, PACKED)
    assert_same(result, expected, FIELDS)
    assert_same(gradients, fused_norm.rms_norm_backward(x, expected.residual, w, expected.rstd), ("dx", "dweight"))


@gpu
@pytest.mark.slow
@pytest.mark.parametrize("m, n", [(2**23 + 16, 256), (175000, 12288)])
def test_more_than_2_31_elements(m, n):
    x = torch.zeros(m, n, dtype=torch.bfloat16, device=DEVICE)
    x[-3:] = distinct(3, n)
    w = weight(n)
    result = forward(x, w, EPS, *FLOAT, with_rstd=True)
    cast = reference(fused_norm.rms_norm(x[-3:], w, EPS)[0], *FLOAT)
    assert_bitwise_equal(result.out[-3:], cast[0])
    assert_bitwise_equal(result.out_sf[-3:], cast[1])
    dx, _ = backward(x, x, w, result.rstd)
    assert_bitwise_equal(dx[-3:], fused_norm.rms_norm_backward(x[-3:], x[-3:], w, result.rstd[-3:])[0])
