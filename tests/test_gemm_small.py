"""GEMMs of few rows and of FP4 weights: choice of tiles, machine code, and the kernel of one row on CPU tensors.

Run as `TRITON_INTERPRET=1 pytest -m interpreter` for the last.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from compiling import ARCHITECTURES, compile_launch
from gemming import BF16, E4M3, FP32, RECIPES, addend, assert_product, nan, operand, product
from generators import deep_gemm
from views import guarded, with_stride

pytest.importorskip("triton")
gemm = deep_gemm.gemm
gemv, small, Gran = gemm.gemv, gemm.hopper_small, gemm.reference.Gran
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
interprets = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
FORWARD = RECIPES["1x128 by 128x128"]
SHAPES = [(2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]
each_shape = pytest.mark.parametrize("n, k", [*SHAPES, (33, 576)])
SMS = 132

# M -> (parts, cols, parts_k, splits) of what an H200 took the least time for, or at most 5% more, for SHAPES.
FASTEST = {
    64: [
        {(1, 64, 2, 4), (1, 128, 2, 4)}, {(1, 64, 2, 4)}, {(1, 128, 2, 1), (1, 64, 2, 1)}, {(1, 128, 2, 1)},
        {(1, 64, 4, 1)}, {(1, 128, 2, 4)}, {(1, 64, 2, 1), (1, 64, 4, 1)},
    ],
    128: [
        {(2, 64, 1, 4)}, {(2, 64, 1, 4)}, {(2, 128, 1, 1), (2, 64, 1, 1)}, {(2, 128, 1, 1)},
        {(2, 64, 2, 1), (2, 128, 1, 2)}, {(2, 128, 1, 4)}, {(2, 64, 1, 1), (2, 64, 2, 1)},
    ],
}  # fmt: skip


def tile(config):
    return config.parts, config.cols, config.parts_k, config.splits


@pytest.mark.parametrize("m", FASTEST)
def test_fp8_config_is_the_fastest(m):
    for (n, k), fastest in zip(SHAPES, FASTEST[m]):
        assert tile(small.fp8_config(m, n, k, 2, SMS)) in fastest, (n, k)


def shared_bytes(config, fp4, itemsize):
    """Shared memory, without barriers."""
    stage = ((32 if fp4 else 64) * config.parts + config.cols) * 128
    return config.stages * stage + config.parts * 64 * config.cols * (4 * (config.parts_k - 1) + itemsize)


@each_shape
def test_fp8_config(n, k):
    for itemsize in (2, 4):
        configs = {m: small.fp8_config(m, n, k, itemsize, SMS) for m in range(2, 129)}
        assert len(set(configs.values())) <= 2, "each is compiled"
        for m, config in configs.items():
            assert 64 * config.parts >= m and 128 % config.cols == 0 and config.parts * config.parts_k in (2, 4)
            assert config.stages % config.parts_k == 0 and config.stages >= 2
            assert shared_bytes(config, False, itemsize) <= 225 * 1024
            one = small.fp8_config(m, n, k, itemsize, SMS, invariant=True)
            assert (one.parts_k, one.splits) == (1, 1)


@each_shape
def test_fp4_config(n, k):
    rows = (1, 16, 17, 32, 33, 64, 65, 128, 4096)
    configs = [small.fp4_config(m, n, k, 2, SMS) for m in rows]
    assert [config.cols for config in configs] == [16, 16, 32, 32, 64, 64, 128, 128, 128]
    for m, config in zip(rows, configs):
        assert config.stages % config.parts_k == 0 and config.stages >= 2
        assert config.splits == 1 or (m <= 128 and -(-k // 128) >= 8 * config.splits)
        assert shared_bytes(config, True, 2) <= 225 * 1024
        one = small.fp4_config(m, n, k, 2, SMS, invariant=True)
        assert (one.parts_k, one.splits) == (1, 1)


@each_shape
def test_gemv_config(n, k):
    config = gemv.gemv_config(n, k, SMS)
    assert 128 % config.rows == 0 and config.rows * -(-n // config.rows) < n + config.rows
    assert -(-n // config.rows) >= 4 * SMS or config.rows == 1
    assert config.block_k in (512 * config.num_warps, 1024 * config.num_warps)


def meta(shape, dtype, column_major=False):
    return torch.empty_strided(shape, (1, shape[0]) if column_major else (shape[1], 1), dtype=dtype, device="meta")


def tensors(m, n, k, fp4=False, packed=False, dtype=BF16, mn_major=False):
    """A, its sf, B, its sf and d, of no memory."""
    gran_n, gran_k = (1, 32) if fp4 else (128, 128)
    sfb = (-(-n // gran_n), -(-k // (gran_k * (4 if packed else 1))))
    return (
        meta((m, k), E4M3), meta((m, -(-k // 128)), FP32, mn_major),
        meta((n, k // 2), torch.int8) if fp4 else meta((n, k), E4M3), meta(sfb, torch.int32 if packed else FP32),
        meta((m, n), dtype),
    )  # fmt: skip


def bind(operands, fp4=False, **options):
    launch = small.bind(*operands, small._FP4 if fp4 else small._FP8, False, **options)
    return launch.launch if isinstance(launch, small._SplitLaunch) else launch


def test_what_is_served():
    assert bind(tensors(1, 2112, 7168)).kernel is gemv.fp8_gemm_m1_kernel
    assert bind(tensors(64, 2112, 7168)).kernel is small.fp8_small_gemm_kernel
    assert bind(tensors(129, 2112, 7168)) is None
    # The kernel for many rows takes few blocks of K in two waves, if it has not to transpose scale factors first.
    for n, k in SHAPES:
        served = bind(tensors(128, n, k, mn_major=True)) is not None
        assert served == ((n, k) not in ((24576, 1536), (32768, 512))), (n, k)
        assert bind(tensors(128, n, k)) and bind(tensors(64, n, k, mn_major=True))
    for m in (1, 64, 4096):
        assert bind(tensors(m, 2112, 7168, True, True), True).kernel is small.fp8_fp4_small_gemm_kernel


def test_kernel_names():
    """Profilers look for these, and take one for a call."""
    for kernel in (gemv.fp8_gemm_m1_kernel, small.fp8_small_gemm_kernel, small.fp8_fp4_small_gemm_kernel):
        assert "gemm_" in kernel.__name__
    assert "gemm_" not in small.add_splits_kernel.__name__


GLUON_TYPES = {E4M3: "fp8e4nv", torch.int8: "i8"}
POINTERS = {E4M3: "*fp8e4nv", torch.int8: "*i8", torch.int32: "*i32", FP32: "*fp32", BF16: "*bf16"}


def compile_tma(launch, operands):
    """Shared memory and machine code for sm_90a of a bound launch with tensor maps."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, constexprs, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(launch.kernel.params, (*launch.operands, *launch.args), strict=True)):
        if i >= len(launch.operands):
            assert parameter.is_constexpr or parameter.do_not_specialize
            signature[parameter.name] = "constexpr" if parameter.is_constexpr else "i32"
            if parameter.is_constexpr:
                constexprs[parameter.name] = value
        elif isinstance(value, int):
            signature[parameter.name] = POINTERS[operands[value].dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            dtype = GLUON_TYPES[operands[value.index].dtype]
            signature[parameter.name] = f"tensordesc<{dtype}{list(value.block)},{value.layout!r}>"
    compiled = triton.compile(
        GluonASTSource(launch.kernel, signature, constexprs, attributes),
        target=GPUTarget("cuda", 90, 32), options=launch.options,
    )  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        sass = subprocess.run([tool, "-c", cubin.name], capture_output=True, text=True, check=True).stdout
    return compiled.metadata.shared, sass


def innermost_loops(sass):
    """Machine code of the loops that hold no other."""
    lines = sass.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"\s*(\.L_x_\d+):", line))}
    branches = [(re.search(r"BRA(?:\.\w+)* .*`\((\.L_x_\d+)\)", line), i) for i, line in enumerate(lines)]
    loops = [(labels[found[1]], i) for found, i in branches if found and labels.get(found[1], i) < i]
    inside = lambda one, other: one != other and other[0] <= one[0] and one[1] <= other[1]
    return [lines[start:end] for start, end in loops if not any(inside(one, (start, end)) for one in loops)]


