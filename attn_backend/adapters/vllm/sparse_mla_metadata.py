"""One plan for the rows of a batch that attend to the tokens which the indexer selects (DeepSeek V3.2, GLM
5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonDecodeMetadata, MLACommonMetadata
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonMetadataBuilder
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from attn_backend.adapters.capability import warn_if_untried
from attn_backend.adapters.selected import SelectedAttention, count_visible
from attn_backend.adapters.vllm import compat, sampler
from attn_backend.adapters.vllm.draft_backend import tell_of_drafts
from attn_backend.adapters.vllm.layer_cache import FLOAT8_LATENTS, SCALED_LATENTS
from attn_backend.adapters.vllm.memory import outside_memory_pools
from attn_backend.adapters.vllm.metadata import unsupported_invariance, workspace_maxima
from attn_backend.adapters.vllm.mla_prefill import make_prefill
from attn_backend.adapters.vllm.refusal import refuse
from attn_backend.metadata.kv_cache import SCALED_LATENT_DTYPE


@dataclass(kw_only=True)
class SparseMlaMetadata(MLACommonMetadata[MLACommonDecodeMetadata]):
    """A planned batch, with the fields that SparseMLACommonMetadataBuilder fills and vLLM's layer reads.

    attention: planned for all rows; runs may leave out the last ones, which the engine may attend to in
    decompressed K and V.
    """

    block_table: Tensor  # int32 [requests, blocks]
    req_id_per_token: Tensor  # int32 [tokens]
    seq_lens: Tensor | None = None
    block_size: int = 64
    topk_tokens: int = 2048
    decode_max_query_len: int = 0
    prefill_max_seq_len: int = 0
    cp_kv_cache_interleave_size: int = 1
    attention: SelectedAttention | None = None


class SparseMlaMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMlaMetadata]):
    """Plans the batches of one group of layers, on the device, without waiting for it.

    A row attends to topk_tokens of those that it sees, or to all where those are fewer. So the plan is one
    for all layers, although each selects for itself; a layer may select fewer.
    Prompts that are no longer than topk_tokens may be the engine's prefills over decompressed K and V
    (mla_prefill.py): there nothing is left out. Under VLLM_BATCH_INVARIANT there are none.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    metadata_cls = SparseMlaMetadata
    reorder_batch_threshold: int = 128  # as for MlaMetadataBuilder
    # SparseMLACommonMetadataBuilder makes it, plans it and hands it to the layers; None: not for this model
    _prefill_backend: Any

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
        dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
        max_rows, max_batch = workspace_maxima(vllm_config)
        unsupported = (
            compat.unsupported_feature(vllm_config)
            or compat.unsupported_sparse_feature(vllm_config)
            or unsupported_invariance(max_batch, device)
        )
        kv_dtypes = dict.fromkeys(FLOAT8_LATENTS, torch.float8_e4m3fn) | {SCALED_LATENTS: SCALED_LATENT_DTYPE}
        kv_dtype = kv_dtypes.get(cache_dtype) if kv_cache_spec.dtype.itemsize == 1 else None
        if unsupported is None and kv_dtype is None and kv_cache_spec.dtype != dtype:
            unsupported = (
                f"a cache of latents of {kv_cache_spec.dtype} for a model of {dtype} (pass "
                f"--kv-cache-dtype auto)"
            )
        if unsupported is None and kv_dtype == SCALED_LATENT_DTYPE and dtype != torch.bfloat16:
            unsupported = f"--kv-cache-dtype {SCALED_LATENTS} for a model of {dtype} (pass --dtype bfloat16)"
        if unsupported is not None:
            refuse(unsupported)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        warn_if_untried(device, sampler.logger)
        tell_of_drafts(sampler.logger, vllm_config)
        batch_invariant = compat.batch_invariant()
        num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        if batch_invariant:
            # the batch's longest prompt decides whether prompts are decompressed: all stay in their latents
            self.reorder_batch_threshold = max_rows
        topk = self.topk_tokens
        self._rows = outside_memory_pools(
            lambda: SelectedAttention(
                num_heads,
                topk,
                max_rows=max_rows,
                dtype=dtype,
                kv_dtype=kv_dtype,
                device=device,
                batch_invariant=batch_invariant,
            ),
            device,
        )
        if (
            self._prefill_backend is not None
            and not batch_invariant
            and not compat.has_chosen_mla_prefill(vllm_config)
        ):
            self._prefill_backend = make_prefill(
                self._prefill_backend, num_heads, self.mla_dims, dtype, device, max_rows, max_batch
            )
        sampler.install(device, vllm_config)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **kwargs: Any,
    ) -> SparseMlaMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        cm = common_attn_metadata
        self._rows.plan(
            count_visible(
                metadata.num_actual_tokens, metadata.req_id_per_token, cm.query_start_loc, cm.seq_lens
            )
        )
        metadata.attention = self._rows
        return metadata
