"""Routing, gather + cast, combine and their backward: byte for byte plain loops over slots, whatever the routing."""

import os

import pytest
import torch
from casting import E4M3, distinct, each_dtype, each_recipe, gpu, sf_spec, specials
from compiling import compile_launch
from generators import DEVICE, deep_gemm, forget
from views import Guarded, same_values, with_stride

fused_moe = deep_gemm.fused_moe
assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal
route = deep_gemm.fused_moe_route
gather_cast = deep_gemm.fused_moe_gather_cast_to_fp8
combine = deep_gemm.fused_moe_combine
combine_backward = deep_gemm.fused_moe_combine_backward
combine_backward_cast = deep_gemm.fused_moe_combine_backward_cast_to_fp8
num_rows = deep_gemm.get_num_rows_for_contiguous_layout
token_cast = deep_gemm.utils.per_token_cast_to_fp8
FLOAT, PACKED = (False, 128, False), (True, 32, True)

# T, K, experts, alignment; the routing works in blocks of 128 slots.
ROUTINGS = (
    (1, 1, 1, 1), (1, 8, 256, 128), (3, 2, 4, 16), (7, 6, 5, 3), (127, 1, 2, 128), (128, 1, 3, 64), (129, 1, 17, 1),
    (43, 3, 16, 128), (130, 8, 7, 100), (65, 2, 300, 240), (1000, 4, 33, 128),
)  # fmt: skip
each_routing = pytest.mark.parametrize("tokens, topk, experts, alignment", ROUTINGS)
# A tile has 1024 columns.
HIDDEN = (1, 33, 128, 1000, 1024, 1025, 2048)


