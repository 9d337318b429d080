"""Process-global settings, and the names that are not built yet."""

import inspect

import pytest
import torch
from generators import DEVICE, deep_gemm

LIMIT = torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 0


@pytest.fixture(autouse=True)
def restore():
    yield
    deep_gemm.set_num_sms(0)
    deep_gemm.set_tc_util(100)
    deep_gemm.set_pdl(False)
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)


def test_defaults():
    assert deep_gemm.get_num_sms() == LIMIT
    assert deep_gemm.get_tc_util() == 100
    assert deep_gemm.get_pdl() is False
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 128


def test_num_sms():
    deep_gemm.set_num_sms(LIMIT // 2)
    for bad in (-1, LIMIT + 1, 1.5, "all", None):
        with pytest.raises(RuntimeError, match="num_sms"):
            deep_gemm.set_num_sms(bad)
        assert deep_gemm.get_num_sms() == LIMIT // 2
    deep_gemm.set_num_sms(0)
    assert deep_gemm.get_num_sms() == LIMIT


def test_tc_util():
    deep_gemm.set_tc_util(40)
    for bad in (-1, 101, 50.0, None):
        with pytest.raises(RuntimeError, match="tc_util"):
            deep_gemm.set_tc_util(bad)
        assert deep_gemm.get_tc_util() == 40
    deep_gemm.set_tc_util(0)
    assert deep_gemm.get_tc_util() == 100


def test_pdl():
    deep_gemm.set_pdl(1)
    assert deep_gemm.get_pdl() is True


def test_hints_are_accepted():
    deep_gemm.set_ignore_compile_dims(True)
    deep_gemm.set_block_size_multiple_of(16)
    deep_gemm.set_block_size_multiple_of((16, 32))


def test_alignment_is_one_setting_under_several_names():
    deep_gemm.utils.layout.set_mk_alignment_for_contiguous_layout(96)
    for module in (deep_gemm, deep_gemm.utils, deep_gemm.utils.layout):
        for dims in ("mk", "m", "k"):
            assert getattr(module, f"get_{dims}_alignment_for_contiguous_layout")() == 96


def test_theoretical_alignment(monkeypatch):
    theoretical = deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout
    monkeypatch.setattr(deep_gemm._runtime, "is_sm100", lambda: False)
    assert [theoretical(), theoretical(1), theoretical(256)] == [128] * 3
    monkeypatch.setattr(deep_gemm._runtime, "is_sm100", lambda: True)
    assert [theoretical(m) for m in (None, 256, 240, 225, 224, 33, 32, 1)] == [240, 240, 240, 240, 224, 48, 32, 32]


STUBS = {
    name: value
    for name, value in vars(deep_gemm._not_built).items()
    if callable(value) and not name.startswith("_")
}


@pytest.mark.parametrize("name", STUBS)
def test_what_is_not_built_says_so(name):
    function = STUBS[name]
    assert getattr(deep_gemm, name) is function
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    with pytest.raises(NotImplementedError, match=f"{function.__name__} is not built"):
        function(*[None] * len(required))


@pytest.mark.parametrize(
    "alias, name",
    [
        ("fp8_gemm_nt", "fp8_fp4_gemm_nt"),
        ("fp8_gemm_tt", "fp8_fp4_gemm_tt"),
        ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
        ("fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked"),
        ("bf16_m_grouped_gemm_nt_masked", "m_grouped_bf16_gemm_nt_masked"),
        ("get_col_major_tma_aligned_tensor", "get_mn_major_tma_aligned_tensor"),
    ],
)
def test_aliases(alias, name):
    assert getattr(deep_gemm, alias) is getattr(deep_gemm, name)
