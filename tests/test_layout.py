"""Scale-factor layouts: values, and every stride, against plain indexing."""

import pytest
import torch
from generators import DEVICE, deep_gemm

layout = deep_gemm.utils.layout
assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal

MN = (1, 2, 4, 5, 7, 127, 128, 129)
K = (1, 3, 4, 5, 57)
GROUPS = (None, 1, 3)
GRID = pytest.mark.parametrize("mn, k, groups", [(mn, k, g) for mn in MN for k in K for g in GROUPS])


def powers_of_two(*shape):
    """Neighbours differ, in every dimension."""
    index = torch.arange(torch.Size(shape).numel()).view(shape) * 37 + torch.arange(shape[-2])[:, None]
    return torch.exp2((index % 251 - 125).float()).to(DEVICE)


def shape_of(mn, k, groups):
    return (mn, k) if groups is None else (groups, mn, k)


def inputs(sf):
    """The same values in several memory layouts; what lies between them is NaN."""
    wide = sf.new_full((*sf.shape[:-2], sf.shape[-2] + 3, sf.shape[-1] + 5), torch.nan)
    wide[..., 1 : 1 + sf.shape[-2], 2 : 2 + sf.shape[-1]] = sf
    layouts = {
        "row-major": sf,
        "MN-major": sf.mT.contiguous().mT,
        "slice": wide[..., 1 : 1 + sf.shape[-2], 2 : 2 + sf.shape[-1]],
    }
    if sf.dim() == 3:
        aligned = layout.get_mn_major_tma_aligned_tensor(sf.repeat_interleave(2, dim=0))
        aligned[1::2] = torch.nan
        layouts["every other group"] = aligned[::2]
    return layouts


def mn_major_strides(mn, k, groups):
    aligned = (mn + 3) // 4 * 4
    return (1, aligned) if groups is None else (aligned * k, 1, aligned)


def packed_words(sf):
    """int32 [.., mn, ceil(k / 4)] by arithmetic on the host."""
    exponents = sf.cpu().log2().long() + 127
    exponents = torch.nn.functional.pad(exponents, (0, -sf.shape[-1] % 4)).unflatten(-1, (-1, 4))
    return (exponents * 256 ** torch.arange(4)).sum(-1).to(torch.uint32).view(torch.int32)


@pytest.mark.parametrize(
    "mn, size, aligned", [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8), (5, 2, 8), (9, 2, 16), (17, 1, 32), (3, 16, 3)]
)
def test_tma_aligned_size(mn, size, aligned):
    assert layout.get_tma_aligned_size(mn, size) == aligned


@GRID
def test_mn_major(mn, k, groups):
    sf = powers_of_two(*shape_of(mn, k, groups))
    for name, x in inputs(sf).items():
        result = layout.get_mn_major_tma_aligned_tensor(x)
        assert_bitwise_equal(result, sf, name)
        assert result.stride() == mn_major_strides(mn, k, groups) and result.data_ptr() % 16 == 0
        assert layout.get_mn_major_tma_aligned_tensor(result) is result
        if result is not x:
            assert result.untyped_storage().nbytes() >= 4 * (groups or 1) * k * mn_major_strides(mn, k, groups)[-1]


@GRID
def test_mn_major_packed(mn, k, groups):
    sf = powers_of_two(*shape_of(mn, k, groups))
    for name, x in inputs(sf).items():
        result = layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(x)
        assert_bitwise_equal(result, packed_words(sf), name)
        assert result.stride() == mn_major_strides(mn, -(-k // 4), groups) and result.data_ptr() % 16 == 0


def test_packing_keeps_bytes_apart():
    sf = torch.full((5, 4), 0.006975, device=DEVICE)
    assert layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf).tolist() == [[0x77777777]] * 5
    ks = torch.tensor([512], dtype=torch.int32, device=DEVICE)
    packed = layout.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf.T[:, :4].contiguous(), ks, [512], 128)
    assert packed.tolist() == [[0x77777777] * 4]


