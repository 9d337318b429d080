"""The casts by block and by channel and to FP4, each beside its reference."""

import torch
from casting import distinct
from generators import deep_gemm
from views import Guarded

assert_bitwise_equal = deep_gemm.testing.assert_bitwise_equal
utils = deep_gemm.utils
E4M3 = torch.float8_e4m3fn


def flat(result):
    """The tensors of a result, pairs of pairs included."""
    return [tensor for part in result for tensor in (part if isinstance(part, tuple) else (part,))]


def transposed_reference(x, use_ue8m0, gran_k):
    m, n = x.shape
    padded = torch.cat([x, x.new_zeros(-m % gran_k, n)])
    payload, sf = utils.per_channel_cast_to_fp8(padded, use_ue8m0, gran_k)
    return payload[:m].T, sf.T


def both_reference(x, use_ue8m0, gran_k):
    return *utils.per_token_cast_to_fp8(x, use_ue8m0, gran_k), *transposed_reference(x, use_ue8m0, gran_k)


def block_transposed_reference(x, use_ue8m0, gran_k):
    payload, sf = utils.per_block_cast_to_fp8(x, use_ue8m0, gran_k)
    return payload, sf, payload.T, sf.T


def block_transposed(x, use_ue8m0, gran_k, **outputs):
    return deep_gemm.fused_per_block_cast_to_fp8(x, use_ue8m0, gran_k, with_transpose=True, **outputs)


NAMES = ("out", "out_sf", "out_t", "out_sf_t")
# Name -> (cast, reference, names of the outputs, what divides M and what divides N).
CASTS = {
    "block": (deep_gemm.fused_per_block_cast_to_fp8, utils.per_block_cast_to_fp8, NAMES[:2], 1, 1),
    "block, transposed": (block_transposed, block_transposed_reference, NAMES, 1, 1),
    "channel": (deep_gemm.fused_per_channel_cast_to_fp8, utils.per_channel_cast_to_fp8, NAMES[:2], None, 1),
    "transposed": (deep_gemm.fused_per_channel_cast_to_fp8_transposed, transposed_reference, NAMES[:2], 1, 1),
    "both": (deep_gemm.fused_per_token_and_channel_cast_to_fp8, both_reference, NAMES, 1, 1),
    "fp4": (deep_gemm.fused_per_token_cast_to_fp4, utils.per_token_cast_to_fp4, NAMES[:2], 1, 2),
}


def shape_of(name, m, n, gran_k):
    """The nearest shape that a cast takes, from above."""
    unit_m, unit_n = CASTS[name][3] or gran_k, CASTS[name][4]
    return -(-m // unit_m) * unit_m, -(-n // unit_n) * unit_n


def check(name, x, use_ue8m0, gran_k, label="", **outputs):
    """Cast and compare with the reference on the same device."""
    cast, reference, *_ = CASTS[name]
    result = flat(cast(x, use_ue8m0, gran_k, **outputs))
    for i, (got, want) in enumerate(zip(result, flat(reference(x, use_ue8m0, gran_k)), strict=True)):
        assert_bitwise_equal(got, want, f"{name} {list(x.shape)} output {i} {label}")
        assert not got.requires_grad
    return result


def check_guarded(name, x, use_ue8m0, gran_k, place, label=""):
    """`check` into views, `place(shape) -> (stride, offset)`, whose surroundings must stay as they are."""
    _, reference, names, *_ = CASTS[name]
    guards = {}
    for output, want in zip(names, flat(reference(x, use_ue8m0, gran_k))):
        stride, offset = place(tuple(want.shape))
        guards[output] = Guarded(tuple(want.shape), stride, want.dtype, offset, x.device)
    result = check(name, x, use_ue8m0, gran_k, label, **{output: guard.view for output, guard in guards.items()})
    for got, (output, guard) in zip(result, guards.items()):
        assert got is guard.view
        guard.assert_untouched(f"{name} {output} {label}")


def segments(ks, alignment=1):
    """(first row, rows) of each group of x, and (first, size) of its columns in the k-grouped operand."""
    row = column = 0
    for k in ks:
        yield row, k, column, -(-k // 128) * 128
        row += -(-k // alignment) * alignment
        column += -(-k // 128) * 128


def k_grouped(payload, sf, ks, n, gran_k, alignment=1):
    """Per group the payload [N, k_g] and the scale factors [N, k_g / gran_k] of a k-grouped operand."""
    for _, _, column, size in segments(ks, alignment):
        yield (
            payload[n * column : n * (column + size)].view(n, size),
            sf[:, column // gran_k : (column + size) // gran_k],
        )


def check_grouped(x, ks, use_ue8m0, gran_k, alignment, operand, rows=None, label=""):
    """A k-grouped operand, and the rows that were cast from the same read, against the reference group by group."""
    n = x.shape[1]
    for g, (payload, sf) in enumerate(k_grouped(*operand, ks, n, gran_k, alignment)):
        row, k, _, size = list(segments(ks, alignment))[g]
        group = x[row : row + k]
        want, want_sf = transposed_reference(torch.cat([group, group.new_zeros(size - k, n)]), use_ue8m0, gran_k)
        assert_bitwise_equal(payload, want, f"group {g} payload {label}")
        assert_bitwise_equal(sf, want_sf, f"group {g} sf {label}")
        if rows is not None:
            want, want_sf = utils.per_token_cast_to_fp8(group, use_ue8m0, gran_k)
            assert_bitwise_equal(rows[0][row : row + k], want, f"group {g} rows {label}")
            assert_bitwise_equal(rows[1][row : row + k], want_sf, f"group {g} rows' sf {label}")


def powers(m, n, dtype=torch.bfloat16, device="cpu"):
    """[m, n] whose neighbouring groups of 32 x 32 differ by powers of two, columns and rows within them by a sign."""
    rows, columns = torch.arange(m, device=device)[:, None], torch.arange(n, device=device)[None, :]
    sign = 1 - 2 * ((rows * 3 + columns * 5) % 7 < 3).float()
    return (sign * torch.exp2(((rows // 32 * 5 + columns // 32 * 7 + rows % 4) % 19 - 9).float())).to(dtype)


def specials(m, n, dtype, device):
    """`distinct` with NaN, Inf, zeros and the largest value here and there."""
    x = distinct(m, n, dtype, device=device)
    x[:, 3] = 0
    x[1, :] = -0.0
    x[2 % m, 5], x[2 % m, 6] = torch.inf, -torch.inf
    x[m // 2, n // 2] = torch.nan
    x[m - 1, n - 1] = torch.finfo(dtype).max
    return x
