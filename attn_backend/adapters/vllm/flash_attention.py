"""FlashAttention-3 as vLLM ships it, for `attn-backend bench`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def flash_attention_3(
    q: Tensor,
    kv: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    longest_q: int,
    longest_kv: int,
) -> Callable[[], Tensor]:
    """A launch of causal attention over pages: q [rows, heads, head_dim], kv [pages, 2, page_size, KV heads,
    head_dim], the rest int32.

    Raises:
        ImportError: vLLM is not installed, or was built without it.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    metadata = get_scheduler_metadata(
        batch_size=kv_lens.shape[0],
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_kv,
        num_heads_q=q.shape[1],
        num_heads_kv=kv.shape[3],
        headdim=q.shape[2],
        cache_seqlens=kv_lens,
        cu_seqlens_q=qo_indptr,
        page_size=kv.shape[2],
        causal=True,
    )
    out = q.new_empty(q.shape)

    def launch() -> Tensor:
        flash_attn_varlen_func(
            q=q,
            k=kv[:, 0],
            v=kv[:, 1],
            out=out,
            cu_seqlens_q=qo_indptr,
            seqused_k=kv_lens,
            block_table=block_table,
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_kv,
            softmax_scale=q.shape[2] ** -0.5,
            causal=True,
            fa_version=3,
            scheduler_metadata=metadata,
        )
        return out

    return launch