def random_ids(tokens, topk, experts, sentinels=True, dtype=torch.int64, seed=0):
    """Expert ids, some of them of no expert."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (-2, experts + 2) if sentinels else (0, experts)
    return torch.randint(low, high, (tokens, topk), generator=generator).to(DEVICE, dtype)


def route_by_hand(topk_ids, experts, alignment):
    """Expert by expert, slot by slot."""
    ids = topk_ids.cpu().flatten().tolist()
    rows = [-1] * len(ids)
    layout = []
    for expert in range(experts):
        slots = [slot for slot, e in enumerate(ids) if e == expert]
        for slot in slots:
            rows[slot] = len(layout)
            layout.append(expert)
        layout += [-1] * (-len(slots) % alignment)
    return layout, rows


def check_route(topk_ids, experts, alignment, label=""):
    grouped_layout, row_map = route(topk_ids, experts, alignment)
    layout, rows = route_by_hand(topk_ids, experts, alignment)
    most = num_rows(*topk_ids.shape, experts, alignment)
    assert len(layout) <= most and most % alignment == 0, label
    layout += [-1] * (most - len(layout))
    assert_bitwise_equal(grouped_layout, torch.tensor(layout, dtype=torch.int32), f"{label} grouped_layout")
    assert_bitwise_equal(row_map, torch.tensor(rows, dtype=torch.int32).view(topk_ids.shape), f"{label} row_map")
    assert row_map.is_contiguous() and row_map.device == grouped_layout.device == topk_ids.device, label
    return grouped_layout, row_map


def random_routing(tokens, topk, experts=5, alignment=16, seed=0, device=DEVICE):
    """Number of rows, row map, and which rows are used."""
    ids = random_ids(tokens, topk, experts, seed=seed)
    grouped_layout, row_map = fused_moe.route_reference(ids.to(device), experts, alignment)
    return len(grouped_layout), row_map, grouped_layout >= 0


def slots(row_map):
    """(t, k, row) of every slot that has one."""
    return [(t, k, row) for t, rows in enumerate(row_map.tolist()) for k, row in enumerate(rows) if row >= 0]


def assert_rows_equal(result, expected, used, label=""):
    """Raise unless the used rows have the same bytes."""
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), label
    as_bytes = [t.view(torch.uint8) if t.dtype is E4M3 else t for t in (result, expected)]
    assert_bitwise_equal(as_bytes[0][used], as_bytes[1][used], label)


def check_gather_cast(x, row_map, rows, used, recipe, out=None, out_sf=None, label=""):
    expected = fused_moe.gather_cast_reference(x, row_map, rows, *recipe)
    result = gather_cast(x, row_map, rows, *recipe, out=out, out_sf=out_sf)
    for name, got, want, given in zip(("x_fp8", "sf"), result, expected, (out, out_sf)):
        assert_rows_equal(got, want, used, f"{label} {name}")
        assert got is given if given is not None else got.is_contiguous(), label
        assert not got.requires_grad
    return result


def check_combine(y, row_map, weights, out=None, label=""):
    expected = fused_moe.combine_reference(y, row_map, weights)
    result = combine(y, row_map, weights, out)
    assert_bitwise_equal(result, expected, label)
    assert result is out if out is not None else result.is_contiguous(), label
    return result


def check_dweights(result, dout, y, row_map, label=""):
    assert result.dtype == torch.float32 and result.shape == row_map.shape, label
    assert (result[row_map < 0] == 0).all(), label
    products = dout.double()[:, None] * y[row_map.clamp(min=0).long()].double()
    products = torch.where((row_map >= 0)[..., None], products, 0)
    error = (result.double() - products.sum(-1)).abs()
    assert (error <= products.abs().sum(-1) * 2**-19).all(), f"{label}: {error.max()}"


def backward_inputs(tokens, topk, hidden, dtype=torch.bfloat16, seed=0, **options):
    """dout, y with NaN in rows of padding, row map, weights with NaN in slots without a row, used rows."""
    rows, row_map, used = random_routing(tokens, topk, seed=seed, **options)
    y = distinct(rows, hidden, dtype, seed=seed)
    y[~used] = torch.nan
    weights = distinct(tokens, topk, torch.float32, seed=seed + 1)
    weights[row_map < 0] = torch.nan
    return distinct(tokens, hidden, dtype, seed=seed + 2), y, row_map, weights, used


def check_backward(dout, y, row_map, weights, used, out=None, out_dweights=None, label=""):
    dy, dweights = combine_backward(dout, y, row_map, weights, out, out_dweights)
    assert_rows_equal(dy, fused_moe.combine_backward_reference(dout, y, row_map, weights)[0], used, f"{label} dy")
    check_dweights(dweights, dout, y, row_map, label)
    return dy, dweights


def check_backward_cast(dout, y, row_map, weights, used, recipe, label="", **outputs):
    dy_fp8, sf, dweights = combine_backward_cast(dout, y, row_map, weights, *recipe, **outputs)
    expected = fused_moe.combine_backward_cast_reference(dout, y, row_map, weights, *recipe)
    assert_rows_equal(dy_fp8, expected[0], used, f"{label} dy_fp8")
    assert_rows_equal(sf, expected[1], used, f"{label} sf")
    check_dweights(dweights, dout, y, row_map, label)
    return dy_fp8, sf, dweights


# Routing


@each_routing
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_route(tokens, topk, experts, alignment, dtype):
    for sentinels in (False, True):
        check_route(random_ids(tokens, topk, experts, sentinels, dtype), experts, alignment, f"sentinels {sentinels}")


@pytest.mark.parametrize(
    "ids", [[[0]] * 300, [[3]] * 300, [[-1]] * 300, [[4]] * 300, [[2**31 - 1, -(2**31)]], [[1, 1, 1]]]
)
def test_route_to_few(ids):
    check_route(torch.tensor(ids, device=DEVICE), 4, 128)


def test_route_64_bit_ids():
    """Ids that are an expert's in their low 32 bits."""
    check_route(torch.tensor([[2**32, 1], [2**32 + 1, 0], [-(2**32) + 2, 2]], device=DEVICE), 4, 2)


def test_route_strided_ids():
    ids = random_ids(50, 6, 9)
    wide = torch.full((100, 20), -1, dtype=ids.dtype, device=DEVICE)
    wide[::2, 3:15:2] = ids
    check_route(wide[::2, 3:15:2], 9, 8, "slice")
    check_route(ids.t().contiguous().t(), 9, 8, "transposed")
    check_route(ids[:1].expand(50, 6), 9, 8, "expanded")


def test_most_rows():
    """The bound is reached: one slot in each expert, and the rest in one of them."""
    for tokens, topk, experts, alignment in ROUTINGS:
        ids = torch.arange(tokens * topk).clamp(max=experts - 1).view(tokens, topk)
        used = len(route_by_hand(ids, experts, alignment)[0])
        assert used <= num_rows(tokens, topk, experts, alignment)
    assert num_rows(128, 1, 300, 64) == 128 * 64 == len(route_by_hand(torch.arange(128), 300, 64)[0])
    assert num_rows(0, 8, 4, 128) == num_rows(8, 0, 4, 128) == 0


