"""The casts that store a transposed copy: byte for byte the reference, transposed, also group by group."""

import os

import numpy as np
import pytest
import torch
from casting import DTYPES, distinct, each_dtype, gpu
from compiling import compile_launch
from generators import DEVICE, deep_gemm
from test_fused_block_cast import PLACES, SHAPES, each_recipe
from tile_casting import CASTS, E4M3, assert_bitwise_equal, check, check_grouped, check_guarded, flat, powers, specials
from views import other_values, same_values, with_stride

transposed = deep_gemm.fused_per_channel_cast_to_fp8_transposed
both = deep_gemm.fused_per_token_and_channel_cast_to_fp8
each_cast = pytest.mark.parametrize("name", ["transposed", "both"])
SPLITS = [
    [100, 28, 130, 126], [128, 0, 256, 0], [0, 0, 0], [384], [0, 0, 300, 1], [1, 2, 127, 128, 129], [7] * 33,
    [5] + [0] * 255,
]  # fmt: skip
each_split = pytest.mark.parametrize("ks", SPLITS, ids=lambda ks: f"{len(ks)}x{sum(ks)}")


# Inductor needs a C++ compiler on the CPU.
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"


def ks_tensor(ks, dtype=torch.int32):
    return torch.tensor(ks, dtype=dtype, device=DEVICE)


@each_cast
@each_recipe
@each_dtype
def test_shapes(name, use_ue8m0, gran_k, dtype):
    for m, n in (*SHAPES, (130, 64), (4, 256), (6, 256), (131, 192)):
        check(name, distinct(m, n, dtype), use_ue8m0, gran_k)


@each_cast
@each_recipe
def test_special_values(name, use_ue8m0, gran_k):
    for dtype in DTYPES:
        check(name, specials(260, 400, dtype, DEVICE), use_ue8m0, gran_k, str(dtype))


@each_cast
@pytest.mark.parametrize("m, n", [(0, 0), (0, 256), (5, 0)])
def test_empty(name, m, n):
    x = torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
    check(name, x, False, 128)
    CASTS[name][0](x, False, ks=ks_tensor([0, 0]))


