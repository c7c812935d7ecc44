"""vLLM's metadata becomes plans over latents: one for the decodes of a batch, one for its prefills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from attn_backend.adapters.capability import warn_if_untried
from attn_backend.adapters.options import use_cascade
from attn_backend.adapters.vllm import compat, sampler
from attn_backend.adapters.vllm.cascade_option import tell_of_cascade
from attn_backend.adapters.vllm.draft_backend import tell_of_drafts
from attn_backend.adapters.vllm.layer_cache import FLOAT8_LATENTS
from attn_backend.adapters.vllm.memory import outside_memory_pools
from attn_backend.adapters.vllm.metadata import unsupported_invariance, workspace_maxima
from attn_backend.adapters.vllm.mla_prefill import make_prefill
from attn_backend.adapters.vllm.refusal import refuse
from attn_backend.jit.manifest import HeadDims
from attn_backend.kernels.attention import Attention
from attn_backend.metadata.page_table import PageTable
from attn_backend.metadata.views import BSRView


@dataclass
class MlaDecodeMetadata(MLACommonDecodeMetadata):
    """attention: planned for the decodes of the batch."""

    attention: Attention


class MlaMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Plans the batches of one group of layers, on the device, without waiting for it.

    Requests of up to reorder_batch_threshold new tokens are attended to in the latents themselves. Their plan
    lies in a workspace of the builder: a full CUDA graph of decodes reads it there, and serves every batch
    that is built afterwards. Longer ones are the engine's prefills (mla_prefill.py), but under
    VLLM_BATCH_INVARIANT, where there are none.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    # A context token costs such a request 2 * (576 + 512) operations for each row, instead of 2 * (192 + 128)
    # and 2 * 512 * 256 to decompress it.
    reorder_batch_threshold: int = 128
    _prefill_backend: Any  # which MLACommonMetadataBuilder makes, plans and hands to the layers

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """
        Raises:
            NotImplementedError: the model or the deployment needs what this package does not have.
        """
        group = compat.dcp_group(kv_cache_spec)
        max_rows, max_batch = workspace_maxima(vllm_config)
        unsupported = compat.unsupported_feature(vllm_config) or unsupported_invariance(max_batch, device)
        if unsupported is None and group is not None:
            unsupported = compat.unsupported_context_parallelism(vllm_config, group.world_size)
        dtype = vllm_config.model_config.dtype
        has_float8 = (
            kv_cache_spec.dtype in (torch.uint8, torch.float8_e4m3fn)
            and vllm_config.cache_config.cache_dtype in FLOAT8_LATENTS
        )
        if unsupported is None and kv_cache_spec.dtype != dtype and not has_float8:
            unsupported = (
                f"a cache of latents of {kv_cache_spec.dtype} for a model of {dtype} (pass "
                f"--kv-cache-dtype auto)"
            )
        if unsupported is not None:
            refuse(unsupported)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        warn_if_untried(device, sampler.logger)
        tell_of_cascade(sampler.logger)
        tell_of_drafts(sampler.logger, vllm_config)
        widths = self.mla_dims
        batch_invariant = compat.batch_invariant()
        latent = HeadDims(widths.kv_lora_rank + widths.qk_rope_head_dim, widths.kv_lora_rank)
        if batch_invariant:
            # how a cached prefix is cut into chunks depends on the batch: all requests stay in their latents
            self.reorder_batch_threshold = max_rows
        room: dict[str, Any] = {"dtype": dtype, "device": device, "max_batch": max_batch}
        max_decode_rows = min(max_rows, max_batch * max(self.reorder_batch_threshold, 1))

        def make_decode() -> Attention:
            kv_dtype = torch.float8_e4m3fn if has_float8 else None
            options: dict[str, Any] = {
                "max_rows": max_decode_rows,
                "cascade": use_cascade(),
                "batch_invariant": batch_invariant,
            }
            # the engine gathers the queries of all ranks
            num_heads = self.num_heads * (1 if group is None else group.world_size)
            return Attention(
                num_heads, 1, latent.qk, head_dim_v=latent.v, kv_dtype=kv_dtype, **options, **room
            )

        self.decode_attention = outside_memory_pools(make_decode, device)
        if not compat.has_chosen_mla_prefill(vllm_config):
            self._prefill_backend = make_prefill(
                self._prefill_backend, self.num_heads, widths, dtype, device, max_rows, max_batch
            )
        sampler.install(device, vllm_config)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Where ranks share KV a request of several new tokens is a prefill, which full graphs do not have:
        no causal mask fits interleaved latents.
        """
        shares_kv = vllm_config.parallel_config.decode_context_parallel_size > 1
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if shares_kv else cls._cudagraph_support

    def _build_decode(
        self, block_table_tensor: Tensor, seq_lens_device: Tensor, *args: Any, **kwargs: Any
    ) -> MlaDecodeMetadata:
        """Plans the decodes, which are the first requests of the batch, on the current stream.

        Args:
            block_table_tensor: int32 [requests, blocks], seq_lens_device: int32 [requests].
            kwargs: query_start_loc_device: int32 [requests + 1], and what is not needed.
        """
        batch, starts = seq_lens_device.shape[0], kwargs["query_start_loc_device"]
        table = PageTable.block_table(block_table_tensor[:batch], seq_lens_device, self.page_size)
        self.decode_attention.plan(BSRView(starts[: batch + 1], table, causal=True))
        return MlaDecodeMetadata(
            block_table_tensor,
            seq_lens_device,
            kwargs.get("dcp_tot_seq_lens_device"),
            attention=self.decode_attention,
        )
