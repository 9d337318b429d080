"""What the portable GEMM kernels become for every supported GPU, by the installed Triton, without a GPU."""

import os

import pytest
import torch
from compiling import ARCHITECTURES, compile_launch
from gemming import BF16, E4M3, FP32, RECIPES
from generators import deep_gemm

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
portable, Gran = deep_gemm.gemm.portable, deep_gemm.gemm.reference.Gran
each_architecture = pytest.mark.parametrize("capability", ARCHITECTURES, ids=ARCHITECTURES.values())
FORWARD, WGRAD, GROUPS_OF_32, WEIGHTS_OF_32, _ = RECIPES.values()

# Name -> N, K, recipe, packed scale factors, FP4, dtype of d, whether to accumulate, column-major operands.
VARIANTS = {
    "forward": (2112, 7168, FORWARD, False, "", BF16, False, ""),
    "wgrad": (2112, 7168, WGRAD, False, "", FP32, True, ""),
    "packed": (2112, 7168, GROUPS_OF_32, True, "", BF16, False, ""),
    "FP4 weights": (2112, 7168, WEIGHTS_OF_32, True, "b", BF16, False, ""),
    "FP4 by FP4": (2112, 7168, GROUPS_OF_32, True, "ab", BF16, False, ""),
    "column-major": (2112, 7168, FORWARD, False, "", BF16, False, "ab"),
    "column-major FP4": (2112, 7168, WEIGHTS_OF_32, True, "b", BF16, False, "b"),
    "odd sizes": (33, 577, FORWARD, False, "", BF16, True, ""),
}
# Instructions of tensor cores.
FP8_DOT, BF16_DOT = r"QMMA\.16832\.F32\.E4M3\.E4M3", r"HMMA\.16816\.F32\.BF16"
MMA = {80: r"HMMA\.16816\.F32", 89: FP8_DOT, 90: "QGMMA", 100: "UTCQMMA", 120: FP8_DOT}
MMA_BF16 = {80: BF16_DOT, 89: BF16_DOT, 90: "HGMMA", 100: "UTCHMMA", 120: BF16_DOT}


def meta(shape, dtype, column_major=False):
    return torch.empty_strided(shape, (1, shape[0]) if column_major else (shape[1], 1), dtype=dtype, device="meta")


def problem(name, m=4112):
    n, k, recipe, packed, fp4, dtype, accumulate, column_major = VARIANTS[name]
    tensors = []
    for operand, mn, (gran_mn, gran_k) in zip("ab", (m, n), recipe):
        turned, groups = operand in column_major, gran_k * (4 if packed else 1)
        shape = (mn, k)
        if operand in fp4:
            shape = (mn // 2, k) if turned else (mn, k // 2)
        tensors.append(meta(shape, torch.int8 if operand in fp4 else E4M3, turned))
        tensors.append(meta((-(-mn // gran_mn), -(-k // groups)), torch.int32 if packed else FP32))
    d = meta((m, n), dtype)
    gran = Gran(recipe[0][0], recipe[1][0], recipe[0][1], recipe[1][1])
    return (*tensors, d), portable.bind(*tensors, d, gran, accumulate)


def check(code, mma):
    assert code.local == 0 and code.stack == 0 and not code.instructions("(?:LDL|STL)"), "spills"
    assert code.registers <= 255
    assert code.shared < 99 * 1024, "more than sm_89 has"
    assert code.instructions(mma), "no tensor cores"
    assert ".ftz" not in code.ptx


@each_architecture
@pytest.mark.parametrize("name", VARIANTS)
def test_code(name, capability):
    tensors, launch = problem(name)
    check(compile_launch(launch, tensors, capability, HARDWARE=capability >= 89), MMA[capability])


@each_architecture
@pytest.mark.parametrize("column_major", ["", "ab"])
@pytest.mark.parametrize("n, k", [(2112, 7168), (33, 577)])
def test_code_of_bf16(n, k, column_major, capability):
    a, b = meta((4112, k), BF16, "a" in column_major), meta((n, k), BF16, "b" in column_major)
    for accumulate, dtype in ((False, BF16), (True, FP32)):
        d = meta((4112, n), dtype)
        launch = portable.bind_bf16(a, b, d, accumulate)
        check(compile_launch(launch, (a, b, d), capability), MMA_BF16[capability])


@each_architecture
def test_rows_of_operands_take_16_byte_copies(capability):
    tensors, launch = problem("forward")
    code = compile_launch(launch, tensors, capability, HARDWARE=capability >= 89)
    assert all(".128" in copy for copy in code.instructions("LDGSTS") if "32" not in copy)
    assert not any(".U8" in load for load in code.instructions("LDG"))


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_recompile_nothing(name):
    """Only where A or d has its rows next to each other is M, or what divides it, a constant."""
    constants = [
        tuple(arg for arg, parameter in zip(launch.args, launch.kernel.params[5:]) if parameter.is_constexpr)
        for launch in (problem(name, m)[1] for m in (2, 128, 4098, 8192))
    ]
    if VARIANTS[name][-1] != "ab":
        assert len(set(constants)) == 1


def test_config():
    for gran in (Gran(1, 128, 128, 128), Gran(1, 1, 128, 32), Gran(1, 1, 32, 32)):
        for wide in (False, True):
            config = portable.fp8_config(gran, wide)
            assert config.block_k == min(gran.k_a, gran.k_b)
            assert config.block_n == 64 * (1 + wide) == portable.bf16_config(wide).block_n


def test_kernel_names():
    """Profilers look for these."""
    assert "gemm_" in portable.portable_fp8_gemm_kernel.__name__
    assert "bf16_gemm" in portable.portable_bf16_gemm_kernel.__name__
