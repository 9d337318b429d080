"""The scale-factor layouts in one kernel each: values and every stride, against plain indexing on the host."""

import pytest
import torch
from casting import gpu
from generators import DEVICE, deep_gemm, forget
from test_layout import GRID, inputs, mn_major_strides, packed_words, powers_of_two, shape_of

fused_layout = deep_gemm.fused_layout
assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal
aligned = deep_gemm.get_mn_major_tma_aligned_tensor
packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor
packed_k_grouped = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor
transform = deep_gemm.transform_sf_into_required_layout
reference = deep_gemm.utils.layout

# A tile has 32 rows and 64 columns.
LARGE = pytest.mark.parametrize(
    "mn, k, groups", [(31, 63, 2), (33, 64, None), (4097, 57, None), (130, 129, 3), (8192, 7, 1)]
)


def check_aligned(sf, groups, x, label=""):
    result = aligned(x)
    assert_bitwise_equal(result, sf, label)
    assert result.stride() == mn_major_strides(*sf.shape[-2:], groups) and result.data_ptr() % 16 == 0, label
    assert aligned(result) is result, label
    if result is not x:
        assert result.untyped_storage().nbytes() == 4 * (groups or 1) * sf.shape[-1] * result.stride(-1), label


def check_packed(sf, groups, x, label=""):
    result = packed(x)
    assert_bitwise_equal(result, packed_words(sf), label)
    assert result.stride() == mn_major_strides(sf.shape[-2], -(-sf.shape[-1] // 4), groups), label
    assert result.data_ptr() % 16 == 0, label


@GRID
def test_small(mn, k, groups):
    sf = powers_of_two(*shape_of(mn, k, groups))
    for name, x in inputs(sf).items():
        check_aligned(sf, groups, x, name)
        check_packed(sf, groups, x, name)


@LARGE
def test_large(mn, k, groups):
    sf = powers_of_two(*shape_of(mn, k, groups))
    for name, x in inputs(sf).items():
        check_aligned(sf, groups, x, name)
        check_packed(sf, groups, x, name)


def test_any_bits():
    """Every sign, exponent and mantissa; a packed byte is the exponent whatever stands beside it."""
    bits = torch.randint(-(2**31), 2**31, (129, 57), generator=torch.Generator().manual_seed(0)).int().to(DEVICE)
    sf = bits.view(torch.float32)
    assert_bitwise_equal(aligned(sf), sf)
    exponent = torch.nn.functional.pad(bits >> 23 & 255, (0, 3)).view(129, 15, 4).cpu()
    word = (exponent.long() * 256 ** torch.arange(4)).sum(-1).to(torch.uint32).view(torch.int32)
    assert_bitwise_equal(packed(sf), word)
    leaking = torch.full((5, 4), 0.006975, device=DEVICE)
    assert packed(leaking).tolist() == [[0x77777777]] * 5


@pytest.mark.parametrize("gran_k", [32, 128])
@pytest.mark.parametrize(
    "ks", [[128], [0], [0, 0], [256, 0, 1024, 640], [1, 129, 511, 513], [0, 5000, 0], [128] * 128, [129, 0] * 64]
)
def test_k_grouped(ks, gran_k):
    rows = [-(-k // gran_k) for k in ks]
    for mn in (4, 12, 1028, 2048):
        sf = powers_of_two(sum(rows), mn)
        for ks_tensor in (torch.tensor(ks, dtype=torch.int32), torch.tensor([ks, ks]).int().T.contiguous()[:, 1]):
            result = packed_k_grouped(sf, ks_tensor.to(DEVICE), ks, gran_k)
            words = [packed_words(group.T).T for group in sf.split(rows)]
            assert_bitwise_equal(result, torch.cat(words), f"mn = {mn}")
            assert result.is_contiguous()


def test_k_grouped_sizes_elsewhere():
    """The list alone says enough."""
    sf = powers_of_two(5, 8)
    for ks_tensor in (torch.tensor([384, 256], dtype=torch.int32), torch.empty(2, dtype=torch.int32, device="meta")):
        result = packed_k_grouped(sf, ks_tensor, [384, 256], 128)
        assert_bitwise_equal(result, reference.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
            sf, ks_tensor, [384, 256], 128))  # fmt: skip


@pytest.mark.parametrize("mn, k", [(0, 4), (5, 0), (0, 0)])
@pytest.mark.parametrize("groups", [None, 0, 1, 3])
def test_empty(mn, k, groups):
    sf = torch.empty(shape_of(mn, k, groups), device=DEVICE)
    for function in ("get_mn_major_tma_aligned_tensor", "get_mn_major_tma_aligned_packed_ue8m0_tensor"):
        result, want = getattr(deep_gemm, function)(sf), getattr(reference, function)(sf)
        assert (result.shape, result.stride(), result.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.fixture(params=[False, True], ids=["other", "sm100"])
def sm100(request, monkeypatch):
    for module in (reference, fused_layout):
        monkeypatch.setattr(module, "is_sm100", lambda device=None: request.param)
    return request.param


@pytest.mark.parametrize("gran_mn, gran_k", [(1, 128), (1, 32), (32, 32), (32, 128), (128, 128), (3, 128)])
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("disable", [False, True])
def test_transform(gran_mn, gran_k, groups, disable, sm100):
    mn, k = 261, 640
    sf = powers_of_two(*shape_of(-(-mn // gran_mn), k // gran_k, groups))
    for x in (sf, sf.mT.contiguous().mT):
        arguments = (x, mn, k, (gran_mn, gran_k), groups, None, disable)
        try:
            want = reference.transform_sf_into_required_layout(*arguments)
        except ValueError as error:
            with pytest.raises(ValueError, match="has no layout") as raised:
                transform(*arguments)
            assert str(raised.value) == str(error)
            continue
        result = transform(*arguments)
        assert_bitwise_equal(result, want)
        assert result.stride() == want.stride() and (result is x) == (want is x)
        if result.dtype == torch.int32:
            assert transform(result, mn, k, (1, gran_k), groups) is result


def test_transform_picks_the_granularity():
    rows, blocks = powers_of_two(300, 3), powers_of_two(3, 3)
    of_rows, of_blocks = (
        transform(sf, 300, 257, (1, 128, 128), is_sfa=is_sfa, disable_ue8m0_cast=True)
        for sf, is_sfa in ((rows, True), (blocks, False))
    )
    assert_bitwise_equal(of_rows, rows)
    assert of_rows.stride() == (1, 300) and of_blocks is blocks


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: aligned(torch.ones(4)), "sf must be float32"),
        (lambda: aligned(torch.ones(4, 4).int()), "sf must be float32"),
        (lambda: packed(torch.ones(1, 1, 4, 4)), "sf must be float32"),
        (lambda: transform(torch.ones(5, 3), 5, 384, (1, 128, 128)), "is_sfa must be given"),
        (lambda: transform(torch.ones(5, 3), 6, 384, (1, 128)), r"sf must have shape \(6, 3\)"),
        (lambda: transform(torch.ones(5, 3).double(), 5, 384, (1, 128)), "sf must be float32 or int32"),
        (lambda: packed_k_grouped(torch.ones(2, 6), torch.tensor([256]).int(), [256], 128), "mn a multiple of 4"),
        (lambda: packed_k_grouped(torch.ones(2, 4), torch.tensor([256]).int(), [256], 64), "gran_k must be 32 or 128"),
        (lambda: packed_k_grouped(torch.ones(2, 4), torch.tensor([256]), [256], 128), r"ks_tensor must be int32 \[1\]"),
        (lambda: packed_k_grouped(torch.ones(2, 4), torch.tensor([]).int(), [], 128), "ks must hold 1 to 128"),
        (lambda: packed_k_grouped(torch.ones(2, 4), torch.tensor([384]).int(), [384], 128), "sf must have 3 rows"),
    ],
)
def test_bad_input(call, message):
    with torch.device(DEVICE), pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("mn", [1, 4, 7, 130])
def test_opcheck(mn):
    op = deep_gemm._ops.ops
    for sf in (powers_of_two(mn, 5), powers_of_two(2, mn, 4), powers_of_two(5, mn).t()):
        torch.library.opcheck(op.get_mn_major_tma_aligned_tensor.default, (sf,))
        torch.library.opcheck(op.pack_fp32_into_ue8m0.default, (sf, mn, 1))
    ks = [512, 0, 256]
    arguments = (powers_of_two(6, 4 * mn), torch.tensor(ks, dtype=torch.int32, device=DEVICE), ks, 128)
    torch.library.opcheck(op.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor.default, arguments)


def test_compile():
    ks = [512, 0, 256]
    ks_tensor = torch.tensor(ks, dtype=torch.int32, device=DEVICE)

    def layouts(sf, grouped):
        return aligned(sf), packed(sf), transform(sf, sf.shape[0], 640, (1, 128), disable_ue8m0_cast=True), (
            packed_k_grouped(grouped, ks_tensor, ks, 128))  # fmt: skip

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    torch._dynamo.reset()
    compiled = torch.compile(layouts, backend=backend, fullgraph=True, dynamic=True)
    for mn in (7, 130):
        sf, grouped = powers_of_two(mn, 5), powers_of_two(6, 4 * mn)
        for result, want in zip(compiled(sf, grouped), layouts(sf, grouped)):
            assert_bitwise_equal(result, want)
            assert result.stride() == want.stride()


def test_fake_tensors():
    for mn, k, groups in ((7, 5, 2), (0, 5, None), (4, 0, 3)):
        with torch._subclasses.FakeTensorMode():
            sf = torch.empty(shape_of(mn, k, groups), device=DEVICE)
            assert aligned(sf).stride() == mn_major_strides(mn, k, groups)
            assert packed(sf).stride() == mn_major_strides(mn, -(-k // 4), groups)


@gpu
def test_kernels_do_the_work(monkeypatch):
    for name in ("_to_mn_major", "pack_ue8m0_to_int"):
        monkeypatch.setattr(reference, name, lambda *args: pytest.fail("took the reference"))
    forget(fused_layout._transpose), forget(fused_layout._pack), forget(fused_layout._pack_k_grouped)
    ks = torch.tensor([512, 640], dtype=torch.int32, device=DEVICE)
    aligned(powers_of_two(130, 5)), packed(powers_of_two(2, 130, 5))
    packed_k_grouped(powers_of_two(9, 8), ks, [512, 640], 128)


@gpu
def test_more_columns_than_a_grid_axis_holds():
    sf = powers_of_two(1, 65536 * 64)
    assert_bitwise_equal(aligned(sf), sf)
    assert_bitwise_equal(aligned(powers_of_two(65537, 3, 2)), powers_of_two(65537, 3, 2))


@gpu
@pytest.mark.slow
def test_offsets_past_2_31():
    sf = torch.ones(2**26 + 3, 33, device=DEVICE)
    sf[-5:] = powers_of_two(5, 33)
    assert_bitwise_equal(aligned(sf)[-5:], sf[-5:])
    assert_bitwise_equal(packed(sf)[-5:], packed_words(sf[-5:]))


@gpu
def test_stable_over_launches():
    sf = powers_of_two(8192, 57)
    ks = [4096, 0, 8192, 640]
    grouped = powers_of_two(sum(-(-k // 128) for k in ks), 7168)
    ks_tensor = torch.tensor(ks, dtype=torch.int32, device=DEVICE)
    first = aligned(sf), packed(sf), packed_k_grouped(grouped, ks_tensor, ks, 128)
    assert_bitwise_equal(first[0], sf)
    assert_bitwise_equal(first[1], packed_words(sf))
    for _ in range(100):
        poison = [torch.full((2**20,), torch.nan, device=DEVICE) for _ in range(3)]
        del poison
        for result, want in zip((aligned(sf), packed(sf), packed_k_grouped(grouped, ks_tensor, ks, 128)), first):
            assert torch.equal(result, want)


@gpu
def test_cuda_graph():
    sf, grouped = powers_of_two(130, 5), powers_of_two(9, 8)
    ks_tensor = torch.tensor([512, 640], dtype=torch.int32, device=DEVICE)

    def run():
        return aligned(sf), packed(sf), packed_k_grouped(grouped, ks_tensor, [512, 640], 128)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for _ in range(2):
        sf.copy_(sf.roll(1, 0)), grouped.copy_(grouped.roll(1, 0))
        graph.replay()
        for result, want in zip(results, run()):
            assert_bitwise_equal(result, want)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device():
    sf = powers_of_two(130, 5).to("cuda:1")
    assert_bitwise_equal(aligned(sf), sf)
    assert aligned(sf).device == sf.device == packed(sf).device


def test_kernel_names():
    """The profiler substrings that users of DeepGEMM look for."""
    pytest.importorskip("triton")
    names = [name for name in vars(fused_layout) if name.endswith("_kernel")]
    assert [name for name in names if "transpose" in name] == ["transpose_sf_kernel"]
    assert len([name for name in names if "pack_fp32_into_ue8m0" in name]) == 2
    assert not [name for name in names if "gemm_" in name]
