"""The helpers that other tests rely on."""

import math
import os

import pytest
import torch
from generators import DEVICE, deep_gemm

testing = deep_gemm.testing


def test_submodules_are_attributes():
    assert testing.numeric.calc_diff is testing.calc_diff
    assert testing.utils.test_filter is testing.test_filter
    assert callable(testing.bench)


def test_calc_diff():
    x = torch.tensor([3.0, 4.0])
    assert testing.calc_diff(x, x) == 0
    assert testing.calc_diff(x, -x) == 2
    assert testing.calc_diff(x.bfloat16(), 2 * x).item() == pytest.approx(0.2)
    zero = testing.calc_diff(0 * x, 0 * x)
    assert zero == 0 and isinstance(zero, float)
    assert math.isnan(testing.calc_diff(x, x * torch.nan))


def test_count_bytes():
    x = torch.empty(3, 5, dtype=torch.bfloat16)
    assert testing.count_bytes(x, None, (x, [x.float(), None])) == 30 + 30 + 60


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_bitwise_equal(dtype):
    x = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]).to(dtype).to(DEVICE)
    testing.assert_bitwise_equal(x, x.cpu().t().contiguous().t())
    testing.assert_bitwise_equal(x[:0], x[:0])
    testing.assert_bitwise_equal(x[0, 0], x[1, 1])
    with pytest.raises(AssertionError, match=r"cast: 6 of 6 elements differ, first at \[0, 0\]"):
        testing.assert_bitwise_equal(x, (x.float() == 0).to(dtype), "cast")


def test_bitwise_differences():
    x = torch.tensor([[1.0, torch.nan], [0.0, 3.0]])
    testing.assert_bitwise_equal(x, x.clone())
    y = x.clone()
    y[1] = torch.tensor([-0.0, 3.5])
    with pytest.raises(AssertionError, match=r"2 of 4 elements differ, first at \[1, 0\]: 0x00000000 != 0x80000000"):
        testing.assert_bitwise_equal(x, y)
    for other in (x.double(), x[:1], x.view(4)):
        with pytest.raises(AssertionError, match="torch.float32 "):
            testing.assert_bitwise_equal(x, other)


def test_filter_runs_or_says_why_not(capsys):
    allowed = True

    @testing.test_filter(lambda: allowed)
    def run(x):
        return x

    assert run(3) == 3
    allowed = False
    assert run(3) is None
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == "run:" and "Filtered by" in lines[1] and lines[2] == ""


def test_ignore_env(monkeypatch):
    monkeypatch.setenv("DG_TEST", "1")

    @testing.ignore_env("DG_TEST", lambda: True)
    def fail():
        assert "DG_TEST" not in os.environ
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.environ["DG_TEST"] == "1"
    assert testing.ignore_env("DG_TEST", lambda: False)(lambda: os.environ["DG_TEST"])() == "1"


def test_suppress_reaches_file_descriptors(capfd):
    with pytest.raises(ZeroDivisionError), testing.suppress_stdout_stderr():
        print("python")
        os.system("echo shell; echo shell >&2")
        1 / 0
    print("after")
    assert capfd.readouterr() == ("after\n", "")


def test_bench_kineto_leaves_the_profiler_to_others(monkeypatch):
    monkeypatch.setenv("DG_USE_NVIDIA_TOOLS", "1")
    assert testing.bench_kineto(pytest.fail, "gemm") == 1
    assert testing.bench_kineto(pytest.fail, ("gemm", "reduce")) == (1, 1)
    with pytest.raises(TypeError, match="kernel_names must be"):
        testing.bench_kineto(pytest.fail, ["gemm"])


@pytest.mark.skipif(DEVICE == "cuda", reason="for machines without a GPU")
def test_timing_needs_a_gpu():
    for call in (lambda: testing.bench(int), lambda: testing.bench_kineto(int, "x"), testing.get_arch_major):
        with pytest.raises(RuntimeError, match="torch sees no"):
            call()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_bench_kineto_times_kernels(tmp_path):
    x = torch.ones(1 << 26, device=DEVICE)
    names = ("vectorized_elementwise_kernel", "no such kernel")
    trace = tmp_path / "trace.json"
    options = {"num_tests": 3, "suppress_kineto_output": True, "trace_path": str(trace), "flush_l2": False}
    times = testing.bench_kineto(lambda: x.mul_(1.5), names, **options)
    assert 1e-5 < times[0] < 1e-2 and times[1] == 0 and trace.stat().st_size > 0
    # An L2 flush is a fill, which is elementwise too.
    with pytest.raises(ValueError, match="matches several kernels"):
        testing.bench_kineto(lambda: x.mul_(1.5), "vectorized_elementwise_kernel", num_tests=3)
    assert testing.bench(lambda: x.mul_(1.5)) == pytest.approx(times[0], rel=0.5)
