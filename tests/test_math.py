"""The reference casts against NumPy and ml_dtypes, which share no code with torch's arithmetic."""

import pytest
import torch
from generators import DEVICE, deep_gemm

np = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")

math = deep_gemm.utils.math
assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BF16_PATTERNS = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCALE_MODES = pytest.mark.parametrize("use_ue8m0", [False, True], ids=["fp32", "ue8m0"])


def oracle_sf(amax, largest, use_ue8m0):
    sf = np.maximum(amax, np.float32(1e-4)) * (np.float32(1) / np.float32(largest))
    if use_ue8m0:
        finite = np.isfinite(sf)
        fraction, exponent = np.frexp(np.where(finite, sf, 1))
        exponent = np.where(finite, exponent - (fraction == 0.5), 127).clip(-126, 127)
        sf = np.ldexp(np.float32(1), exponent)
    return sf.astype(np.float32)


def oracle_scale(groups, use_ue8m0, largest=448):
    """x / sf and sf of an fp32 array [..., group]."""
    with np.errstate(all="ignore"):
        sf = oracle_sf(np.abs(groups).max(-1), largest, use_ue8m0)
        return groups * (np.float32(1) / sf)[..., None], sf


def oracle_per_token_fp8(x, use_ue8m0, gran_k):
    m, n = x.shape
    padded = np.pad(x.float().cpu().numpy(), ((0, 0), (0, -n % gran_k)))
    y, sf = oracle_scale(padded.reshape(m, padded.shape[1] // gran_k, gran_k), use_ue8m0)
    with np.errstate(all="ignore"):
        return y.reshape(padded.shape)[:, :n].astype(ml_dtypes.float8_e4m3fn), sf


def oracle_e2m1(y):
    """Codes; argmin takes the first of equals, which is the one nearer to zero."""
    magnitude = np.abs(y.astype(np.float64))
    index = np.abs(np.minimum(magnitude, 6)[..., None] - E2M1_VALUES).argmin(-1)
    index[np.isnan(y)] = 7
    return (index + 8 * ((y < 0) & (index > 0))).astype(np.uint8)


def as_bytes(q):
    """e4m3 as uint8 on the CPU, every NaN as 0x7f: sign and payload of a NaN are the device's."""
    q = torch.from_numpy(q.view(np.uint8)) if isinstance(q, np.ndarray) else q.view(torch.uint8).cpu()
    return torch.where(q & 0x7F == 0x7F, 0x7F, q)


def as_bits(sf):
    """fp32 on the CPU, every NaN the same one."""
    sf = torch.from_numpy(sf) if isinstance(sf, np.ndarray) else sf.cpu()
    return torch.where(sf.isnan(), torch.nan, sf)


def check(result, expected, label=""):
    assert_bitwise_equal(as_bytes(result[0]), as_bytes(expected[0]), f"{label} q")
    assert_bitwise_equal(as_bits(result[1]), as_bits(expected[1]), f"{label} sf")


def exponent(sf):
    return (sf.cpu().view(torch.int32) >> 23).tolist()


def exact_groups(shape, largest, seed=0):
    """fp32 [groups, *shape]: random values that the format holds, the largest among them in each group."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float() if largest == 448 else torch.tensor(E2M1_VALUES)
    index = torch.randint(len(values), shape, generator=generator)
    sign = torch.randint(2, shape, generator=generator) * 2 - 1
    grid = (values[index] * sign).float()
    grid.view(shape[0], -1)[:, 0] = largest
    return grid


def finite_input(dtype, m=33, n=1000):
    """Groups of very different magnitude, with an all-zero one, subnormals and the largest value."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(m, n, generator=generator) * torch.exp2(torch.randint(-20, 15, (m, n), generator=generator))
    x[3, :256] = 0
    x[4, :256] *= 1e-6
    x[5, n // 2] = torch.finfo(dtype).max
    x[6, n // 3] = -torch.finfo(dtype).max
    return x.to(dtype)


# FP8, per token


@SCALE_MODES
@pytest.mark.parametrize("amax", [1e-5, 0.4375, 1.0, 448.0, 3e4, 1e30, 3.3895e38])
def test_every_bf16_pattern_under_an_amax(amax, use_ue8m0):
    amax = torch.tensor(amax).bfloat16()
    values = BF16_PATTERNS[BF16_PATTERNS.abs() <= amax]
    values = torch.cat([values, values.new_zeros(-len(values) % (4 * 127))]).view(-1, 127)
    x = torch.cat([values, amax.expand(len(values), 1)], dim=1).view(-1, 512)
    result = math.per_token_cast_to_fp8(x.to(DEVICE), use_ue8m0)
    check(result, oracle_per_token_fp8(x, use_ue8m0, 128))


@SCALE_MODES
def test_every_bf16_pattern_as_the_amax(use_ue8m0):
    x = torch.stack([torch.ones_like(BF16_PATTERNS), BF16_PATTERNS], dim=1)
    q, sf = oracle_per_token_fp8(x, use_ue8m0, 2)
    if use_ue8m0:
        # Inf stays Inf after scaling, and the installed torch decides on its byte.
        infinite = x.isinf().to(DEVICE)
        q[infinite.cpu().numpy()] = as_bytes(x.to(DEVICE)[infinite].float().to(E4M3)).numpy().view(q.dtype)
    check(math.per_token_cast_to_fp8(x.to(DEVICE), use_ue8m0, 2), (q, sf))


@SCALE_MODES
@pytest.mark.parametrize("gran_k", [1, 32, 100, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_per_token_fp8(dtype, gran_k, use_ue8m0):
    x = finite_input(dtype)
    check(math.per_token_cast_to_fp8(x.to(DEVICE), use_ue8m0, gran_k), oracle_per_token_fp8(x, use_ue8m0, gran_k))


@SCALE_MODES
@pytest.mark.parametrize("n", [1, 31, 32, 33, 127, 128, 129, 576])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_partial_groups(m, n, use_ue8m0):
    x = finite_input(torch.float32)[:m, :n]
    q, sf = math.per_token_cast_to_fp8(x.to(DEVICE), use_ue8m0, 32)
    check((q, sf), oracle_per_token_fp8(x, use_ue8m0, 32))
    assert q.stride() == (n, 1) and sf.stride() == (sf.shape[1], 1)


@SCALE_MODES
@pytest.mark.parametrize(
    "value, byte",
    [
        (1.0625, 0x38),  # ties, to even
        (1.1875, 0x3A),
        (1.5 * 2**-9, 0x02),
        (2.5 * 2**-9, 0x02),
        (2**-10, 0x00),
        (1.0625 + 2**-23, 0x39),  # just above a tie
        (2**-10 + 2**-33, 0x01),
        (-0.0, 0x80),
        (-448.0, 0xFE),
    ],
)
def test_fp8_rounding(value, byte, use_ue8m0):
    q, sf = math.per_token_cast_to_fp8(torch.tensor([[value, 448.0]], device=DEVICE), use_ue8m0)
    assert sf.item() == 1.0
    assert q.view(torch.uint8).tolist() == [[byte, 0x7E]]


def test_fp32_sf_is_a_product():
    sf = math.per_token_cast_to_fp8(torch.full((1, 128), 3.0, device=DEVICE), False)[1]
    assert sf.view(torch.int32).item() == 0x3BDB6DB8  # 3 / 448, divided, is 0x3bdb6db7


def test_ue8m0_around_powers_of_two():
    middle = 448 * torch.exp2(torch.arange(-40, 41))
    amax = torch.stack([torch.nextafter(middle, torch.tensor(0.0)), middle, torch.nextafter(middle, 2 * middle)], 1)
    x = torch.stack([amax, -amax / 3], dim=-1).view(-1, 6)
    result = math.per_token_cast_to_fp8(x.to(DEVICE), True, 2)
    check(result, oracle_per_token_fp8(x, True, 2))
    k = 3 - -40
    assert exponent(result[1])[k] == [127 + 3, 127 + 3, 127 + 4]


@SCALE_MODES
def test_per_token_scales_go_with_their_groups(use_ue8m0):
    grid = exact_groups((5 * 8, 32), 448)
    sf = torch.exp2(torch.arange(40.0) - 8).view(5, 8)
    x = (grid.view(5, 8, 32) * sf[..., None]).view(5, 256)
    check(math.per_token_cast_to_fp8(x.to(DEVICE), use_ue8m0, 32), (grid.view(5, 256).to(E4M3), sf))
    if use_ue8m0:
        packed = math.per_token_cast_to_fp8(x.bfloat16().to(DEVICE), True, 32, True)[1]
        words = (torch.arange(40).view(5, 8) + 119).to(torch.uint8).view(torch.int32)
        assert_bitwise_equal(packed, words)


# The other groupings


@SCALE_MODES
def test_per_channel_fp8(use_ue8m0):
    grid = exact_groups((2 * 7, 128), 448).view(2, 7, 128).transpose(1, 2)
    sf = torch.exp2(torch.arange(14.0) - 8).view(2, 7)
    x = (grid * sf[:, None]).reshape(256, 7)
    expected = grid.reshape(256, 7).to(E4M3), sf
    check(math.per_channel_cast_to_fp8(x.to(DEVICE), use_ue8m0), expected)
    check(math.per_channel_cast_to_fp8(x.T.contiguous().to(DEVICE).T, use_ue8m0), expected, "transposed")


@SCALE_MODES
@pytest.mark.parametrize("m, n", [(64, 96), (57, 91), (1, 65), (33, 1)])
def test_per_block_fp8(m, n, use_ue8m0):
    rows, columns = -(-m // 32), -(-n // 32)
    grid = exact_groups((rows * columns, 32, 32), 448).view(rows, columns, 32, 32)
    sf = torch.exp2(torch.arange(float(rows * columns)) - 8).view(rows, columns)

    def assemble(blocks):
        return blocks.transpose(1, 2).reshape(rows * 32, columns * 32)[:m, :n]

    x = assemble(grid * sf[..., None, None])
    check(math.per_block_cast_to_fp8(x.to(DEVICE), use_ue8m0, 32), (assemble(grid).to(E4M3), sf))


@SCALE_MODES
@pytest.mark.parametrize(
    "dims, sf_shape", [((0,), (3,)), ((0, 2), (3, 7)), ((-1,), (7,)), ((), ()), ((0, 1, 2), (3, 5, 7))]
)
def test_per_custom_dims_fp8(dims, sf_shape, use_ue8m0):
    x = finite_input(torch.bfloat16, 15, 7).view(3, 5, 7)
    kept = [d % 3 for d in dims]
    order = kept + [d for d in range(3) if d not in kept]
    groups = x.permute(order).float().reshape(*sf_shape, -1).numpy()
    y, sf = oracle_scale(groups, use_ue8m0)
    q = torch.from_numpy(y.reshape([x.shape[d] for d in order])).permute([order.index(d) for d in range(3)])
    check(math.per_custom_dims_cast_to_fp8(x.to(DEVICE), dims, use_ue8m0), (q.to(E4M3), torch.from_numpy(np.array(sf))))


def test_per_custom_dims_squeezes():
    shapes = [(5, 64), (1, 64), (5, 0), (0, 64)]
    results = [math.per_custom_dims_cast_to_fp8(torch.ones(s, device=DEVICE), (0,), True) for s in shapes]
    assert [tuple(q.shape) for q, _ in results] == shapes
    assert [tuple(sf.shape) for _, sf in results] == [(5,), (), (5,), (0,)]
    assert math.per_custom_dims_cast_to_fp8(torch.ones(5, 0, device=DEVICE), (0, 1), True)[1].shape == (5, 0)


# FP4


@SCALE_MODES
@pytest.mark.parametrize("gran_k", [1, 32, 100, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_per_token_fp4(dtype, gran_k, use_ue8m0):
    x = finite_input(dtype)
    m, n = x.shape
    padded = np.pad(x.float().numpy(), ((0, 0), (0, -n % gran_k)))
    y, sf = oracle_scale(padded.reshape(m, -1, gran_k), use_ue8m0, largest=6)
    codes = oracle_e2m1(y.reshape(padded.shape)[:, :n])
    packed, result_sf = math.per_token_cast_to_fp4(x.to(DEVICE), use_ue8m0, gran_k)
    assert_bitwise_equal(packed, torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8))
    assert_bitwise_equal(result_sf, torch.from_numpy(sf))


def test_fp4_ties_go_toward_zero():
    # 0.25 up to 5, each with its sign, and neighbours; the 6 makes sf 1.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    above = torch.nextafter(ties, torch.tensor(7.0)).clamp(max=6)
    x = torch.stack([ties, -ties, above, -above]).view(4, 8)
    packed, sf = math.per_token_cast_to_fp4(x.to(DEVICE), True)
    assert exponent(sf) == [[127]] * 4
    assert [bytes(row).hex() for row in packed.view(torch.uint8).tolist()] == [
        "10325476",  # 0.25 -> 0 in the low nibble, 0.75 -> 0.5 in the high one
        "90badcfe",
        "21436577",
        "a9cbedff",
    ]


def test_fp4_codes():
    codes = torch.arange(16, dtype=torch.uint8, device=DEVICE)
    values = math._dequantize_from_fp4_e2m1(codes)
    expected = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32) + np.float32(0)
    assert_bitwise_equal(values, torch.from_numpy(expected))
    codes[8] = 0
    assert_bitwise_equal(math._quantize_to_fp4_e2m1(values), codes)


def test_transpose_packed_fp4():
    codes = torch.randint(16, (6, 10), dtype=torch.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8).to(DEVICE)
    transposed = math.transpose_packed_fp4(packed)
    assert_bitwise_equal(transposed, (codes.T[:, ::2] | codes.T[:, 1::2] << 4).view(torch.int8))
    assert_bitwise_equal(math.transpose_packed_fp4(transposed), packed)


# Casting back


@pytest.mark.parametrize("packed", [False, True], ids=["fp32", "packed"])
@pytest.mark.parametrize("n", [128, 116])
def test_cast_back(n, packed):
    sf = torch.exp2(torch.arange(20.0) - 8).view(5, 4, 1)
    for largest, cast, cast_back in [
        (448, math.per_token_cast_to_fp8, math.cast_back_from_fp8),
        (6, math.per_token_cast_to_fp4, math.cast_back_from_fp4),
    ]:
        grid = exact_groups((20, 32), largest).view(5, 4, 32)
        x = (grid * sf).view(5, 128)[:, :n].to(DEVICE)
        result = cast_back(*cast(x, True, 32, packed), 32, packed)
        assert result.dtype == torch.float32
        # + 0: minus zero comes back as such from FP8 only.
        assert_bitwise_equal(result + 0, x + 0, str(largest))


# UE8M0


def test_ceil_to_ue8m0():
    x = torch.tensor([0.0, 2**-149, 2**-126, 0.75, 1.0, 1.0 + 2**-23, -3.0, 2.0**127, 3e38, torch.inf, torch.nan])
    sf = math.ceil_to_ue8m0(x.to(DEVICE))
    assert exponent(sf) == [1, 1, 1, 127, 127, 128, 129, 254, 254, 254, 254]
    assert (sf.view(torch.int32) & ~0x7F800000 == 0).all()


def test_pack_keeps_bytes_apart():
    x = torch.full((3, 4), 0.006975, device=DEVICE)
    assert math.pack_ue8m0_to_int(x).tolist() == [[0x77777777]] * 3


def test_pack_any_bits():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3, 5, 8), generator=generator, dtype=torch.int32)
    bits[0, 0] = torch.tensor([0x00400000, 1, 0x7FC00001, -1, 0x7F800000, -(2**31), 0x3F800000, 0x7F7FFFFF])
    expected = (bits.numpy().view(np.uint32) >> 23).astype(np.uint8).view("<u4").astype(np.uint32).view(np.int32)
    x = bits.view(torch.float32).to(DEVICE)
    assert_bitwise_equal(math.pack_ue8m0_to_int(x), torch.from_numpy(expected))
    mn_major = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert_bitwise_equal(math.pack_ue8m0_to_int(mn_major), torch.from_numpy(expected), "MN-major")
    assert math.pack_ue8m0_to_int(mn_major).is_contiguous()


def test_unpack():
    exponents = torch.arange(256, dtype=torch.uint8)
    x = math.unpack_ue8m0_from_int(exponents.view(torch.int32).view(2, 32).to(DEVICE))
    assert_bitwise_equal(x, (exponents.int() << 23).view(torch.float32).view(2, 128))
    assert_bitwise_equal(math.pack_ue8m0_to_int(x).view(torch.uint8), exponents.view(2, 128))


# Special values


@SCALE_MODES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_groups(dtype, use_ue8m0):
    sf_bits = 105 << 23 if use_ue8m0 else (np.float32(1e-4) / np.float32(448)).view(np.int32)
    x = torch.zeros(128, 512, dtype=dtype, device=DEVICE)
    x[:, 1::2] *= -1
    x[:, 128:256] = 1
    for q, sf in [
        math.per_token_cast_to_fp8(x, use_ue8m0),
        math.per_channel_cast_to_fp8(x, use_ue8m0),
        math.per_block_cast_to_fp8(x, use_ue8m0),
        math.per_custom_dims_cast_to_fp8(x, (1,), use_ue8m0),
    ]:
        zero_sf = sf.view(torch.int32).expand(-1, 4) if sf.shape[-1] == 4 else sf.view(torch.int32)[..., ::128]
        assert (zero_sf.reshape(-1, 4)[:, [0, 2, 3]] == sf_bits).all()
        assert q.view(torch.uint8)[:, [0, 1, 256, 257, 510, 511]].unique(dim=0).tolist() == [[0, 0x80] * 3]
    packed, sf = math.per_token_cast_to_fp4(x, use_ue8m0)
    assert exponent(sf)[0][0] == 112 - (not use_ue8m0)
    assert (packed[:, :64] == 0).all()


@SCALE_MODES
def test_nan_and_inf(use_ue8m0):
    x = torch.ones(4, 8, device=DEVICE)
    x[0, 3], x[1, 3], x[2, 3], x[3, 3] = torch.nan, torch.inf, -torch.inf, 3e38
    q, sf = math.per_token_cast_to_fp8(x, use_ue8m0, 4)
    q, byte = q.view(torch.uint8).cpu(), (q.view(torch.uint8) & 0x7F).cpu()
    one = as_bytes(oracle_per_token_fp8(torch.ones(1, 4), use_ue8m0, 4)[0])
    assert_bitwise_equal(q[:, 4:], one.expand(4, 4), "the other group")
    if use_ue8m0:
        assert exponent(sf[:3, 0]) == [254] * 3 and exponent(sf[3:, 0]) == [247]
        assert byte[:3, 3].tolist() == [0x7F, *as_bytes(torch.tensor([torch.inf] * 2, device=DEVICE).to(E4M3))]
        assert (q[:, :3] == 0).all() and byte[3, 3] < 0x7E
    else:
        assert sf[0, 0].isnan() and sf[1:3, 0].isinf().all()
        assert (byte[0, :4] == 0x7F).all() and (byte[1:3, 3] == 0x7F).all() and (q[1:, :3] == 0).all()
        assert byte[3, 3] == 0x7E

    packed, sf = math.per_token_cast_to_fp4(x, use_ue8m0, 4)
    rows = ["0070", "0070", "00f0", "0060"] if use_ue8m0 else ["7777", "0070", "0070", "0070"]
    assert [bytes(row).hex() for row in packed[:, :2].view(torch.uint8).tolist()] == rows


@SCALE_MODES
def test_empty(use_ue8m0):
    for m, n in [(0, 1000), (7, 0), (0, 0)]:
        x = torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
        groups = -(-n // 32)
        q, sf = math.per_token_cast_to_fp8(x, use_ue8m0, 32)
        assert (q.dtype, q.shape, sf.dtype, sf.shape) == (E4M3, (m, n), torch.float32, (m, groups))
        q, sf = math.per_token_cast_to_fp4(x, use_ue8m0, 32)
        assert (q.dtype, q.shape, sf.dtype, sf.shape) == (torch.int8, (m, n // 2), torch.float32, (m, groups))
        assert math.cast_back_from_fp4(q, sf, 32).shape == (m, n)
        assert math.per_block_cast_to_fp8(x, use_ue8m0, 32)[1].shape == (-(-m // 32), groups)
        for cast in (math.per_token_cast_to_fp8, math.per_token_cast_to_fp4):
            sf = cast(x, True, 32, True)[1]
            assert (sf.dtype, sf.shape) == (torch.int32, (m, groups // 4))
            assert math.unpack_ue8m0_from_int(sf).shape == (m, groups)
    for m, n in [(0, 5), (256, 0)]:
        q, sf = math.per_channel_cast_to_fp8(torch.empty(m, n, device=DEVICE), use_ue8m0)
        assert (q.shape, sf.shape) == ((m, n), (m // 128, n))
    for m, n in [(0, 3), (4, 0)]:
        assert math.transpose_packed_fp4(torch.empty(m, n, dtype=torch.int8, device=DEVICE)).shape == (2 * n, m // 2)


# Behaviour that all share

CASTS = {
    "per_token_cast_to_fp8": (True, 32, True),
    "per_channel_cast_to_fp8": (True, 32),
    "per_block_cast_to_fp8": (False, 32),
    "per_custom_dims_cast_to_fp8": ((0,), False),
    "per_token_cast_to_fp4": (False, 32),
}


@pytest.fixture(params=CASTS)
def cast(request):
    """A cast with all arguments but x bound."""
    return lambda x: getattr(math, request.param)(x, *CASTS[request.param])


def test_views(cast):
    parent = finite_input(torch.bfloat16, 128, 384).to(DEVICE)
    before = parent.clone()
    views = {
        "slice": parent[:, 128:256],
        "odd offset": parent[:, 1:129],
        "transposed": parent[:, :128].T,
        "step": parent[::2],
        "column step": parent[:, ::3],
        "expanded row": parent[:1].expand(32, 384),
        "expanded column": parent[:, :1].expand(128, 256),
    }
    for name, view in views.items():
        for result, expected in zip(cast(view), cast(view.contiguous())):
            assert_bitwise_equal(result, expected, name)
    assert_bitwise_equal(parent, before)


def test_no_gradient(cast):
    x = torch.randn(32, 128, device=DEVICE, requires_grad=True)
    assert not any(t.requires_grad for t in cast(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_traces(cast, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(cast, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m in (32, 96):
        x = finite_input(torch.bfloat16, m, 128).to(DEVICE)
        for result, expected in zip(compiled(x), cast(x)):
            assert_bitwise_equal(result, expected)


def test_fake_tensors(cast):
    real = cast(torch.ones(32, 128, device=DEVICE))
    with torch._subclasses.FakeTensorMode():
        fake = cast(torch.ones(32, 128, device=DEVICE))
    for f, r in zip(fake, real):
        assert (f.shape, f.dtype, f.stride(), f.device) == (r.shape, r.dtype, r.stride(), r.device)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="compares the two devices")
def test_cuda_equals_cpu(cast):
    for dtype in DTYPES:
        x = finite_input(dtype, 64, 1024)
        torch.cuda.set_sync_debug_mode("error")
        try:
            on_device = x.to(DEVICE, non_blocking=True)
            result = cast(on_device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for got, expected in zip(result, cast(x)):
            assert_bitwise_equal(got.cpu(), expected, str(dtype))


@pytest.mark.parametrize(
    "name, args, error, message",
    [
        ("per_token_cast_to_fp8", (torch.ones(3, 2, 128), True), ValueError, "x must be 2-D"),
        ("per_token_cast_to_fp4", (torch.ones(128), True), ValueError, "x must be 2-D"),
        ("per_block_cast_to_fp8", (torch.ones(128), True), ValueError, "x must be 2-D"),
        ("per_channel_cast_to_fp8", (torch.ones(2, 128, 4), True), ValueError, "x must be 2-D"),
        ("per_token_cast_to_fp8", (torch.ones(3, 128).double(), True), TypeError, "x must be bfloat16"),
        ("per_custom_dims_cast_to_fp8", (torch.ones(3, 128).int(), (0,), True), TypeError, "x must be bfloat16"),
        ("per_token_cast_to_fp8", (torch.ones(3, 128), True, 0), ValueError, "gran_k must"),
        ("per_block_cast_to_fp8", (torch.ones(3, 128), True, -1), ValueError, "gran_k must"),
        ("per_channel_cast_to_fp8", (torch.ones(3, 128), True, 32.0), ValueError, "gran_k must"),
        ("per_channel_cast_to_fp8", (torch.ones(3, 128), True), ValueError, "multiple of gran_k = 128, got 3"),
        ("per_token_cast_to_fp8", (torch.ones(3, 512), False, 128, True), ValueError, "needs use_ue8m0"),
        ("per_token_cast_to_fp4", (torch.ones(3, 512), False, 128, True), ValueError, "needs use_ue8m0"),
        ("per_token_cast_to_fp8", (torch.ones(3, 513), True, 128, True), ValueError, "multiple of 4, got 5"),
        ("per_token_cast_to_fp4", (torch.ones(3, 384), True, 128, True), ValueError, "multiple of 4, got 3"),
        ("per_token_cast_to_fp4", (torch.ones(3, 33), True), ValueError, "even number of columns, got 33"),
        ("per_custom_dims_cast_to_fp8", (torch.ones(3, 4), (2,), True), ValueError, "dims must"),
        ("pack_ue8m0_to_int", (torch.ones(3, 5),), ValueError, "multiple of 4"),
        ("pack_ue8m0_to_int", (torch.ones(3, 4).int(),), TypeError, "x must be float32"),
        ("unpack_ue8m0_from_int", (torch.ones(3, 4),), TypeError, "packed must be int32"),
        ("transpose_packed_fp4", (torch.ones(3, 4, dtype=torch.int8),), ValueError, "even number of rows, got 3"),
        ("transpose_packed_fp4", (torch.ones(4, dtype=torch.int8),), ValueError, "a must be 2-D"),
        ("transpose_packed_fp4", (torch.ones(4, 4),), TypeError, "a must be int8"),
        ("cast_back_from_fp8", (torch.ones(3, 64), torch.ones(3, 1)), TypeError, "x must be float8_e4m3fn"),
        ("cast_back_from_fp8", (torch.ones(3, 64).to(E4M3), torch.ones(1, 3)), ValueError, r"have shape \(3, 1\)"),
        ("cast_back_from_fp4", (torch.ones(3, 64).char(), torch.ones(3, 1), 128, True), TypeError, "be torch.int32"),
    ],
)
def test_bad_input(name, args, error, message):
    with pytest.raises(error, match=message):
        getattr(math, name)(*args)


def test_unpack_of_one_word_a_row():
    sf = torch.exp2(torch.arange(20, dtype=torch.float32, device=DEVICE).view(5, 4) - 9)
    packed = deep_gemm.utils.pack_ue8m0_to_int(sf)
    aligned = torch.empty_strided((5, 1), (1, 8), dtype=torch.int32, device=DEVICE).copy_(packed)
    assert torch.equal(deep_gemm.utils.unpack_ue8m0_from_int(aligned), sf)


@pytest.mark.parametrize("dims", [(0.5,), (2,), ("0",)])
def test_custom_dims_are_refused(dims):
    with pytest.raises(ValueError, match="dims"):
        deep_gemm.utils.per_custom_dims_cast_to_fp8(torch.ones(4, 256, device=DEVICE), dims, False)
