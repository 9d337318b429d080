"""The casts by block, by channel and to FP4: byte for byte their references."""

import os

import numpy as np
import pytest
import torch
from casting import DTYPES, distinct, each_dtype, gpu
from compiling import compile_launch
from generators import DEVICE, deep_gemm
from tile_casting import CASTS, E4M3, assert_bitwise_equal, check, check_guarded, flat, powers, shape_of, specials
from views import other_values, same_values, with_stride

each_cast = pytest.mark.parametrize("name", [name for name in CASTS if name not in ("transposed", "both")])
RECIPES = [(False, 128), (True, 128), (False, 32), (True, 32)]
each_recipe = pytest.mark.parametrize("use_ue8m0, gran_k", RECIPES)
# Tiles are 128 rows, or for FP4 4, by 128 to 1024 columns.
SHAPES = (
    (1, 1), (1, 128), (3, 97), (7, 16), (31, 33), (32, 160), (127, 127), (128, 128), (129, 129), (130, 576),
    (255, 1025), (256, 384), (1000, 136), (513, 1000),
)  # fmt: skip


@each_cast
@each_recipe
@each_dtype
def test_shapes(name, use_ue8m0, gran_k, dtype):
    for m, n in SHAPES:
        check(name, distinct(*shape_of(name, m, n, gran_k), dtype), use_ue8m0, gran_k)


@each_cast
@each_recipe
def test_special_values(name, use_ue8m0, gran_k):
    for dtype in DTYPES:
        check(name, specials(*shape_of(name, 260, 400, gran_k), dtype, DEVICE), use_ue8m0, gran_k, str(dtype))


@each_cast
@pytest.mark.parametrize("m, n", [(0, 0), (0, 256), (128, 0)])
def test_empty(name, m, n):
    check(name, torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE), False, 128)


@each_cast
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_strided_inputs(name, use_ue8m0):
    x = distinct(*shape_of(name, 130, 200, 128))
    parent = x.clone()
    for label, view in (same_values(x) | other_values(x)).items():
        if shape_of(name, *view.shape, 128) == tuple(view.shape):
            check(name, view, use_ue8m0, 128, label)
    for offset in range(17):
        check(name, with_stride(x, (x.shape[1] + 32, 1), offset), use_ue8m0, 128, f"offset {offset}")
    assert torch.equal(x, parent)


@each_cast
@pytest.mark.parametrize("m, n", [(1, 128), (130, 400), (257, 90)])
def test_output_views(name, m, n):
    x = distinct(*shape_of(name, m, n, 128))
    for label, place in PLACES.items():
        check_guarded(name, x, False, 128, place, label)


