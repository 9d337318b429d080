"""The benchmark scripts as far as they go without a GPU, and the results in the tree."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("the benchmarks are not shipped here", allow_module_level=True)
sys.path[:0] = [str(BENCHMARKS), str(ROOT / "scripts")]

import bench_fused_cast  # noqa: E402
import common  # noqa: E402
import render_results  # noqa: E402

RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))
FIELDS = {
    "benchmark": str, "case": str, "metric": str, "value": (int, float), "unit": str,
    "baseline": (str, type(None)), "baseline_value": (int, float, type(None)), "ratio": (float, type(None)),
    "bar": (str, type(None)),
}  # fmt: skip
ENVIRONMENT = {"gpu", "driver", "cuda", "torch", "triton", "python", "cpu", "kernel", "kernel_version", "date", "timing"}
MADE_UP = {"gpu": "NVIDIA Test-1", **dict.fromkeys(ENVIRONMENT - {"gpu", "timing"}, "?"), "timing": {"host": "none"}}


def check_row(row):
    assert list(row) == list(FIELDS)
    for field, types in FIELDS.items():
        assert isinstance(row[field], types), (field, row)
    assert (row["baseline"] is None) == (row["baseline_value"] is None) == (row["ratio"] is None), row
    if row["baseline"] is not None:
        ratio = row["value"] / row["baseline_value"]
        assert row["ratio"] == pytest.approx(1 / ratio if row["metric"].startswith("speedup") else ratio, rel=1e-4)
    assert common.met(row) in (None, True, False)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_in_the_tree(path):
    content = json.loads(path.read_text())
    assert content["environment"].keys() == {row["benchmark"] for row in content["rows"]}
    for stem, environment in content["environment"].items():
        assert (BENCHMARKS / f"bench_{stem}.py").exists()
        assert ENVIRONMENT <= environment.keys()
        assert not environment["quick"], f"{stem}: results of a --quick run"
    for row in content["rows"]:
        check_row(row)


@pytest.mark.skipif(not RESULTS, reason="no results yet")
def test_readme_shows_the_results():
    command = [sys.executable, ROOT / "scripts" / "render_results.py", "--check"]
    check = subprocess.run(command, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("bench_*.py")), ids=lambda path: path.stem)
def test_help_needs_no_gpu(path):
    shown = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and "--quick" in shown.stdout, shown.stderr


@pytest.mark.parametrize(
    ("bar", "expected"),
    [(None, None), ("ratio >= 0.95", True), ("ratio >= 0.96", False), ("value <= 3", True), ("value <= 2 (aim)", False)],
)
def test_met(bar, expected):
    assert common.met({"value": 3.0, "ratio": 0.95, "bar": bar}) is expected


def test_rotation_leaves_the_cache():
    for nbytes in (12_000, common.ROTATED_BYTES // 2, common.ROTATED_BYTES, 10**9):
        sets = common.rotated(object, nbytes)
        assert len(sets) >= 2 and len(sets) * nbytes > common.ROTATED_BYTES


def test_save_keeps_the_rows_of_other_benchmarks(tmp_path):
    for stem, value in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        results = common.Results(stem, {**MADE_UP, "date": value}, tmp_path)
        results.add("case", "time", value, "us", "copy", 4.0, "ratio <= 0.5")
        results.save()
    content = json.loads((tmp_path / "nvidia_test_1.json").read_text())
    assert [(row["benchmark"], row["value"]) for row in content["rows"]] == [("b", 2.0), ("a", 3.0)]
    assert {stem: environment["date"] for stem, environment in content["environment"].items()} == {"a": 3.0, "b": 2.0}


class OnMeta(TorchFunctionMode):
    """Tensors asked for on "cuda" come on "meta": shapes and strides without a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def checked_cast(x, use_ue8m0, gran_k=128, use_packed_ue8m0=False, out=None, out_sf=None):
    columns = -(-x.shape[1] // gran_k) // (4 if use_packed_ue8m0 else 1)
    if out is not None:
        assert (out.shape, out.dtype) == (x.shape, torch.float8_e4m3fn)
        assert out_sf.shape == (len(x), columns)
        assert out_sf.dtype == (torch.int32 if use_packed_ue8m0 else torch.float32)


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """Results of bench_fused_cast's sections on meta tensors: every call runs once, every time is made up."""

    def seconds(*workloads, **_):
        for workload in workloads:
            for call in workload if isinstance(workload, list) else [workload]:
                call()
        return [1e-6 * (i + 1) for i in range(len(workloads))]

    for timer in ("graph_seconds", "eager_seconds", "host_seconds"):
        monkeypatch.setattr(bench_fused_cast, timer, seconds)
    monkeypatch.setattr(bench_fused_cast, "_fresh_process", lambda recipe, cache, *options: {"seconds": 1.5, "kernels": 1})
    kernel = SimpleNamespace(
        fused_per_token_cast_to_fp8=checked_cast, utils=SimpleNamespace(per_token_cast_to_fp8=checked_cast)
    )
    results = common.Results("fused_cast", MADE_UP, tmp_path)
    with OnMeta():
        for section in bench_fused_cast.SECTIONS:
            section(kernel, results, quick=False)
    results.save()
    return results


def test_bench_fused_cast_makes_every_row(made_up):
    for row in made_up.rows:
        check_row(row)
    keys = [(row["case"], row["metric"]) for row in made_up.rows]
    assert len(set(keys)) == len(keys)
    for recipe in bench_fused_cast.RECIPES:
        bars = {(row["case"].partition("; ")[0], row["bar"]) for row in made_up.rows if row["case"].endswith(recipe)}
        sizes = [f"{tokens} x {hidden}" for tokens in (4096, 8192, 16384, 32768) for hidden in (4096, 7168)]
        assert bars >= {(size, "ratio >= 0.95") for size in sizes}
        assert bars >= {("1 x 4096", "ratio <= 1.6"), ("1 x 4096", "ratio <= 1.15"), ("16384 x 4096", "ratio <= 1.05")}
        assert ("16384 x 4096", "ratio >= 26" if "group 32" in recipe else "ratio >= 17") in bars


def test_layouts_are_what_they_say():
    packed, fp32 = bench_fused_cast.RECIPES.values()
    with OnMeta():
        for options in (packed, fp32):
            _, out, sf = bench_fused_cast.buffers(48, 4096, options, sf_padding=16)
            assert out.is_contiguous() and sf.stride() == (1, 64)
            _, out, sf = bench_fused_cast.buffers(48, 4096, options, out_padding=256)
            assert out.stride() == (4352, 1) and sf.is_contiguous()
            x, out, sf = bench_fused_cast.buffers(48, 4096, options)
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in (x, out, sf))
            assert nbytes == bench_fused_cast.moved(48, 4096, options)