@each_cast
def test_strides_of_what_is_allocated(name):
    for m, n in ((128, 64), (130, 66), (1, 5)):
        for mn_major_sf in (False, True):
            *rows, out, sf = flat(CASTS[name][0](distinct(m, n), False, mn_major_sf=mn_major_sf))
            assert out.stride() == (-(-m // 16) * 16, 1)
            groups = -(-m // 128)
            assert sf.stride() == ((1, -(-n // 4) * 4) if mn_major_sf else (groups, 1))
            if rows:
                assert rows[1].stride() == ((1, -(-m // 4) * 4) if mn_major_sf else (-(-n // 128), 1))


@each_cast
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_strided_inputs(name, use_ue8m0):
    x = distinct(130, 200)
    parent = x.clone()
    for label, view in (same_values(x) | other_values(x)).items():
        check(name, view, use_ue8m0, 128, label)
    for offset in range(17):
        check(name, with_stride(x, (x.shape[1] + 32, 1), offset), use_ue8m0, 128, f"offset {offset}")
    assert torch.equal(x, parent)


@each_cast
@pytest.mark.parametrize("m, n", [(1, 128), (128, 96), (130, 400), (259, 90)])
def test_output_views(name, m, n):
    for label, place in PLACES.items():
        check_guarded(name, distinct(m, n), False, 128, place, label)


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_against_numpy(use_ue8m0):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    m, n = 300, 80
    x = powers(m, n).float()
    payload, sf = transposed(x.to(DEVICE), use_ue8m0)
    for k in range(3):
        rows = x.numpy()[128 * k : 128 * (k + 1)]
        scale = np.abs(rows).max(0) * np.float32(1 / 448)
        if use_ue8m0:
            scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
        expected = (rows * (np.float32(1) / scale)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        got = payload.view(torch.uint8)[:, 128 * k : 128 * (k + 1)].cpu().numpy()
        assert np.array_equal(got, expected.T)
        assert np.array_equal(sf[:, k].cpu().numpy(), scale)


@each_cast
@each_split
@each_recipe
def test_groups(name, ks, use_ue8m0, gran_k):
    for dtype in (torch.int32, torch.int64):
        x = distinct(sum(ks) + 3, 200)
        *rows, out, sf = flat(CASTS[name][0](x, use_ue8m0, gran_k, ks=ks_tensor(ks, dtype)))
        assert sf.stride(0) == 1 and sf.stride(1) == 200
        check_grouped(x, ks, use_ue8m0, gran_k, 1, (out, sf), rows or None)


@each_cast
@pytest.mark.parametrize("alignment", [16, 128])
def test_groups_that_start_at_aligned_rows(name, alignment):
    ks = [100, 0, 28, 130, 126]
    x = distinct(sum(-(-k // alignment) * alignment for k in ks), 136)
    poisoned = torch.full_like(x, torch.nan)
    row = 0
    for k in ks:
        poisoned[row : row + k] = x[row : row + k]
        row += -(-k // alignment) * alignment
    *rows, out, sf = flat(CASTS[name][0](poisoned, True, ks=ks_tensor(ks), alignment=alignment))
    check_grouped(x, ks, True, 128, alignment, (out, sf), rows or None)


@each_cast
def test_groups_into_given_outputs(name):
    """What is written ends with the last group."""
    ks, n = [100, 28, 130, 126], 48
    x = distinct(sum(ks), n)
    total = sum(-(-k // 128) * 128 for k in ks)
    made = flat(CASTS[name][0](x, False, ks=ks_tensor(ks)))
    names = CASTS[name][2]
    for offset in (0, 1, 2, 16):
        given = [t.clone() for t in made]
        buffer = torch.full((made[-2].numel() + 64,), -1, dtype=torch.int8, device=DEVICE)
        given[-2] = buffer.view(E4M3)[offset : offset + made[-2].numel()]
        given[-1].fill_(torch.nan)
        CASTS[name][0](x, False, ks=ks_tensor(ks), **dict(zip(names, given)))
        check_grouped(x, ks, False, 128, 1, given[-2:], given[:-2] or None, f"offset {offset}")
        if DEVICE == "cuda":
            assert (buffer[:offset] == -1).all() and (buffer[offset + n * total :] == -1).all()
            assert given[-1][:, total // 128 :].isnan().all()


@each_cast
def test_bad_groups(name):
    cast, names = CASTS[name][0], CASTS[name][2]
    x = distinct(128, 64)
    for bad, error in (
        ([128], TypeError), (ks_tensor([128]).float(), ValueError), (ks_tensor([[128]]), ValueError),
        (ks_tensor([]), ValueError), (ks_tensor([64, 0, 64, 0])[::2], ValueError),
    ):  # fmt: skip
        with pytest.raises(error, match="ks must be"):
            cast(x, False, ks=bad)
    for alignment in (0, -1, 1.5):
        with pytest.raises(ValueError, match="alignment must be a positive int"):
            cast(x, False, ks=ks_tensor([128]), alignment=alignment)
    for bad in (torch.empty(64, 128, dtype=E4M3), torch.empty(2 * 128 * 64, dtype=E4M3)[::2]):
        with pytest.raises(ValueError, match=f"^{names[-2]} must be"):
            cast(x, False, ks=ks_tensor([128]), **{names[-2]: bad.to(DEVICE)})


@gpu
@each_cast
@each_recipe
def test_stable_over_launches(name, use_ue8m0, gran_k):
    cast, reference, *_ = CASTS[name]
    for make in (powers, specials):
        x = make(1000, 1168, torch.bfloat16, device=DEVICE)
        expected = flat(reference(x, use_ue8m0, gran_k))
        for _ in range(100):
            for got, want in zip(flat(cast(x, use_ue8m0, gran_k)), expected):
                assert_bitwise_equal(got, want, name)


@gpu
@each_cast
def test_graph_replay_with_other_groups(name):
    """Sizes are read on the device: a captured call follows them."""
    x, ks = distinct(512, 256), ks_tensor([128, 384, 0, 0])
    CASTS[name][0](x, True, ks=ks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        *rows, out, sf = flat(CASTS[name][0](x, True, ks=ks))
    for sizes in ([100, 28, 130, 126], [0, 0, 0, 512], [0, 0, 0, 0]):
        ks.copy_(ks_tensor(sizes))
        graph.replay()
        check_grouped(x, sizes, True, 128, 1, (out, sf), rows or None, str(sizes))


@gpu
@each_cast
def test_no_synchronisation(name):
    x, ks = distinct(512, 256), ks_tensor([100, 28, 130, 126])
    CASTS[name][0](x, True, ks=ks)
    torch.cuda.set_sync_debug_mode("error")
    try:
        CASTS[name][0](x, True, ks=ks)
        CASTS[name][0](x, False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@each_cast
def test_sizes_past_the_end_stay_inside(name):
    x = distinct(256, 128)
    for ks in ([1000, 5], [100, 1000], [300, 300, 300]):
        CASTS[name][0](x, False, ks=ks_tensor(ks))
    torch.cuda.synchronize()


@each_cast
def test_compiled(name):
    torch.compiler.reset()
    cast = CASTS[name][0]
    compiled = torch.compile(lambda x, ks: flat(cast(x, True, ks=ks)), fullgraph=True, dynamic=True, backend=BACKEND)
    for sizes, n in (([100, 28, 130, 126], 256), ([128, 256, 1, 2], 384)):
        x = distinct(sum(sizes), n)
        *rows, out, sf = compiled(x, ks_tensor(sizes))
        check_grouped(x, sizes, True, 128, 1, (out, sf), rows or None)
    compiled = torch.compile(lambda x: flat(cast(x, False)), fullgraph=True, dynamic=True, backend=BACKEND)
    for m, n in ((256, 384), (130, 512)):
        x = distinct(m, n)
        for got, want in zip(compiled(x), flat(cast(x, False))):
            assert_bitwise_equal(got, want, f"{name} {m}x{n}")


def test_operator():
    # The fourth test, of the schema, compares tensors with arithmetic that torch lacks for e4m3.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    op = deep_gemm._tile_cast.ops.tile_cast.default
    x, ks = distinct(300, 256), ks_tensor([100, 200])
    out, sf = transposed(x, True, ks=ks)
    torch.library.opcheck(op, (x, ks, "", "channel", True, 128, False, 1, None, None, out, sf), test_utils=tests)
    (out, sf), (out_t, sf_t) = both(x, True)
    arguments = (x, None, "token", "channel", True, 128, False, 1, out, sf, out_t, sf_t)
    torch.library.opcheck(op, arguments, test_utils=tests)


@gpu
@pytest.mark.slow
def test_offsets_past_32_bits():
    m, n = 2**19 + 384, 4096 + 128
    x = torch.randn(128, n, dtype=torch.bfloat16, device=DEVICE).repeat(m // 128, 1)
    x[-128:] *= 4
    want, want_sf = transposed(x[-128:], False)
    out, sf = transposed(x, False)
    assert_bitwise_equal(out[:, -128:], want)
    assert_bitwise_equal(sf[:, -1:], want_sf)
    out, sf = transposed(x, False, ks=ks_tensor([m - 128, 128]))
    assert_bitwise_equal(out[n * (m - 128) : n * m].view(n, 128), want)
    assert_bitwise_equal(sf[:, m // 128 - 1 : m // 128], want_sf)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("groups", [0, 64])
@pytest.mark.parametrize(
    "rows, columns", [("", "channel"), ("token", "channel"), ("block", "block"), ("block", ""), ("channel", "")]
)
def test_what_is_compiled_for_hopper(rows, columns, groups, use_ue8m0):
    """Nothing is spilled, x is read 16 bytes at a time, and payloads are written as widely as the tile allows."""
    pytest.importorskip("triton")
    if groups and columns != "channel":
        pytest.skip("not offered")
    tile_cast = deep_gemm._tile_cast
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    ks = torch.empty(groups, dtype=torch.int32, device="meta") if groups else None
    specs = tile_cast._CASTS[rows, columns]._check(x, ks, (None,) * 4, use_ue8m0, 128, True, 1)
    outputs = [spec.empty("meta") for spec in specs]
    launch = tile_cast.bind_tile_cast(x, ks, rows, columns, outputs, use_ue8m0, 128, 1)
    given = (x, *((ks,) if groups else ()), *outputs)
    tensors = tuple(given[i] for i in launch.places)
    hopper = launch.launch()
    compiled = compile_launch(hopper, tensors, 90, HARDWARE=True, SATURATE=not use_ue8m0)
    assert compiled.stack == 0 and compiled.local == 0
    # Two tiles on an SM at a time.
    assert compiled.registers * hopper.options["num_warps"] * 32 <= 65536 // 2
    config = tile_cast.tile_cast_config(rows, columns)
    per_thread = config.block_m * config.block_n // (32 * config.num_warps)
    assert compiled.instructions("LDG").count("LDG.E.128") == per_thread // 8
    # The transposed copy of a block goes out 8 bytes at a time: 16 warps were faster than wider stores.
    wide = (rows != "") + (columns == "channel")
    assert compiled.instructions("STG").count("STG.E.128") == per_thread // 16 * wide
    assert compiled.instructions("STG").count("STG.E.64") == (per_thread // 8 if columns == "block" else 0)
