"""Dense GEMMs: block-scaled FP8 and FP4, BF16, and whatever cuBLASLt takes.

In the suffixes the first letter is about A, `[M, K]` if n and `[K, M]` if t, and the second about B, `[K, N]` if n and
`[N, K]` if t. Names, arguments and scheme follow DeepGEMM.
"""

from __future__ import annotations

from functools import partial

import torch

from .._call import Plan, Planned, Spec, check_matrix, check_output, is_traced, served_by_triton
from .._memory import overlap
from .._ops import add_op_namespace_prefix, ops
from .._runtime import _settings
from ..utils.math import ceil_div
from . import hopper, portable, reference
from .reference import Gran, num_k

_E4M3 = torch.float8_e4m3fn
_OUTPUT_DTYPES = (torch.bfloat16, torch.float32)


def fp8_fp4_gemm_nt(
    a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk", disable_ue8m0_cast=False
) -> None:
    """`d = c + A @ B^T` of block-scaled FP8 or FP4, with one scale factor (sf) for each group of elements:

    `d[i, j] = sum over k of a[i, k] * sfa[i // gran_m, k // gran_k_a] * b[j, k] * sfb[j // gran_n, k // gran_k_b]`,
    summed in fp32 block by block of K and rounded once (`gemm.reference`). Without gradient, whatever requires one.

    Args:
        a, b: pairs (data, sf). Data is e4m3 `[M, K]` and `[N, K]`, or int8: e2m1, two to a byte along K (or along the
            other dimension, `[M / 2, K]`), the even one in the low nibble. Rows or columns are next to each other.
            sf is fp32 `[ceil(M / gran_m), ceil(K / gran_k)]`, or int32 with four UE8M0 exponents to a word along K,
            `[ceil(M / gran_m), ceil(K / (4 * gran_k))]`; for b with N. Any strides. The last group may be partial.
        d: `[M, N]` bf16 or fp32, written in place. M = 0 or N = 0 writes nothing; K = 0 leaves c, or zeros.
        c: None or like d; d itself, or the same memory, to accumulate; else d becomes a copy of it first.
        recipe, recipe_a, recipe_b: (gran_m, gran_n, gran_k), or the pair (gran_m, gran_k_a) and (gran_n, gran_k_b);
            gran_m and gran_n are 1 or 128, gran_k 32 or 128. Without any it is (1, gran_n, 128), with a gran_n of 1
            where sfb has N rows, and else 128.
        compiled_dims, disable_ue8m0_cast: accepted without effect.
    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape, device or recipe, a d that requires grad or
            overlaps itself, an input or, but for the same view, c. Nothing is written then.
    """
    (a, sfa), (b, sfb) = _pair("a", a), _pair("b", b)
    recipes = _recipe("recipe", recipe, 3), _recipe("recipe_a", recipe_a, 2), _recipe("recipe_b", recipe_b, 2)
    if is_traced(a):
        inputs = (a, sfa, b, sfb) if c is None else (a, sfa, b, sfb, c)
        gran, _ = _check_fp8(inputs, d, *recipes)
        a, sfa, b, sfb, c = _as_bytes(a), sfa.detach(), _as_bytes(b), sfb.detach(), _other(c, d)
        ops.fp8_fp4_gemm_nt(a, sfa, b, sfb, c, d, [gran.m, gran.n, gran.k_a, gran.k_b], len(inputs) == 5)
        return
    _run(_FP8, (a, sfa, b, sfb), c, d, *recipes)


def fp8_fp4_gemm_nn(
    a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk", disable_ue8m0_cast=False
) -> None:
    """`fp8_fp4_gemm_nt` with b and its sf given transposed: `[K, N]`, `[ceil(K / gran_k), ceil(N / gran_n)]`."""
    fp8_fp4_gemm_nt(a, _transposed("b", b), d, c, recipe, recipe_a, recipe_b)


def fp8_fp4_gemm_tn(
    a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="mn", disable_ue8m0_cast=False
) -> None:
    """`fp8_fp4_gemm_nt` with a, b and their sf given transposed: `[K, M]` and `[K, N]`."""
    fp8_fp4_gemm_nt(_transposed("a", a), _transposed("b", b), d, c, recipe, recipe_a, recipe_b)