def check_loops(sass, config, spills=0):
    """The consumers' loops over blocks of K, which wait for barriers and keep the tensor cores busy, do not spill."""
    has = lambda loop, name: any(re.search(name, line) for line in loop)
    loops = [loop for loop in innermost_loops(sass) if has(loop, "QGMMA") and has(loop, "SYNCS")]
    assert len(loops) == config.parts * config.parts_k, config
    for loop in loops:
        assert sum(bool(re.search(r"\b(?:LDL|STL)\b", line)) for line in loop) <= spills, f"{config} spills"


@compiles
@pytest.mark.parametrize("m", [64, 128])
def test_fp8_code(m):
    seen = set()
    for n, k in SHAPES:
        operands = tensors(m, n, k)
        launch = bind(operands)
        config = small.fp8_config(m, n, k, 2, SMS)
        if tile(config)[:3] in seen:
            continue
        seen.add(tile(config)[:3])
        if config.splits > 1:
            operands = (*operands[:4], meta((m, n), FP32))
        shared, sass = compile_tma(launch, operands)
        assert shared <= 227 * 1024, config
        check_loops(sass, config)


@compiles
@pytest.mark.parametrize("m, packed", [(1, True), (1, False), (64, True), (128, True)])
def test_fp4_code(m, packed):
    operands = tensors(m, 24576, 1536, True, packed)
    shared, sass = compile_tma(bind(operands, True), operands)
    assert shared <= 227 * 1024
    # Triton 3.9 spills up to two registers that change from tile to tile.
    check_loops(sass, small.fp4_config(m, 24576, 1536, 2, SMS), 2)