def test_table_shows_every_row_and_marks_what_misses(made_up, capsys):
    text = render_results.render(
        "before\n<!-- bench:fused_cast -->\nold\n<!-- /bench -->\nafter\n", render_results.load(made_up.path.parent)
    )
    assert text.startswith("before\n<!-- bench:fused_cast -->\n") and text.endswith("<!-- /bench -->\nafter\n")
    missed = [row for row in made_up.rows if common.met(row) is False]
    assert missed and sum(line.count(render_results.MISSED) for line in text.splitlines() if "|" in line) == len(missed)
    for row in made_up.rows:
        assert common.cell(row) in text
    assert render_results.render(text, render_results.load(made_up.path.parent)) == text

    common.print_table(made_up.rows)
    assert f"{len(missed)} missed" in capsys.readouterr().out


def test_plot(made_up, tmp_path):
    pytest.importorskip("matplotlib")
    content = json.loads(made_up.path.read_text())
    for name in ("a.svg", "b.svg"):
        render_results.plot_fused_cast(content, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_classes_for_kernels_benchmark():
    base = pytest.importorskip("kernels.benchmark").Benchmark
    spec = importlib.util.spec_from_file_location("benchmark_module", BENCHMARKS / "benchmark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, base) and c is not base]
    assert classes
    for cls in classes:
        workloads = [name.removeprefix("benchmark_") for name in dir(cls) if name.startswith("benchmark_")]
        assert workloads, f"{cls.__name__} has no benchmark_ method, on which the runner stops"
        assert all(hasattr(cls, f"{step}_{workload}") for workload in workloads for step in ("setup", "verify"))
