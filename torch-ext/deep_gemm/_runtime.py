"""Process-global settings of the kernels. Setters raise RuntimeError on a bad value and keep the old one."""

from dataclasses import dataclass

import torch

__all__ = [
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_num_sms",
    "get_pdl",
    "get_tc_util",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "set_block_size_multiple_of",
    "set_ignore_compile_dims",
    "set_mk_alignment_for_contiguous_layout",
    "set_num_sms",
    "set_pdl",
    "set_tc_util",
]


@dataclass
class _Settings:
    num_sms: int = 0
    tc_util: int = 100
    pdl: bool = False
    mk_alignment: int = 128


_settings = _Settings()


def is_sm100(device: torch.device | None = None) -> bool:
    """Whether `device` (default: the current CUDA device) has compute capability 10.x."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return False
    return torch.cuda.get_device_capability(device)[0] == 10


def _device_num_sms():
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _check_int(name, value, largest):
    if not isinstance(value, int) or not 0 <= value <= largest:
        raise RuntimeError(f"{name} must be an int in 0..{largest}, got {value!r}")


def set_num_sms(num_sms: int) -> None:
    """Let persistent kernels occupy `num_sms` SMs; 0, the initial value, means all of the current device.

    Raises RuntimeError for anything but an int from 0 to the SM count of the current device. Without a CUDA device
    that count is 0.
    """
    _check_int("num_sms", num_sms, _device_num_sms())
    _settings.num_sms = num_sms


def get_num_sms() -> int:
    """The number of SMs set, or the SM count of the current device where that is 0; 0 without a CUDA device."""
    return _settings.num_sms or _device_num_sms()


def set_tc_util(tc_util: int) -> None:
    """Set the tensor-core utilisation to aim at, in percent: a tuning hint that changes no result; 0 means 100.

    Raises RuntimeError for anything but an int from 0 to 100.
    """
    _check_int("tc_util", tc_util, 100)
    _settings.tc_util = tc_util


def get_tc_util() -> int:
    """The tensor-core utilisation to aim at, in percent; initially 100."""
    return _settings.tc_util or 100


def set_pdl(enabled: bool) -> None:
    """Allow programmatic dependent launch: a tuning hint that changes no result; initially off."""
    _settings.pdl = bool(enabled)


def get_pdl() -> bool:
    """Whether programmatic dependent launch is allowed."""
    return _settings.pdl


def set_ignore_compile_dims(enabled: bool) -> None:
    """Accepted without effect: a hint for compilers that specialise kernels on problem sizes."""


def set_block_size_multiple_of(value: int | tuple[int, int]) -> None:
    """Accepted without effect: a hint for the tile sizes, one for both or (block_m, block_n)."""


def set_mk_alignment_for_contiguous_layout(alignment: int) -> None:
    """Set the number of rows (k-grouped: of K) at whose multiples each group of a contiguous layout starts."""
    _settings.mk_alignment = alignment


def get_mk_alignment_for_contiguous_layout() -> int:
    """The number of rows (k-grouped: of K) at whose multiples each group of a contiguous layout starts.

    Initially 128.
    """
    return _settings.mk_alignment


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """The alignment that wastes least for groups of about `expected_m` rows on the current device.

    Compute capability 10.x: the smallest of 240, 224, ..., 32 that is not below expected_m, at most 240, which is also
    the answer without expected_m. Any other device, or none: 128.
    """
    if not is_sm100():
        return 128
    alignment = 240
    if expected_m is not None:
        while alignment > 32 and alignment - 16 >= expected_m:
            alignment -= 16
    return alignment
