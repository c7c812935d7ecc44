"""flashinfer.prefill: many queries of a request, or of each request of a batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..metadata import BSRView, KVCache, PageTable
from .arguments import Scale, alibi_slopes_on, check_kv_layout, indptr_of_equal, pos_encoding, ragged_cache
from .features import missing, not_supported, refuse_given
from .heads import Heads, heads_of
from .jit.attention import JitModule
from .masks import pack_single_mask
from .paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from .planned_attention import Logits, attention_of_call, logits_of
from .ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper
from .scales import Scales, one_of, scaled
from .utils import MaskMode
from .wrapper import BACKENDS

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "cudnn_batch_prefill_with_kv_cache",
    "fmha_varlen",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache_with_jit_module",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
]


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: Scale | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """All queries of one request.

    Args:
        q: [qo_len, num_qo_heads, head_dim].
        k, v: NHD [kv_len, num_kv_heads, head_dim], HND [num_kv_heads, kv_len, head_dim].
        scale_q, scale_k, scale_v: what numbers of float8 are multiplied by: float32 [1] or [heads]. k_scale,
            v_scale: the same under other names.
        o_dtype: of the output: q's (None), or float8_e4m3fn; of float8 Q also float16 or bfloat16.
        custom_mask: bool [qo_len, kv_len]; packed_custom_mask: uint8, its bits, the first the lowest. With a
            mask `causal` does not count.
        use_fp16_qk_reduction: not used: sums are float32.

    Returns:
        q's shape; with return_lse also float32 [qo_len, num_qo_heads], to base 2.

    Raises:
        ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its name.
    """
    refuse_given(kv_cache_sf=kv_cache_sf)
    k_scale, v_scale = one_of(scale_k=scale_k, k_scale=k_scale), one_of(scale_v=scale_v, v_scale=v_scale)
    check_kv_layout(kv_layout)
    if backend not in BACKENDS:
        not_supported(f"backend = {backend!r}")
    packed, mask_indptr = pack_single_mask(custom_mask, packed_custom_mask, q.device)
    logits = Logits(
        logits_soft_cap or 0.0, pos_encoding(pos_encoding_mode, rope_scale, rope_theta), packed, mask_indptr
    )
    kv = ragged_cache(k, v, kv_layout)
    heads = heads_of(
        q.device, q.shape[1], kv.num_kv_heads, q.shape[-1], kv.v.shape[-1], q.dtype, k.dtype, o_dtype
    )
    scales = scaled(heads, 1, sm_scale, scale_q, k_scale)
    return single_request(
        q, kv, heads, logits, causal and packed is None, window_left, scales, return_lse, v_scale=v_scale
    )


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)


def single_prefill_with_kv_cache_with_jit_module(
    jit_module: JitModule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *args: Any,
    kv_layout: str = "NHD",
    mask_mode: int = MaskMode.NON_CAUSAL.value,
    window_left: int = -1,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """single_prefill_with_kv_cache under a variant of one's own; args: what its jit_args name, tensors first.
    mask_mode: MaskMode.CAUSAL.value, or others, which leave it to the variant.

    Raises:
        ValueError: an argument that is wrong. NotImplementedError: one that is not supported, by its name.
    """
    own = jit_module.variant
    kv = ragged_cache(k, v, check_kv_layout(kv_layout))
    heads = heads_of(q.device, q.shape[1], kv.num_kv_heads, q.shape[-1], kv.v.shape[-1], q.dtype, k.dtype)
    slopes = {"maybe_alibi_slopes": alibi_slopes_on(heads.num_qo_heads, q.device)}
    given = own.args(args, slopes, heads.num_qo_heads // heads.num_kv_heads)
    return single_request(
        q,
        kv,
        heads,
        logits_of(own.variant),
        mask_mode == MaskMode.CAUSAL.value,
        window_left,
        Scales(1.0),
        return_lse,
        args=given,
    )


def single_request(
    q: Tensor,
    kv: KVCache,
    heads: Heads,
    logits: Logits,
    causal: bool,
    window_left: int,
    scales: Scales,
    return_lse: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Plans and runs one request."""
    attention = attention_of_call(q.device, heads, logits, scales)
    table = PageTable.ragged(indptr_of_equal(1, kv.num_pages, q.device))
    view = BSRView(
        indptr_of_equal(1, q.shape[0], q.device), table, causal=causal, window_left=max(window_left, -1)
    )
    attention.plan(view, heads, logits, rows=q.shape[0])
    return attention.run(q, kv.k, kv.v, scales, return_lse=return_lse, **options)


cudnn_batch_prefill_with_kv_cache = missing("cudnn_batch_prefill_with_kv_cache")
fmha_varlen = missing("fmha_varlen")
trtllm_batch_context_with_kv_cache = missing("trtllm_batch_context_with_kv_cache")
trtllm_fmha_v2_prefill = missing("trtllm_fmha_v2_prefill")
trtllm_ragged_attention_deepseek = missing("trtllm_ragged_attention_deepseek")
