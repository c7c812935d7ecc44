"""Multi-head latent attention (DeepSeek, Kimi, GLM): cache, prefills, plan, layer and backend.

vLLM projects Q and the outputs. Requests with few new tokens attend to the latents themselves. Longer
prefills attend to decompressed K and V: the new tokens among themselves, and chunks of the cached prefix.
vLLM merges their states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MLAAttentionImpl
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from attn_backend.adapters.layers import LayerSpec, attention_of
from attn_backend.adapters.metrics import export_counts
from attn_backend.adapters.served import warn_if_untried
from attn_backend.jit.manifest import HeadDims
from attn_backend.kernels.append import append_mla_kv
from attn_backend.kernels.attention import Attention
from attn_backend.metadata.kv_cache import KVCache
from attn_backend.metadata.views import BSRView, PageTable

from . import compat, sampler
from .backend import OwnBackend
from .compat import outside_memory_pools
from .rules import FLOAT8_LATENTS, LATENT_CACHES, LATENT_HEAD_SIZES, OTHER_CACHE, PLAIN_CACHES
from .support import (
    logger,
    refuse,
    refuse_if,
    tell_of_cascade,
    tell_when_ready,
    unsupported_context_parallelism,
    unsupported_feature,
    unsupported_invariance,
    unsupported_latents,
    workspace_maxima,
)


class LatentCache:
    """Makes KVCaches of the tensors that vLLM hands over."""

    def __init__(self, kv_cache_dtype: str, width: int) -> None:
        """
        Args:
            kv_cache_dtype: vLLM's name for it.
            width: columns of the latent, which are V.
        """
        self._has_float8 = kv_cache_dtype in FLOAT8_LATENTS
        self._width = width

    def view(self, kv_cache: Tensor, scale: Tensor) -> KVCache:
        """
        Args:
            kv_cache: [blocks, page, latent and rotated part], any strides; uint8 if its numbers have 8 bits
                or if a row is bytes (fp8_ds_mla).
            scale: float32 [], the layer's, which kernels read when they run. Only for 8-bit caches, which
                come in a new view at every step.
        """
        if not self._has_float8:
            return latent_view(kv_cache, self._width)
        k = kv_cache.view(torch.float8_e4m3fn).unsqueeze(2)
        return KVCache.unchecked(k, k[..., : self._width], scale, scale)

    def append(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scale: Tensor
    ) -> None:
        """Writes new latents.

        Args:
            kv_c_normed: [tokens, latent], k_pe: [tokens, 1, rotated part].
            kv_cache, scale: as view() has them.
            slot_mapping: int64 [tokens]; negative for padding. Tokens beyond it are padding too.
        """
        if kv_cache.numel() > 0:
            append_mla_kv(
                kv_c_normed,
                k_pe.squeeze(1),
                self.view(kv_cache, scale),
                slot_mapping.flatten()[: kv_c_normed.shape[0]],
            )


def latent_view(kv_cache: Tensor, head_dim_v: int) -> KVCache:
    """A layer's latents as K and V.

    The view is made once and kept on the tensor itself, so that both have the same lifetime.

    Args:
        kv_cache: [blocks, page, latent and rotated part], or uint8 [blocks, page, 656].
    """
    view: KVCache | None = getattr(kv_cache, "_attn_backend_view", None)
    if view is None:
        # Views of `data` do not refer back to the tensor, which would be a cycle.
        view = KVCache.from_latent(kv_cache.data, head_dim_v)
        kv_cache._attn_backend_view = view  # type: ignore[attr-defined]
    return view


class MlaPrefill(MLAPrefillBackend):
    """Attention of prefills over decompressed K and V. V may be narrower than K: nothing is padded.

    Our metadata builders use it unless the user has chosen a prefill backend. vLLM makes it under
    `--attention-config.mla_prefill_backend CUSTOM`, with any decode backend.

    The new tokens have one plan for all layers, and so has a single chunk of the prefix. Several chunks share
    one workspace: each is planned when it runs. That is one small kernel, next to the kernels that gather,
    decompress and merge it.
    """

    def __init__(self, **of_model: Any) -> None:
        """of_model: arguments of vLLM's base class."""
        super().__init__(**of_model)
        self._new_tokens: Any = None
        self._context: Any = None
        self._chunks: list[tuple[Tensor, Tensor]] = []
        self._planned_chunk = -1

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and device_capability.major >= 8

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        widths = mla_dimensions
        return HeadDims(widths.qk_nope_head_dim + widths.qk_rope_head_dim, widths.v_head_dim).runs_on_cuda

    def supports_out(self) -> bool:
        return True

    def allocate(self, dtype: torch.dtype, device: torch.device, max_rows: int, max_batch: int) -> None:
        head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        heads = self.num_heads
        spec = LayerSpec(heads, heads, head_dim, head_dim_v=self.v_head_dim, of_this_step=True)

        def make() -> Attention:
            return attention_of(spec, dtype=dtype, device=device, max_rows=max_rows, max_batch=max_batch)

        self._new_tokens = outside_memory_pools(make, device)
        self._context = outside_memory_pools(make, device)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Plans the prefills of a batch."""
        super().prepare_metadata(prefill_metadata)
        starts = prefill_metadata.query_start_loc
        if self._new_tokens is None:  # in a builder of another backend
            config = self.vllm_config
            self.allocate(config.model_config.dtype, starts.device, *workspace_maxima(config))
        self._new_tokens.plan(BSRView(starts, PageTable.ragged(starts), causal=True))
        self._chunks = compat.context_chunks(prefill_metadata)
        self._planned_chunk = -1
        if self._chunks:
            self._plan_chunk(0)
        export_counts(logger)

    def _plan_chunk(self, number: int) -> None:
        query_starts, context_starts = self._chunks[number]
        self._context.plan(BSRView(query_starts, PageTable.ragged(context_starts), causal=False))
        self._planned_chunk = number

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            q, k: [tokens, num_heads, columns of K], v: [tokens, num_heads, columns of V].
            out: [tokens, num_heads, columns of V], written.

        Returns:
            out; with return_softmax_lse also float32 [num_heads, tokens], natural.
        """
        if output_scale is not None:
            raise NotImplementedError("attn_backend does not quantize its output")
        o, lse = self._run(self._new_tokens, q, k, v, out, return_softmax_lse)
        return o if lse is None else (o, lse)

    def run_prefill_context_chunk(
        self, *args: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            q: of the chunk's requests; k, v and out as in run_prefill_new_tokens.
            kwargs: chunk or chunk_idx (compat.py).

        Returns:
            The output, and float32 [num_heads, tokens], natural.
        """
        number = compat.number_of_chunk(kwargs)
        if number != self._planned_chunk:
            self._plan_chunk(number)
        return self._run(self._context, q, k, v, out, True)

    def _run(
        self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, wants_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if wants_lse else None
        o = attention.run(
            q, KVCache.unchecked(k.unsqueeze(1), v.unsqueeze(1)), out=out, lse=lse, sm_scale=self.scale
        )
        return o, None if lse is None else lse.t().contiguous()


def prefill_backend(
    of_layer: MLAPrefillBackend,
    vllm_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    max_rows: int,
    max_batch: int,
) -> MLAPrefillBackend:
    """The prefill backend of one of our metadata builders: ours, unless the user has chosen another one.

    vLLM asks no decode backend for its prefill backend, and ignores the user's choice on a CPU. So our
    builders replace what vLLM made for the layer.
    """
    if not isinstance(of_layer, MlaPrefill):
        if compat.setting("attention_config.mla_prefill_backend", vllm_config) is not None:
            return of_layer
        of_layer = MlaPrefill(
            num_heads=of_layer.num_heads,
            scale=of_layer.scale,
            kv_lora_rank=of_layer.kv_lora_rank,
            qk_nope_head_dim=of_layer.qk_nope_head_dim,
            qk_rope_head_dim=of_layer.qk_rope_head_dim,
            v_head_dim=of_layer.v_head_dim,
            vllm_config=of_layer.vllm_config,
        )
    of_layer.allocate(dtype, device, max_rows, max_batch)
    return of_layer


@dataclass
class MlaDecodeMetadata(MLACommonDecodeMetadata):
    """attention: planned for the decodes of the batch."""

    attention: Attention


class MlaMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Plans the batches of one group of layers, on the device, without waiting for it.

    Requests of up to reorder_batch_threshold new tokens attend to the latents themselves. Their plan lies in
    a workspace of the builder: a full CUDA graph of decodes reads it, and serves every later batch. Longer
    requests are vLLM's prefills (MlaPrefill), except under VLLM_BATCH_INVARIANT, which has none.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    # A context token costs such a request 2 * (576 + 512) operations for each row, instead of 2 * (192 + 128)
    # and 2 * 512 * 256 to decompress it.
    reorder_batch_threshold: int = 128
    _prompts: Tensor | None = None  # BSRView.prompts of the step that is built
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
            NotImplementedError: this package does not support the model or the deployment.
        """
        group = compat.dcp_group(kv_cache_spec)
        max_rows, max_batch = workspace_maxima(vllm_config)
        num_ranks = 1 if group is None else group.world_size
        dtype = vllm_config.model_config.dtype
        has_float8 = (
            kv_cache_spec.dtype in (torch.uint8, torch.float8_e4m3fn)
            and vllm_config.cache_config.cache_dtype in FLOAT8_LATENTS
        )
        kv_dtype = torch.float8_e4m3fn if has_float8 else None
        refuse_if(
            unsupported_feature(vllm_config)
            or unsupported_invariance(max_batch, device)
            or unsupported_context_parallelism(vllm_config, num_ranks)
            or unsupported_latents(kv_cache_spec, dtype, kv_dtype)
        )
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        warn_if_untried(device, logger)
        tell_of_cascade(logger)
        widths = self.mla_dims
        batch_invariant = compat.batch_invariant()
        latent = HeadDims(widths.kv_lora_rank + widths.qk_rope_head_dim, widths.kv_lora_rank)
        if batch_invariant:
            # the chunks of a cached prefix depend on the batch, so all requests attend to their latents
            self.reorder_batch_threshold = max_rows
        # the engine gathers the queries of all ranks
        spec = LayerSpec(self.num_heads * num_ranks, 1, latent.qk, head_dim_v=latent.v, kv_dtype=kv_dtype)
        max_decode_rows = min(max_rows, max_batch * max(self.reorder_batch_threshold, 1))
        self.decode_attention = outside_memory_pools(
            lambda: attention_of(
                spec,
                dtype=dtype,
                device=device,
                max_rows=max_decode_rows,
                max_batch=max_batch,
                batch_invariant=batch_invariant,
            ),
            device,
        )
        self._prefill_backend = prefill_backend(
            self._prefill_backend, vllm_config, dtype, device, max_rows, max_batch
        )
        sampler.install(device, vllm_config)
        tell_when_ready(vllm_config, layer_names)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """If ranks share KV, a request of several new tokens is a prefill, which full graphs do not have: no
        causal mask fits interleaved latents.
        """
        shares_kv = vllm_config.parallel_config.decode_context_parallel_size > 1
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if shares_kv else cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> MLACommonMetadata:
        self._prompts = compat.prompts_of(common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)

    def _build_decode(
        self, block_table_tensor: Tensor, seq_lens_device: Tensor, *args: Any, **kwargs: Any
    ) -> MlaDecodeMetadata:
        """Plans the decodes, which are the first requests of the batch, on the current stream.

        Args:
            block_table_tensor: int32 [requests, blocks], seq_lens_device: int32 [requests].
            kwargs: query_start_loc_device: int32 [requests + 1]; others are ignored.
        """
        batch, starts = seq_lens_device.shape[0], kwargs["query_start_loc_device"]
        table = PageTable.block_table(block_table_tensor[:batch], seq_lens_device, self.page_size)
        prompts = None if self._prompts is None else self._prompts[:batch]
        self.decode_attention.plan(BSRView(starts[: batch + 1], table, causal=True, prompts=prompts))
        export_counts(logger)
        return MlaDecodeMetadata(
            block_table_tensor,
            seq_lens_device,
            kwargs.get("dcp_tot_seq_lens_device"),
            attention=self.decode_attention,
        )


class LatentImpl(MLAAttentionImpl[Any]):
    """The common part of a layer over latents: its checks and its cache.

    neutral_arguments: arguments of some models, which must be None or 0.0. unknown_arguments: arguments that
    vLLM's class does not take.
    """

    can_return_lse_for_decode: bool = True
    supports_pcp: bool = False
    kv_cache_dtypes: ClassVar[tuple[str, ...]]
    neutral_arguments: ClassVar[tuple[str, ...]]
    unknown_arguments: ClassVar[tuple[str, ...]] = ()

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
            mla_arguments: widths of the model's projections, kv_b_proj, and arguments of some models.

        Raises:
            NotImplementedError: this package does not support the layer.
        """
        given = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            **{name: mla_arguments.get(name) for name in self.neutral_arguments},
        }
        for name, value in given.items():
            if value is not None and not (isinstance(value, float) and value == 0.0):
                refuse(f"the argument {name} of an MLA layer")
        if attn_type != AttentionType.DECODER:
            refuse(f"attention of type {attn_type} over latents")
        if kv_cache_dtype not in self.kv_cache_dtypes:
            refuse(f"a cache of latents of dtype {kv_cache_dtype} (pass --kv-cache-dtype auto or fp8_e4m3)")
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
            **{name: value for name, value in mla_arguments.items() if name not in self.unknown_arguments},
        )
        self.supports_quant_query_input = False
        self._latents = LatentCache(kv_cache_dtype, self.kv_lora_rank)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

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
            kv_cache: as in forward_mqa; uint8 if its numbers have 8 bits.
            slot_mapping: int64 [tokens]; negative for padding. Tokens beyond it are padding too.
            k_scale: float32 [], of an 8-bit cache, which kernels read when they run.
        """
        self._latents.append(kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale)


class MlaImpl(LatentImpl, MLACommonImpl[MLACommonMetadata]):
    """The absorbed attention of one layer, for decodes and short chunks. vLLM's `MLAAttention` makes it and
    projects.

    Longer prefills go through vLLM's `forward_mha`, which decompresses K and V and calls MlaPrefill.
    """

    supports_dcp: bool = True
    kv_cache_dtypes: ClassVar[tuple[str, ...]] = LATENT_CACHES
    unknown_arguments: ClassVar[tuple[str, ...]] = ("topk_indices_buffer", "index_group_builder")
    neutral_arguments: ClassVar[tuple[str, ...]] = ("indexer", *unknown_arguments, "q_pad_num_heads")

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            q: [tokens, num_heads, latent and rotated part], or a tuple of both; with the heads of all ranks
                that share KV.
            kv_c_and_k_pe_cache: [blocks, page, latent and rotated part], any strides.

        Returns:
            [tokens, num_heads, latent]; float32 [tokens, num_heads], a natural LSE, if vLLM merges states of
            several ranks.
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


class MlaBackend(OwnBackend, MLACommonBackend):
    """The backend behind `--attention-backend CUSTOM` for a model with latents.

    The KV cache of a layer is [blocks, page, latent and rotated part].
    """

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FLOAT8_LATENTS]

    @staticmethod
    def get_impl_cls() -> type[MlaImpl]:
        return MlaImpl

    @staticmethod
    def get_builder_cls() -> type[MlaMetadataBuilder]:
        return MlaMetadataBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return 64  # the Hopper kernel loads a KV tile of 64 tokens by one box

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return LATENT_HEAD_SIZES

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        if kv_cache_dtype in PLAIN_CACHES and PLAIN_CACHES[kv_cache_dtype] != dtype:
            return (
                f"kv_cache_dtype {kv_cache_dtype} is not the model's dtype {dtype}, which latents must "
                f"have: {OTHER_CACHE}"
            )
        return None


class CpuMlaBackend(MlaBackend):
    """Replaces vLLM's CPU_MLA.

    vLLM takes this class without asking for its features: the constructor of a layer refuses unsupported
    ones.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"


class AmxMlaBackend(CpuMlaBackend):
    """Replaces AMX_MLA, which vLLM takes on CPUs with AMX."""

    @staticmethod
    def get_name() -> str:
        return "AMX_MLA"
