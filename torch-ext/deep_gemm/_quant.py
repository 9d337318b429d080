"""Device functions that every cast shares: the scale factor of a group and the rounding to e4m3."""

from __future__ import annotations

import functools

import torch

from ._triton import constexpr, jit, tl


@functools.cache
def torch_saturates() -> bool:
    """Whether torch casts Inf to the largest e4m3 value (0x7e, newer releases) or to NaN (0x7f)."""
    return torch.full((16,), float("inf"), device="cpu").to(torch.float8_e4m3fn).view(torch.uint8)[0].item() == 0x7E


@functools.cache
def converts_in_hardware(device: int) -> bool:
    """Whether the GPU converts fp32 to e4m3 (sm_89 and newer); elsewhere, and on the CPU (-1), integers do it."""
    return device >= 0 and torch.cuda.get_device_capability(device) >= (8, 9)


@jit
def to_fp32(x, HARDWARE: tl.constexpr):
    """fp32 values of bf16, fp16 or fp32 ones."""
    if HARDWARE and x.dtype == tl.bfloat16:
        # The compiler takes two instructions for the upper one of each pair.
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", args=[x], dtype=tl.int32, is_pure=True, pack=2
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def max_abs_bits(x, HARDWARE: tl.constexpr):
    """fp32 bits of max |x| over the last axis; NaN propagates, as it does in torch."""
    if HARDWARE:
        amax = tl.reduce(tl.abs(x), len(x.shape) - 1, _max_nan).to(tl.int32, bitcast=True)
    else:
        # Bits of non-negative floats order like integers, with NaN on top.
        amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=len(x.shape) - 1)
    return amax


@jit
def reciprocal(sf, HARDWARE: tl.constexpr):
    """1 / sf as IEEE division rounds it, for the values that a scale factor takes: 2^-23 to 2^126, Inf and NaN.

    Division proper has a slow path for other values, which costs registers and branches in every kernel that has it.
    """
    if HARDWARE:
        inv = tl.inline_asm_elementwise(
            """{
            .reg .f32 error;
            .reg .pred finite;
            rcp.approx.ftz.f32 $0, $1;
            fma.rn.f32 error, $1, $0, 0fBF800000;
            neg.f32 error, error;
            setp.neu.f32 finite, $1, 0f7F800000;
            @finite fma.rn.f32 $0, $0, error, $0;
            }""",
            "=&f,f",
            args=[sf],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        inv = tl.div_rn(1.0, sf)
    return inv


@jit
def group_sf(amax_bits, USE_UE8M0: tl.constexpr, HARDWARE: tl.constexpr = False):
    """fp32 scale factors of groups whose max |x| is given as fp32 bits, and their reciprocals."""
    amax = tl.maximum(amax_bits, 0x38D1B717).to(tl.float32, bitcast=True)  # 1e-4
    sf = amax * 0.002232142857142857  # fp32(1/448), as torch divides by a scalar on CUDA
    if USE_UE8M0:
        bits = sf.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        exponent = tl.minimum(tl.maximum(exponent, 1), 254)
        sf = (exponent << 23).to(tl.float32, bitcast=True)
        # 2^-127, the reciprocal of the largest, is subnormal.
        inv = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        inv = reciprocal(sf, HARDWARE)
    return sf, inv


@jit
def to_e4m3(y, HARDWARE: tl.constexpr):
    """e4m3 bytes of fp32 values with |y| <= 464 or NaN, to nearest even; Inf saturates."""
    if HARDWARE:
        # Triton's own cast goes through fp16 on sm_89 and rounds twice there.
        byte = tl.inline_asm_elementwise(
            """{
            .reg .b16 lo, hi;
            cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
            mov.b32 $0, {lo, hi};
            }""",
            "=r,r,r,r,r",
            args=[y],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        bits = y.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # 2^14 has the spacing of e4m3's subnormals, 2^-9, so that the addition rounds to it.
        subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(magnitude < (121 << 23), subnormal, normal), 0x7E)
        byte = (tl.where(magnitude > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return byte


def _inf_to_nan_asm() -> str:
    """PTX from 16 fp32 values and 16 flags to 16 bytes; registers $0 to $3, $4 to $19 and $20 to $35."""
    words = range(4)
    convert = [
        f"cvt.rn.satfinite.e4m3x2.f32 lo, ${4 * w + 5}, ${4 * w + 4}; "
        f"cvt.rn.satfinite.e4m3x2.f32 hi, ${4 * w + 7}, ${4 * w + 6}; mov.b32 ${w}, {{lo, hi}};"
        for w in words
    ]
    collect = [f"or.b32 any, any, ${i};" for i in range(20, 36)]
    # Bits 5 and 6 are both set in 0x7e and in NaN alone; a flag has bit 6 of each byte.
    fix = [
        "mov.b32 flag, 0; "
        + " ".join(f"and.b32 t, ${4 * w + 20 + i}, {0x40 << 8 * i}; or.b32 flag, flag, t;" for i in range(4))
        + f" shl.b32 t, ${w}, 1; and.b32 t, t, ${w}; and.b32 t, t, flag; shr.b32 t, t, 6; or.b32 ${w}, ${w}, t;"
        for w in words
    ]
    head = ".reg .b16 lo, hi; .reg .b32 any, flag, t; .reg .pred none; mov.b32 any, 0;"
    return "\n".join(["{", head, *convert, *collect, "setp.eq.u32 none, any, 0; @none bra DONE;", *fix, "DONE: }"])


_INF_TO_NAN = constexpr(_inf_to_nan_asm())
_INF_TO_NAN_REGISTERS = constexpr(",".join(["=&r"] * 4 + ["r"] * 32))


@jit
def to_e4m3_inf_to_nan(y, amax_bits, HARDWARE: tl.constexpr):
    """`to_e4m3`, but Inf gives NaN of its sign; `amax_bits`, shaped like y, is the bits of its group's max |x|.

    Only for UE8M0: there |y| < 2 for whatever is finite in a group with an Inf, so that its 0x7e are the Infs. Fixed
    four bytes at a time and only where there is one; fixed one by one they would cost a bandwidth-bound kernel 15%.
    """
    if HARDWARE:
        byte = tl.inline_asm_elementwise(
            _INF_TO_NAN,
            _INF_TO_NAN_REGISTERS,
            args=[y, tl.where(amax_bits >= 0x7F800000, 0x40404040, 0)],
            dtype=tl.uint8,
            is_pure=True,
            pack=16,
        )
    else:
        byte = to_e4m3(y, HARDWARE)
        byte += ((y.to(tl.int32, bitcast=True) & 0x7FFFFFFF) == 0x7F800000).to(tl.uint8)
    return byte
