"""Reference casts to FP8 and FP4 with one scale factor (`sf`) for each group of elements.

They define the bits of every cast kernel here. For each group, all in fp32:

    amax = max(max |x|, 1e-4)        NaN propagates
    sf   = amax * fp32(1 / 448)      FP4: 1 / 6
    sf   = ceil_to_ue8m0(sf)         with use_ue8m0
    q    = e4m3(x * (1 / sf))        two roundings before the one to e4m3 (FP4: e2m1)

The multiplication by fp32(1 / 448) is what CUDA computes for `amax / 448`, and CUDA's arithmetic is the definition on
every device, so that finite input gives the same bytes on CPU and GPU. Two things are left to the platform: the sign
and payload of a NaN (Inf * 0, for one) follow the device, and the e4m3 of a value beyond 448, which only an Inf in
UE8M0 mode reaches, follows the installed torch. Outputs carry no gradient; nothing waits for the device.
Scheme and names follow DeepGEMM.
"""

import torch

__all__ = [
    "align",
    "cast_back_from_fp4",
    "cast_back_from_fp8",
    "ceil_div",
    "ceil_to_ue8m0",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "transpose_packed_fp4",
    "unpack_ue8m0_from_int",
]

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
# Midpoints between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
_E2M1_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def ceil_div(x: int, y: int) -> int:
    """ceil(x / y) for integers, y > 0."""
    return (x + y - 1) // y


def align(x: int, y: int) -> int:
    """The smallest multiple of y that is not below x, for integers, y > 0."""
    return ceil_div(x, y) * y


def ceil_to_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """Smallest power of two not below |x|, elementwise, in fp32.

    x: any shape. The biased exponent is clamped to 1..254: zero and subnormals give 2^-126; Inf, NaN and what lies
    above 2^127 give 2^127. Exponent bits are exact where a floating-point log2 is off by one next to a power of two.
    """
    bits = x.float().view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def pack_ue8m0_to_int(x: torch.Tensor) -> torch.Tensor:
    """Pack the exponents of four neighbouring scale factors into one word.

    x: fp32 [..., 4 * w], powers of two. Returns int32 [..., w], contiguous: byte j (little endian) of word i is
    `(bits >> 23) & 255` of x[..., 4 * i + j]. Sign and mantissa are dropped, so they never reach a neighbour.
    Raises TypeError for another dtype, ValueError if the last size is not a multiple of 4.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"x must be float32, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] % 4 != 0:
        raise ValueError(f"x must have a last size that is a multiple of 4, got shape {tuple(x.shape)}")
    exponent = ((x.view(torch.int32) >> 23) & 0xFF).to(torch.uint8, memory_format=torch.contiguous_format)
    return exponent.view(*x.shape[:-1], x.shape[-1] // 4, 4).view(torch.int32).squeeze(-1)


def unpack_ue8m0_from_int(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_ue8m0_to_int`.

    packed: int32 [..., w]. Returns fp32 [..., 4 * w]. Byte 0 gives +0, byte 255 gives Inf.
    Raises TypeError for another dtype, ValueError for a 0-D tensor.
    """
    if packed.dtype != torch.int32:
        raise TypeError(f"packed must be int32, got {packed.dtype}")
    if packed.dim() == 0:
        raise ValueError("packed must have at least one dimension, got a 0-D tensor")
    # As a dimension of its own a word's bytes are next to each other even where w = 1 has an odd stride.
    exponent = packed.unsqueeze(-1).contiguous().view(torch.uint8).flatten(-2)
    return (exponent.to(torch.int32) << 23).view(torch.float32)