def fp8_fp4_gemm_tt(
    a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="mn", disable_ue8m0_cast=False
) -> None:
    """`fp8_fp4_gemm_nt` with a and its sf given transposed: `[K, M]`, `[ceil(K / gran_k), ceil(M / gran_m)]`."""
    fp8_fp4_gemm_nt(_transposed("a", a), b, d, c, recipe, recipe_a, recipe_b)


fp8_gemm_nt = fp8_fp4_gemm_nt
fp8_gemm_nn = fp8_fp4_gemm_nn
fp8_gemm_tn = fp8_fp4_gemm_tn
fp8_gemm_tt = fp8_fp4_gemm_tt


def gemm_fp8_fp8_bf16_nt(lhs, rhs, out) -> None:
    """First-generation name of `fp8_gemm_nt(lhs, rhs, out, recipe=(1, 128, 128))`."""
    fp8_gemm_nt(lhs, rhs, out, recipe=(1, 128, 128))


def wgrad_gemm_fp8_fp8_fp32_nt(lhs, rhs, out) -> None:
    """First-generation name of `fp8_gemm_nt(lhs, rhs, out, c=out, recipe=(1, 1, 128))`, which accumulates."""
    fp8_gemm_nt(lhs, rhs, out, c=out, recipe=(1, 1, 128))


def bf16_gemm_nt(a, b, d, c=None, compiled_dims="nk") -> None:
    """`d = c + A @ B^T` in BF16, summed in fp32 and rounded once. Without gradient, whatever requires one.

    Args:
        a, b: bf16 `[M, K]` and `[N, K]`; rows or columns are next to each other.
        d, c, compiled_dims: as in `fp8_fp4_gemm_nt`.
    Raises:
        TypeError, ValueError: as `fp8_fp4_gemm_nt`.
    """
    if is_traced(a):
        _check_bf16((a, b) if c is None else (a, b, c), d)
        ops.bf16_gemm_nt(a.detach(), b.detach(), _other(c, d), d, c is not None)
        return
    _run(_BF16, (a, b), c, d)


def bf16_gemm_nn(a, b, d, c=None, compiled_dims="nk") -> None:
    """`bf16_gemm_nt` with b given transposed, `[K, N]`."""
    bf16_gemm_nt(a, _mT("b", b), d, c)


def bf16_gemm_tn(a, b, d, c=None, compiled_dims="mn") -> None:
    """`bf16_gemm_nt` with a and b given transposed, `[K, M]` and `[K, N]`."""
    bf16_gemm_nt(_mT("a", a), _mT("b", b), d, c)


def bf16_gemm_tt(a, b, d, c=None, compiled_dims="mn") -> None:
    """`bf16_gemm_nt` with a given transposed, `[K, M]`."""
    bf16_gemm_nt(_mT("a", a), b, d, c)


@torch.no_grad()
def cublaslt_gemm_nt(a, b, d, c=None) -> None:
    """`d = c + A @ B^T` by torch's own matmul, which is cuBLASLt on CUDA, summed in fp32. Without gradient.

    Args:
        a, b: `[M, K]` and `[N, K]` of one dtype, bf16, fp16, fp32 or e4m3 (as it is, without scale factors), any
            strides. e4m3 that cuBLASLt cannot take (K or N no multiple of 16, other strides) goes there as bf16.
        d: `[M, N]` bf16, fp16 or fp32, written in place. c: None, d itself or like d, as in `fp8_fp4_gemm_nt`.
    Raises:
        TypeError, ValueError: as `fp8_fp4_gemm_nt`.
    """
    check_matrix("a", a, torch.bfloat16, torch.float16, torch.float32, _E4M3)
    check_matrix("b", b, a.dtype)
    _check_problem(a, a.shape[1], b, b.shape[1], (torch.float16, *_OUTPUT_DTYPES), c, d)
    if not is_traced(d):
        _check_apart(c, d, a=a, b=b)
    m, n = d.shape
    if not m or not n:
        return
    with torch.autocast(d.device.type, enabled=False):
        _by_torch(a, b, c, d)


def cublaslt_gemm_nn(a, b, d, c=None) -> None:
    """`cublaslt_gemm_nt` with b given transposed, `[K, N]`."""
    cublaslt_gemm_nt(a, _mT("b", b), d, c)