PLACES = {
    "row-major, padded": lambda shape: ((-(-shape[1] // 16) * 16 + 32, 1), 16),
    "row-major, unaligned": lambda shape: ((shape[1] + 3, 1), 5),
    "row-major, a byte off": lambda shape: ((-(-shape[1] // 16) * 16 + 16, 1), 1),
    "column-major": lambda shape: ((1, -(-shape[0] // 4) * 4 + 4), 4),
    "every other column": lambda shape: ((2 * shape[1] + 1, 2), 1),
}


@pytest.mark.parametrize("use_ue8m0, packed", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("gran_k", [32, 128])
def test_fp4_recipes(use_ue8m0, packed, gran_k):
    for m, n in ((1, 512), (5, 1000), (9, 4096), (130, 3072)):
        x = distinct(m, n)
        expected = deep_gemm.utils.per_token_cast_to_fp4(x, use_ue8m0, gran_k, packed)
        result = deep_gemm.fused_per_token_cast_to_fp4(x, use_ue8m0, gran_k, packed)
        for got, want in zip(result, expected):
            assert_bitwise_equal(got, want, f"{m}x{n}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp4_ties_and_neighbours(dtype):
    """Every midpoint and its neighbours, in a group whose scale factor is 1."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).to(dtype)
    up, down = (torch.nextafter(midpoints, torch.full_like(midpoints, end)) for end in (9.0, 0.0))
    values = torch.cat([midpoints, up, down])
    values = torch.cat([values, -values, torch.tensor([6.0, 0.0, -0.0]).to(dtype)])
    x = torch.zeros(2, 128, dtype=dtype)
    x[:, : len(values)] = values
    packed, sf = deep_gemm.fused_per_token_cast_to_fp4(x.to(DEVICE), True)
    assert (sf == 1).all()
    codes = torch.stack([packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4], -1).flatten(1)
    index = np.searchsorted([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], x.abs().double().numpy(), side="left")
    expected = index + 8 * ((x < 0).numpy() & (index > 0))
    assert np.array_equal(codes.cpu().numpy(), expected)


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_block_cast_against_numpy(use_ue8m0):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = powers(256, 384).float()
    (payload, sf), (payload_t, sf_t) = deep_gemm.fused_per_block_cast_to_fp8(
        x.to(DEVICE), use_ue8m0, with_transpose=True
    )
    blocks = x.numpy().reshape(2, 128, 3, 128)
    scale = np.abs(blocks).max((1, 3)) * np.float32(1 / 448)
    if use_ue8m0:
        scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
    bytes_ = (blocks * (np.float32(1) / scale)[:, None, :, None]).reshape(256, 384).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(payload.view(torch.uint8).cpu().numpy(), bytes_.view(np.uint8))
    assert np.array_equal(payload_t.view(torch.uint8).cpu().numpy(), bytes_.view(np.uint8).T)
    assert np.array_equal(sf.cpu().numpy(), scale) and np.array_equal(sf_t.cpu().numpy(), scale.T)


@each_cast
def test_bad_arguments(name):
    cast, _, names, unit_m, unit_n = CASTS[name]
    x = torch.ones(128, 128, dtype=torch.bfloat16, device=DEVICE)
    for bad, error, text in (
        ([1], TypeError, "x must be a tensor"),
        (x[0], ValueError, "x must be 2-D"),
        (x.double(), ValueError, "x must be torch.bfloat16"),
    ):
        with pytest.raises(error, match=text):
            cast(bad, False, 128)
    with pytest.raises(ValueError, match="gran_k must be 32 or 128, got 64"):
        cast(x, False, 64)
    for output, good in zip(names, flat(cast(x, False, 128))):
        for bad in (good.double(), good[:0], good.expand(2, *good.shape)):
            with pytest.raises(ValueError, match=f"^{output} must be"):
                cast(x, False, 128, **{output: bad})
        with pytest.raises(TypeError, match=f"^{output} must be a tensor"):
            cast(x, False, 128, **{output: 1})
    if unit_m is None:
        with pytest.raises(ValueError, match="multiple of gran_k = 128, got 127"):
            cast(x[1:], False, 128)
    if unit_n == 2:
        with pytest.raises(ValueError, match="even number of columns, got 127"):
            cast(x[:, 1:], False, 128)


def test_transposed_outputs_need_the_transpose():
    x = torch.ones(128, 128, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="with_transpose=True"):
        deep_gemm.fused_per_block_cast_to_fp8(x, False, out_t=torch.empty(128, 128, dtype=E4M3, device=DEVICE))


def test_outputs_that_overlap():
    buffer = torch.zeros(256, 128, dtype=E4M3, device=DEVICE)
    x = torch.ones(128, 128, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="out_t overlaps out in memory"):
        deep_gemm.fused_per_block_cast_to_fp8(x, False, with_transpose=True, out=buffer[:128], out_t=buffer[1:129])
    assert not buffer.view(torch.uint8).any()


@gpu
@each_cast
@each_recipe
def test_stable_over_launches(name, use_ue8m0, gran_k):
    _, reference, *_ = CASTS[name]
    for make in (powers, specials):
        x = make(*shape_of(name, 1000, 1168, gran_k), torch.bfloat16, device=DEVICE)
        expected = flat(reference(x, use_ue8m0, gran_k))
        for _ in range(100):
            for got, want in zip(flat(CASTS[name][0](x, use_ue8m0, gran_k)), expected):
                assert_bitwise_equal(got, want, name)


@gpu
@each_cast
def test_graph_replay(name):
    cast, reference, *_ = CASTS[name]
    x = distinct(256, 512)
    cast(x, True, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = flat(cast(x, True, 128))
    x.copy_(distinct(256, 512, seed=1))
    graph.replay()
    for got, want in zip(result, flat(reference(x, True, 128))):
        assert_bitwise_equal(got, want, name)


@each_cast
def test_compiled(name):
    torch.compiler.reset()
    cast = CASTS[name][0]
    # Inductor needs a C++ compiler on the CPU.
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(lambda x: flat(cast(x, True, 128)), fullgraph=True, dynamic=True, backend=backend)
    for m, n in ((256, 384), (384, 512), (128, 256)):
        x = distinct(m, n)
        for got, want in zip(compiled(x), flat(cast(x, True, 128))):
            assert_bitwise_equal(got, want, f"{name} {m}x{n}")


@gpu
@pytest.mark.slow
@each_cast
def test_offsets_past_32_bits(name):
    m, n = 2**19 + 128, 4096 + 128
    x = torch.randn(128, n, dtype=torch.bfloat16, device=DEVICE).repeat(m // 128, 1)
    x[-128:] *= 4
    result, tail = flat(CASTS[name][0](x, False, 128)), flat(CASTS[name][0](x[-128:], False, 128))
    assert_bitwise_equal(result[0][-128:], tail[0], name)
    if len(result) == 4:
        assert_bitwise_equal(result[2][:, -128:], tail[2], name)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("recipe", [(False, 128, False), (True, 32, True)], ids=["fp32-128", "packed-32"])
def test_what_is_compiled_for_hopper(recipe):
    """FP4: nothing is spilled, x and the payload move 16 bytes at a time."""
    pytest.importorskip("triton")
    fused = deep_gemm.fused_block_cast
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    outputs = [spec.empty("meta") for spec in fused._check_fp4(x, *recipe, None, None)]
    launch = fused.bind_per_token_cast_to_fp4(x, *recipe, *outputs)
    compiled = compile_launch(launch, (x, *outputs), 90, HARDWARE=True)
    assert compiled.stack == 0 and compiled.local == 0
    assert set(compiled.instructions("LDG")) == {"LDG.E.128"}
    assert "STG.E.128" in compiled.instructions("STG")