@torch.no_grad()
def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast to e4m3 with one scale factor for each row and `gran_k` columns, see the module for the arithmetic.

    x: bf16, fp16 or fp32 [m, n], any strides; a partial last group counts as filled up with zeros.
    Returns (q, sf), both row-major: q e4m3 [m, n]; sf fp32 [m, ceil(n / gran_k)], or with use_packed_ue8m0 int32
    [m, ceil(n / gran_k) / 4] as `pack_ue8m0_to_int` lays it out. x is about q[i, j] * sf[i, j // gran_k].
    Raises TypeError for another dtype; ValueError for another rank, gran_k < 1, use_packed_ue8m0 without use_ue8m0
    or with a number of groups that is not a multiple of 4.
    """
    y, sf = _scale_tokens(x, use_ue8m0, gran_k, use_packed_ue8m0, _E4M3_MAX)
    return _to_e4m3(y), sf


@torch.no_grad()
def per_channel_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast to e4m3 with one scale factor for each column and `gran_k` rows, see the module for the arithmetic.

    x: bf16, fp16 or fp32 [m, n], any strides, m a multiple of gran_k.
    Returns (q, sf), both row-major: q e4m3 [m, n]; sf fp32 [m / gran_k, n]. x is about q[i, j] * sf[i // gran_k, j].
    Raises TypeError for another dtype; ValueError for another rank, gran_k < 1 or an m that gran_k does not divide.
    """
    _check_matrix(x, gran_k)
    m, n = x.shape
    if m % gran_k != 0:
        raise ValueError(f"x must have a number of rows that is a multiple of gran_k = {gran_k}, got {m}")
    y, sf = _scale_groups(x.contiguous().view(m // gran_k, gran_k, n), (1,), use_ue8m0)
    return _to_e4m3(y).view(m, n), sf.view(m // gran_k, n)


@torch.no_grad()
def per_block_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast to e4m3 with one scale factor for each gran_k x gran_k block, see the module for the arithmetic.

    x: bf16, fp16 or fp32 [m, n], any strides; partial blocks at the edges count as filled up with zeros.
    Returns (q, sf), both row-major: q e4m3 [m, n]; sf fp32 [ceil(m / gran_k), ceil(n / gran_k)].
    Raises TypeError for another dtype; ValueError for another rank or gran_k < 1.
    """
    _check_matrix(x, gran_k)
    m, n = x.shape
    rows, columns = ceil_div(m, gran_k), ceil_div(n, gran_k)
    blocks = _zero_pad(x, rows * gran_k, columns * gran_k).view(rows, gran_k, columns, gran_k)
    y, sf = _scale_groups(blocks, (1, 3), use_ue8m0)
    return _to_e4m3(y.view(rows * gran_k, columns * gran_k)[:m, :n]), sf.view(rows, columns)


@torch.no_grad()
def per_custom_dims_cast_to_fp8(
    x: torch.Tensor, dims: tuple[int, ...], use_ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast to e4m3 with one scale factor for each index of the kept `dims`, see the module for the arithmetic.

    x: bf16, fp16 or fp32 of any shape. dims: the dimensions that sf keeps; the group is all others.
    Returns (q, sf): q e4m3 of x's shape; sf fp32 with the sizes of `dims`, in x's order, size-1 dimensions squeezed
    away ([5, 64] with dims (0,) gives [5]). The amax of an empty group is 0.
    Raises TypeError for another dtype, ValueError for a dimension that x does not have.
    """
    _check_dtype(x)
    dims = tuple(dims)
    if any(type(d) is not int or not -x.dim() <= d < x.dim() for d in dims):
        raise ValueError(f"dims must be among the {x.dim()} dimensions of x, got {dims}")
    kept = {d % x.dim() for d in dims}
    reduced = tuple(d for d in range(x.dim()) if d not in kept)
    y, sf = _scale_groups(x, reduced, use_ue8m0)
    return y.to(torch.float8_e4m3fn), sf.squeeze()


@torch.no_grad()
def per_token_cast_to_fp4(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast to packed e2m1 with one scale factor for each row and `gran_k` columns, see the module for the arithmetic.

    x: bf16, fp16 or fp32 [m, n], any strides, n even; a partial last group counts as filled up with zeros.
    Returns (packed, sf), both row-major: packed int8 [m, n / 2], even columns in the low nibble, odd ones in the high;
    sf as in `per_token_cast_to_fp8`. A nibble is the sign bit, then the index into 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties
    go toward zero, zero has no sign, NaN becomes 6.
    Raises what `per_token_cast_to_fp8` raises, and ValueError for an odd n.
    """
    y, sf = _scale_tokens(x, use_ue8m0, gran_k, use_packed_ue8m0, _E2M1_MAX)
    if x.shape[1] % 2 != 0:
        raise ValueError(f"x must have an even number of columns, got {x.shape[1]}")
    return _pack_nibbles(_quantize_to_fp4_e2m1(y)), sf


def transpose_packed_fp4(a: torch.Tensor) -> torch.Tensor:
    """Transpose a matrix of packed e2m1 values.

    a: int8 [m, n / 2], two values a byte along the row. Returns int8 [n, m / 2], two values a byte along its rows.
    Raises TypeError for another dtype, ValueError for another rank or an odd m.
    """
    _check_packed_fp4(a, "a")
    if a.shape[0] % 2 != 0:
        raise ValueError(f"a must have an even number of rows, got {a.shape[0]}")
    return _pack_nibbles(_unpack_nibbles(a).T)


def cast_back_from_fp4(
    packed: torch.Tensor, sf: torch.Tensor, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> torch.Tensor:
    """Inverse of `per_token_cast_to_fp4`: fp32 [m, n] of value[i, j] * sf[i, j // gran_k].

    packed: int8 [m, n / 2]. sf: fp32 [m, ceil(n / gran_k)], or with use_packed_ue8m0 int32 with four exponents a word.
    Code 8 (minus zero) gives +0.
    Raises TypeError for another dtype, ValueError for another shape or gran_k < 1.
    """
    _check_packed_fp4(packed, "packed")
    return _apply_sf(_dequantize_from_fp4_e2m1(_unpack_nibbles(packed)), sf, gran_k, use_packed_ue8m0)


def cast_back_from_fp8(
    x: torch.Tensor, sf: torch.Tensor, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> torch.Tensor:
    """Inverse of `per_token_cast_to_fp8`: fp32 [m, n] of x[i, j] * sf[i, j // gran_k].

    x: e4m3 [m, n]. sf: fp32 [m, ceil(n / gran_k)], or with use_packed_ue8m0 int32 with four exponents a word.
    Raises TypeError for another dtype, ValueError for another shape or gran_k < 1.
    """
    if x.dtype != torch.float8_e4m3fn:
        raise TypeError(f"x must be float8_e4m3fn, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"x must be 2-D, got shape {tuple(x.shape)}")
    return _apply_sf(x.float(), sf, gran_k, use_packed_ue8m0)


def _scale_groups(x, dims, use_ue8m0, largest=_E4M3_MAX):
    """x / sf in fp32 and sf, for groups that extend over `dims`; sf keeps them as size-1 dimensions."""
    magnitude = x.abs().float()
    if x.numel() == 0:
        amax = magnitude.new_zeros([1 if d in dims else size for d, size in enumerate(x.shape)])
    else:
        # For amax no dims mean all of them; here they mean that each element is a group.
        amax = magnitude.amax(dims, keepdim=True) if dims else magnitude
    sf = amax.clamp(min=1e-4) * (1 / largest)
    if use_ue8m0:
        sf = ceil_to_ue8m0(sf)
    return x * (1.0 / sf), sf


def _scale_tokens(x, use_ue8m0, gran_k, use_packed_ue8m0, largest):
    """x / sf in fp32 [m, n] and sf [m, groups], packed if asked, for groups of gran_k columns."""
    _check_matrix(x, gran_k)
    m, n = x.shape
    groups = ceil_div(n, gran_k)
    if use_packed_ue8m0 and not use_ue8m0:
        raise ValueError("use_packed_ue8m0 needs use_ue8m0=True: only powers of two can be packed")
    if use_packed_ue8m0 and groups % 4 != 0:
        raise ValueError(
            f"use_packed_ue8m0 needs a number of groups that is a multiple of 4, got {groups} "
            f"({n} columns in groups of gran_k = {gran_k})"
        )
    padded = _zero_pad(x, m, groups * gran_k)
    y, sf = _scale_groups(padded.view(m, groups, gran_k), (2,), use_ue8m0, largest)
    sf = sf.view(m, groups)
    return y.view(m, groups * gran_k)[:, :n], pack_ue8m0_to_int(sf) if use_packed_ue8m0 else sf


def _zero_pad(x, rows, columns):
    padded = x.new_zeros(rows, columns)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded


def _to_e4m3(y):
    return y.to(torch.float8_e4m3fn, memory_format=torch.contiguous_format)


def _quantize_to_fp4_e2m1(x):
    """uint8 codes of fp32 values."""
    magnitude = x.abs()
    # Counting what is "not <=" sends a tie toward zero, as the public kernels of this name do (hardware rounds it to
    # even), and a NaN to the last index.
    index = sum((~(magnitude <= t)).to(torch.uint8) for t in _E2M1_THRESHOLDS)
    return index | ((x < 0) & (index != 0)).to(torch.uint8) << 3


def _dequantize_from_fp4_e2m1(codes):
    """fp32 values of uint8 codes."""
    codes = codes.to(torch.int32)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    # Twice the magnitude is an integer, and an integer has no minus zero.
    doubled = (2 * (exponent != 0) + mantissa) << (exponent - 1).clamp(min=0)
    return doubled * (1 - 2 * (codes >> 3)) * 0.5


def _pack_nibbles(codes):
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous().view(torch.int8)


def _unpack_nibbles(packed):
    pairs = packed.view(torch.uint8)
    return torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(1)


def _apply_sf(values, sf, gran_k, use_packed_ue8m0):
    m, n = values.shape
    _check_gran_k(gran_k)
    groups = ceil_div(n, gran_k)
    shape, dtype = ((m, ceil_div(groups, 4)), torch.int32) if use_packed_ue8m0 else ((m, groups), torch.float32)
    if sf.dtype != dtype:
        raise TypeError(f"sf must be {dtype} with use_packed_ue8m0={use_packed_ue8m0}, got {sf.dtype}")
    if sf.shape != shape:
        raise ValueError(f"sf must have shape {shape}, got {tuple(sf.shape)}")
    if use_packed_ue8m0:
        sf = unpack_ue8m0_from_int(sf)
    return values * sf.repeat_interleave(gran_k, dim=1)[:, :n]


def _check_dtype(x):
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}")


def _check_gran_k(gran_k):
    if not isinstance(gran_k, int) or gran_k < 1:
        raise ValueError(f"gran_k must be a positive int, got {gran_k!r}")


def _check_matrix(x, gran_k):
    _check_dtype(x)
    if x.dim() != 2:
        raise ValueError(f"x must be 2-D, got shape {tuple(x.shape)}")
    _check_gran_k(gran_k)


def _check_packed_fp4(a, name):
    if a.dtype != torch.int8:
        raise TypeError(f"{name} must be int8 (two e2m1 values a byte), got {a.dtype}")
    if a.dim() != 2:
        raise ValueError(f"{name} must be 2-D, got shape {tuple(a.shape)}")
