"""Attention of one layer over latents: where vLLM's tensors meet run() and append_mla_kv()."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl, MLACommonMetadata
from vllm.v1.attention.backend import AttentionType

from attn_backend.adapters.vllm.latent_cache import LatentCache
from attn_backend.adapters.vllm.layer_cache import FLOAT8_LATENTS
from attn_backend.adapters.vllm.mla_metadata import MlaDecodeMetadata
from attn_backend.adapters.vllm.refusal import refuse


class MlaImpl(MLACommonImpl[MLACommonMetadata]):
    """Made once for each layer, with the arguments of vLLM's `MLAAttention`, which projects: here is the
    absorbed attention of decode and of short chunks.

    Longer prefills are the engine's `forward_mha`, which decompresses K and V and calls the prefill backend
    of the metadata (mla_prefill.py).
    """

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("auto", "float16", "bfloat16", "float32", *FLOAT8_LATENTS)

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
            mla_arguments: widths of the model's projections, kv_b_proj, and what only some models pass, which
                is refused unless it is at its neutral value.

        Raises:
            NotImplementedError: the layer needs what this package does not have.
        """
        given = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }
        given |= {
            name: mla_arguments.get(name)
            for name in ("indexer", "topk_indices_buffer", "index_group_builder", "q_pad_num_heads")
        }
        check_layer(given, attn_type, kv_cache_dtype, self.kv_cache_dtypes)
        plain = {
            name: value
            for name, value in mla_arguments.items()
            if name not in ("topk_indices_buffer", "index_group_builder")
        }
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
            **plain,
        )
        self.supports_quant_query_input = False
        self._latents = LatentCache(kv_cache_dtype, self.kv_lora_rank)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            q: [tokens, num_heads, latent and rotated part], or the two apart; where ranks share KV with the
                heads of all ranks.
            kv_c_and_k_pe_cache: [blocks, page, latent and rotated part], any strides.

        Returns:
            [tokens, num_heads, latent]; float32 [tokens, num_heads], natural, where the engine merges states
            of several ranks.
        """
        decode: MlaDecodeMetadata = attn_metadata.decode
        q, q_rope = q if isinstance(q, tuple) else (q, None)
        lse = (
            torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            if self.need_to_return_lse_for_decode
            else None
        )
        kv = self._latents.view(kv_c_and_k_pe_cache, layer._k_scale)
        out = decode.attention.run(q, kv, q_rope=q_rope, lse=lse, sm_scale=self.scale, after_append=True)
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
        """Writes new latents into the cache.

        Args:
            kv_c_normed: [tokens, latent], k_pe: [tokens, 1, rotated part].
            kv_cache: as forward_mqa has it; uint8 where its numbers have 8 bits.
            slot_mapping: int64 [tokens]; negative for padding. Tokens beyond it are padding too.
            k_scale: float32 [], of such a cache: the layer's, which kernels read when they run.
        """
        self._latents.append(kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale)


def check_layer(
    given: dict[str, Any], attn_type: str, kv_cache_dtype: str, kv_cache_dtypes: tuple[str, ...]
) -> None:
    """Refuses what none of our MLA layers supports.

    Args:
        given: arguments that must be None or 0.0.
        kv_cache_dtypes: that such layers have.

    Raises:
        NotImplementedError: see there.
    """
    for name, value in given.items():
        if value is not None and not (isinstance(value, float) and value == 0.0):
            refuse(f"the argument {name} of an MLA layer")
    if attn_type != AttentionType.DECODER:
        refuse(f"attention of type {attn_type} over latents")
    if kv_cache_dtype not in kv_cache_dtypes:
        refuse(f"a cache of latents of dtype {kv_cache_dtype} (pass --kv-cache-dtype auto or fp8_e4m3)")
