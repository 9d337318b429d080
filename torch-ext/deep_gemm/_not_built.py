"""Public functions that this version does not build yet, with their signatures.

A call raises NotImplementedError, on which transformers falls back to its own kernels. In the GEMM suffixes the first
letter is about A, [m, k] if n and [k, m] if t, and the second about B, [k, n] if n and [n, k] if t.
"""

import torch


def _not_built(name, instead):
    raise NotImplementedError(f"deep_gemm.{name} is not built in this version; use {instead} instead")


_FP8 = "torch._scaled_mm with block-wise scales"
_FP8_GROUPED = "one torch._scaled_mm with block-wise scales for each group"
_BF16_GROUPED = "one torch.matmul for each group"
_LOGITS = "torch.einsum on dequantised operands"
_MEGA_MOE = "a grouped or eager experts implementation"


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a,
    b,
    d,
    grouped_layout,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    compiled_dims="nk",
    disable_ue8m0_cast=False,
    use_psum_layout=False,
    expected_m_for_psum_layout=None,
):
    """Each row of d = that row of A @ the B of its group, FP8 or FP4, groups one after the other. Not built."""
    _not_built("m_grouped_fp8_fp4_gemm_nt_contiguous", _FP8_GROUPED)


def m_grouped_fp8_fp4_gemm_nn_contiguous(
    a,
    b,
    d,
    grouped_layout,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    compiled_dims="nk",
    disable_ue8m0_cast=False,
    use_psum_layout=False,
):
    """Each row of d = that row of A @ the B of its group, FP8 or FP4, groups one after the other. Not built."""
    _not_built("m_grouped_fp8_fp4_gemm_nn_contiguous", _FP8_GROUPED)


def m_grouped_fp8_fp4_gemm_nt_masked(
    a,
    b,
    d,
    masked_m,
    expected_m,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    compiled_dims="nk",
    disable_ue8m0_cast=False,
):
    """d[g] = A[g] @ B[g] for the first masked_m[g] rows, FP8 or FP4. Not built."""
    _not_built("m_grouped_fp8_fp4_gemm_nt_masked", _FP8_GROUPED)


m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
m_grouped_fp8_gemm_nn_contiguous = m_grouped_fp8_fp4_gemm_nn_contiguous
m_grouped_fp8_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked


def k_grouped_fp8_gemm_tn_contiguous(a, b, d, ks, ks_tensor, c=None, recipe=(1, 1, 128), compiled_dims="mn"):
    """d[g] = c[g] + A_g @ B_g, FP8, groups one after the other along K. Not built."""
    _not_built("k_grouped_fp8_gemm_tn_contiguous", _FP8_GROUPED)


def k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, ks_tensor, c=None, recipe=(1, 1, 128), compiled_dims="mn"):
    """d[g] = c[g] + A_g @ B_g, FP8, groups one after the other along K. Not built."""
    _not_built("k_grouped_fp8_gemm_nt_contiguous", _FP8_GROUPED)


def m_grouped_bf16_gemm_nt_contiguous(
    a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False, expected_m_for_psum_layout=None
):
    """Each row of d = that row of A @ the B of its group, BF16, groups one after the other. Not built."""
    _not_built("m_grouped_bf16_gemm_nt_contiguous", _BF16_GROUPED)


def m_grouped_bf16_gemm_nn_contiguous(a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False):
    """Each row of d = that row of A @ the B of its group, BF16, groups one after the other. Not built."""
    _not_built("m_grouped_bf16_gemm_nn_contiguous", _BF16_GROUPED)


def m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m, compiled_dims="nk"):
    """d[g] = A[g] @ B[g] for the first masked_m[g] rows, BF16. Not built."""
    _not_built("m_grouped_bf16_gemm_nt_masked", _BF16_GROUPED)


bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked


def k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, ks_tensor, c=None, compiled_dims="mn"):
    """d[g] = c[g] + A_g @ B_g, BF16, groups one after the other along K. Not built."""
    _not_built("k_grouped_bf16_gemm_tn_contiguous", _BF16_GROUPED)


def fp8_gemm_nt_skip_head_mid(a, b, d, head_splits, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
    """The FP8 product with a gap in the columns of each head of d. Not built."""
    _not_built("fp8_gemm_nt_skip_head_mid", _FP8)


def fp8_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0):
    """Indexer logits sum over h of relu(q[i, h] . k[j]) * weights[i, h], FP8. Not built."""
    _not_built("fp8_mqa_logits", _LOGITS)