def test_default_alignment():
    ids = random_ids(40, 2, 6)
    for alignment in (128, 64):
        deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
        try:
            for got, want in zip(route(ids, 6), route(ids, 6, alignment)):
                assert_bitwise_equal(got, want)
            assert num_rows(40, 2, 6) == num_rows(40, 2, 6, alignment)
        finally:
            deep_gemm.set_mk_alignment_for_contiguous_layout(128)


# Gather + cast


@each_dtype
@each_recipe
def test_gather_cast(recipe, dtype):
    for (tokens, topk), hidden in zip(((1, 1), (7, 2), (5, 8), (130, 3), (9, 6), (3, 2), (33, 4)), HIDDEN):
        if sf_spec(tokens, hidden, recipe):
            rows, row_map, used = random_routing(tokens, topk)
            check_gather_cast(distinct(tokens, hidden, dtype), row_map, rows, used, recipe, label=f"{tokens}x{hidden}")


@each_recipe
def test_gathered_rows_are_those_of_the_token_cast(recipe):
    x = distinct(9, 1024)
    rows, row_map, _ = random_routing(9, 4)
    result, expected = gather_cast(x, row_map, rows, *recipe), token_cast(x, *recipe)
    assert slots(row_map)
    for t, _, row in slots(row_map):
        assert_bitwise_equal(result[0][row], expected[0][t], f"row {row}")
        assert_bitwise_equal(result[1][row], expected[1][t], f"sf of row {row}")


@each_dtype
@each_recipe
def test_gather_cast_special_values(recipe, dtype):
    if DEVICE == "cpu" and not recipe[0]:
        pytest.skip("which of several NaNs wins is the CPU's choice")
    x = specials(dtype)
    rows, row_map, used = random_routing(16, 3)
    check_gather_cast(x, row_map, rows, used, recipe)


@pytest.mark.parametrize("recipe", [FLOAT, PACKED], ids=["fp32-128", "packed-32"])
def test_gather_cast_strided_inputs(recipe):
    x = distinct(20, 1024)
    rows, row_map, used = random_routing(20, 3)
    for name, view in same_values(x).items():
        check_gather_cast(view, row_map, rows, used, recipe, label=name)


