"""`fused_per_token_cast_to_fp8`: byte for byte its reference, whatever the shape, strides and values."""

import math

import pytest
import torch
from casting import (
    DTYPES,
    E4M3,
    RECIPES,
    assert_same,
    bf16_patterns,
    bits,
    cast,
    check,
    check_guarded,
    distinct,
    each_dtype,
    each_recipe,
    gpu,
    reference,
    sf_spec,
    specials,
)
from generators import DEVICE, deep_gemm, forget
from views import Guarded, guarded, other_values, same_values, with_stride

assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal
fused_cast = deep_gemm.fused_cast
FLOAT, PACKED = (False, 128, False), (True, 32, True)

# A tile of the kernel is 2 x 1024, or 64 x 128 for a column-major input; rows lie on grid axes that end at 65535.
SHAPES = (
    (1, 1), (3, 8), (2, 16), (5, 31), (6, 32), (4, 33), (3, 97), (127, 127), (128, 128), (129, 129), (5, 385), (2, 512),
    (7, 1000), (6, 1023), (1, 1024), (8, 1025), (3, 1409), (9, 2048), (4, 3000), (3, 4096),
)  # fmt: skip
COLUMN_MAJOR_SHAPES = ((1, 8), (2, 1), (63, 127), (64, 128), (65, 129), (127, 32), (128, 385), (129, 512), (1000, 33))
TALL_SHAPES = ((65537, 32), (131070, 1), (131071, 33))


# Shapes and strides


@each_dtype
@each_recipe
def test_shapes(recipe, dtype):
    for m, n in SHAPES:
        if sf_spec(m, n, recipe):
            check(distinct(m, n, dtype), recipe, label=f"{m}x{n}")


@pytest.mark.parametrize("recipe", [FLOAT, PACKED, (True, 128, True)], ids=["fp32-128", "packed-32", "packed-128"])
def test_column_major_shapes(recipe):
    for m, n in COLUMN_MAJOR_SHAPES:
        if sf_spec(m, n, recipe):
            check(distinct(n, m).t(), recipe, label=f"{m}x{n}")


@pytest.mark.parametrize("m, n", TALL_SHAPES)
def test_many_rows(m, n):
    check(distinct(m, n), (False, 128, False))


@pytest.mark.parametrize("m, n", [(0, 0), (0, 512), (5, 0)])
@each_dtype
@each_recipe
def test_empty(m, n, dtype, recipe):
    x = torch.empty(m, n, dtype=dtype, device=DEVICE)
    check(x, recipe)
    shape, sf_dtype = sf_spec(m, n, recipe)
    out, out_sf = torch.empty(m, n, dtype=E4M3, device=DEVICE), torch.empty(shape, dtype=sf_dtype, device=DEVICE)
    check(x, recipe, out, out_sf)


