"""Sparse attention over latents (DeepSeek V3.2, GLM 5): plan, layer and backend.

vLLM's indexer selects the tokens that each row attends to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonDecodeMetadata, MLACommonMetadata
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from attn_backend.adapters.metrics import export_counts
from attn_backend.adapters.selected import SelectedAttention, count_visible
from attn_backend.adapters.served import warn_if_untried
from attn_backend.metadata.kv_cache import SCALED_LATENT_BYTES, SCALED_LATENT_DTYPE

from . import compat, sampler
from .compat import outside_memory_pools
from .mla import LatentImpl, MlaBackend, MlaImpl, prefill_backend
from .rules import FLOAT8_LATENTS, SCALED_LATENTS
from .support import (
    logger,
    refuse,
    refuse_if,
    tell_when_ready,
    unsupported_feature,
    unsupported_invariance,
    unsupported_latents,
    unsupported_sparse_feature,
    workspace_maxima,
)


@dataclass(kw_only=True)
class SparseMlaMetadata(MLACommonMetadata[MLACommonDecodeMetadata]):
    """A planned batch, with the fields that SparseMLACommonMetadataBuilder fills and vLLM's layer reads.

    Attributes:
        attention: planned for all rows. Runs may leave out the last rows, which vLLM may attend to in
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

    A row attends to topk_tokens of its visible tokens, or to all if there are fewer. So all layers share one
    plan, although each layer selects its own tokens, and may select fewer.
    Prompts of at most topk_tokens may be vLLM's prefills over decompressed K and V (MlaPrefill), which leave
    nothing out. Under VLLM_BATCH_INVARIANT there are none.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    metadata_cls = SparseMlaMetadata
    reorder_batch_threshold: int = 128  # as for MlaMetadataBuilder
    # SparseMLACommonMetadataBuilder makes it, plans it and hands it to the layers; None: this model has none
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
            NotImplementedError: this package does not support the model or the deployment.
        """
        dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
        max_rows, max_batch = workspace_maxima(vllm_config)
        kv_dtypes = dict.fromkeys(FLOAT8_LATENTS, torch.float8_e4m3fn) | {SCALED_LATENTS: SCALED_LATENT_DTYPE}
        kv_dtype = kv_dtypes.get(cache_dtype) if kv_cache_spec.dtype.itemsize == 1 else None
        refuse_if(
            unsupported_feature(vllm_config)
            or unsupported_sparse_feature(vllm_config)
            or unsupported_invariance(max_batch, device)
            or unsupported_latents(kv_cache_spec, dtype, kv_dtype)
        )
        if kv_dtype == SCALED_LATENT_DTYPE and dtype != torch.bfloat16:
            refuse(f"--kv-cache-dtype {SCALED_LATENTS} for a model of {dtype} (pass --dtype bfloat16)")
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        warn_if_untried(device, logger)
        batch_invariant = compat.batch_invariant()
        num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        if batch_invariant:
            # the longest prompt of a batch decides about decompression, so all prompts attend to latents
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
        if self._prefill_backend is not None and not batch_invariant:
            self._prefill_backend = prefill_backend(
                self._prefill_backend, vllm_config, dtype, device, max_rows, max_batch
            )
        sampler.install(device, vllm_config)
        tell_when_ready(vllm_config, layer_names)

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
        export_counts(logger)
        metadata.attention = self._rows
        return metadata


class SparseMlaImpl(LatentImpl, SparseMLACommonImpl[SparseMlaMetadata]):
    """Sparse attention of one layer. vLLM's `MLAAttention` makes it and projects.

    The indexer and its cache are vLLM's. It writes the selected tokens into topk_indices_buffer before the
    layer attends.
    """

    supports_dcp: bool = False
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = (*MlaImpl.kv_cache_dtypes, SCALED_LATENTS)
    neutral_arguments: ClassVar[tuple[str, ...]] = ("q_pad_num_heads",)

    def __init__(self, *arguments: Any, **mla_arguments: Any) -> None:
        super().__init__(*arguments, **mla_arguments)
        if self.topk_indices_buffer is None:
            refuse("a sparse MLA layer without indices of selected tokens")

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SparseMlaMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            q: [tokens, num_heads, latent and rotated part], or a tuple of both: the batch's first tokens.
            kv_c_and_k_pe_cache: [blocks, page, latent and rotated part], any strides; uint8 [blocks, page,
                656] for fp8_ds_mla.

        Returns:
            [tokens, num_heads, latent]; float32 [tokens, num_heads], a natural LSE, if vLLM merges states of
            several ranks.
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


class SparseMlaBackend(MlaBackend):
    """The backend behind `--attention-backend CUSTOM` for a model with an indexer.

    The KV cache of a layer is as in MlaBackend, or uint8 [blocks, page, 656] (fp8_ds_mla).
    """

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*MlaBackend.supported_kv_cache_dtypes, SCALED_LATENTS]

    @staticmethod
    def get_impl_cls() -> type[SparseMlaImpl]:
        return SparseMlaImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMlaMetadataBuilder]:
        return SparseMlaMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Shape of a layer's KV cache (compat.py says which releases ask)."""
        return (
            num_blocks,
            block_size,
            SCALED_LATENT_BYTES if cache_dtype_str == SCALED_LATENTS else head_size,
        )

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return compat.with_whole_rows_between_blocks(spec)

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        if kv_cache_dtype != SCALED_LATENTS:
            return super().supports_combination(head_size, dtype, kv_cache_dtype, *args, **kwargs)
        return (
            None
            if dtype == torch.bfloat16
            else f"kv_cache_dtype {SCALED_LATENTS} not supported with a model of {dtype}: pass --dtype "
            f"bfloat16"
        )