def cublaslt_gemm_tn(a, b, d, c=None) -> None:
    """`cublaslt_gemm_nt` with a and b given transposed, `[K, M]` and `[K, N]`."""
    cublaslt_gemm_nt(_mT("a", a), _mT("b", b), d, c)


def cublaslt_gemm_tt(a, b, d, c=None) -> None:
    """`cublaslt_gemm_nt` with a given transposed, `[K, M]`."""
    cublaslt_gemm_nt(_mT("a", a), b, d, c)


@torch.library.custom_op(add_op_namespace_prefix("fp8_fp4_gemm_nt"), mutates_args=("d",))
def _fp8_op(
    a: torch.Tensor,
    sfa: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    c: torch.Tensor | None,
    d: torch.Tensor,
    gran: list[int],
    add: bool,
) -> None:
    m, n, k_a, k_b = gran
    a, b = [t.view(_E4M3) if t.dtype == torch.uint8 else t for t in (a, b)]
    _run(_FP8, (a, sfa, b, sfb), d if add and c is None else c, d, None, (m, k_a), (n, k_b))


@torch.library.register_fake(add_op_namespace_prefix("fp8_fp4_gemm_nt"))
def _(a, sfa, b, sfb, c, d, gran, add):
    return None


@torch.library.custom_op(add_op_namespace_prefix("bf16_gemm_nt"), mutates_args=("d",))
def _bf16_op(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, d: torch.Tensor, add: bool) -> None:
    _run(_BF16, (a, b), d if add and c is None else c, d)


@torch.library.register_fake(add_op_namespace_prefix("bf16_gemm_nt"))
def _(a, b, c, d, add):
    return None


def _as_bytes(data):
    """e4m3 as bytes, for torch compares no e4m3 tensors when opcheck asks it to."""
    return data.detach().view(torch.uint8) if data.dtype == _E4M3 else data.detach()


def _other(c, d):
    """c for an op, which must not be given d twice."""
    return None if c is None or c is d else c.detach()


def _pair(name, pair):
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name} must be a pair (data, sf), got {type(pair).__name__}")
    for part, tensor in zip(("data", "sf"), pair):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a pair of tensors (data, sf), got {type(tensor).__name__} as {part}")
    return pair


def _transposed(name, pair):
    data, sf = _pair(name, pair)
    return _mT(f"{name} data", data), _mT(f"{name} sf", sf)


def _mT(name, tensor):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dim() != 2:
        raise ValueError(f"{name} must be 2-D, got shape {tuple(tensor.shape)}")
    return tensor.T


def _recipe(name, recipe, length):
    if recipe is None:
        return None
    if not isinstance(recipe, (tuple, list)) or len(recipe) != length or any(type(g) is not int for g in recipe):
        raise ValueError(f"{name} must be {length} ints, got {recipe!r}")
    return tuple(recipe)


def _run(family, inputs, c, d, *options) -> None:
    """Launch with c as a further input, unless there is none."""
    plain, with_c = family
    # The kernel is bound for a number of SMs.
    if c is None:
        plain(inputs, (d,), False, _settings.num_sms, *options)
    else:
        with_c((*inputs, c), (d,), _same_view(c, d), _settings.num_sms, *options)


def _same_view(c, d) -> bool:
    if c is d:
        return True
    if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in (c, d)):
        return False
    return c.shape == d.shape and c.stride() == d.stride() and c.data_ptr() == d.data_ptr()


class _GemmPlan(Plan):
    """A plan whose output may be the same view as its last input."""

    __slots__ = ()

    def __init__(self, inputs, outputs, launch, reference, empty, in_place):
        super().__init__(inputs, outputs, (), launch, reference, empty)
        if in_place:
            self.pairs = [pair for pair in self.pairs if pair[:2] != (len(inputs), len(inputs) - 1)]


