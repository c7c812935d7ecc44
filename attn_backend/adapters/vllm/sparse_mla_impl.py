"""Sparse attention of one layer over latents: where the indices of vLLM's indexer meet run()."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonImpl

from attn_backend.adapters.vllm.latent_cache import LatentCache
from attn_backend.adapters.vllm.layer_cache import SCALED_LATENTS
from attn_backend.adapters.vllm.mla_impl import MlaImpl, check_layer
from attn_backend.adapters.vllm.refusal import refuse
from attn_backend.adapters.vllm.sparse_mla_metadata import SparseMlaMetadata


class SparseMlaImpl(SparseMLACommonImpl[SparseMlaMetadata]):
    """Made once for each layer, with the arguments of vLLM's `MLAAttention`, which projects.

    The indexer, with a cache of its own, is vLLM's. It leaves the tokens that it has selected in
    topk_indices_buffer before the layer attends.
    """

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = False
    supports_pcp: bool = False
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = (*MlaImpl.kv_cache_dtypes, SCALED_LATENTS)

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_arguments: Any,
    ) -> None:
        """
        Args:
            mla_arguments: widths of the model's projections, kv_b_proj, indexer or topk_indices_buffer, and
                what only some models pass, which is refused unless it is at its neutral value.

        Raises:
            NotImplementedError: the layer needs what this package does not have.
        """
        given = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }
        check_layer(
            given | {"q_pad_num_heads": mla_arguments.get("q_pad_num_heads")},
            attn_type,
            kv_cache_dtype,
            self.kv_cache_dtypes,
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_arguments,
        )
        if self.topk_indices_buffer is None:
            refuse("a sparse MLA layer without indices of selected tokens")
        self.supports_quant_query_input = False
        self._latents = LatentCache(kv_cache_dtype, self.kv_lora_rank)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SparseMlaMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            q: [tokens, num_heads, latent and rotated part], or the two apart: the batch's first tokens.
            kv_c_and_k_pe_cache: [blocks, page, latent and rotated part], any strides; uint8 [blocks, page,
                656] for fp8_ds_mla.

        Returns:
            [tokens, num_heads, latent]; float32 [tokens, num_heads], natural, where the engine merges states
            of several ranks.
        """
        assert attn_metadata.attention is not None
        assert self.topk_indices_buffer is not None
        q, q_rope = q if isinstance(q, tuple) else (q, None)
        rows = q.shape[0]
        lse = (
            torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            if self.need_to_return_lse_for_decode
            else None
        )
        kv = self._latents.view(kv_c_and_k_pe_cache, layer._k_scale)
        indices, requests = self.topk_indices_buffer[:rows], attn_metadata.req_id_per_token[:rows]
        out = attn_metadata.attention.run(
            q, kv, indices, attn_metadata.block_table, requests, q_rope=q_rope, lse=lse, sm_scale=self.scale
        )
        return out, lse

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As MlaImpl's."""
        self._latents.append(kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale)