def fp8_fp4_mqa_logits(
    q,
    kv,
    weights,
    cu_seq_len_k_start,
    cu_seq_len_k_end,
    clean_logits=True,
    max_seqlen_k=0,
    logits_dtype=torch.float32,
):
    """Indexer logits sum over h of relu(q[i, h] . k[j]) * weights[i, h], FP8 or FP4. Not built."""
    _not_built("fp8_fp4_mqa_logits", _LOGITS)


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None):
    """Work split for the paged logits functions. Not built."""
    _not_built("get_paged_mqa_logits_metadata", _LOGITS)


def fp8_paged_mqa_logits(
    q,
    kv_cache,
    weights,
    context_lens,
    block_table,
    schedule_meta,
    max_context_len,
    clean_logits=False,
    indices=None,
):
    """Indexer logits over a paged KV cache, FP8. Not built."""
    _not_built("fp8_paged_mqa_logits", _LOGITS)


def fp8_fp4_paged_mqa_logits(
    q,
    kv_cache,
    weights,
    context_lens,
    block_table,
    schedule_meta,
    max_context_len,
    clean_logits=False,
    logits_dtype=torch.float32,
    indices=None,
):
    """Indexer logits over a paged KV cache, FP8 or FP4. Not built."""
    _not_built("fp8_fp4_paged_mqa_logits", _LOGITS)


def einsum(expr, a, b, d, c=None, use_cublaslt=False):
    """d = c + einsum(expr, a, b) in BF16. Not built."""
    _not_built("einsum", "torch.einsum")


def fp8_einsum(expr, a, b, d, c=None, recipe=(1, 128, 128)):
    """d = c + einsum(expr, a, b) for block-scaled FP8 (data, sf) pairs. Not built."""
    _not_built("fp8_einsum", "torch.einsum on dequantised operands")


def tf32_hc_prenorm_gemm(a, b, d, sqr_sum, num_splits=None):
    """d = a @ b^T in TF32 and sqr_sum = the row sums of a^2. Not built."""
    _not_built("tf32_hc_prenorm_gemm", "torch.matmul and torch.sum")


def m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(lhs, rhs, out, m_indices):
    """First-generation name of m_grouped_fp8_gemm_nt_contiguous. Not built."""
    _not_built("m_grouped_gemm_fp8_fp8_bf16_nt_contiguous", _FP8_GROUPED)


def m_grouped_gemm_fp8_fp8_bf16_nt_masked(lhs, rhs, out, masked_m, expected_m):
    """First-generation name of m_grouped_fp8_gemm_nt_masked. Not built."""
    _not_built("m_grouped_gemm_fp8_fp8_bf16_nt_masked", _FP8_GROUPED)


def k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(lhs, rhs, out, batch_sizes):
    """First-generation name of k_grouped_fp8_gemm_nt_contiguous with c = out. Not built."""
    _not_built("k_grouped_wgrad_gemm_fp8_fp8_fp32_nt", _FP8_GROUPED)


class SymmBuffer:
    """Symmetric-memory buffer of the fused MoE. Not built."""

    def __init__(
        self,
        group,
        num_experts,
        num_max_tokens_per_rank,
        num_topk,
        hidden,
        intermediate_hidden,
        use_fp8_dispatch=True,
        activation="swiglu",
    ):
        _not_built("SymmBuffer", _MEGA_MOE)


def get_symm_buffer_for_mega_moe(
    group,
    num_experts,
    num_max_tokens_per_rank,
    num_topk,
    hidden,
    intermediate_hidden,
    use_fp8_dispatch=True,
    activation="swiglu",
):
    """A SymmBuffer with the number of tokens rounded up. Not built."""
    _not_built("get_symm_buffer_for_mega_moe", _MEGA_MOE)


def transform_weights_for_mega_moe(l1_weights, l2_weights):
    """Weights of the experts in the order that fp8_fp4_mega_moe reads. Not built."""
    _not_built("transform_weights_for_mega_moe", _MEGA_MOE)


def fp8_fp4_mega_moe(
    y,
    l1_weights,
    l2_weights,
    sym_buffer,
    cumulative_local_expert_recv_stats=None,
    recipe=(1, 1, 32),
    activation="swiglu",
    activation_clamp=None,
    fast_math=True,
):
    """y = the experts' weighted sum for each token, over all ranks, in one kernel. Not built."""
    _not_built("fp8_fp4_mega_moe", _MEGA_MOE)