def _check_fp8(inputs, d, recipe, recipe_a, recipe_b) -> tuple[Gran, int]:
    """Refuse what types, dtypes, shapes and strides say is wrong; the granularity and K."""
    a, sfa, b, sfb, *c = inputs
    check_matrix("d", d, *_OUTPUT_DTYPES)
    for name, data, mn in zip("ab", (a, b), d.shape):
        check_matrix(f"{name} data", data, _E4M3, torch.int8)
        # What is packed along its rows has half of them.
        if data.shape[0] != mn and not (data.dtype == torch.int8 and 2 * data.shape[0] == mn):
            raise ValueError(f"{name} data must have {mn} rows for d of {tuple(d.shape)}, got {tuple(data.shape)}")
        _check_strides(f"{name} data", data)
    k, k_b = (num_k(data, mn) for data, mn in zip((a, b), d.shape))
    if k != k_b:
        raise ValueError(f"b data must have the K of a, {k}, got {k_b}")
    gran = _gran(sfb, d.shape[1], recipe, recipe_a, recipe_b)
    _check_sf("a sf", sfa, d.shape[0], k, gran.m, gran.k_a)
    _check_sf("b sf", sfb, d.shape[1], k, gran.n, gran.k_b)
    _check_outputs(a, c[0] if c else None, d, **{"a sf": sfa, "b data": b, "b sf": sfb})
    return gran, k


def _check_bf16(inputs, d) -> None:
    """`_check_fp8` for bf16."""
    a, b, *c = inputs
    for name, data in zip("ab", (a, b)):
        check_matrix(name, data, torch.bfloat16)
        _check_strides(name, data)
    _check_problem(a, a.shape[1], b, b.shape[1], _OUTPUT_DTYPES, c[0] if c else None, d)


def _check_problem(a, k, b, k_b, dtypes, c, d) -> None:
    check_matrix("d", d, *dtypes)
    if k != k_b:
        raise ValueError(f"b must have the K of a, {k}, got {k_b}")
    if d.shape != (a.shape[0], b.shape[0]):
        raise ValueError(f"d must have shape {(a.shape[0], b.shape[0])}, got {tuple(d.shape)}")
    _check_outputs(a, c, d, b=b)


def _check_outputs(a, c, d, **others) -> None:
    for name, tensor in others.items():
        if tensor.device != a.device:
            raise ValueError(f"{name} must be on {a.device} as a is, got {tensor.device}")
    check_output("d", d, a, Spec(tuple(d.shape), d.dtype))
    if c is not None:
        check_matrix("c", c, d.dtype)
        if c.shape != d.shape or c.device != d.device:
            raise ValueError(f"c must be {tuple(d.shape)} on {d.device} as d is, got {tuple(c.shape)} on {c.device}")


def _check_apart(c, d, **others) -> None:
    """Refuse a d that shares memory with what it is computed from."""
    if c is not None and not _same_view(c, d):
        others["c"] = c
    for name, tensor in others.items():
        if overlap(d, tensor):
            raise ValueError(f"d overlaps {name} in memory")


def _check_strides(name, data) -> None:
    (rows, columns), (stride_m, stride_k) = data.shape, data.stride()
    if rows > 1 and columns > 1 and stride_m != 1 and stride_k != 1:
        raise ValueError(f"{name} must have a stride of 1, got strides {data.stride()}")


def _check_sf(name, sf, mn, k, gran_mn, gran_k) -> None:
    check_matrix(name, sf, torch.float32, torch.int32)
    shape = (ceil_div(mn, gran_mn), ceil_div(k, gran_k if sf.dtype == torch.float32 else 4 * gran_k))
    if sf.shape != shape:
        raise ValueError(
            f"{name} must have shape {shape} as {sf.dtype} with granularity {(gran_mn, gran_k)}, got {tuple(sf.shape)}"
        )


def _gran(sfb, n, recipe, recipe_a, recipe_b) -> Gran:
    if (recipe_a is None) != (recipe_b is None):
        raise ValueError(f"recipe_a and recipe_b must be given together, got {recipe_a} and {recipe_b}")
    if recipe is not None and recipe_a is not None:
        raise ValueError(f"recipe must be None where recipe_a and recipe_b are given, got {recipe}")
    if recipe is None and recipe_a is None:
        # Weights with a row of scale factors for each of theirs come without a recipe too.
        recipe = (1, 1 if sfb.shape[:1] == (n,) else 128, 128)
    if recipe is not None:
        recipe_a, recipe_b = (recipe[0], recipe[2]), (recipe[1], recipe[2])
    for name, (gran_mn, gran_k) in (("recipe_a", recipe_a), ("recipe_b", recipe_b)):
        if gran_mn not in (1, 128) or gran_k not in (32, 128):
            where = name if recipe is None else "recipe"
            got = recipe or (gran_mn, gran_k)
            raise ValueError(f"{where} must have a granularity of 1 or 128 rows and 32 or 128 of K, got {got}")
    return Gran(recipe_a[0], recipe_b[0], recipe_a[1], recipe_b[1])


