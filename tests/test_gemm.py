"""Dense GEMMs against an fp64 product of exactly known operands; the same on CPU and GPU, unless marked."""

import pytest
import torch
from casting import gpu
from gemming import (
    BF16,
    E4M3,
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
from generators import DEVICE, deep_gemm, forget
from views import guarded, with_stride

dense = deep_gemm.gemm.dense
reference = deep_gemm.gemm.reference
ops = deep_gemm.gemm.dense.ops
fp8_nt, bf16_nt = deep_gemm.fp8_gemm_nt, deep_gemm.bf16_gemm_nt
assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal

FORWARD, WGRAD = RECIPES["1x128 by 128x128"], RECIPES["1x128 by 1x128"]
SHAPES = [(1, 33, 16), (7, 129, 1), (65, 130, 127), (130, 64, 129), (3, 300, 576), (257, 128, 256)]
LARGE = [(1, 576, 7168), (129, 2112, 576), (4096, 33, 512), (64, 4096, 2048), (130, 7168, 576), (1000, 1000, 1000)]
each_shape = pytest.mark.parametrize("m, n, k", SHAPES)
each_large_shape = pytest.mark.parametrize("m, n, k", LARGE)
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"


def pairs(m, n, k, recipe=FORWARD, packed=(False, False), fp4=(False, False)):
    grans = recipe
    return tuple(operand(mn, k, *rest) for mn, *rest in zip((m, n), grans, (1, 2), packed, fp4))


def run(a: Operand, b: Operand, recipe, d, c=None):
    fp8_nt(a.pair, b.pair, d, c, recipe_a=recipe[0], recipe_b=recipe[1])
    return d


def check(m, n, k, recipe=FORWARD, packed=(False, False), fp4=(False, False), label=""):
    """Both output dtypes, alone, accumulated into d, and added to another tensor."""
    a, b = pairs(m, n, k, recipe, packed, fp4)
    expected = product(a, b)
    for dtype in (FP32, BF16):
        assert_product(run(a, b, recipe, nan(m, n, dtype)), expected, label)
        c = addend(m, n, dtype)
        total = c.double().cpu() + expected
        assert_product(run(a, b, recipe, nan(m, n, dtype), c), total, f"{label} c")
        assert torch.equal(c, addend(m, n, dtype)), "wrote to c"
        assert_product(run(a, b, recipe, c, c), total, f"{label} c is d")
        c = addend(m, n, dtype)
        assert_product(run(a, b, recipe, c, c.view(m, n)), total, f"{label} c is a view of d")


@each_shape
@each_recipe
def test_recipes(m, n, k, recipe):
    for packed in ((False, False), (True, True), (True, False), (False, True)):
        check(m, n, k, recipe, packed, label=f"packed {packed}")


@each_shape
@pytest.mark.parametrize("recipe", [RECIPES["1x128 by 1x32"], RECIPES["1x32 by 1x32"], FORWARD])
def test_fp4(m, n, k, recipe):
    k += k % 2
    for fp4 in ((False, True), (True, False), (True, True)):
        check(m, n, k, recipe, (True, True), fp4, f"fp4 {fp4}")


@gpu
@each_large_shape
@each_recipe
def test_recipes_at_large_shapes(m, n, k, recipe):
    check(m, n, k, recipe)
    check(m, n, k, recipe, (True, True), (False, True), label="FP4 weights")


def every_e2m1_by_e4m3():
    """All 16 codes in b, all finite e4m3 values in a, one of each in a row."""
    codes = torch.arange(16, dtype=torch.uint8, device=DEVICE)
    b = (codes[:, None] * torch.tensor([1, 0], dtype=torch.uint8, device=DEVICE)).repeat_interleave(8, 1)
    a = torch.zeros(256, 32, dtype=torch.uint8, device=DEVICE)
    a[:, 0] = torch.arange(256)
    return a.view(E4M3), b.view(torch.int8)


def test_every_value():
    """Every e4m3 byte by every e2m1 code, NaN, subnormals and minus zero among them."""
    a, b = every_e2m1_by_e4m3()
    assert b.shape == (16, 16)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([magnitudes, -magnitudes])
    d, one = nan(256, 16), torch.ones(256, 1, device=DEVICE)
    fp8_nt((a, one), (b, one[:16]), d, recipe=(1, 1, 32))
    expected = a.float()[:, :1].cpu() * values
    torch.testing.assert_close(d.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("m, n, k", [(6, 130, 258), (64, 48, 576)])
def test_layouts_of_operands(m, n, k):
    a, b = pairs(m, n, k)
    expected = product(a, b)
    stored = {"n": a, "t": Operand(a.data.T.contiguous().T, a.sf.T.contiguous().T, a.values)}
    functions = {"nt": fp8_nt, "nn": deep_gemm.fp8_gemm_nn, "tn": deep_gemm.fp8_gemm_tn, "tt": deep_gemm.fp8_gemm_tt}
    for (of_a, of_b), function in functions.items():
        for name, first in stored.items():
            d = nan(m, n)
            function(first.pair if of_a == "n" else first.transposed, b.pair if of_b == "t" else b.transposed, d)
            assert_product(d, expected, f"{of_a}{of_b} of {name}")


@pytest.mark.parametrize("m, n, k", [(6, 130, 258), (64, 48, 576)])
def test_fp4_packed_along_rows(m, n, k):
    recipe = RECIPES["1x32 by 1x32"]
    a, b = pairs(m, n, k, recipe, (True, True), (True, True))
    transpose = deep_gemm.utils.transpose_packed_fp4
    d = nan(m, n)
    deep_gemm.fp8_fp4_gemm_tn((transpose(a.data), a.sf.T), (transpose(b.data), b.sf.T), d, recipe=(1, 1, 32))
    assert_product(d, product(a, b))


def operand_views(data):
    """Views of an operand: rows far apart, unaligned, slices of columns, columns next to each other."""
    m, n = data.shape
    places = ((n + 3, 1), 5), ((2 * n + 64, 1), 16), ((1, m + 16 - m % 16), 0), ((1, m + 1), 3)
    return [with_stride(data, *place) for place in places]


def test_strided_operands_and_scale_factors():
    m, n, k = 66, 130, 272
    a, b = pairs(m, n, k, WGRAD)
    expected = product(a, b)
    for data in operand_views(a.data):
        for other in operand_views(b.data):
            got = run(Operand(data, a.sf, None), Operand(other, b.sf, None), WGRAD, nan(m, n))
            assert_product(got, expected, f"strides {data.stride()} and {other.stride()}")
    for packed in (False, True):
        a, b = pairs(m, n, k, WGRAD, (packed, packed))
        for stride in ((1, m), (1, m + 2), (7, 1), (8, 2), (11, 3)):
            sfa = with_stride(a.sf, stride)
            sfb = with_stride(b.sf, (1, n + 2))
            got = run(Operand(a.data, sfa, None), Operand(b.data, sfb, None), WGRAD, nan(m, n))
            assert_product(got, expected, f"sf strides {stride}")


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("m, n, k", [(5, 130, 144), (130, 33, 128)])
def test_strided_outputs(m, n, k, dtype):
    """Every layout of d, in a buffer whose other bytes stay as they are."""
    a, b = pairs(m, n, k)
    first, second = bf16_operand(m, k, 1), bf16_operand(n, k, 2)
    for name, d in guarded(m, n, dtype).items():
        assert_product(run(a, b, FORWARD, d.view), product(a, b), name)
        assert_product(run(a, b, FORWARD, d.view, d.view), 2 * product(a, b), name)
        d.assert_untouched(name)
        bf16_nt(first.data, second.data, d.view)
        assert_product(d.view, product(first, second), f"bf16 {name}")
        d.assert_untouched(f"bf16 {name}")


def test_nothing_beyond_the_operands_counts():
    """NaN in the rows and columns, and scale factors, next to those of the operands."""
    m, n, k = 65, 70, 200
    a, b = pairs(m, n, k, WGRAD)

    def amid_nan(x):
        byte = x.dtype == E4M3
        whole = x.new_full((x.shape[0] + 66, x.shape[1] + 70), torch.nan, dtype=FP32 if byte else x.dtype).to(x.dtype)
        inner = whole[1:-65, 3:-67]
        inner.copy_(x)
        return inner

    a, b = [Operand(amid_nan(o.data), amid_nan(o.sf), o.values) for o in (a, b)]
    assert_product(run(a, b, WGRAD, nan(m, n)), product(a, b))
    first, second = bf16_operand(m, k, 1), bf16_operand(n, k, 2)
    d = nan(m, n)
    bf16_nt(amid_nan(first.data), amid_nan(second.data), d)
    assert_product(d, product(first, second))


def test_default_recipe():
    """Without a recipe sfb says itself whether each row has a scale factor or each 128."""
    for n in (1, 128, 129, 300):
        for packed in (False, True):
            for recipe in (FORWARD, WGRAD):
                a, b = pairs(5, n, 256, recipe, (packed, packed))
                d = nan(5, n)
                fp8_nt(a.pair, b.pair, d)
                assert_product(d, product(a, b), f"N = {n}, {recipe}")


def test_recipe_forms():
    a, b = pairs(5, 130, 256, WGRAD)
    for options in ({"recipe": (1, 1, 128)}, {"recipe": [1, 1, 128]}, {"recipe_a": (1, 128), "recipe_b": [1, 128]}):
        d = nan(5, 130)
        fp8_nt(a.pair, list(b.pair), d, compiled_dims="mnk", disable_ue8m0_cast=True, **options)
        assert_product(d, product(a, b), str(options))


def test_legacy_names():
    a, b = pairs(5, 130, 256, FORWARD)
    d = nan(5, 130, BF16)
    assert deep_gemm.gemm_fp8_fp8_bf16_nt(a.pair, b.pair, d) is None
    assert_product(d, product(a, b))
    a, b = pairs(5, 130, 256, WGRAD)
    d = addend(5, 130)
    assert deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(a.pair, b.pair, d) is None
    assert_product(d, addend(5, 130).double().cpu() + product(a, b))


def test_small_scale_factors():
    """Scale factors of dead experts: finite, and zero where they are zero."""
    a, b = pairs(4, 256, 256)
    for small in (1e-23, 1e-38, 1e-42, 0.0):
        sf = b.sf.clone()
        sf[1, 1] = small
        d = run(a, Operand(b.data, sf, None), FORWARD, nan(4, 256))
        values = b.data.double().cpu() * sf.double().cpu().repeat_interleave(128, 0).repeat_interleave(128, 1)
        torch.testing.assert_close(d.double().cpu(), torch.tensor(a.values) @ values.T, rtol=1e-6, atol=1e-30)


@each_shape
def test_bf16(m, n, k):
    a, b = bf16_operand(m, k, 1), bf16_operand(n, k, 2)
    check_bf16(a, b)


@gpu
@each_large_shape
def test_bf16_at_large_shapes(m, n, k):
    check_bf16(bf16_operand(m, k, 1), bf16_operand(n, k, 2))


def check_bf16(a, b):
    (m, k), n = a.data.shape, b.data.shape[0]
    expected = product(a, b)
    at, bt = a.data.T.contiguous(), b.data.T.contiguous()
    calls = {
        deep_gemm.bf16_gemm_nt: (a.data, b.data),
        deep_gemm.bf16_gemm_nn: (a.data, bt),
        deep_gemm.bf16_gemm_tn: (at, bt),
        deep_gemm.bf16_gemm_tt: (at, b.data),
    }
    for function, operands in calls.items():
        for dtype in (FP32, BF16):
            d, c = nan(m, n, dtype), addend(m, n, dtype)
            assert function(*operands, d) is None
            assert_product(d, expected, function.__name__)
            function(*operands, d, c)
            assert_product(d, c.double().cpu() + expected, f"{function.__name__} c")
            function(*operands, c, c=c, compiled_dims="")
            assert_bitwise_equal(c, d, f"{function.__name__} c is d")
    for data in operand_views(a.data):
        d = nan(m, n)
        bf16_nt(data, b.data, d)
        assert_product(d, expected, f"strides {data.stride()}")


CUBLASLT = {
    "nt": deep_gemm.cublaslt_gemm_nt,
    "nn": deep_gemm.cublaslt_gemm_nn,
    "tn": deep_gemm.cublaslt_gemm_tn,
    "tt": deep_gemm.cublaslt_gemm_tt,
}


@pytest.mark.parametrize("m, n, k", [(128, 512, 512), (1, 33, 16), (7, 129, 127), (5, 16, 0), (0, 4, 8)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32, E4M3], ids=str)
def test_cublaslt(m, n, k, dtype):
    a, b = bf16_operand(m, k, 1), bf16_operand(n, k, 2)
    first, second = a.data.to(dtype), b.data.to(dtype)
    expected = first.double().cpu() @ second.double().cpu().T
    for name, function in CUBLASLT.items():
        x = first if name[0] == "n" else first.T.contiguous()
        y = second if name[1] == "t" else second.T.contiguous()
        for out in (BF16, FP32):
            d, c = nan(m, n, out), addend(m, n, out)
            assert function(x, y, d) is None
            assert_product(d, expected, name)
            function(x, y, d, c)
            # Through bf16 the product may be rounded before the addition.
            if out == FP32:
                assert_product(d, c.double().cpu() + expected, f"{name} c")
            function(x, y, c, c)
            assert_bitwise_equal(c, d, f"{name} c is d")


@pytest.mark.parametrize("m, n", [(0, 64), (64, 0), (0, 0)])
def test_empty_output(m, n):
    a, b = pairs(m, n, 256)
    d = nan(m, n)
    run(a, b, FORWARD, d)
    run(a, b, FORWARD, d, d)
    bf16_nt(bf16_operand(m, 256).data, bf16_operand(n, 256).data, d)
    with pytest.raises(ValueError, match="b data must have the K of a"):
        run(a, operand(n, 128, (128, 128)), FORWARD, d)


def test_no_k():
    a, b = pairs(5, 33, 0)
    for dtype in (FP32, BF16):
        d, c = nan(5, 33, dtype), addend(5, 33, dtype)
        run(a, b, FORWARD, d)
        assert_bitwise_equal(d, torch.zeros_like(d))
        run(a, b, FORWARD, d, c)
        assert_bitwise_equal(d, c)
        run(a, b, FORWARD, d, d)
        assert_bitwise_equal(d, c)
        bf16_nt(bf16_operand(5, 0).data, bf16_operand(33, 0).data, d)
        assert_bitwise_equal(d, torch.zeros_like(d))


def refusals():
    """Name -> (exception, what its message names, arguments of fp8_gemm_nt)."""
    (m, n, k), (x, y) = (6, 130, 256), pairs(6, 130, 256)
    (a, sfa), (b, sfb), d = x.pair, y.pair, nan(m, n)
    whole = nan(2 * m, n)
    memory = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    a_inside = memory[: m * k].view(E4M3).view(m, k)
    inside = memory[: m * n * 4].view(FP32).view(m, n)
    strided = torch.zeros(m, 2 * k, dtype=torch.uint8, device=DEVICE).view(E4M3)[:, ::2]
    requires_grad = nan(m, n).requires_grad_()
    good = {"a": (a, sfa), "b": (b, sfb), "d": d}

    def case(error, match, **changes):
        return error, match, {**good, **changes}

    return {
        "a is no pair": case(TypeError, "^a must be a pair", a=a),
        "a of three": case(TypeError, "^a must be a pair", a=(a, sfa, sfa)),
        "no sf": case(TypeError, "^b must be a pair of tensors", b=(b, None)),
        "no d": case(TypeError, "^d must be a tensor", d=None),
        "dtype of a": case(ValueError, "^a data must be .*got torch.bfloat16", a=(a.bfloat16(), sfa)),
        "bytes": case(ValueError, "^b data must be .*got torch.uint8", b=(b.view(torch.uint8), sfb)),
        "dtype of sf": case(ValueError, "^a sf must be .*got torch.float64", a=(a, sfa.double())),
        "uint8 sf": case(ValueError, "^b sf must be .*got torch.uint8", b=(b, sfb.to(torch.uint8))),
        "bf16 sf": case(ValueError, "^b sf must be .*got torch.bfloat16", b=(b, sfb.bfloat16())),
        "dtype of d": case(ValueError, "^d must be .*got torch.float16", d=nan(m, n, torch.float16)),
        "rank of a": case(ValueError, "^a data must be 2-D", a=(a[None], sfa)),
        "rank of sf": case(ValueError, "^b sf must be 2-D", b=(b, sfb[None]), recipe=(1, 128, 128)),
        "rank of d": case(ValueError, "^d must be 2-D", d=d[None]),
        "M": case(ValueError, "^a data must have 7 rows", d=nan(m + 1, n)),
        "N": case(ValueError, "^b data must have 129 rows", d=nan(m, n - 1)),
        "K": case(ValueError, "^b data must have the K of a, 256, got 255", b=(b[:, 1:], sfb)),
        "rows of sfa": case(ValueError, r"^a sf must have shape \(6, 2\)", a=(a, sfa[1:])),
        "columns of sfa": case(ValueError, r"^a sf must have shape \(6, 2\)", a=(a, sfa[:, :1])),
        "rows of sfb": case(ValueError, r"^b sf must have shape \(2, 2\)", b=(b, sfb[:1])),
        "sfb of another recipe": case(ValueError, r"^b sf must have shape \(130, 2\)", recipe=(1, 1, 128)),
        "fp32 bits as words": case(ValueError, r"^b sf must have shape \(2, 1\)", b=(b, sfb.view(torch.int32))),
        "strides of a": case(ValueError, "^a data must have a stride of 1", a=(strided, sfa)),
        "dtype of c": case(ValueError, "^c must be torch.float32", c=d.bfloat16()),
        "shape of c": case(ValueError, "^c must be ", c=nan(m, n + 1)),
        "c is no tensor": case(TypeError, "^c must be a tensor", c=1.0),
        "both recipes": case(
            ValueError, "^recipe must be None", recipe=(1, 128, 128), recipe_a=(1, 128), recipe_b=(128, 128)
        ),
        "recipe_a alone": case(ValueError, "^recipe_a and recipe_b must be given together", recipe_a=(1, 128)),
        "recipe_b beside recipe": case(ValueError, "^recipe_a and", recipe=(1, 1, 128), recipe_b=(1, 128)),
        "recipe of two": case(ValueError, "^recipe must be 3 ints", recipe=(1, 128)),
        "recipe of floats": case(ValueError, "^recipe must be 3 ints", recipe=(1, 128.0, 128)),
        "recipe is an int": case(ValueError, "^recipe must be 3 ints", recipe=128),
        "gran_m of 64": case(ValueError, "^recipe must have", recipe=(64, 128, 128)),
        "gran_k of 64": case(ValueError, "^recipe_b must have", recipe_a=(1, 128), recipe_b=(128, 64)),
        "d requires grad": case(ValueError, "^d requires grad", d=requires_grad),
        "d overlaps itself": case(ValueError, "^d must have memory of its own", d=d[:1].expand(m, n)),
        "d overlaps a": case(ValueError, "^d overlaps a data", a=(a_inside, sfa), d=inside),
        "d overlaps sfa": case(ValueError, "^d overlaps a sf", a=(a, memory[:48].view(FP32).view(6, 2)), d=inside),
        "d overlaps c": case(ValueError, "^d overlaps c", d=whole[:m], c=whole[1 : m + 1]),
        "c with other strides": case(
            ValueError, "^d overlaps c", d=whole[:m], c=whole.view(-1).as_strided((m, n), (1, m))
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", refusals())
def test_refusals(name):
    error, match, arguments = refusals()[name]
    d = arguments["d"]
    before = d.detach().clone() if isinstance(d, torch.Tensor) else None
    with pytest.raises(error, match=match):
        fp8_nt(**arguments)
    if before is not None:
        assert_bitwise_equal(d.detach().contiguous(), before.contiguous(), "wrote to d")


def test_refusals_of_bf16_and_cublaslt():
    a, b, d = bf16_operand(6, 64).data, bf16_operand(33, 64).data, nan(6, 33)
    strided = torch.zeros(33, 128, device=DEVICE, dtype=BF16)[:, ::2]
    memory = torch.zeros(6 * 64, dtype=BF16, device=DEVICE)
    inside = memory[:180].view(6, 30)
    bf16, cublaslt = deep_gemm.bf16_gemm_nt, deep_gemm.cublaslt_gemm_nt
    for functions, error, match, arguments in (
        ((bf16, cublaslt), TypeError, "^a must be a tensor", (None, b, d)),
        ((bf16, cublaslt), TypeError, "^d must be a tensor", (a, b, None)),
        ((bf16, cublaslt), ValueError, "^b must be torch.bfloat16", (a, b.float(), d)),
        ((bf16, cublaslt), ValueError, "^b must have the K of a, 64, got 63", (a, b[:, 1:], d)),
        ((bf16, cublaslt), ValueError, r"^d must have shape \(6, 33\)", (a, b, d[1:])),
        ((bf16, cublaslt), ValueError, "^d must be .*got torch.float64", (a, b, d.double())),
        ((bf16, cublaslt), ValueError, "^c must be torch.float32", (a, b, d, d.bfloat16())),
        ((bf16, cublaslt), ValueError, "^d overlaps a", (memory.view(6, 64), b[:30], inside)),
        ((bf16,), ValueError, "^a must be torch.bfloat16", (a.float(), b.float(), d)),
        ((bf16,), ValueError, "^d must be .*got torch.float16", (a, b, d.half())),
        ((bf16,), ValueError, "^b must have a stride of 1", (a, strided, d)),
        ((cublaslt,), ValueError, "^a must be .*got torch.int8", (a.to(torch.int8), b.to(torch.int8), d)),
    ):
        for function in functions:
            with pytest.raises(error, match=match):
                function(*arguments)
    with pytest.raises(ValueError, match="^b must be 2-D"):
        deep_gemm.bf16_gemm_nn(a, b[None], d)
    with pytest.raises(TypeError, match="^a must be a pair of tensors"):
        deep_gemm.fp8_gemm_tn((None, None), (a, b), d)
    assert d.isnan().all() and not memory.any()


def test_gradients_and_versions():
    a, b = bf16_operand(6, 64).data.requires_grad_(), bf16_operand(33, 64).data
    d = nan(6, 33)
    version = d._version
    bf16_nt(a, b, d, nan(6, 33).requires_grad_())
    assert not d.requires_grad and d._version > version
    x, y = pairs(6, 33, 64)
    version = d._version
    fp8_nt(x.pair, y.pair, d)
    assert d._version > version


def test_settings_make_a_plan_of_their_own(monkeypatch):
    a, b, d = bf16_operand(6, 64).data, bf16_operand(33, 64).data, nan(6, 33)
    plans = dense._BF16[0].plans
    forget(dense._BF16[0])
    for sms, number in ((0, 1), (0, 1), (64, 2), (0, 2)):
        monkeypatch.setattr(deep_gemm._runtime._settings, "num_sms", sms)
        bf16_nt(a, b, d)
        assert len(plans) == number


def test_plans_hold_no_tensors():
    import gc
    import weakref

    a, b = pairs(6, 33, 64)
    d = nan(6, 33)
    fp8_nt(a.pair, b.pair, d, d)
    references = [weakref.ref(tensor) for tensor in (a.data, a.sf, b.data, b.sf, d)]
    del a, b, d
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_opcheck():
    gran = [1, 128, 128, 128]
    a, b = pairs(6, 33, 64)
    as_bytes = a.data.view(torch.uint8), a.sf, b.data.view(torch.uint8), b.sf
    first, second = bf16_operand(6, 64).data, bf16_operand(33, 64).data
    for dtype in (FP32, BF16):
        for c, add in ((None, False), (None, True), (addend(6, 33, dtype), True)):
            d = addend(6, 33, dtype)
            torch.library.opcheck(ops.fp8_fp4_gemm_nt.default, (*as_bytes, c, d, gran, add))
            torch.library.opcheck(ops.bf16_gemm_nt.default, (first, second, c, d, add))


def test_torch_compile():
    """One graph for every M: new outputs, given ones, slices, accumulation."""

    def step(a, sfa, b, sfb, x, y, d, c):
        made = torch.empty(a.shape[0], b.shape[0], dtype=BF16, device=a.device)
        fp8_nt((a, sfa), (b, sfb), made)
        fp8_nt((a, sfa), (b, sfb), d, c)
        deep_gemm.bf16_gemm_nn(x, y.t(), d, d)
        both = torch.empty(a.shape[0], 2 * b.shape[0], device=a.device)
        bf16_nt(x, y, both[:, b.shape[0] :])
        deep_gemm.cublaslt_gemm_nt(x, y, both[:, : b.shape[0]])
        return made, both

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=BACKEND)
    for m in (7, 130, 33):
        a, b = pairs(m, 96, 256)
        x, y = bf16_operand(m, 64, 3), bf16_operand(96, 64, 4)
        c, d = addend(m, 96), nan(m, 96)
        made, both = compiled(*a.pair, *b.pair, x.data, y.data, d, c)
        assert_product(made, product(a, b), f"made, M = {m}")
        assert_product(d, c.double().cpu() + product(a, b) + product(x, y), f"d, M = {m}")
        assert_product(both, product(x, y).repeat(1, 2), f"both, M = {m}")
        assert_bitwise_equal(c, addend(m, 96), "c")


def test_errors_while_compiling():
    a, b = pairs(6, 130, 256)
    compiled = torch.compile(fp8_nt, backend="eager")
    with pytest.raises(Exception, match="a sf must have shape"):
        compiled((a.data, a.sf[1:]), b.pair, nan(6, 130))


def test_fake_tensors():
    with torch._subclasses.FakeTensorMode():
        a, b = (torch.empty(mn, 512, dtype=BF16, device=DEVICE) for mn in (128, 256))
        d = torch.empty(128, 256, dtype=BF16, device=DEVICE)
        bf16_nt(a, b, d)
        deep_gemm.bf16_gemm_nn(a, b.t(), d)
        deep_gemm.cublaslt_gemm_nt(a, b, d)
        sfa, sfb = (torch.empty(mn, 4, device=DEVICE) for mn in (128, 2))
        fp8_nt((a.to(E4M3), sfa), (b.to(E4M3), sfb), d)
        fp8_nt((a.to(E4M3), sfa), (b.to(E4M3), sfb), d, d)
        assert isinstance(d, torch._subclasses.FakeTensor)


def test_reference_in_chunks(monkeypatch):
    monkeypatch.setattr(reference, "_MAX_ELEMENTS", 1)
    for fp4 in (False, True):
        a, b = pairs(300, 34, 256, fp4=(fp4, fp4))
        for c in (None, addend(300, 34)):
            got = reference.fp8_gemm(*a.pair, *b.pair, c, (300, 34), FP32, reference.Gran(1, 128, 128, 128))
            assert_product(got, product(a, b) + (0 if c is None else c.double().cpu()))
    packed = deep_gemm.utils.transpose_packed_fp4(a.data).T
    got = reference.fp8_gemm(packed, a.sf, *b.pair, None, (300, 34), FP32, reference.Gran(1, 128, 128, 128))
    assert_product(got, product(a, b), "packed along rows")


def test_the_reference_promotes_every_block():
    """The scale product is rounded first, then its product with the block's sum, then the sum."""
    torch.manual_seed(0)
    a, b = (torch.randn(mn, 384, device="cpu").to(E4M3) for mn in (3, 5))
    sfa, sfb = torch.rand(3, 3), torch.rand(1, 3)
    acc = torch.zeros(3, 5)
    for j in range(3):
        block = slice(128 * j, 128 * j + 128)
        acc = acc + (sfa[:, j, None] * sfb[:, j]) * (a[:, block].float() @ b[:, block].float().T)
    d = torch.empty(3, 5)
    fp8_nt((a, sfa), (b, sfb), d)
    assert_bitwise_equal(d, acc)


def quantised(m, n, k):
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, w = (torch.randn(mn, k, generator=generator, device=DEVICE) for mn in (m, n))
    return deep_gemm.utils.per_token_cast_to_fp8(x, False), deep_gemm.utils.per_block_cast_to_fp8(w, False)


def dequantised(a, b):
    (a, sfa), (b, sfb) = a, b
    n, k = b.shape
    wide = sfb.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return a.double() * sfa.double().repeat_interleave(128, 1)[:, :k], b.double() * wide.double()


HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)


def rms(x):
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("k", [512, 7168, pytest.param(65536, marks=pytest.mark.slow)])
def test_error_against_fp64(k):
    """With an fp32 output at most 1.5 times the error of an fp32 matmul; with bf16 that of rounding what is right.

    Hopper's tensor cores keep about 14 bits while they add up a block of K, which shows in fp32 outputs.
    """
    m, n = 64, 256
    a, b = quantised(m, n, k)
    x, w = dequantised(a, b)
    exact = x @ w.T
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = x.float() @ w.float().T
    torch.backends.cuda.matmul.allow_tf32 = allowed
    d = nan(m, n)
    fp8_nt(a, b, d)
    assert rms(d - exact) <= (2e-4 * rms(exact) if HOPPER else 1.5 * rms(plain - exact))
    d = nan(m, n, BF16)
    fp8_nt(a, b, d)
    assert rms(d - exact) <= 1.01 * rms(exact.to(BF16) - exact)


@pytest.mark.parametrize("mode", ["default dtype", "autocast"])
def test_modes_change_no_bit(mode):
    m, n, k = 8, 16, 1024
    a, b = quantised(m, n, k)
    x, w = torch.randn(m, k, device=DEVICE).bfloat16(), torch.randn(n, k, device=DEVICE).bfloat16()

    def results():
        made = nan(m, n), nan(m, n), nan(m, n), nan(m, n, BF16)
        fp8_nt(a, b, made[0])
        bf16_nt(x, w, made[1])
        deep_gemm.cublaslt_gemm_nt(x, w, made[2])
        deep_gemm.cublaslt_gemm_nt(a[0][:, :32], b[0][:, :32], made[3])
        return made

    want = results()
    default = torch.get_default_dtype()
    try:
        if mode == "autocast":
            with torch.autocast(DEVICE, torch.bfloat16):
                got = results()
        else:
            torch.set_default_dtype(BF16)
            got = results()
    finally:
        torch.set_default_dtype(default)
    for one, other in zip(got, want):
        assert_bitwise_equal(one, other, mode)


@gpu
def test_constant_sums():
    """All ones, and one product of 2^-8 in each block: a sum that needs 22 bits, of which a block's needs 15."""
    m, n, k = 65, 130, 16384
    a, b = torch.ones(m, k, device=DEVICE), torch.ones(n, k, device=DEVICE)
    one = torch.ones(m, k // 128, device=DEVICE)
    d = nan(m, n)
    fp8_nt((a.to(E4M3), one), (b.to(E4M3), torch.ones(2, k // 128, device=DEVICE)), d)
    assert d.eq(k).all()
    a[:, ::128], b[:, ::128] = 2**-4, 2**-4
    fp8_nt((a.to(E4M3), one), (b.to(E4M3), torch.ones(2, k // 128, device=DEVICE)), d)
    lost = 2**-8 if HOPPER else 0
    assert (d - k // 128 * (127 + 2**-8)).abs().le(k // 128 * lost).all(), d.flatten()[0]


def each_kernel():
    """Name -> a call, its output and the right answer, of every kind of kernel."""
    calls = {}
    for name, (recipe, packed, fp4, dtype) in {
        "forward": (FORWARD, (False, False), (False, False), BF16),
        "wgrad": (WGRAD, (False, False), (False, False), FP32),
        "packed": (FORWARD, (True, True), (False, False), BF16),
        "fp4": (RECIPES["1x128 by 1x32"], (True, True), (False, True), BF16),
    }.items():
        for m in (1, 200):
            a, b = pairs(m, 576, 1024, recipe, packed, fp4)
            d = nan(m, 576, dtype)
            calls[f"{name} M={m}"] = (lambda a=a, b=b, d=d, recipe=recipe: run(a, b, recipe, d)), d, product(a, b)
    a, b, d = bf16_operand(200, 512, 1), bf16_operand(576, 512, 2), nan(200, 576, BF16)
    calls["bf16"] = (lambda: bf16_nt(a.data, b.data, d)), d, product(a, b)
    return calls


@gpu
def test_repeatable():
    for name, (call, d, expected) in each_kernel().items():
        for i in range(50):
            d.fill_(torch.nan)
            call()
            assert_product(d, expected, f"{name}, launch {i}")
    a, b = quantised(333, 576, 7168)
    first, again = nan(333, 576), nan(333, 576)
    fp8_nt(a, b, first)
    for i in range(50):
        fp8_nt(a, b, again)
        assert_bitwise_equal(again, first, f"random data, launch {i}")


@gpu
def test_cuda_graph():
    calls = each_kernel()
    accumulated = addend(200, 576)
    a, b = pairs(200, 576, 1024, WGRAD)

    def every():
        for call, *_ in calls.values():
            call()
        run(a, b, WGRAD, accumulated, accumulated)

    every()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every()
    accumulated.copy_(addend(200, 576))
    for _ in range(2):
        for _, d, _ in calls.values():
            d.fill_(torch.nan)
        graph.replay()
        for name, (_, d, expected) in calls.items():
            assert_product(d, expected, name)
    assert_product(accumulated, addend(200, 576).double().cpu() + 2 * product(a, b))


@gpu
def test_side_stream():
    a, b = pairs(200, 576, 1024)
    expected = product(a, b)
    stream = torch.cuda.Stream()
    for _ in range(5):
        d = nan(200, 576, BF16)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            data = a.data.view(torch.uint8).clone().view(E4M3)
            run(Operand(data, a.sf, None), b, FORWARD, d)
        torch.cuda.current_stream().wait_stream(stream)
        assert_product(d, expected)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device():
    a, b = (operand(mn, 512, gran, device="cuda:1") for mn, gran in zip((70, 130), FORWARD))
    assert_product(run(a, b, FORWARD, nan(70, 130, device="cuda:1")), product(a, b))
    with pytest.raises(ValueError, match="^b data must be on cuda:1"):
        run(a, operand(130, 512, (128, 128)), FORWARD, nan(70, 130, device="cuda:1"))


@gpu
def test_no_host_sync_and_no_allocation():
    calls = each_kernel()
    for call, *_ in calls.values():
        call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call, *_ in calls.values():
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_num_sms():
    a, b = pairs(1000, 576, 1024)
    try:
        for sms in (2, 64, 0):
            deep_gemm.set_num_sms(sms)
            assert_product(run(a, b, FORWARD, nan(1000, 576, BF16)), product(a, b), f"{sms} SMs")
    finally:
        deep_gemm.set_num_sms(0)


@gpu
def test_kernels_do_the_work(monkeypatch):
    for name in ("fp8_gemm", "bf16_gemm"):
        monkeypatch.setattr(reference, name, lambda *args: pytest.fail("took the reference"))
    for call, d, expected in each_kernel().values():
        call()
        assert_product(d, expected)


@gpu
def test_kernel_names():
    """Profilers look for these; a call launches one kernel of them."""
    for name, (call, *_) in each_kernel().items():
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        wanted = "bf16_gemm" if name == "bf16" else "gemm_"
        assert len([e for e in profile.events() if wanted in e.name]) == 1, [e.name for e in profile.events()]


@gpu
@pytest.mark.slow
def test_offsets_beyond_32_bits():
    """Rows of every operand, and of d, that lie 2^31 elements apart."""
    m, n, k = 130, 130, 256
    a, b = pairs(m, n, k)
    stride = (2**31 + 2**20) // m
    far = [torch.zeros(m * stride, dtype=torch.uint8, device=DEVICE).view(E4M3) for _ in "ab"]
    far = [x.as_strided((m, k), (stride, 1)).copy_(data) for x, data in zip(far, (a.data, b.data))]
    d = torch.empty(m * stride, dtype=BF16, device=DEVICE).as_strided((m, n), (stride, 1))
    assert_product(run(Operand(far[0], a.sf, None), Operand(far[1], b.sf, None), FORWARD, d), product(a, b))