@pytest.mark.parametrize("recipe", [FLOAT, (True, 128, False), PACKED], ids=["fp32-128", "ue8m0-128", "packed-32"])
@pytest.mark.parametrize("hidden", [512, 1000])
def test_gather_cast_writes_the_used_rows_alone(recipe, hidden):
    """Into strided views, MN-major scale factors among them, and nothing but what a slot maps to."""
    if not sf_spec(1, hidden, recipe):
        pytest.skip("no such packing")
    x = distinct(20, hidden)
    rows, row_map, used = random_routing(20, 3)
    (_, groups), sf_dtype = sf_spec(rows, hidden, recipe)
    aligned = -(-rows // 4) * 4
    strides = ((hidden + 16, 1), (hidden + 3, 1), (1, rows + 5))
    for stride, sf_stride in zip(strides, ((1, aligned), (groups + 1, 1), (3, 3 * rows))):
        out, out_sf = Guarded((rows, hidden), stride, E4M3, 16), Guarded((rows, groups), sf_stride, sf_dtype, 4)
        check_gather_cast(x, row_map, rows, used, recipe, out.view, out_sf.view, label=f"{stride}")
        out.assert_untouched("out"), out_sf.assert_untouched("out_sf")
        if DEVICE == "cuda":
            assert (out.view.view(torch.uint8)[~used] == 0xFF).all()
            assert (out_sf.view.view(torch.int32)[~used] == -1).all()


def test_tokens_without_rows():
    row_map = torch.full((3, 2), -1, dtype=torch.int32, device=DEVICE)
    gather_cast(distinct(3, 256), row_map, 16, *FLOAT)
    assert (combine(torch.full((16, 256), torch.nan, device=DEVICE), row_map) == 0).all()


def test_rows_out_of_range_are_none():
    """Nothing outside of the outputs is written or read, whatever the row map holds."""
    row_map = torch.tensor([[0, 4], [3, 2**31 - 1], [-(2**31), -1]], dtype=torch.int32, device=DEVICE)
    x, used = distinct(3, 256), torch.tensor([True, False, False, True], device=DEVICE)
    out, out_sf = Guarded((4, 256), (256, 1), E4M3, 256), Guarded((4, 2), (2, 1), torch.float32, 2)
    check_gather_cast(x, row_map, 4, used, FLOAT, out.view, out_sf.view)
    out.assert_untouched("out"), out_sf.assert_untouched("out_sf")
    y, weights = distinct(4, 256), distinct(3, 2, torch.float32)
    check_combine(y, row_map, weights)
    dweights = combine_backward(x, y, row_map, weights)[1]
    assert (dweights != 0).tolist() == [[True, False], [True, False], [False, False]]


# Combine


@each_dtype
def test_combine(dtype):
    for (tokens, topk), hidden in zip(((1, 1), (7, 2), (5, 8), (130, 3), (9, 6), (3, 2), (33, 4)), HIDDEN):
        _, y, row_map, weights, _ = backward_inputs(tokens, topk, hidden, dtype)
        for w in (weights, weights.bfloat16(), weights.half(), None):
            label = f"{tokens}x{hidden} {w if w is None else w.dtype}"
            assert not check_combine(y, row_map, w, label=label).isnan().any(), label


def test_combine_by_hand():
    """Products of fp32, one after the other, on values where the order of the sum shows."""
    _, y, row_map, weights, _ = backward_inputs(9, 6, 40, torch.float32)
    result, total = combine(y, row_map, weights), torch.zeros(9, 40, device=DEVICE)
    for t, k, row in slots(row_map):
        total[t] += weights[t, k] * y[row]
    assert_bitwise_equal(result, total)
    assert not torch.equal(combine(y, row_map.flip(1).contiguous(), weights.flip(1)), result)


def test_combine_special_values():
    y = specials(torch.bfloat16)
    row_map = torch.arange(16, dtype=torch.int32, device=DEVICE)[:, None]
    for weights in (None, torch.tensor([[2.0], [0.0], [-1.0], [torch.inf]] * 4, device=DEVICE)):
        result = combine(y, row_map, weights)
        want = fused_moe.combine_reference(y, row_map, weights)
        assert torch.equal(result.isnan(), want.isnan())
        assert_bitwise_equal(torch.where(result.isnan(), 0, result), torch.where(want.isnan(), 0, want))


def test_combine_is_the_inverse_of_a_gather():
    x = distinct(50, 96)
    rows, row_map, used = random_routing(50, 1)
    y = torch.full((rows, 96), torch.nan, dtype=x.dtype, device=DEVICE)
    y[row_map[row_map >= 0].long()] = x[row_map[:, 0] >= 0]
    assert_bitwise_equal(combine(y, row_map), torch.where(row_map >= 0, x, 0))


def test_combine_strided():
    dout, y, row_map, weights, _ = backward_inputs(20, 3, 1000)
    wide = torch.full((40, 9), torch.nan, device=DEVICE)
    wide[::2, 1:7:2] = weights
    for name, view in same_values(y).items():
        check_combine(view, row_map, wide[::2, 1:7:2], label=name)
    for stride in ((1016, 1), (1003, 1), (1, 27), (3000, 2)):
        out = Guarded((20, 1000), stride, torch.bfloat16, 16)
        check_combine(y, row_map, weights, out.view, f"out {stride}")
        out.assert_untouched(f"out {stride}")


# Backward


@each_dtype
def test_combine_backward(dtype):
    for (tokens, topk), hidden in zip(((1, 1), (7, 2), (5, 8), (130, 3), (9, 6), (3, 2), (33, 4)), HIDDEN):
        check_backward(*backward_inputs(tokens, topk, hidden, dtype), label=f"{tokens}x{hidden}")


@each_dtype
@each_recipe
def test_combine_backward_cast(recipe, dtype):
    for (tokens, topk), hidden in zip(((1, 1), (7, 2), (5, 8), (130, 3), (9, 6), (3, 2), (33, 4)), HIDDEN):
        if sf_spec(tokens, hidden, recipe):
            check_backward_cast(*backward_inputs(tokens, topk, hidden, dtype), recipe, label=f"{tokens}x{hidden}")


def test_backward_strided():
    dout, y, row_map, weights, used = backward_inputs(20, 3, 1000)
    stride_w = with_stride(weights, (7, 2))
    for (name, dout_view), y_view in zip(same_values(dout).items(), reversed(same_values(y).values())):
        out, out_dweights = Guarded(y.shape, (1008, 1), y.dtype, 16), Guarded((20, 3), (1, 21), torch.float32, 3)
        check_backward(dout_view, y_view, row_map, stride_w, used, out.view, out_dweights.view, name)
        out.assert_untouched(name), out_dweights.assert_untouched(name)
        out, out_sf = Guarded(y.shape, (1008, 1), E4M3, 16), Guarded((len(y), 8), (1, len(y)), torch.float32, 4)
        check_backward_cast(dout_view, y_view, row_map, stride_w, used, FLOAT, name, out=out.view, out_sf=out_sf.view)
        out.assert_untouched(name), out_sf.assert_untouched(name)


@pytest.mark.parametrize("sentinel", [-1, 8])
def test_sentinels_contribute_nothing(sentinel):
    """Half of the slots elsewhere, their rows and weights NaN, Inf in dout: nothing of it shows."""
    ids = random_ids(8, 2, 8, sentinels=False)
    ids[::2, 0], ids[1::2, 1] = sentinel, sentinel
    grouped_layout, row_map = route(ids, 8, 4)
    y = torch.full((len(grouped_layout), 4), torch.nan, device=DEVICE)
    y[grouped_layout >= 0] = 3.0
    weights = torch.where(row_map >= 0, 0.5, torch.nan)
    assert (combine(y, row_map, weights) == 1.5).all()
    dout = torch.ones(8, 4, device=DEVICE)
    assert torch.equal(combine_backward(dout, y, row_map, weights)[1], torch.where(row_map >= 0, 12.0, 0.0))
    dout[0] = torch.inf
    dweights = combine_backward(dout, y, row_map, weights)[1]
    assert (dweights[row_map < 0] == 0).all()


def test_autograd_agrees():
    """The formulas of the backward are those of the forward's derivative."""
    _, y, row_map, weights, used = backward_inputs(12, 3, 64, torch.float32)
    y = torch.where(used[:, None], y, 0).requires_grad_()
    weights = torch.where(row_map >= 0, weights, 0).requires_grad_()
    dout = distinct(12, 64, torch.float32, seed=9)
    out = sum(
        weights[:, k, None] * torch.where((row >= 0)[:, None], y[row.clamp(min=0).long()], 0)
        for k, row in enumerate(row_map.unbind(1))
    )
    dy, dweights = torch.autograd.grad(out, (y, weights), dout)
    result = combine_backward(dout, y.detach(), row_map, weights.detach())
    torch.testing.assert_close(result[0][used], dy[used])
    torch.testing.assert_close(result[1], dweights)


# Empty and refused


@pytest.mark.parametrize("tokens, topk, hidden", [(0, 8, 128), (3, 0, 128), (3, 2, 0), (0, 0, 0)])
def test_empty(tokens, topk, hidden):
    ids = random_ids(tokens, topk, 4)
    grouped_layout, row_map = route(ids, 4, 8)
    assert row_map.shape == (tokens, topk) and len(grouped_layout) == num_rows(tokens, topk, 4, 8)
    x, weights = distinct(tokens, hidden), torch.ones(tokens, topk, device=DEVICE)
    x_fp8, sf = gather_cast(x, row_map, len(grouped_layout), *FLOAT)
    assert x_fp8.shape == (len(grouped_layout), hidden) and sf.shape == (len(grouped_layout), -(-hidden // 128))
    y = distinct(len(grouped_layout), hidden)
    out = combine(y, row_map, weights)
    assert out.shape == (tokens, hidden) and (out == 0).all() or topk
    dy, dweights = combine_backward(x, y, row_map, weights)
    assert dy.shape == y.shape and dweights.shape == (tokens, topk)
    assert hidden or (dweights == 0).all()


def arguments():
    x, row_map = distinct(4, 256), torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
    return x, distinct(8, 256), row_map, torch.ones(4, 2, device=DEVICE)


BAD = {
    "topk_ids must be a tensor": lambda x, y, m, w: route([[0]], 4),
    "topk_ids must be torch.int32 or": lambda x, y, m, w: route(w, 4),
    "topk_ids must be 2-D": lambda x, y, m, w: route(m[0], 4),
    "num_experts must be": lambda x, y, m, w: route(m, 0),
    r"num_experts must be an int in 1\.\.4096, got 4097": lambda x, y, m, w: route(m, 4097),
    "alignment must be": lambda x, y, m, w: route(m, 4, 0),
    "fewer than 2": lambda x, y, m, w: route(m, 4, 2**30),
    "x must be": lambda x, y, m, w: gather_cast(x.int(), m, 8, False),
    "row_map must be torch.int32": lambda x, y, m, w: gather_cast(x, m.long(), 8, False),
    "row_map must be contiguous with 4": lambda x, y, m, w: gather_cast(x, m[:3], 8, False),
    "row_map must be contiguous": lambda x, y, m, w: combine(y, m[:, :1], w),
    "num_rows must not be negative": lambda x, y, m, w: gather_cast(x, m, -1, False),
    "gran_k must be 32 or 128, got 64": lambda x, y, m, w: gather_cast(x, m, 8, False, 64),
    "needs use_ue8m0": lambda x, y, m, w: gather_cast(x, m, 8, False, 32, True),
    "multiple of 4 groups": lambda x, y, m, w: gather_cast(x, m, 8, True, 128, True),
    "out must be torch.float8": lambda x, y, m, w: gather_cast(x, m, 8, False, out=x),
    "out_sf must be": lambda x, y, m, w: gather_cast(x, m, 8, False, out_sf=w),
    "y must be": lambda x, y, m, w: combine(y.double(), m, w),
    "topk_weights must have shape": lambda x, y, m, w: combine(y, m, w[:, :1]),
    "topk_weights must be torch": lambda x, y, m, w: combine(y, m, m),
    "out must be torch.bfloat16": lambda x, y, m, w: combine(y, m, w, x.float()),
    "y must have 256 columns": lambda x, y, m, w: combine_backward(x, y[:, :128], m, w),
    "y must be torch.bfloat16": lambda x, y, m, w: combine_backward(x, y.float(), m, w),
    "out_dweights must be": lambda x, y, m, w: combine_backward(x, y, m, w, None, w.bfloat16()),
    "out overlaps y": lambda x, y, m, w: combine_backward(x, y, m, w, y),
    "out overlaps row_map": lambda x, y, m, w: combine(y[:, :2].half(), m, None, m.view(torch.float16)[:, :2]),
    "row_map must be on": lambda x, y, m, w: combine(y, m.to("meta"), w),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises((TypeError, ValueError), match=message):
        BAD[message](*arguments())


# Traced


@pytest.mark.parametrize("tokens", [1, 4, 7, 130])
def test_opcheck(tokens, monkeypatch):
    allclose = torch.allclose

    def allclose_of_bytes(a, b, **options):
        """torch has none for e4m3, with which opcheck finds out what an op changes."""
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dtype is E4M3 else allclose(a, b, **options)

    monkeypatch.setattr(torch, "allclose", allclose_of_bytes)
    ops = deep_gemm._ops.ops
    dout, y, row_map, weights, _ = backward_inputs(tokens, 3, 256)
    y = torch.nan_to_num(y)
    weights = torch.nan_to_num(weights)
    rows = len(y)

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    ids = random_ids(tokens, 3, 5)
    layout = zeros(num_rows(tokens, 3, 5, 16), dtype=torch.int32)
    check = torch.library.opcheck
    check(ops.fused_moe_route.default, (ids, 5, 16, layout, zeros(tokens, 3, dtype=torch.int32)))
    payload, sf = zeros(rows, 256, dtype=E4M3), zeros(rows, 2)
    check(ops.fused_moe_gather_cast_to_fp8.default, (dout, row_map, rows, *FLOAT, payload, sf))
    for w in (weights, None):
        check(ops.fused_moe_combine.default, (y, row_map, w, zeros(tokens, 256, dtype=y.dtype)))
    dy, dweights = zeros(rows, 256, dtype=y.dtype), zeros(tokens, 3)
    check(ops.fused_moe_combine_backward.default, (dout, y, row_map, weights, dy, dweights))
    check(
        ops.fused_moe_combine_backward_cast_to_fp8.default,
        (dout, y, row_map, weights, *FLOAT, payload, sf, dweights),
    )


def layer(x, topk_ids, weights, dout):
    """Everything once, with the identity for the experts."""
    grouped_layout, row_map = route(topk_ids, 5, 16)
    x_fp8, sf = gather_cast(x, row_map, grouped_layout.shape[0], *FLOAT)
    used = (grouped_layout >= 0)[:, None]
    y = torch.where(used, x_fp8.float() * sf.repeat_interleave(128, 1), 0).to(x.dtype)
    dy, dweights = combine_backward(dout, y, row_map, weights)
    dy_fp8, dy_sf, _ = combine_backward_cast(dout, y, row_map, weights, *FLOAT)
    dx = combine(torch.where(used, dy, 0), row_map)
    payloads = [torch.where(used, payload.view(torch.uint8), 0) for payload in (x_fp8, dy_fp8)]
    return grouped_layout, row_map, *payloads, torch.where(used, dy_sf, 0), combine(y, row_map, weights), dweights, dx


def layer_inputs(tokens, seed=0):
    return (distinct(tokens, 256, seed=seed), random_ids(tokens, 3, 5, seed=seed),
            distinct(tokens, 3, torch.float32, seed=seed + 1), distinct(tokens, 256, seed=seed + 2))  # fmt: skip


def test_compile():
    torch._dynamo.reset()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (7, 130):
        for result, want in zip(compiled(*layer_inputs(tokens)), layer(*layer_inputs(tokens))):
            assert_bitwise_equal(result, want, f"{tokens} tokens")
            assert result.stride() == want.stride()


def test_fake_tensors():
    real = layer(*layer_inputs(7))
    with torch._subclasses.FakeTensorMode() as mode:
        for got, want in zip(layer(*map(mode.from_tensor, layer_inputs(7))), real):
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


# On the GPU


@gpu
def test_kernels_do_the_work(monkeypatch):
    for name in ("route", "gather_cast", "combine", "combine_backward", "combine_backward_cast"):
        monkeypatch.setattr(fused_moe, f"{name}_reference", lambda *args: pytest.fail("took the reference"))
    for planned in (fused_moe._route, fused_moe._gather_cast, fused_moe._combine, fused_moe._combine_backward,
                    fused_moe._combine_backward_cast):  # fmt: skip
        forget(planned)
    layer(*layer_inputs(19))


@gpu
@pytest.mark.parametrize("experts, topk", [(8, 2), (64, 6), (256, 8), (1024, 10), (4096, 3)])
def test_route_many(experts, topk):
    for tokens in (1000, 16384):
        for alignment in (64, 128):
            ids = random_ids(tokens, topk, experts)
            for got, want in zip(route(ids, experts, alignment), fused_moe.route_reference(ids, experts, alignment)):
                assert_bitwise_equal(got, want, f"{tokens} tokens, alignment {alignment}")


@gpu
@pytest.mark.parametrize("topk, experts", [(2, 8), (8, 256)])
@pytest.mark.parametrize("hidden", [4096, 7168])
def test_stable_over_launches(topk, experts, hidden):
    tokens = 1024
    x, dout = distinct(tokens, hidden), distinct(tokens, hidden, seed=2)
    ids = random_ids(tokens, topk, experts)
    weights = distinct(tokens, topk, torch.float32, seed=1)

    def run():
        grouped_layout, row_map = route(ids, experts, 128)
        used = grouped_layout >= 0
        outputs = [grouped_layout, row_map]
        for recipe in (FLOAT, PACKED):
            x_fp8, sf = gather_cast(x, row_map, len(used), *recipe)
            outputs += [x_fp8.view(torch.uint8)[used], sf[used]]
        y = torch.zeros(len(used), hidden, dtype=x.dtype, device=DEVICE)
        y[used] = outputs[2].to(x.dtype)
        y[~used] = torch.nan
        dy, dweights = combine_backward(dout, y, row_map, weights)
        dy_fp8, dy_sf, dweights_too = combine_backward_cast(dout, y, row_map, weights, *FLOAT)
        return [*outputs, combine(y, row_map, weights), dy[used], dweights, dy_fp8.view(torch.uint8)[used], dy_sf[used],
                dweights_too]  # fmt: skip

    first = run()
    grouped_layout, row_map = first[:2]
    used = grouped_layout >= 0
    for got, recipe in zip((first[2:4], first[4:6]), (FLOAT, PACKED)):
        want = fused_moe.gather_cast_reference(x, row_map, len(used), *recipe)
        assert_bitwise_equal(got[0], want[0].view(torch.uint8)[used])
        assert_bitwise_equal(got[1], want[1][used])
    for launch in range(100):
        poison = [torch.full((len(used), hidden), torch.nan, dtype=x.dtype, device=DEVICE) for _ in range(2)]
        del poison
        for got, want in zip(run(), first):
            assert torch.equal(got, want), f"launch {launch}"


@gpu
def test_cuda_graph():
    graphs = []
    for tokens in (7, 130):
        inputs = layer_inputs(tokens)
        layer(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = layer(*inputs)
        graphs.append((tokens, inputs, graph, results))
    for seed in range(1, 4):
        for tokens, inputs, graph, results in graphs:
            for t, new in zip(inputs, layer_inputs(tokens, seed)):
                t.copy_(new)
            graph.replay()
            for got, want in zip(results, layer(*layer_inputs(tokens, seed))):
                assert_bitwise_equal(got, want, f"{tokens} tokens, replay {seed}")


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device():
    expected = layer(*layer_inputs(40))
    for got, want in zip(layer(*(t.to("cuda:1") for t in layer_inputs(40))), expected):
        assert_bitwise_equal(got.cpu(), want.cpu())


@gpu
@pytest.mark.slow
def test_offsets_past_2_31():
    """Rows whose first element lies beyond 2^31."""
    hidden, rows = 7168, 299_594 + 128
    row_map = torch.tensor([[rows - 1, 0], [rows - 2, 1]], dtype=torch.int32, device=DEVICE)
    used = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    used[row_map.flatten().long()] = True
    x = distinct(2, hidden)
    x_fp8, sf = gather_cast(x, row_map, rows, *FLOAT)
    want = token_cast(x, *FLOAT)
    for t, _, row in slots(row_map):
        assert_bitwise_equal(x_fp8[row], want[0][t])
        assert_bitwise_equal(sf[row], want[1][t])
    y = torch.full((rows, hidden), torch.nan, dtype=x.dtype, device=DEVICE)
    y[used] = distinct(4, hidden)
    weights = distinct(2, 2, torch.float32)
    check_combine(y, row_map, weights)
    dy, dweights = combine_backward(x, y, row_map, weights)
    assert_bitwise_equal(dy[rows - 1], (weights[0, 0] * x[0].float()).to(x.dtype))
    check_dweights(dweights, x, y, row_map)


def bound(hidden, topk, dtype, recipe):
    """(launch, tensors) of every kernel, on meta tensors."""
    tokens, experts = 8192, 256

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    ids, row_map = empty(tokens, topk, dtype=torch.int64), empty(tokens, topk, dtype=torch.int32)
    rows, weights = num_rows(tokens, topk, experts, 128), empty(tokens, topk, dtype=torch.float32)
    router = fused_moe.bind_route(ids, experts, 128)
    table, layout = empty(*router.table_shape, dtype=torch.int32), empty(rows, dtype=torch.int32)
    yield router.count, (ids, table)
    yield router.scan, (table,)
    yield router.assign, (ids, layout, row_map, table)
    few = fused_moe.bind_route(ids[:8], experts, 128)
    yield few.assign, (ids[:8], layout, row_map, row_map)
    x, y, dy, dweights = empty(tokens, hidden), empty(rows, hidden), empty(rows, hidden), weights
    (_, groups), sf_dtype = sf_spec(rows, hidden, recipe)
    x_fp8, sf = empty(rows, hidden, dtype=E4M3), empty(rows, groups, dtype=sf_dtype)
    yield fused_moe.bind_gather_cast(x, row_map, rows, *recipe, x_fp8, sf), (x, row_map, x_fp8, sf)
    yield fused_moe.bind_combine(y, row_map, weights, True, x), (y, row_map, weights, x)
    yield fused_moe.bind_combine(y, row_map, row_map, False, x), (y, row_map, row_map, x)
    inputs = (x, y, row_map, weights)
    yield fused_moe.bind_combine_backward(*inputs, dy, dweights), (*inputs, weights, dy, dweights)
    launch = fused_moe.bind_combine_backward(*inputs, x_fp8, dweights, sf, recipe)
    yield launch, (*inputs, sf, x_fp8, dweights)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize(
    "hidden, topk, dtype, recipe",
    [(4096, 8, torch.bfloat16, FLOAT), (7168, 2, torch.bfloat16, PACKED), (1000, 6, torch.float32, FLOAT)],
    ids=["4096", "7168", "1000"],
)
def test_no_spills(hidden, topk, dtype, recipe, capability):
    pytest.importorskip("triton")
    for launch, tensors in bound(hidden, topk, dtype, recipe):
        constants = {"HARDWARE": capability >= 89} if "HARDWARE" in launch.kernel.arg_names else {}
        compiled = compile_launch(launch, tensors, capability, **constants)
        # For sm_100 ptxas keeps a few values of the plain backward on the stack, well below the registers it has.
        assert compiled.local == 0 and compiled.stack <= (64 if capability == 100 else 0), launch.kernel
        if capability >= 90 and hidden % 1024 == 0 and dtype == torch.bfloat16 and compiled.instructions("F2FP"):
            # Whole rows move in words of 16 bytes, gathered or not.
            assert "LDG.E.128" in compiled.instructions("LDG") and "STG.E.128" in compiled.instructions("STG")


def test_kernel_names():
    """No name that profilers take for a GEMM or a layout."""
    pytest.importorskip("triton")
    names = [name for name in vars(fused_moe) if name.endswith("_kernel")]
    assert len(names) == 6
    assert not [name for name in names if "gemm_" in name or "transpose" in name or "pack_fp32" in name]