@pytest.mark.parametrize(
    "recipe, dtype", [(FLOAT, torch.float32), (PACKED, torch.bfloat16)], ids=["float32-fp32-128", "bfloat16-packed-32"]
)
def test_strided_inputs(recipe, dtype):
    for m, n in ((5, 512), (70, 1000)):
        x = distinct(m, n, dtype)
        parent = x.clone()
        for name, view in (same_values(x) | other_values(x)).items():
            if sf_spec(*view.shape, recipe):
                check(view, recipe, label=f"{m}x{n} {name}")
        for name, view in same_values(x).items():
            assert_same(cast(view, *recipe), reference(x, *recipe), f"{m}x{n} {name}")
        assert torch.equal(x, parent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_start(dtype):
    x = distinct(4, 512, dtype)
    for offset in range(17):
        check(with_stride(x, (544, 1), offset), FLOAT, label=f"offset {offset}")


@pytest.mark.parametrize("recipe", [FLOAT, PACKED], ids=["fp32-128", "packed-32"])
def test_lazily_negated_input(recipe):
    values = torch.complex(distinct(6, 512, torch.float32), distinct(6, 512, torch.float32, seed=1))
    x = values.conj().imag
    assert x.is_neg()
    assert_same(cast(x, *recipe), reference(-values.imag, *recipe))
    # The same dtype, shape and strides without the sign must not take what was planned for it, nor the other way round.
    assert_same(cast(values.imag, *recipe), reference(values.imag.clone(), *recipe))
    assert_same(cast(x, *recipe), reference(-values.imag, *recipe))


# Outputs


@pytest.mark.parametrize("recipe", [FLOAT, (True, 128, True), PACKED], ids=["fp32-128", "packed-128", "packed-32"])
@pytest.mark.parametrize("m", [1, 7, 130])
def test_output_views(m, recipe):
    n = 1000
    x = distinct(m, n)
    (_, groups), sf_dtype = sf_spec(m, n, recipe)
    sfs = guarded(m, groups, sf_dtype)
    for name, out in guarded(m, n, E4M3).items():
        for sf_name, out_sf in sfs.items():
            out.buffer.fill_(-1)
            out_sf.buffer.fill_(-1)
            check_guarded(x, recipe, out, out_sf, f"out {name}, out_sf {sf_name}")


@pytest.mark.parametrize("n", [1, 16, 33, 63, 65, 129, 576, 1025])
def test_output_is_not_written_past_the_last_column(n):
    for m in (1, 5):
        x = distinct(m, n)
        for recipe in RECIPES:
            if spec := sf_spec(m, n, recipe):
                (_, groups), sf_dtype = spec
                out, out_sf = Guarded((m, n), (n + 64, 1), E4M3, 16), Guarded((m, groups), (groups + 8, 1), sf_dtype, 4)
                check_guarded(x, recipe, out, out_sf, f"{m}x{n}")


@each_recipe
def test_one_output_given(recipe):
    x = distinct(5, 512)
    (_, groups), sf_dtype = sf_spec(5, 512, recipe)
    out, out_sf = Guarded((5, 512), (520, 1), E4M3, 8), Guarded((5, groups), (1, 8), sf_dtype, 3)
    check(x, recipe, out=out.view)
    out.assert_untouched("out")
    check(x, recipe, out_sf=out_sf.view)
    out_sf.assert_untouched("out_sf")


def test_rows_of_payload_then_scale_factors():
    m, n, groups = 9, 512, 4
    record = torch.full((m, n + 4 * groups + 16), 0xFF, dtype=torch.uint8, device=DEVICE)
    out, out_sf = record[:, :n].view(E4M3), record[:, n : n + 4 * groups].view(torch.float32)
    check(distinct(m, n), FLOAT, out, out_sf)
    assert (record[:, n + 4 * groups :] == 0xFF).all()


def test_outputs_between_rows_of_the_input():
    m, n = 6, 512
    buffer = torch.full((2 * m, n), -1, dtype=torch.int16, device=DEVICE)
    x = buffer[::2].view(torch.bfloat16).copy_(distinct(m, n))
    out = buffer[1::2].view(E4M3)[:, :n]
    out_sf = buffer[1::2].view(torch.float32)[:, n // 2 - 4 :]
    expected = x.clone()
    check(x, FLOAT, out, out_sf)
    assert torch.equal(x, expected)
    assert (buffer[1::2, n // 2 : -8] == -1).all()


def test_odd_strides_of_size_one_dimensions():
    x = distinct(1, 512)
    out = Guarded((1, 512), (3, 1), E4M3, 5)
    out_sf = Guarded((1, 4), (0, 2), torch.float32, 1)
    check_guarded(x, FLOAT, out, out_sf)
    x = distinct(5, 1)
    check_guarded(x, FLOAT, Guarded((5, 1), (7, 0), E4M3), Guarded((5, 1), (3, 99), torch.float32))


def test_lazily_negated_out_sf():
    buffer = torch.full((5, 4), torch.nan, dtype=torch.complex64, device=DEVICE)
    out_sf = buffer.conj().imag
    assert out_sf.is_neg()
    check(distinct(5, 512), FLOAT, out_sf=out_sf)


def test_given_outputs_count_as_modified():
    x = distinct(4, 512)
    out, out_sf = (t.clone() for t in cast(x, *FLOAT))
    for _ in range(2):
        versions = out._version, out_sf._version
        cast(x, *FLOAT, out=out)
        assert out._version > versions[0] and out_sf._version == versions[1]
        cast(x, *FLOAT, out_sf=out_sf)
        assert out_sf._version > versions[1]


def test_config_fills_its_threads_whatever_the_width():
    for n in [1, 31, 32, 127, 128, 129, 511, 512, 513, 1000, 1024, 7168, 2**33]:
        for sf_mn_major in (False, True):
            config = fused_cast.cast_config("n", n, sf_mn_major)
            assert config.block_m * config.block_n == 16 * 32 * config.num_warps
            assert config.block_n % 128 == 0 and config.block_n <= (512 if sf_mn_major else 1024)
            assert config.block_n == 128 or config.block_n < 2 * n


def test_outputs_that_require_grad_are_refused():
    x = distinct(5, 512)
    leaf = torch.full((5, 4), torch.nan, device=DEVICE, requires_grad=True)
    for out_sf in (leaf, leaf * 1):
        check(x, FLOAT, out_sf=out_sf.detach().clone())  # with a plan at hand
        out = torch.zeros(5, 512, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
        with pytest.raises(ValueError, match="out_sf requires grad"):
            cast(x, *FLOAT, out=out, out_sf=out_sf)
        assert not out.view(torch.uint8).any() and out_sf.isnan().all()


def test_freed_storage_is_refused():
    x, out = distinct(5, 512), cast(distinct(5, 512), *FLOAT)[0]
    out.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="out has no memory"):
        cast(x, *FLOAT, out=out)


def test_no_gradient():
    x = distinct(4, 512).requires_grad_()
    for result in (*cast(x, *FLOAT), *cast(x * 2, *PACKED)):
        assert not result.requires_grad and result.grad_fn is None
    with torch.inference_mode():
        check(distinct(4, 512), FLOAT)


def test_parameters():
    check(torch.nn.Parameter(distinct(4, 512)), FLOAT)


def test_every_argument_by_position_and_by_name():
    x = distinct(4, 512)
    (out, out_sf), (named, named_sf) = (reference(x, *PACKED) for _ in range(2))
    assert_same(cast(x, *PACKED, out.zero_(), out_sf.zero_()), reference(x, *PACKED))
    cast(x=x, use_ue8m0=True, gran_k=32, use_packed_ue8m0=True, out=named.zero_(), out_sf=named_sf.zero_())
    assert_same((named, named_sf), reference(x, *PACKED))
    assert_same(cast(x, False), reference(x, False, 128, False))
    assert deep_gemm.per_token_cast_to_fp8 is cast


# Values


@each_dtype
@each_recipe
def test_special_values(recipe, dtype):
    x = specials(dtype)
    check(x, recipe)
    check(x.t().contiguous().t(), recipe, label="column-major")


@each_recipe
def test_bf16_patterns(recipe):
    patterns = bf16_patterns()
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    check(patterns, recipe, label="in order")
    check(patterns.flatten()[order].view(128, 512), recipe, label="shuffled")
    finite = patterns[patterns.isfinite()]
    finite = finite[torch.argsort(finite.abs().float())]
    check(finite[: len(finite) // 512 * 512].view(-1, 512), recipe, label="by magnitude")


@pytest.mark.parametrize("gran_k", [32, 128])
def test_bf16_patterns_beside_an_amax(gran_k):
    """Each pattern meets several scale factors: the first of each group is the amax."""
    patterns = bf16_patterns().flatten()
    groups = torch.nn.functional.pad(patterns, (0, -len(patterns) % (gran_k - 1))).view(-1, gran_k - 1)
    for amax in (448.0, 1.75, 3.0, 2.0**-20, 2.0**100, torch.inf, torch.nan):
        x = torch.cat((groups.new_full((len(groups), 1), amax), groups), dim=1)
        for use_ue8m0 in (False, True):
            check(x, (use_ue8m0, gran_k, False), label=f"amax {amax}")


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_zero_group(use_ue8m0):
    x = torch.zeros(3, 512, device=DEVICE)
    x[1] = -0.0
    x[2, 300] = 1.0
    x_fp8, sf = check(x, (use_ue8m0, 128, False))
    payload, floor = x_fp8.view(torch.uint8), sf.view(torch.int32)[:2]
    assert (payload[0] == 0).all() and (payload[1] == 0x80).all()
    assert (floor == (0x69 << 23 if use_ue8m0 else bits(0x38D1B717).mul(1 / 448).view(torch.int32))).all()
    if use_ue8m0:
        assert (check(x, (True, 128, True))[1][:2] == 0x69696969).all()


def test_rounding():
    """One rounding to nearest even, from fp32, subnormals kept: values in a group whose scale factor is 1."""
    cases = (
        (1.0625, 0x38), (1.0625001, 0x39), (1.1875, 0x3A), (17.0, 0x58), (19.0, 0x5A), (2.0**-10, 0x00),
        (2.0**-10 * (1 + 2.0**-23), 0x01), (2.0**-9, 0x01), (1.5 * 2.0**-9, 0x02), (2.5 * 2.0**-9, 0x02),
        (3.5 * 2.0**-9, 0x04), (7.5 * 2.0**-9, 0x08), (2.0**-6, 0x08), (416.0, 0x7D), (431.9999, 0x7D), (432.0, 0x7E),
        (440.0, 0x7E), (448.0, 0x7E), (0.0, 0x00),
    )  # fmt: skip
    values, expected = torch.tensor([case[0] for case in cases]), [case[1] for case in cases]
    x = torch.zeros(2, 128)
    x[0, : len(cases)], x[1, : len(cases)] = values, -values
    x[:, 127] = 448.0
    x_fp8, sf = check(x.to(DEVICE), (True, 128, False))
    assert (sf == 1).all()
    assert x_fp8.view(torch.uint8)[0, : len(cases)].tolist() == expected
    assert x_fp8.view(torch.uint8)[1, : len(cases)].tolist() == [byte | 0x80 for byte in expected]


@pytest.mark.parametrize("gran_k", [32, 128])
def test_ue8m0_next_to_powers_of_two(gran_k):
    """amax = 448 * 2^k and its neighbours, for which a floating log2 is off by one."""
    amax = torch.tensor([448.0 * 2.0**k for k in range(-40, 41)])
    below, above = (torch.nextafter(amax, torch.tensor(limit)) for limit in (0.0, torch.inf))
    amax = torch.cat((below, amax, above))
    x = torch.zeros(len(amax), gran_k)
    x[:, 5], x[:, 7] = -amax, amax / 3
    _, sf = check(x.to(DEVICE), (True, gran_k, False))
    check(x.to(DEVICE).repeat(1, 4), (True, gran_k, True))
    floored = amax.clamp(min=1e-4).double() * torch.tensor(1 / 448).double()
    # The product in fp32 is exact enough to tell: next to a power of two fp32(1/448) decides on which side it falls.
    product = floored.float()
    expected = torch.tensor([2.0 ** (math.frexp(p)[1] - (math.frexp(p)[0] == 0.5)) for p in product.tolist()])
    assert sf.flatten().tolist() == expected.tolist()


def test_scale_factors_belong_to_their_groups():
    """Each group holds one power of two, so that payload and scale factor are known without a reference."""
    m, groups = 37, 36
    exponent = (torch.arange(m)[:, None] * 11 + torch.arange(groups) * 5) % 61 - 10
    x = torch.exp2(exponent.float()).repeat_interleave(32, dim=1).to(DEVICE)
    x_fp8, packed = cast(x, True, 32, True)
    # 2^e / 448 lies between 2^(e - 9) and 2^(e - 8).
    assert (x_fp8.float() == 256).all()
    assert torch.equal(packed.cpu().view(torch.uint8).view(m, groups).int(), (exponent - 8 + 127).int())


# What is refused


def _x(m=8, n=512, **options):
    return torch.ones(m, n, device=DEVICE, **options)


def _overlapping(kind):
    """x, out and out_sf of [8, 512] and [8, 4], two of which share memory."""
    buffer = torch.full((8 * 512 * 8,), 0, dtype=torch.uint8, device=DEVICE)
    x = buffer[: 8 * 512 * 4].view(torch.float32).view(8, 512)
    out = buffer[8 * 512 * 4 : 8 * 512 * 5].view(E4M3).view(8, 512)
    out_sf = buffer[-128:].view(torch.float32).view(8, 4)
    if kind == "out is x":
        out = x.view(E4M3)[:, :512]
    elif kind == "last byte of x":
        out = buffer[8 * 512 * 4 - 1 :][: 8 * 512].view(E4M3).view(8, 512)
    elif kind == "between the columns of x":
        out = buffer[2:].as_strided((8, 512), (2048, 4)).view(E4M3)
    elif kind == "out_sf in x":
        out_sf = x[:, 3:7]
    elif kind == "out_sf in out":
        out_sf = out.view(torch.float32)[:, ::32]
    elif kind == "out_sf at the end of out":
        out_sf = buffer[8 * 512 * 5 - 4 :][:128].view(torch.float32).view(8, 4)
    elif kind == "out repeats rows":
        out = out[:1].expand(8, 512)
    elif kind == "out repeats columns":
        out = out[:, :1].expand(8, 512)
    elif kind == "rows of out overlap":
        out = out.as_strided((8, 512), (511, 1), out.storage_offset())
    elif kind == "out_sf repeats rows":
        out_sf = out_sf[:1].expand(8, 4)
    elif kind == "rows of out_sf overlap":
        out_sf = out_sf.as_strided((8, 4), (3, 1), out_sf.storage_offset())
    return buffer, x, out, out_sf


OVERLAPS = {
    "out is x": "out.*x", "last byte of x": "out.*x", "between the columns of x": "out.*x", "out_sf in x": "out_sf.*x",
    "out_sf in out": "out_sf.*out", "out_sf at the end of out": "out_sf.*out", "out repeats rows": "out",
    "out repeats columns": "out", "rows of out overlap": "out", "out_sf repeats rows": "out_sf",
    "rows of out_sf overlap": "out_sf",
}  # fmt: skip


@pytest.mark.parametrize("kind", OVERLAPS)
def test_overlap_is_refused(kind):
    buffer, x, out, out_sf = _overlapping(kind)
    before = buffer.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=OVERLAPS[kind]):
            cast(x, *FLOAT, out=out, out_sf=out_sf)
        assert torch.equal(buffer, before)


def test_overlap_is_refused_after_the_same_strides_passed():
    x, memory = _x(dtype=torch.float32), torch.zeros(8 * 512 * 4, dtype=torch.uint8, device=DEVICE)
    sf = memory[:128].view(torch.float32).view(8, 4)
    check(x, FLOAT, memory[128:][: 8 * 512].view(E4M3).view(8, 512), sf)
    with pytest.raises(ValueError, match="out_sf.*out"):
        cast(x, *FLOAT, out=memory[64:][: 8 * 512].view(E4M3).view(8, 512), out_sf=sf)
    with pytest.raises(ValueError, match="out.*x"):
        cast(x, *FLOAT, out=x.view(E4M3).flatten()[: 8 * 512].view(8, 512), out_sf=sf)


BAD_X = {
    "1-D": lambda: torch.ones(512, device=DEVICE),
    "3-D": lambda: torch.ones(8, 4, 128, device=DEVICE),
    "0-D": lambda: torch.ones((), device=DEVICE),
    "float64": lambda: _x(dtype=torch.float64),
    "int32": lambda: _x(dtype=torch.int32),
    "e4m3": lambda: _x().to(E4M3),
    "complex64": lambda: _x(dtype=torch.complex64),
    "bool": lambda: _x(dtype=torch.bool),
    "sparse": lambda: _x().to_sparse(),
    "list": lambda: [[1.0] * 512] * 8,
    "None": lambda: None,
    "array": lambda: pytest.importorskip("numpy").ones((8, 512), "float32"),
}


def _refused(match, x, *recipe, errors=(TypeError, ValueError)):
    out, out_sf = Guarded((8, 512), (512, 1), E4M3), Guarded((8, 4), (4, 1), torch.float32)
    for _ in range(2):
        for given in ({}, {"out": out.view, "out_sf": out_sf.view}):
            with pytest.raises(errors, match=match):
                cast(x, *recipe, **given)
    out.assert_unwritten()
    out_sf.assert_unwritten()


@pytest.mark.parametrize("kind", BAD_X)
def test_x_is_refused(kind):
    if kind == "array":
        pytest.importorskip("numpy")
    errors = ValueError if kind.endswith("-D") else (TypeError, ValueError)
    _refused(r"\bx\b", BAD_X[kind](), *FLOAT, errors=errors)


@pytest.mark.parametrize("gran_k", [0, 1, 16, 64, 127, 256, -32, 32.5, "128", None, True, (128,), [128]])
def test_gran_k_is_refused(gran_k):
    _refused("gran_k", _x(), True, gran_k)


@pytest.mark.parametrize("warm", [False, True])
def test_gran_k_of_another_type_is_the_same_with_and_without_a_plan(warm):
    x = distinct(3, 640)
    forget(fused_cast._per_token_cast)
    if warm:
        cast(x, True, 128)
    with pytest.raises((TypeError, ValueError), match="gran_k"):
        cast(x, True, 128.0)


def test_packing_is_refused():
    _refused("use_packed_ue8m0", _x(), False, 128, True, errors=ValueError)
    for n in (1, 128, 384, 513, 640):
        _refused("multiple of 4", _x(8, n), True, 128, True, errors=ValueError)
    for n in (1, 96, 129, 160):
        _refused("multiple of 4", _x(8, n), True, 32, True, errors=ValueError)
    for n in (97, 128):
        check(_x(8, n), (True, 32, True))


def _output(shape=(8, 512), dtype=E4M3, device=DEVICE):
    return torch.empty(shape, device=device).to(dtype)


BAD_OUT = {
    "transposed": lambda: _output((512, 8)),
    "more rows": lambda: _output((9, 512)),
    "fewer rows": lambda: _output((7, 512)),
    "one row": lambda: _output((1, 512)),
    "fewer columns": lambda: _output((8, 511)),
    "1-D": lambda: _output((8 * 512,)),
    "3-D": lambda: _output((1, 8, 512)),
    "empty": lambda: _output((0, 512)),
    "e5m2": lambda: _output(dtype=torch.float8_e5m2),
    "uint8": lambda: _output(dtype=torch.uint8),
    "bfloat16": lambda: _output(dtype=torch.bfloat16),
    "meta": lambda: _output().to("meta"),
    "other device": lambda: _output(device="cpu" if DEVICE == "cuda" else "meta"),
    "list": lambda: [1],
}
BAD_OUT_SF = {
    "transposed": lambda: _output((4, 8), torch.float32),
    "a group more": lambda: _output((8, 5), torch.float32),
    "a group less": lambda: _output((8, 3), torch.float32),
    "one row": lambda: _output((1, 4), torch.float32),
    "1-D": lambda: _output((32,), torch.float32),
    "of the padded rows": lambda: _output((12, 4), torch.float32),
    "int32": lambda: _output((8, 4), torch.int32),
    "bfloat16": lambda: _output((8, 4), torch.bfloat16),
    "float64": lambda: _output((8, 4), torch.float64),
    "meta": lambda: _output((8, 4), torch.float32).to("meta"),
    "string": lambda: "sf",
}


@pytest.mark.parametrize("kind", BAD_OUT)
def test_out_is_refused(kind):
    out_sf = Guarded((8, 4), (4, 1), torch.float32)
    for sf in (None, out_sf.view):
        with pytest.raises(TypeError if kind == "list" else ValueError, match=r"\bout\b"):
            cast(_x(), *FLOAT, out=BAD_OUT[kind](), out_sf=sf)
    out_sf.assert_unwritten()


@pytest.mark.parametrize("kind", BAD_OUT_SF)
def test_out_sf_is_refused(kind):
    out = Guarded((8, 512), (512, 1), E4M3)
    for given in (None, out.view):
        with pytest.raises(TypeError if kind == "string" else ValueError, match=r"\bout_sf\b"):
            cast(_x(), *FLOAT, out=given, out_sf=BAD_OUT_SF[kind]())
    out.assert_unwritten()


def test_packed_out_sf_is_refused():
    out = Guarded((8, 512), (512, 1), E4M3)
    for shape, dtype in (((8, 4), torch.int32), ((8, 1), torch.float32), ((8, 4), torch.uint8), ((8, 2), torch.int32)):
        with pytest.raises(ValueError, match="out_sf"):
            cast(_x(), True, 128, True, out=out.view, out_sf=_output(shape, dtype))
    out.assert_unwritten()


@pytest.mark.parametrize("m", [0, 8])
def test_empty_inputs_are_checked_too(m):
    x = torch.empty(m, 0 if m else 512, device=DEVICE)
    with pytest.raises(ValueError, match=r"\bout\b"):
        cast(x, *FLOAT, out=_output((m + 1, x.shape[1])))
    with pytest.raises(ValueError, match="gran_k"):
        cast(x, False, 64)


def test_message_says_what_came_and_what_is_allowed():
    with pytest.raises(ValueError, match=r"out_sf .*float32.*\(8, 4\).*int32.*\(8, 1\)"):
        cast(_x(), *FLOAT, out_sf=_output((8, 1), torch.int32))
    with pytest.raises(ValueError, match="64"):
        cast(_x(), False, 64)


# Properties


def test_any_view_of_any_values():
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    sizes = st.one_of(st.integers(1, 12), st.sampled_from([31, 32, 33, 63, 64, 65, 127, 129]))
    widths = st.one_of(st.integers(1, 300), st.sampled_from([385, 512, 1000, 1023, 1024, 1025, 1152, 2048]))

    @st.composite
    def places(draw, m, n):
        """A stride and an offset: the inner dimension steps by `step`, the outer one past it and some more."""
        step = draw(st.sampled_from([1, 1, 1, 2, 3]))
        inner, outer = ((n, 0), (m, 1)) if draw(st.booleans()) else ((m, 1), (n, 0))
        gap = draw(st.sampled_from([0, 0, 1, 7, 16]))
        pitch = inner[0] * step + gap
        stride = (pitch, step) if inner[1] == 0 else (step, pitch)
        return stride, draw(st.sampled_from([0, 0, 1, 8, 16]))

    @hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
    @hypothesis.given(st.data())
    def run(data):
        m, n = data.draw(sizes), data.draw(widths)
        recipe = data.draw(st.sampled_from([recipe for recipe in RECIPES if sf_spec(m, n, recipe)]))
        dtype = data.draw(st.sampled_from(DTYPES))
        x = distinct(m, n, torch.float32, seed=data.draw(st.integers(0, 2**16)))
        x = (x * 2.0 ** data.draw(st.integers(-120, 120))).to(dtype)
        odd_values = st.sampled_from([0.0, -0.0, 1e-40, torch.inf, -torch.inf, torch.nan])
        for value in data.draw(st.lists(odd_values, max_size=4)):
            x[data.draw(st.integers(0, m - 1)), data.draw(st.integers(0, n - 1))] = value
        x = with_stride(x, *data.draw(places(m, n)))
        if data.draw(st.booleans()):
            x = x[:1].expand(m, n)
        (_, groups), sf_dtype = sf_spec(m, n, recipe)
        stride, offset = data.draw(places(m, n))
        sf_stride, sf_offset = data.draw(places(m, groups))
        check_guarded(
            x, recipe, Guarded((m, n), stride, E4M3, offset), Guarded((m, groups), sf_stride, sf_dtype, sf_offset)
        )

    run()


@each_recipe
def test_a_row_does_not_depend_on_the_others(recipe):
    x = distinct(130, 1536)
    x_fp8, sf = cast(x, *recipe)
    for m in (1, 7, 128):
        assert_same(cast(x[:m], *recipe), (x_fp8[:m], sf[:m]), f"first {m} rows")
    assert_same(cast(x[-1:], *recipe), (x_fp8[-1:], sf[-1:]), "last row")


# Sizes that only a GPU has the memory and the speed for


@gpu
@pytest.mark.slow
def test_random_fp32_bits():
    """10^9 values; in every other chunk exponents stay within 16 of each other in a group: few round to zero."""
    generator = torch.Generator("cuda").manual_seed(0)
    for chunk in range(15):
        pattern = torch.empty(16384, 4096, dtype=torch.int32, device="cuda")
        pattern.random_(-(2**31), 2**31, generator=generator)
        if chunk % 2:
            exponent = torch.randint(20, 250, (16384, 128, 1), dtype=torch.int32, device="cuda", generator=generator)
            below = (pattern.view(16384, 128, 32) >> 23) & 15
            pattern = (pattern & -0x7F800001) | ((exponent - below) << 23).view(16384, 4096)
        x = pattern.view(torch.float32)
        for recipe in RECIPES:
            check(x, recipe, label=f"chunk {chunk}, {recipe}")


def _require_memory(gib):
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def _check_in_chunks(x, recipe, out=None, out_sf=None):
    result = cast(x, *recipe, out=out, out_sf=out_sf)
    for start in range(0, x.shape[0], 2**16):
        rows = slice(start, start + 2**16)
        assert_same([t[rows] for t in result], reference(x[rows], *recipe), f"rows from {start}")


@gpu
@pytest.mark.slow
@pytest.mark.parametrize("recipe", [FLOAT, PACKED], ids=["fp32-128", "packed-32"])
def test_more_than_2_31_elements(recipe):
    _require_memory(24)
    m, n = 2**31 // 4096 + 3, 4096
    x = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    for start in range(0, m, 2**16):
        x[start : start + 2**16] = distinct(min(2**16, m - start), n, seed=start)
    _check_in_chunks(x, recipe)


@gpu
@pytest.mark.slow
@pytest.mark.parametrize("m", [2**22 - 64, 2**22 + 65])
def test_more_than_2_22_rows(m):
    x = distinct(m, 16)
    check(x, FLOAT)
    check(x.t().contiguous().t(), FLOAT, label="column-major")


@gpu
@pytest.mark.slow
@pytest.mark.parametrize("stride", [(2**30 + 16, 1), (1, 2**30 + 16), (2, 2**30 + 6), (2**30 + 5, 3)])
def test_offsets_past_2_31(stride):
    _require_memory(40)
    m, n = (3, 512) if stride[0] > stride[1] else (512, 3)
    values = distinct(m, n)
    x = with_stride(values, stride)
    out = Guarded((m, n), stride, E4M3)
    out_sf = Guarded((m, -(-n // 128)), (2**30 + 1, 7) if m == 3 else (2, 1), torch.float32)
    assert_same(cast(x, *FLOAT, out=out.view, out_sf=out_sf.view), reference(values, *FLOAT))
    out.assert_untouched("out")
    out_sf.assert_untouched("out_sf")


@gpu
def test_stable_over_launches():
    for dtype in DTYPES:
        x = distinct(300, 4096, dtype)
        for view in (x, x.t().contiguous().t()):
            for recipe in RECIPES:
                expected = reference(view, *recipe)
                out, out_sf = (torch.empty_like(t) for t in expected)
                wrong = torch.zeros((), dtype=torch.int64, device="cuda")
                for _ in range(200):
                    out.view(torch.uint8).fill_(0x7F)
                    out_sf.view(torch.int32).fill_(-1)
                    cast(view, *recipe, out=out, out_sf=out_sf)
                    for got, want in zip((out, out_sf), expected):
                        wrong += (got.view(torch.uint8) != want.view(torch.uint8)).any()
                assert wrong.item() == 0, f"{dtype} {recipe} {view.stride()}: {wrong.item()} of 400 outputs differ"


@gpu
@each_recipe
def test_poisoned_allocator(recipe):
    """New outputs take memory full of NaN, so that an element that is not written shows."""
    x = distinct(129, 1000)
    expected = reference(x, *recipe)
    for _ in range(20):
        poison = [torch.full_like(t.view(torch.uint8), 0xFF) for t in expected for _ in range(4)]
        del poison
        assert_same(cast(x, *recipe), expected)


@gpu
@each_recipe
def test_integer_rounding_on_the_gpu(recipe, monkeypatch):
    """What GPUs without the conversion compute (sm_80)."""
    monkeypatch.setattr(fused_cast, "converts_in_hardware", lambda device: False)
    forget(fused_cast._per_token_cast)
    try:
        for x in (bf16_patterns(), specials(), distinct(129, 4096, torch.float32), distinct(7, 1000, torch.float16)):
            check(x, recipe)
    finally:
        forget(fused_cast._per_token_cast)
