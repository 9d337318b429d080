"""The FP8 GEMM kernels for Hopper: which tile a problem gets, and what they are compiled to."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from gemming import BF16, E4M3, FP32
from generators import deep_gemm

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
gemm = deep_gemm.gemm
Gran, Tma = gemm.reference.Gran, gemm._tma.Tma
FORWARD = Gran(1, 128, 128, 128)
TYPES = {E4M3: "fp8e4nv", BF16: "bf16", FP32: "fp32"}

# M, N, K -> TFLOPS on an H200 of tiles of 256 and 192 rows.
MEASURED = {
    (4096, 2112, 7168): (931, 1231), (4096, 576, 7168): (787, 930), (4096, 24576, 1536): (1093, 1089),
    (4096, 32768, 512): (812, 838), (4096, 7168, 16384): (1231, 1134), (4096, 4096, 7168): (1236, 1133),
    (4096, 7168, 2048): (1135, 1071), (8192, 8192, 8192): (1159, 1146),
}  # fmt: skip


@pytest.mark.parametrize("shape, speeds", MEASURED.items(), ids=str)
def test_tile_is_the_faster_one(shape, speeds):
    rows = gemm.config.fp8_config(*shape, 2, False, False, 132).block_m
    assert speeds[(256, 192).index(rows)] >= 0.96 * max(speeds)


def test_configs_fit():
    for per_column, accumulate, d_bytes in ((False, False, 2), (False, True, 4), (True, True, 4), (True, False, 2)):
        rows = set()
        for m in (129, 200, 1000, 4096, 8192):
            for n, k in ((33, 128), (576, 7168), (2112, 7168), (32768, 512)):
                chosen = gemm.config.fp8_config(m, n, k, d_bytes, per_column, accumulate, 132)
                rows.add(chosen.block_m)
                assert chosen.block_m % (64 * chosen.consumers) == 0 and chosen.stages >= 2
                consumer, producer = chosen.registers
                # As many warps produce, though three of them are idle.
                assert 128 * (chosen.consumers * consumer + producer) <= 65536
        assert len(rows) > 1


def problem(m, n, k, per_column, dtype):
    def meta(shape, dtype, stride=None):
        return torch.empty_strided(shape, stride or (shape[1], 1), dtype=dtype, device="meta")

    def mn_major(mn):
        return meta((mn, -(-k // 128)), FP32, (1, -(-mn // 4) * 4))

    sfb = mn_major(n) if per_column else meta((-(-n // 128), -(-k // 128)), FP32)
    return meta((m, k), E4M3), mn_major(m), meta((n, k), E4M3), sfb, meta((m, n), dtype)


def large(m, n, k, per_column, accumulate, dtype, rows):
    """The kernel for many rows, with a tile of so many."""
    tensors = problem(m, n, k, per_column, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm.config, "_clocks", lambda block_m, *_: block_m != rows)
        chosen = gemm.config.fp8_config(m, n, k, dtype.itemsize, per_column, accumulate, 132)
    assert chosen.block_m == rows
    return gemm.hopper_fp8.bind(*tensors, per_column, accumulate, chosen, 132), tensors


def small(m, n, k):
    """The kernel for up to 128 rows."""
    tensors = problem(m, n, k, False, BF16)
    launch = gemm.hopper_small.bind(*tensors, FORWARD, False, 132)
    return getattr(launch, "launch", launch), tensors


LAUNCHES = {
    "256 rows": lambda: large(4096, 2112, 7168, False, False, BF16, 256),
    "192 rows": lambda: large(4096, 2112, 7168, False, False, BF16, 192),
    "128 rows": lambda: large(4096, 2112, 7168, False, False, BF16, 128),
    "192 rows, added to C": lambda: large(4096, 2112, 7168, False, True, BF16, 192),
    "256 rows, wgrad added to C": lambda: large(4096, 2112, 7168, True, True, FP32, 256),
    "128 rows, wgrad": lambda: large(4096, 2112, 7168, True, False, BF16, 128),
    "a row": lambda: small(1, 2112, 7168),
    "few rows": lambda: small(64, 7168, 2048),
    "few rows, K split": lambda: small(128, 4096, 7168),
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("make", LAUNCHES.values(), ids=LAUNCHES)
def test_code(make):
    compiled = compile_for_hopper(*make())
    assert compiled.metadata.shared <= 227 * 1024
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage, sass = tool("cuobjdump", "-res-usage", cubin.name), tool("nvdisasm", "-c", cubin.name)
    assert re.search(r"STACK:0 .*LOCAL:0", usage), usage
    assert "QGMMA" in sass and "UTMALDG" in sass and not re.search(r"\b(LDL|STL)\b", sass)


def compile_for_hopper(launch, tensors):
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(launch.kernel.params, (*launch.operands, *launch.args))):
        if isinstance(value, Tma):
            dtype = TYPES[tensors[value.index].dtype]
            signature[parameter.name] = f"tensordesc<{dtype}{list(value.block)},{value.layout!r}>"
        elif i < len(launch.operands):
            signature[parameter.name] = "*" + TYPES[tensors[value].dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            assert parameter.do_not_specialize, f"{parameter.name} would recompile the kernel for each value"
            signature[parameter.name] = "i32"
    source = GluonASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)


def tool(name, *arguments):
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def test_operands_that_are_converted():
    """Rows that overlap have to be copied; one column of scale factors, at whatever distance, has not."""
    hopper = gemm.hopper
    a = torch.empty(256, device="meta", dtype=E4M3)
    assert hopper._k_major(a[:128].expand(64, 128)) and hopper._k_major(a.as_strided((8, 128), (16, 1)))
    assert not hopper._k_major(a.view(2, 128)) and not hopper._k_major(a[:100].view(1, 100))
    for stride in ((1, 1), (1, 64), (1, 67)):
        assert hopper._mn_major_sf(torch.empty_strided((64, 1), stride, device="meta"), 64, 128) is None
    assert hopper._mn_major_sf(torch.empty(64, 2, device="meta"), 64, 256)


def test_kernel_names():
    """Profilers look for these."""
    for kernel in (gemm.hopper_fp8.hopper_fp8_gemm_kernel, gemm.hopper_small.fp8_small_gemm_kernel):
        assert "fp8" in kernel.__name__ and "gemm_" in kernel.__name__