def _make_fp8(inputs, outputs, in_place, num_sms, *recipes) -> Plan:
    (d,) = outputs
    gran, k = _check_fp8(inputs, d, *recipes)
    a, sfa, b, sfb, *c = inputs

    def bind(path):
        return path.bind(a, sfa, b, sfb, d, gran, bool(c))

    def compute(a, sfa, b, sfb, c=None):
        return (reference.fp8_gemm(a, sfa, b, sfb, c, d_shape, d_dtype, gran),)

    d_shape, d_dtype = tuple(d.shape), d.dtype
    return _plan(inputs, outputs, bind, compute, k, c, in_place)


def _make_bf16(inputs, outputs, in_place, num_sms) -> Plan:
    (d,) = outputs
    _check_bf16(inputs, d)
    a, b, *c = inputs

    def bind(path):
        return path.bind_bf16(a, b, d, bool(c))

    def compute(a, b, c=None):
        return (reference.bf16_gemm(a, b, c, d_shape, d_dtype),)

    d_shape, d_dtype = tuple(d.shape), d.dtype
    return _plan(inputs, outputs, bind, compute, a.shape[1], c, in_place)


def _plan(inputs, outputs, bind, compute, k, c, in_place):
    (d,) = outputs
    launch = None
    if k and d.numel() and served_by_triton(d.device):
        launch = bind(hopper) or bind(portable)
        if c:
            launch = partial(_launch_in_place if in_place else _launch_on_copy, launch)
    return _GemmPlan(inputs, outputs, launch, compute, not d.numel(), in_place)


def _launch_in_place(launch, tensors, pointers):
    *operands, _, d = tensors
    launch((*operands, d), (*pointers[:-2], pointers[-1]))


@torch.no_grad()
def _launch_on_copy(launch, tensors, pointers):
    *_, c, d = tensors
    d.copy_(c)
    _launch_in_place(launch, tensors, pointers)


_FP8_NAMES = ("a data", "a sf", "b data", "b sf")
_FP8 = Planned(_make_fp8, (*_FP8_NAMES, "d")), Planned(_make_fp8, (*_FP8_NAMES, "c", "d"))
_BF16 = Planned(_make_bf16, ("a", "b", "d")), Planned(_make_bf16, ("a", "b", "c", "d"))


def _by_torch(a, b, c, d) -> None:
    if a.dtype == d.dtype:
        # Compilers take few strides of an `out`.
        out = {} if is_traced(d) else {"out": d}
        product = torch.mm(a, b.T, **out) if c is None else torch.addmm(c, a, b.T, **out)
        if product is not d:
            d.copy_(product)
    else:
        product = _mm(a, b.T, d.dtype)
        d.copy_(product if c is None else c + product)


def _mm(a, b, dtype):
    """`a @ b` in another dtype, summed in fp32."""
    if a.dtype == _E4M3:
        if a.is_cuda and _takes_e4m3(a, b) and dtype != torch.float16:
            one = torch.ones((), dtype=torch.float32, device=a.device)
            return torch._scaled_mm(a, b, one, one, out_dtype=dtype)
        a, b = a.bfloat16(), b.bfloat16()
    if a.is_cuda and a.dtype != torch.float32 and dtype == torch.float32 and min(*a.shape, *b.shape) > 0:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.float(), b.float()).to(dtype)


def _takes_e4m3(a, b) -> bool:
    """Whether `torch._scaled_mm` does: row-major by column-major, on compute capability 8.9 and newer."""
    multiples = a.shape[0] and all(size % 16 == 0 and size for size in b.shape)
    row_major = a.stride(1) == 1 and b.stride(0) == 1 and a.stride(0) % 16 == 0 and b.stride(1) % 16 == 0
    return multiples and row_major and torch.cuda.get_device_capability(a.device) >= (8, 9)
