"""The Hopper GEMMs for many rows: which tile a problem gets, what it is compiled to, and that every form is right."""

import itertools
import os
import re
import subprocess
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from casting import gpu
from gemming import BF16, E4M3, FP32, RECIPES, addend, assert_product, bf16_operand, nan, operand, product
from generators import deep_gemm
from views import Guarded

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
config, hopper, hopper_fp8, hopper_bf16, _tma = (
    getattr(deep_gemm.gemm, name) for name in ("config", "hopper", "hopper_fp8", "hopper_bf16", "_tma")
)
Gran = deep_gemm.gemm.reference.Gran
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

# M, N, K -> TFLOPS of tiles of 256, 192 and 128 rows on an H200.
MEASURED = {
    (4096, 2112, 7168): (931, 1231, 1098),
    (4096, 576, 7168): (787, 930, 749),
    (4096, 24576, 1536): (1093, 1089, 1059),
    (4096, 32768, 512): (812, 838, 895),
    (4096, 7168, 16384): (1231, 1134, 1158),
    (4096, 4096, 7168): (1236, 1133, 1172),
    (4096, 7168, 2048): (1135, 1071, 1134),
    (8192, 8192, 8192): (1159, 1146, 1140),
}
TILES = (256, 192, 128)


def forms():
    """Name -> rows of a tile, scale factors per column, accumulate, dtype of d, by TMA: all that `fp8_config` gives."""
    every = itertools.product(TILES, (False, True), (False, True), (BF16, FP32), (True, False))
    for rows, per_column, accumulate, dtype, by_tma in every:
        if rows == 128 or not (per_column or (accumulate and not by_tma)):
            words = str(rows), "wgrad" * per_column, "accumulate" * accumulate, str(dtype)[6:], "direct" * (not by_tma)
            yield " ".join(filter(None, words)), (rows, per_column, accumulate, dtype, by_tma)


