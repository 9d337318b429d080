"""The kernel itself on CPU tensors, under Triton's interpreter, against the reference.

Run as `TRITON_INTERPRET=1 pytest -m interpreter`. The interpreter does not round to e4m3 to nearest even, so the kernel
rounds in integers here, as it does on sm_80.
"""

import os

import pytest
import torch
from casting import (
    E4M3,
    assert_same,
    bf16_patterns,
    cast,
    check,
    check_guarded,
    distinct,
    each_dtype,
    each_recipe,
    reference,
    sf_spec,
    specials,
)
from generators import deep_gemm, forget
from views import guarded, other_values, same_values

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in multiply"),  # NumPy, at Inf * 0
]
fused_cast = deep_gemm.fused_cast
FLOAT, PACKED = (False, 128, False), (True, 32, True)


@pytest.fixture(autouse=True)
def kernel_on_the_cpu(monkeypatch):
    """Send CPU tensors to the kernel, and prove that they went there."""
    pytest.importorskip("triton")
    launches = []
    by_triton = deep_gemm._triton.Launch._launch_by_triton
    monkeypatch.setattr(fused_cast, "served_by_triton", lambda device: True)
    monkeypatch.setattr(
        deep_gemm._triton.Launch,
        "_launch_by_triton",
        lambda self, *args: (launches.append(self), by_triton(self, *args))[1],
    )
    forget(fused_cast._per_token_cast)
    yield
    forget(fused_cast._per_token_cast)
    assert launches


@each_dtype
@each_recipe
def test_shapes(recipe, dtype):
    for m, n in ((1, 1), (3, 33), (2, 97), (5, 385), (4, 512), (3, 1000), (1, 1024), (2, 1025), (3, 1409), (3, 2048)):
        if sf_spec(m, n, recipe):
            check(distinct(m, n, dtype, device="cpu"), recipe, label=f"{m}x{n}")


def check_but_for_nan_times_nan(x, recipe, label=""):
    """`check`, without the sign of x_fp8 and the payload of sf where NaNs meet: which of them wins is the CPU's choice.

    In UE8M0 mode the scale factor of a NaN is a power of two, and all bytes count.
    """

    def without_choice(x_fp8, sf):
        if recipe[0]:
            return x_fp8, sf
        payload = x_fp8.view(torch.uint8)
        return torch.where(x.isnan(), payload & 0x7F, payload).view(E4M3), sf.where(~sf.isnan(), torch.nan)

    assert_same(without_choice(*cast(x, *recipe)), without_choice(*reference(x, *recipe)), label)


@each_dtype
@each_recipe
def test_special_values(recipe, dtype):
    x = specials(dtype, device="cpu")
    check_but_for_nan_times_nan(x, recipe)
    check_but_for_nan_times_nan(x.t().contiguous().t(), recipe, "column-major")


@each_recipe
def test_bf16_patterns(recipe):
    patterns = bf16_patterns("cpu")
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(0))
    finite = patterns[patterns.isfinite()]
    finite = finite[torch.argsort(finite.abs().float())][: len(finite) // 512 * 512].view(-1, 512)
    check(finite, recipe, label="by magnitude")
    check_but_for_nan_times_nan(patterns, recipe, "in order")
    check_but_for_nan_times_nan(patterns.flatten()[order].view(128, 512), recipe, "shuffled")


@each_recipe
def test_random_bits(recipe):
    generator = torch.Generator().manual_seed(0)
    pattern = torch.empty(64, 1024, dtype=torch.int32).random_(-(2**31), 2**31, generator=generator)
    exponent = torch.randint(1, 255, (64, 32, 1), dtype=torch.int32, generator=generator)
    below = (pattern.view(64, 32, 32) >> 23) & 15
    pattern = (pattern & -0x7F800001) | ((exponent - below).clamp(min=0) << 23).view(64, 1024)
    x = pattern.view(torch.float32)
    check_but_for_nan_times_nan(x, recipe)


@pytest.mark.parametrize("recipe", [FLOAT, PACKED], ids=["fp32-128", "packed-32"])
def test_strided_inputs(recipe):
    for m, n in ((3, 512), (20, 385)):
        x = distinct(m, n, device="cpu")
        for name, view in (same_values(x) | other_values(x)).items():
            if sf_spec(*view.shape, recipe):
                check(view, recipe, label=f"{m}x{n} {name}")


@pytest.mark.parametrize(
    "m, n, recipe", [(1, 512, FLOAT), (5, 1000, (True, 128, False)), (5, 1000, PACKED), (66, 385, (True, 128, True))]
)
def test_output_views(m, n, recipe):
    (_, groups), sf_dtype = sf_spec(m, n, recipe)
    x = distinct(m, n, device="cpu")
    outs, sfs = guarded(m, n, E4M3), guarded(m, groups, sf_dtype)
    for (name, out), (sf_name, out_sf) in zip(outs.items(), reversed(sfs.items())):
        check_guarded(x, recipe, out, out_sf, f"out {name}, out_sf {sf_name}")
        out.buffer.fill_(-1)
        out_sf.buffer.fill_(-1)
        check_guarded(x.t().contiguous().t(), recipe, out, out_sf, f"column-major x, out {name}, out_sf {sf_name}")


@pytest.mark.parametrize("tall", [False, True])
def test_grid_of_many_rows(tall, monkeypatch):
    """Rows past the end of the second grid axis, which here ends at 3 tiles."""
    bind = fused_cast.bind_per_token_cast

    def bind_with_a_small_axis(x, *args):
        launch = bind(x, *args)
        columns, y, z = launch.grid
        tiles = y * z
        launch.grid = (columns, min(tiles, 3), -(-tiles // 3))
        return launch

    monkeypatch.setattr(fused_cast, "bind_per_token_cast", bind_with_a_small_axis)
    x = distinct(23, 1100, device="cpu")
    check(x.t().contiguous().t() if tall else x, FLOAT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("saturates", [False, True])
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_inf(use_ue8m0, saturates, dtype, monkeypatch):
    """Both bytes that releases of torch give Inf in UE8M0 mode, whichever is installed."""
    monkeypatch.setattr(fused_cast, "torch_saturates", lambda: saturates)
    x = distinct(8, 512, dtype, device="cpu")
    x[1, 3], x[2, 200], x[3, 5:9] = torch.inf, -torch.inf, torch.tensor([torch.inf, -torch.inf, -0.0, 448.0])
    x[4, :] = torch.inf
    x[5, 130], x[5, 131] = torch.inf, torch.finfo(dtype).max
    x[6, 256], x[7, 0], x[7, 1] = torch.nan, torch.nan, -torch.inf
    got, sf = cast(x, use_ue8m0, 128)
    y = x.float() * (1.0 / sf).repeat_interleave(128, dim=1)
    magnitude = y.abs().clamp(max=448.0).to(E4M3).view(torch.uint8)
    if not saturates:
        magnitude[y.isinf()] = 0x7F
    sign = y.view(torch.int32) >> 31 & 0x80
    expected = (magnitude | sign.to(torch.uint8)).view(E4M3)
    assert y.isinf().any() == use_ue8m0 and y.isnan().any()
    assert_same((got, sf), (expected, reference(x, use_ue8m0, 128)[1]))
