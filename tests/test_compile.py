"""What the kernels become for every supported GPU, by the installed Triton, without a GPU.

The variants take both values of each constexpr, and both sides of each branch on them, rather than all combinations.
"""

import functools
import os
import re

import pytest
import torch
from casting import E4M3, sf_spec
from compiling import ARCHITECTURES, compile_launch
from generators import deep_gemm

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
fused_cast = deep_gemm.fused_cast
each_architecture = pytest.mark.parametrize("capability", ARCHITECTURES, ids=ARCHITECTURES.values())

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = (4100, 1)
# Name -> dtype, N, (use_ue8m0, gran_k, packed), saturate, x strides, out strides; None: contiguous.
VARIANTS = {
    "bf16 fp32-128": (BF16, 4096, (False, 128, False), True, None, None),
    "bf16 packed-32": (BF16, 4096, (True, 32, True), True, None, None),
    "bf16 packed-32, Inf to NaN": (BF16, 4096, (True, 32, True), False, None, None),
    "fp32 packed-128": (FP32, 7168, (True, 128, True), True, None, None),
    "fp32 ue8m0-128, Inf to NaN": (FP32, 7168, (True, 128, False), False, None, None),
    "fp16 fp32-32": (FP16, 2048, (False, 32, False), True, None, None),
    "bf16 ue8m0-32, slices of rows": (BF16, 4096, (True, 32, False), True, (3 * 4096, 1), (8192, 1)),
    "bf16 packed-128, 1008 columns": (BF16, 1008, (True, 128, True), True, None, None),
    "bf16 fp32-128, 1000 columns": (BF16, 1000, (False, 128, False), True, None, None),
    "fp32 fp32-32, 1023 columns": (FP32, 1023, (False, 32, False), True, None, None),
    "bf16 packed-32, column-major x": (BF16, 4096, (True, 32, True), True, (1, 4096), None),
    "fp32 fp32-128, column-major x": (FP32, 1000, (False, 128, False), True, (1, 4104), None),
    "bf16 ue8m0-32, column-major x and out, Inf to NaN": (BF16, 4096, (True, 32, False), False, (1, 4096), (1, 4096)),
    "bf16 fp32-128, column-major out": (BF16, 4096, (False, 128, False), True, None, (1, 4096)),
    "fp16 packed-128, every other column": (FP16, 1000, (True, 128, True), True, (2000, 2), (2000, 2)),
    "fp32 ue8m0-32, column-major with steps, Inf to NaN": (FP32, 1000, (True, 32, False), False, (2, 9000), (3, 15000)),
}
WIDE = [name for name in VARIANTS if "column" not in name]


@functools.cache
def compiled(name, capability, aligned=True):
    dtype, n, recipe, saturate, x_stride, out_stride = VARIANTS[name]
    m = 4096
    shape, sf_dtype = sf_spec(m, n, recipe)
    x = torch.empty_strided((m, n), x_stride or (n, 1), dtype=dtype, device="meta")
    out = torch.empty_strided((m, n), out_stride or (n, 1), dtype=E4M3, device="meta")
    out_sf = torch.empty(shape, dtype=sf_dtype, device="meta")
    launch = fused_cast.bind_per_token_cast(x, *recipe, out, out_sf)
    return compile_launch(
        launch, (x, out, out_sf), capability, aligned, HARDWARE=capability >= 89, SATURATE=saturate or not recipe[0]
    )


def test_variants_cover_the_constants():
    seen = {}
    for dtype, n, recipe, saturate, x_stride, out_stride in VARIANTS.values():
        shape, sf_dtype = sf_spec(4096, n, recipe)
        x = torch.empty_strided((4096, n), x_stride or (n, 1), dtype=dtype, device="meta")
        out = torch.empty_strided((4096, n), out_stride or (n, 1), dtype=E4M3, device="meta")
        launch = fused_cast.bind_per_token_cast(x, *recipe, out, torch.empty(shape, dtype=sf_dtype, device="meta"))
        for parameter, value in zip(launch.kernel.params[3:], launch.args):
            if parameter.is_constexpr:
                seen.setdefault(parameter.name, set()).add(value)
        seen.setdefault("saturate", set()).add((recipe[0], saturate))
        seen.setdefault("dtype", set()).add(dtype)
    assert seen["dtype"] == {BF16, FP16, FP32}
    assert seen["X_MAJOR"] == seen["OUT_MAJOR"] == {"n", "m", ""}
    assert seen["saturate"] == {(False, True), (True, True), (True, False)}
    assert seen["N_UNIT"] >= {1, 8, 16} and seen["X_UNIT"] >= {1, 8, 16} and seen["M_UNIT"] == {1, 16}
    assert seen["GRAN_K"] == {32, 128}
    for name in ("USE_UE8M0", "PACKED", "EVEN_N"):
        assert seen[name] == {False, True}, name


@each_architecture
@pytest.mark.parametrize("name", VARIANTS)
def test_code(name, capability):
    dtype, n, recipe, *_ = VARIANTS[name]
    code = compiled(name, capability)
    assert code.local == 0 and not code.instructions("(?:LDL|STL)"), "spills"
    assert code.stack == 0, "stack"
    assert code.registers <= 128
    assert code.shared < 48 * 1024
    # fp32 scale factors take an IEEE division, powers of two none.
    assert not re.search(r"\bdiv\.(full|approx)|\brcp\.approx", code.ptx)
    assert bool(re.search(r"\bdiv\.rn\.f32|\brcp\.rn\.f32", code.ptx)) == (not recipe[0])
    # Nothing rounds once where the reference rounds twice, nothing flushes a subnormal.
    assert not re.search(r"\bfma\.|\bmad\.[\w.]*f(16|32|64)", code.ptx)
    assert ".ftz" not in code.ptx
    # One rounding from fp32: by way of fp16, as Triton may do for sm_89, there are two.
    conversions = set(re.findall(r"\bcvt\.[\w.]*e4m3x2\.(\w+)", code.ptx))
    assert conversions == ({"f32"} if capability >= 89 else set())
    assert not re.search(r"\bcvt\.\w+\.f16x?2?\.f32", code.ptx)


@each_architecture
@pytest.mark.parametrize("name", WIDE)
def test_contiguous_rows_take_16_byte_accesses(name, capability):
    dtype, *_ = VARIANTS[name]
    code = compiled(name, capability)
    loads, stores = code.instructions("LDG"), code.instructions("STG")
    # A thread takes 16 elements; besides them it stores scale factors only.
    assert len(loads) == dtype.itemsize and all(".128" in load for load in loads), loads
    assert sum(".128" in store for store in stores) == 1 and len(stores) <= 5, stores
    # No tile goes through shared memory, at most what warps tell each other about a group.
    assert code.shared < 1024


@each_architecture
def test_unaligned_pointers_take_narrow_accesses(capability):
    code = compiled("bf16 fp32-128", capability, aligned=False)
    assert not any(".128" in access for access in code.instructions("(?:LDG|STG)"))