@compiles
@pytest.mark.parametrize("capability", ARCHITECTURES, ids=ARCHITECTURES.values())
def test_gemv_code(capability):
    for n, k, packed, accumulate in ((2112, 7168, False, False), (576, 7168, True, True), (33, 577, False, True)):
        operands = tensors(1, n, k, packed=packed)
        launch = gemv.bind(*operands, small._FP8, accumulate, SMS)
        code = compile_launch(launch, operands, capability, HARDWARE=capability >= 89)
        assert code.local == 0 and code.stack == 0 and not code.instructions("(?:LDL|STL)"), "spills"
        assert code.registers <= 160 and code.shared <= 1024, "a tile changes its layout"
        if k % 16 == 0:
            assert code.instructions(r"LDG\.E\.128|LDG\.E\.\w+\.128"), "narrow loads"
            assert not code.instructions(r"LDG\.E\.U8")


@pytest.fixture
def launches_on_the_cpu(monkeypatch):
    """Mend what the interpreter lacks."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        # As the bound of a range; NumPy converts no array to int any more.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)


def run_gemv(a, b, d, accumulate=False, num_sms=SMS):
    operands = (*a.pair, *b.pair, d)
    gemv.bind(*operands, small._FP8, accumulate, num_sms)(operands, tuple(t.data_ptr() for t in operands))


@interprets
@pytest.mark.interpreter
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n, k", [(7, 16), (130, 130), (3, 1), (9, 577), (5, 4112)])
def test_gemv(n, k, packed, launches_on_the_cpu):
    a = operand(1, k, FORWARD[0], 1, packed, device="cpu")
    b = operand(n, k, FORWARD[1], 2, packed, device="cpu")
    d = nan(1, n, device="cpu")
    run_gemv(a, b, d)
    assert_product(d, product(a, b))
    d = addend(1, n, device="cpu")
    run_gemv(a, b, d, True, num_sms=1)
    assert_product(d, addend(1, n, device="cpu").double() + product(a, b))


@interprets
@pytest.mark.interpreter
def test_gemv_of_random_values(launches_on_the_cpu):
    n, k = 130, 1536
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(mn, k, generator=generator) for mn in (1, n))
    a, b = deep_gemm.utils.per_token_cast_to_fp8(x, False), deep_gemm.utils.per_block_cast_to_fp8(w, False)
    operands = (*a, *b, nan(1, n, device="cpu"))
    gemv.bind(*operands, small._FP8, False, 8)(operands, tuple(t.data_ptr() for t in operands))
    expected = gemm.reference.fp8_gemm(*a, *b, None, (1, n), FP32, Gran(1, 128, 128, 128))
    torch.testing.assert_close(operands[-1], expected, rtol=1e-5, atol=1e-4)


@interprets
@pytest.mark.interpreter
def test_gemv_strides(launches_on_the_cpu):
    """Scale factors of any strides, rows of B anywhere, and nothing beside d written."""
    n, k = 34, 144
    a, b = operand(1, k, FORWARD[0], 1, device="cpu"), operand(n, k, FORWARD[1], 2, device="cpu")
    for strides, offset in (((k + 3, 1), 5), ((k + 16, 1), 16)):
        a.sf, b.sf = with_stride(a.sf, (1, 68)), with_stride(b.sf, (1, 36))
        b.data = with_stride(b.data, strides, offset)
        for name, d in guarded(1, n, FP32).items():
            run_gemv(a, b, d.view, num_sms=8)
            assert_product(d.view, product(a, b), name)
            d.assert_untouched(name)