FORMS = dict(forms())
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
each_tile = pytest.mark.parametrize("tile", hopper_bf16._CONFIGS, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")


def config_of(form, m=4096, n=2112, k=7168):
    """The config of a form, whichever the problem would get."""
    rows, per_column, accumulate, dtype, by_tma = form
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_clocks", lambda block_m, *_: block_m != rows)
        return config.fp8_config(m, n, k, dtype.itemsize, by_tma, per_column, accumulate, 132)


@pytest.mark.parametrize("shape, speeds", MEASURED.items(), ids=str)
def test_tile_is_the_fastest_measured(shape, speeds):
    chosen = config.fp8_config(*shape, 2, True, False, False, 132)
    assert speeds[TILES.index(chosen.block_m)] >= 0.98 * max(speeds)


@each_form
def test_config_fits(form):
    rows, per_column, *_ = form
    chosen = config_of(form)
    assert chosen.block_m == rows and rows % (64 * chosen.consumers) == 0
    assert chosen.stages >= 3
    consumer, producer = chosen.registers
    # As many warps produce, though three of them are idle.
    assert 128 * (chosen.consumers * consumer + producer) <= 65536


@pytest.mark.parametrize("n, k", [(2112, 7168), (576, 7168), (32768, 512)])
def test_rows_compile_few_variants(n, k):
    for per_column, dtype in ((False, BF16), (True, FP32)):
        variants = set()
        for m in (*range(129, 8193, 61), 8192):
            chosen = config.fp8_config(m, n, k, dtype.itemsize, True, per_column, False, 132)
            launch = bound(fp8_problem(m, n, k, per_column, dtype), per_column, False, chosen)[0]
            constants = [a for a, p in zip(launch.args, launch.kernel.params[5:]) if p.is_constexpr]
            variants.add(tuple(constants))
        assert len(variants) <= (1 if per_column else 3)


def meta(shape, dtype, strides=None):
    return torch.empty_strided(shape, strides or (shape[1], 1), dtype=dtype, device="meta")


def fp8_problem(m, n, k, per_column, dtype):
    def mn_major(mn):
        return meta((mn, -(-k // 128)), FP32, (1, -(-mn // 4) * 4))

    sfb = mn_major(n) if per_column else meta((-(-n // 128), -(-k // 128)), FP32)
    return meta((m, k), E4M3), mn_major(m), meta((n, k), E4M3), sfb, meta((m, n), dtype)


def bound(tensors, per_column, accumulate, chosen):
    return hopper_fp8.bind(*tensors, per_column, accumulate, chosen, 132), tensors


_TYPES = {E4M3: "fp8e4nv", BF16: "bf16", FP32: "fp32"}


class Code:
    """What a bound launch is compiled to for sm_90a."""

    def __init__(self, launch, tensors):
        from triton.backends.compiler import GPUTarget
        from triton.experimental.gluon._runtime import GluonASTSource

        signature, constants, attributes = {}, {}, {}
        for i, (parameter, value) in enumerate(zip(launch.kernel.params, (*launch.operands, *launch.args))):
            if isinstance(value, _tma.Tma):
                dtype = _TYPES[tensors[value.index].dtype]
                signature[parameter.name] = f"tensordesc<{dtype}{list(value.block)},{value.layout!r}>"
            elif i < len(launch.operands):
                signature[parameter.name] = "*" + _TYPES[tensors[value].dtype]
                if not parameter.do_not_specialize_on_alignment:
                    attributes[(i,)] = [["tt.divisibility", 16]]
            elif parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            else:
                assert parameter.do_not_specialize, f"{parameter.name} would recompile the kernel for each value"
                signature[parameter.name] = "i32"
        source = GluonASTSource(launch.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)
        self.ptx, self.cubin, self.shared = compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata.shared

    def tool(self, name, *arguments):
        path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(self.cubin)
            cubin.flush()
            return subprocess.run([path, *arguments, cubin.name], capture_output=True, text=True, check=True).stdout

    def check(self, operand_type):
        assert self.shared <= 227 * 1024
        assert re.search(r"STACK:0 .*LOCAL:0 ", self.tool("cuobjdump", "-res-usage")), "spills"
        assert f".f32.{operand_type}.{operand_type}" in self.ptx, "no tensor cores"
        loops = list(self.loops_over_k())
        assert loops
        for loop in loops:
            # Triton carries no variable that is first another one's value: each arrival would be at the same stage.
            arrivals = re.findall(r"mbarrier\.arrive\.shared::cta\.b64 _, \[(%r\d+)\]", loop)
            assert arrivals, "no stage is given back"
            for address in arrivals:
                assert re.search(rf"\.\w+\s+{address},", loop), "the same stage is given back in every iteration"

    def loops_over_k(self):
        """PTX of the innermost loops with wgmmas, one of each consumer."""
        starts, loops = {}, []
        lines = self.ptx.splitlines()
        for i, line in enumerate(lines):
            if label := re.match(r"(\$L__BB\w+):", line):
                starts[label[1]] = i
            elif (branch := re.search(r"\bbra\S*\s+(\$L__BB\w+);", line)) and branch[1] in starts:
                loops.append((starts[branch[1]], i))
        for start, end in loops:
            inner = [loop for loop in loops if loop != (start, end) and start <= loop[0] and loop[1] <= end]
            text = "\n".join(lines[start : end + 1])
            if "wgmma.mma_async" in text and not inner:
                yield text


@compiles
@each_form
def test_code(form):
    rows, per_column, accumulate, dtype, by_tma = form
    if per_column and accumulate and by_tma and dtype == BF16 and triton.__version__.startswith("3.9."):
        pytest.skip("Triton 3.9 spills six registers")
    tensors = fp8_problem(4096, 2112 if by_tma else 2113, 7168, per_column, dtype)
    code = Code(*bound(tensors, per_column, accumulate, config_of(form)))
    code.check("e4m3")
    if dtype == BF16 and not accumulate and by_tma:
        sass = code.tool("nvdisasm", "-c")
        assert len(re.findall(r"\bQGMMA\b|\bQGMMA\.", sass)) >= 4 * len(list(code.loops_over_k()))
        assert not re.search(r"\b(LDL|STL)\b", sass)


@compiles
@each_tile
def test_code_of_bf16(tile):
    for dtype, accumulate in ((BF16, False), (FP32, True)):
        tensors = meta((4096, 7168), BF16), meta((2112, 7168), BF16), meta((4096, 2112), dtype)
        code = Code(hopper_bf16.bind_tile(*tensors, accumulate, tile, 132), tensors)
        code.check("bf16")
    assert "HGMMA" in code.tool("nvdisasm", "-c")


@compiles
@pytest.mark.parametrize("turned, n", [("a", 2112), ("b", 2112), ("", 2113)])
def test_code_of_bf16_layouts(turned, n):
    m, k = 4096, 7168
    a = meta((m, k), BF16, (1, m) if "a" in turned else None)
    b = meta((n, k), BF16, (1, n) if "b" in turned else None)
    tensors = a, b, meta((m, n), BF16)
    Code(hopper_bf16.bind_tile(*tensors, False, hopper_bf16._CONFIGS[0], 132), tensors).check("bf16")


@pytest.mark.parametrize(
    "shape, strides, dtype, written",
    [
        ((130, 64), (64, 1), BF16, True),
        ((130, 64), (80, 1), BF16, True),
        ((130, 33), (33, 1), BF16, False),
        ((130, 33), (80, 1), FP32, False),
        ((130, 36), (80, 1), FP32, True),
        ((130, 36), (80, 1), BF16, False),
        ((130, 64), (65, 1), BF16, False),
        ((130, 64), (1, 144), BF16, False),
        ((1, 64), (1, 1), BF16, True),
        ((1, 33), (33, 1), FP32, False),
        ((130, 1), (16, 1), FP32, False),
    ],
)
def test_which_outputs_tma_writes(shape, strides, dtype, written):
    d = meta(shape, dtype, strides)
    assert _tma.is_written_by_tma(d) == written
    chosen = config_of((256, False, False, dtype, written))
    launch = bound((*fp8_problem(*shape, 128, False, dtype)[:4], d), False, False, chosen)
    assert (4 in launch[0].tma_indices) == written


def test_bound_launches_keep_no_tensor():
    """Plans are kept for shapes, and tensors would be with them."""
    m, n, k = 256, 256, 256
    shapes = ((m, k), E4M3), ((m, 2), FP32), ((n, k), E4M3), ((2, 2), FP32), ((m, n), BF16)
    fp8 = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    bf16 = [torch.empty(s, dtype=BF16) for s in ((m, k), (n, k), (m, n))]
    kept = hopper.bind_fp8(*fp8, Gran(1, 128, 128, 128), False), hopper_bf16.bind(*bf16, False)
    alive = [weakref.ref(t) for t in (*fp8, *bf16)]
    del fp8, bf16
    assert all(kept) and not any(ref() is not None for ref in alive)


def call(launch, *tensors):
    launch(tensors, tuple(t.data_ptr() for t in tensors))


@gpu
@each_form
def test_every_form(form):
    """One block of K to more than there are stages, an odd and an even number; one tile a program, and many."""
    rows, per_column, accumulate, dtype, by_tma = form
    recipe = RECIPES["1x128 by 1x128" if per_column else "1x128 by 128x128"]
    for m, n, k in ((rows + 65, 392, 128), (rows + 65, 130, 200), (1000, 272, 1152), (129, 400, 2304)):
        n = n // 8 * 8 if by_tma else n | 1
        a, b = operand(m, -(-k // 16) * 16, recipe[0], 1), operand(n, -(-k // 16) * 16, recipe[1], 2)
        sfa, sfb = mn_major(a.sf), mn_major(b.sf) if per_column else b.sf
        expected = product(a, b) + (addend(m, n).double().cpu() if accumulate else 0)
        for num_sms in (132, 2):
            d = Guarded((m, n), (n + 8 if by_tma else n, 1), dtype)
            d.view.copy_(addend(m, n, dtype) if accumulate else nan(m, n, dtype))
            launch = hopper_fp8.bind(a.data, sfa, b.data, sfb, d.view, per_column, accumulate, config_of(form), num_sms)
            call(launch, a.data, sfa, b.data, sfb, d.view)
            assert_product(d.view, expected, f"{m}x{n}x{k} on {num_sms} SMs")
            d.assert_untouched(f"{m}x{n}x{k}")


def mn_major(sf):
    return deep_gemm.get_mn_major_tma_aligned_tensor(sf)


@gpu
@each_tile
@pytest.mark.parametrize("accumulate", [False, True])
def test_every_bf16_tile(tile, accumulate):
    for m, n, k in ((tile.block_m + 65, 392, 72), (600, 272, 1152), (129, 401, 2304)):
        a, b = bf16_operand(m, k, 1), bf16_operand(n, k, 2)
        expected = product(a, b) + (addend(m, n).double().cpu() if accumulate else 0)
        for dtype, num_sms in itertools.product((BF16, FP32), (132, 2)):
            d = Guarded((m, n), (n + 8, 1), dtype)
            d.view.copy_(addend(m, n, dtype) if accumulate else nan(m, n, dtype))
            call(hopper_bf16.bind_tile(a.data, b.data, d.view, accumulate, tile, num_sms), a.data, b.data, d.view)
            assert_product(d.view, expected, f"{m}x{n}x{k} on {num_sms} SMs")
            d.assert_untouched(f"{m}x{n}x{k}")


@gpu
def test_outputs_at_odd_addresses():
    """d has strides for TMA, but no address."""
    m, n, k = 300, 272, 640
    recipe = RECIPES["1x128 by 128x128"]
    a, b = operand(m, k, recipe[0], 1), operand(n, k, recipe[1], 2)
    first, second = bf16_operand(m, k, 1), bf16_operand(n, k, 2)
    for dtype in (BF16, FP32):
        for offset in (1, 8, 3):
            d = Guarded((m, n), (n + 16, 1), dtype, offset)
            deep_gemm.fp8_gemm_nt(a.pair, b.pair, d.view)
            assert_product(d.view, product(a, b), f"offset {offset}")
            d.view.copy_(addend(m, n, dtype))
            deep_gemm.fp8_gemm_nt(a.pair, b.pair, d.view, d.view)
            assert_product(d.view, product(a, b) + addend(m, n).double().cpu(), f"offset {offset}, accumulated")
            deep_gemm.bf16_gemm_nt(first.data, second.data, d.view)
            assert_product(d.view, product(first, second), f"bf16, offset {offset}")
            d.assert_untouched(f"offset {offset}")


@gpu
def test_nothing_behind_a_row_counts():
    """NaN behind the last of K, in a row whose length is no multiple of 16 bytes."""
    m, n, k = 200, 144, 203
    recipe = RECIPES["1x128 by 128x128"]
    a, b = operand(m, k, recipe[0], 1), operand(n, k, recipe[1], 2)
    first, second = bf16_operand(m, k, 1), bf16_operand(n, k, 2)

    def amid_nan(x):
        wide = torch.full((x.shape[0], 224), torch.nan, device=x.device).to(x.dtype)
        wide[:, :k] = x
        return wide[:, :k]

    d = nan(m, n)
    deep_gemm.fp8_gemm_nt((amid_nan(a.data), a.sf), (amid_nan(b.data), b.sf), d)
    assert_product(d, product(a, b))
    deep_gemm.bf16_gemm_nt(amid_nan(first.data), amid_nan(second.data), d)
    assert_product(d, product(first, second))