@pytest.mark.parametrize("mn, k", [(0, 4), (5, 0), (0, 0)])
def test_empty(mn, k):
    for groups in GROUPS:
        sf = torch.empty(shape_of(mn, k, groups), device=DEVICE)
        for result, columns in [
            (layout.get_mn_major_tma_aligned_tensor(sf), k),
            (layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf), k // 4),
        ]:
            assert result.shape == shape_of(mn, columns, groups)
            assert result.stride() == mn_major_strides(mn, columns, groups)


@pytest.mark.parametrize("gran_k", [32, 128])
@pytest.mark.parametrize("ks", [[128], [0], [256, 0, 1024, 640], [1, 129, 511, 513]])
def test_k_grouped_packed(ks, gran_k):
    rows = [-(-k // gran_k) for k in ks]
    sf = powers_of_two(sum(rows), 12)
    ks_tensor = torch.tensor(ks, dtype=torch.int32, device=DEVICE)
    result = layout.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, ks_tensor, ks, gran_k)
    assert_bitwise_equal(result, torch.cat([packed_words(group.T).T for group in sf.split(rows)]))
    assert result.stride() == (12, 1)


@pytest.fixture
def sm100(monkeypatch):
    monkeypatch.setattr(layout, "is_sm100", lambda device=None: True)


@pytest.fixture
def other_arch(monkeypatch):
    monkeypatch.setattr(layout, "is_sm100", lambda device=None: False)


transform = layout.transform_sf_into_required_layout


def test_transform_picks_the_granularity(other_arch):
    per_row, per_block = powers_of_two(300, 3), powers_of_two(3, 3)
    assert transform(per_row, 300, 257, (1, 128, 128), is_sfa=True).stride() == (1, 300)
    assert transform(per_block, 300, 257, (1, 128, 128), is_sfa=False) is per_block
    assert transform(per_row, 300, 257, (1, 128)).stride() == (1, 300)
    assert transform(powers_of_two(2, 5, 3), 5, 384, (1, 128), num_groups=2).stride() == (24, 1, 8)


def test_transform_blocks(other_arch):
    for sf in (powers_of_two(2, 3, 5), powers_of_two(2, 5, 3).mT):
        assert transform(sf, 300, 600, (128, 128), num_groups=2) is sf
    aligned = layout.get_mn_major_tma_aligned_tensor(powers_of_two(3, 5))
    with pytest.raises(ValueError, match="sf must be contiguous"):
        transform(aligned, 300, 600, (128, 128))
    one_row = layout.get_mn_major_tma_aligned_tensor(powers_of_two(1, 1))
    assert transform(one_row, 100, 100, (128, 128)) is one_row


@pytest.mark.parametrize("gran_mn", [1, 32, 128])
@pytest.mark.parametrize("gran_k", [32, 128])
def test_transform_packs_on_sm100(sm100, gran_mn, gran_k):
    mn, k = 261, 640
    sf = powers_of_two(2, -(-mn // gran_mn), k // gran_k)
    result = transform(sf, mn, k, (gran_mn, gran_k), num_groups=2)
    rows = sf[:, [i // gran_mn for i in range(mn)]]
    assert_bitwise_equal(result, packed_words(rows))
    assert result.stride() == mn_major_strides(mn, -(-k // (4 * gran_k)), 2)
    assert transform(result, mn, k, (1, gran_k), num_groups=2) is result


def test_transform_flag_on_sm100(sm100):
    sf = powers_of_two(5, 3)
    assert_bitwise_equal(transform(sf, 5, 384, (1, 128), disable_ue8m0_cast=True), sf)


def test_transform_one_row_on_sm100(sm100):
    word = torch.zeros(1, 8, dtype=torch.int32, device=DEVICE)[:, :2].as_strided((1, 2), (3, 4))
    assert transform(word, 1, 1024, (1, 128)) is word


@pytest.mark.parametrize(
    "shape, dtype, mn, k, recipe, options, message",
    [
        ((5, 3), torch.float32, 5, 384, (1, 128, 128), {}, "is_sfa must be given"),
        ((5, 3), torch.float32, 5, 384, (1, 128), {"is_sfa": True}, "is_sfa must be None"),
        ((5, 3), torch.float32, 5, 384, (128,), {}, "recipe must be"),
        ((5, 3), torch.float32, 5, 384, (0, 128), {}, "recipe must be positive"),
        ((5, 3), torch.float64, 5, 384, (1, 128), {}, "sf must be float32 or int32"),
        ((5, 3), torch.float32, 6, 384, (1, 128), {}, r"sf must have shape \(6, 3\)"),
        ((5, 3), torch.float32, 5, 385, (1, 128), {}, r"sf must have shape \(5, 4\)"),
        ((5, 3), torch.float32, 5, 384, (1, 128), {"num_groups": 2}, r"sf must have shape \(2, 5, 3\)"),
        ((5, 12), torch.float32, 5, 384, (1, 32), {}, "has no layout"),
        ((5, 1), torch.int32, 5, 384, (1, 128), {}, "has no layout"),
        ((1, 1), torch.int32, 5, 384, (128, 128), {}, "has no layout"),
    ],
)
def test_transform_bad_input(other_arch, shape, dtype, mn, k, recipe, options, message):
    with pytest.raises(ValueError, match=message):
        transform(torch.ones(shape, dtype=dtype, device=DEVICE), mn, k, recipe, **options)


@pytest.mark.parametrize(
    "sf, mn, recipe, options, message",
    [
        (torch.ones(5, 6), 5, (1, 64), {}, "has no layout"),
        (torch.ones(5, 12), 5, (1, 32), {"disable_ue8m0_cast": True}, "has no layout"),
        (torch.ones(5, 1, dtype=torch.int32).expand(5, 1), 5, (1, 128), {}, "MN-major and TMA-aligned"),
        (torch.ones(1, 1, dtype=torch.int32), 5, (128, 128), {}, "has no layout"),
    ],
)
def test_transform_bad_input_on_sm100(sm100, sf, mn, recipe, options, message):
    with pytest.raises(ValueError, match=message):
        transform(sf.to(DEVICE), mn, 384, recipe, **options)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: layout.get_tma_aligned_size(4, 3), "element_size must divide 16, got 3"),
        (lambda: layout.get_mn_major_tma_aligned_tensor(torch.ones(4)), "sf must be float32"),
        (lambda: layout.get_mn_major_tma_aligned_tensor(torch.ones(4, 4).int()), "sf must be float32"),
        (lambda: layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.ones(1, 1, 4, 4)), "sf must be float32"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "sf, ks_tensor, ks, gran_k, message",
    [
        (torch.ones(2, 6), [256], [256], 128, "mn a multiple of 4"),
        (torch.ones(4, 2).T, [256], [256], 128, "contiguous"),
        (torch.ones(2, 4).int(), [256], [256], 128, "sf must be float32"),
        (torch.ones(2, 4), [256], [256], 64, "gran_k must be 32 or 128"),
        (torch.ones(2, 4), [256, 0], [256], 128, r"ks_tensor must be int32 \[1\]"),
        (torch.ones(2, 4), [], [], 128, "ks must hold 1 to 128"),
        (torch.ones(129, 4), [128] * 129, [128] * 129, 128, "ks must hold 1 to 128"),
        (torch.ones(2, 4), [512, -256], [512, -256], 128, "at least 0"),
        (torch.ones(2, 4), [384], [384], 128, "sf must have 3 rows"),
    ],
)
def test_k_grouped_bad_input(sf, ks_tensor, ks, gran_k, message):
    ks_tensor = torch.tensor(ks_tensor, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        layout.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, ks_tensor, ks, gran_k)


def test_fake_tensors():
    with torch._subclasses.FakeTensorMode():
        sf = torch.empty(2, 7, 5, device=DEVICE)
        assert layout.get_mn_major_tma_aligned_tensor(sf).stride() == (40, 1, 8)
        assert layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf).stride() == (16, 1, 8)
