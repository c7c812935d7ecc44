"""One plan for each batch: where vLLM's metadata meets plan()."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from attn_backend.adapters.capability import warn_if_untried
from attn_backend.adapters.layer_variants import variant_of, visibility_of
from attn_backend.adapters.options import use_cascade
from attn_backend.adapters.plan_key import PlanKey
from attn_backend.adapters.spans import Spans
from attn_backend.adapters.vllm import compat, sampler
from attn_backend.adapters.vllm.cascade_option import tell_of_cascade
from attn_backend.adapters.vllm.dcp import ContextParallel, has_context
from attn_backend.adapters.vllm.draft_backend import tell_of_drafts
from attn_backend.adapters.vllm.layer_cache import FLOAT8_CACHES
from attn_backend.adapters.vllm.memory import outside_memory_pools
from attn_backend.adapters.vllm.refusal import refuse
from attn_backend.kernels.attention import MAX_CUDA_INVARIANT_BATCH, Attention
from attn_backend.metadata.page_table import PageTable
from attn_backend.metadata.views import BSRView


def window_left(sliding_window: int | None) -> int:
    """vLLM counts the query itself in a sliding window; BSRView does not."""
    return -1 if sliding_window is None else sliding_window - 1


class Plan(NamedTuple):
    """Where the plans of the layers of one key are made.

    Attributes:
        key: with what the builder knows and the layers do not.
        logits_soft_cap: what runs are told; 0 where the variant knows it.
        arguments: what the variant is given by plan and runs, slopes excepted, which each layer has for
            itself. None: nothing.
        context: of the heads of all ranks that share KV, over what this rank holds of it. None: none shares
            it. Otherwise `attention` is over the step's own tokens, and not planned where every request has
            one.
    """

    key: PlanKey
    attention: Attention
    logits_soft_cap: float
    arguments: dict[str, torch.Tensor | int] | None
    context: Attention | None = None


@dataclass
class AttnMetadata(AttentionMetadata):
    """A planned batch.

    Fields that vLLM's speculators and KV connectors read keep the names that they have in vLLM's own
    backends.

    num_actual_tokens counts padding rows when a full CUDA graph is captured or replayed.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # int32 [num_reqs + 1]
    seq_lens: torch.Tensor  # int32 [num_reqs]
    block_table: torch.Tensor  # int32 [num_reqs, max_blocks]
    slot_mapping: torch.Tensor  # int64 [tokens]
    causal: bool
    plans: dict[PlanKey, Plan]
    context_parallel: ContextParallel | None = None
    has_context: bool = True  # where there is one: whether a request may have tokens before those of the step
    # if there is a plan: whether every request has one token, in every batch that a captured graph serves
    single_tokens: bool = False


class AttnMetadataBuilder(AttentionMetadataBuilder[AttnMetadata]):
    """Plans the batches of one group of layers, on the device, without waiting for it.

    The plan is written into workspaces that belong to the builder. A CUDA graph reads it there, so a graph
    captured for one batch serves every batch that is built afterwards: full graphs are good for decode,
    prefill and any mix. Sleep mode leaves them where they are.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    reorder_batch_threshold: int | None = None
    supports_draft_decode_metadata_update: bool = True
    chunked: ClassVar[bool] = False  # whether its layers see the query's own chunk only

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """vLLM makes its builder for chunked local attention out of this one: it cuts requests at their
        chunks on the host, and has no full graphs.
        """
        super().__init_subclass__(**kwargs)
        if compat.cuts_at_chunks(cls):
            compat.leave_whole(cls)
            cls.chunked = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        """
        Raises:
            NotImplementedError: the model or the deployment needs what this package does not have.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        group = compat.dcp_group(kv_cache_spec)
        max_rows, max_batch = workspace_maxima(vllm_config)
        unsupported = (
            compat.unsupported_feature(vllm_config)
            or unsupported_cache(vllm_config, kv_cache_spec)
            or unsupported_invariance(max_batch, device)
        )
        if unsupported is None and group is not None:
            unsupported = compat.unsupported_context_parallelism(vllm_config, group.world_size)
            if unsupported is None and (self.chunked or compat.is_prefix_lm(vllm_config)):
                unsupported = (
                    "masks of chunks or images with decode context parallelism (pass "
                    "--decode-context-parallel-size 1)"
                )
        if unsupported is not None:
            refuse(unsupported)

        self.page_size: int = kv_cache_spec.block_size
        self.context_parallel: ContextParallel | None = None
        if group is not None:
            self.context_parallel = outside_memory_pools(
                lambda: make_context_parallel(vllm_config, group, max_batch, device), device
            )
            # A captured loop of drafts would keep what the host knew when it was captured; vLLM's own
            # backends do not have it here either.
            self.supports_draft_decode_metadata_update = False
        warn_if_untried(device, sampler.logger)
        tell_of_cascade(sampler.logger)
        tell_of_drafts(sampler.logger, vllm_config)
        keys = plan_keys(vllm_config, kv_cache_spec, layer_names)
        head_size_v = compat.head_size_v(kv_cache_spec)
        if any(
            (getattr(impl, "dcp_world_size", 1) > 1) != (group is not None)
            for impl in compat.attention_impls(vllm_config, layer_names)
        ):
            refuse(
                "some layers that share KV over ranks in a model where others do not (pass "
                "--decode-context-parallel-size 1)"
            )
        for key in keys:
            if not key.of_this_step and (key.head_dim_v or key.head_dim) != head_size_v:
                refuse(
                    f"values of another head size ({head_size_v}) than keys ({kv_cache_spec.head_size}) in "
                    f"layers that do not say so"
                )
        dtype = query_dtype(vllm_config, kv_cache_spec)
        self.spans = (
            outside_memory_pools(lambda: Spans(max_rows, device), device)
            if compat.is_prefix_lm(vllm_config)
            else None
        )
        chunk = compat.chunk_of(kv_cache_spec) if self.chunked else 0

        def make(key: PlanKey) -> Plan:
            cuts_spans = self.spans is not None and compat.clamps_spans(vllm_config)
            # Where windows cut spans, layers without a window do not have them.
            has_spans = self.spans is not None and key.causal and (key.window_left >= 0 or not cuts_spans)
            key = key._replace(has_spans=has_spans, cuts_spans=has_spans and cuts_spans, chunk=chunk)
            variant = variant_of(key)
            options: dict[str, Any] = {
                "head_dim_v": key.head_dim_v,
                "dtype": dtype,
                "device": device,
                "max_rows": max_rows,
                "max_batch": max_batch,
            }
            options |= {
                "batch_invariant": compat.batch_invariant(),
                "variant": variant,
                "sinks": key.has_sinks,
                "float8_out": key.float8_out,
            }
            kv_dtype = key.kv_dtype if key.of_this_step or has_8_bits(kv_cache_spec) else kv_cache_spec.dtype
            of_cache: dict[str, Any] = {
                "kv_dtype": kv_dtype,
                "q_dtype": key.kv_dtype if key.float8_q else None,
                "cascade": use_cascade(),
            }
            if self.context_parallel is not None:
                context = Attention(
                    key.num_qo_heads * self.context_parallel.size,
                    key.num_kv_heads,
                    key.head_dim,
                    **of_cache,
                    **options,
                )
                new_tokens = Attention(
                    key.num_qo_heads, key.num_kv_heads, key.head_dim, cascade=False, **options
                )
                return Plan(key, new_tokens, key.logits_soft_cap, None, context)
            attention = Attention(key.num_qo_heads, key.num_kv_heads, key.head_dim, **of_cache, **options)
            arguments: dict[str, torch.Tensor | int] | None = None
            if self.spans is not None and key.has_spans:
                arguments = {
                    "span_begin": self.spans.begin,
                    "span_end": self.spans.end,
                    "window": -1 if key.cuts_spans else key.window_left,
                }
            return Plan(key, attention, key.logits_soft_cap if variant is None else 0.0, arguments)

        self.plans = outside_memory_pools(lambda: {key: make(key) for key in keys}, device)
        sampler.install(device, vllm_config)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **kwargs: Any,
    ) -> AttnMetadata:
        cm = common_attn_metadata
        if not isinstance(cm.causal, bool):
            refuse("batches that mix causal and bidirectional requests")
        if not cm.causal and all(key.window_left >= 0 and key.window_right < 0 for key in self.plans):
            way_out = "set use_non_causal in --attention-config, or choose another --attention-backend"
            refuse("a sliding window to both sides in layers that were made for causal steps", way_out)
        metadata = AttnMetadata(
            num_actual_tokens=cm.num_actual_tokens,
            max_query_len=cm.max_query_len,
            max_seq_len=cm.max_seq_len,
            query_start_loc=cm.query_start_loc,
            seq_lens=cm.seq_lens,
            block_table=cm.block_table_tensor,
            slot_mapping=cm.slot_mapping,
            causal=cm.causal,
            plans=self.plans,
            context_parallel=self.context_parallel,
            has_context=self.context_parallel is None or has_context(cm),
            single_tokens=self.context_parallel is not None
            and cm.max_query_len == 1
            and compat.captures_single_tokens_alone(self.vllm_config),
        )
        if self.spans is not None:
            # A single row sees nothing after itself.
            self.spans.fill(
                compat.spans_of(cm) if cm.max_query_len > 1 else [], cm.query_start_loc, cm.seq_lens
            )
        self.plan(metadata)
        return metadata

    def plan(self, metadata: AttnMetadata) -> None:
        """Plans the batch on the current stream; may be captured."""
        batch = metadata.seq_lens.shape[0]
        qo_indptr, blocks = metadata.query_start_loc, metadata.block_table
        # Runners pad either for CUDA graphs; the lengths say how many requests are meant.
        if qo_indptr.shape[0] != batch + 1:
            qo_indptr = qo_indptr[: batch + 1]
        if blocks.shape[0] != batch:
            blocks = blocks[:batch]
        kv_lens = metadata.seq_lens
        if self.context_parallel is not None:
            kv_lens = self.context_parallel.local_lens(
                qo_indptr, metadata.seq_lens, single_tokens=metadata.single_tokens
            )
        table = PageTable.block_table(blocks, kv_lens, self.page_size)
        for key, attention, _, arguments, context in self.plans.values():
            causal, window = visibility_of(key, metadata.causal)
            of_key = PageTable.ragged(qo_indptr) if key.of_this_step or context is not None else table
            if not metadata.single_tokens:
                attention.plan(
                    BSRView(qo_indptr, of_key, causal=causal, window_left=window),
                    variant_args=None if key.has_alibi else arguments,
                )
            if context is not None:
                context.plan(BSRView(qo_indptr, table, causal=False))

    def update_draft_decode_metadata(self, metadata: AttnMetadata) -> None:
        """Plans again from the same tensors, whose contents have changed; recorded inside the CUDA graph of a
        draft loop.
        """
        if self.spans is not None:
            self.spans.clear()
        self.plan(metadata)


def make_context_parallel(
    vllm_config: Any, group: Any, max_batch: int, device: torch.device
) -> ContextParallel:
    interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
    return ContextParallel(group, interleave, compat.combine_of_ranks(vllm_config), max_batch, device)


def plan_keys(vllm_config: Any, kv_cache_spec: Any, layer_names: list[str]) -> list[PlanKey]:
    """The distinct plans that a group of layers needs: usually one.

    A group holds several windows when vLLM's hybrid KV cache manager is off.
    """
    keys = {
        impl.plan_key
        for impl in compat.attention_impls(vllm_config, layer_names)
        if isinstance(getattr(impl, "plan_key", None), PlanKey)
    }
    if not keys:  # layers that are not the engine's: its attention tests
        num_qo_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        window = window_left(getattr(kv_cache_spec, "sliding_window", None))
        float8 = FLOAT8_CACHES[vllm_config.cache_config.cache_dtype] if has_8_bits(kv_cache_spec) else None
        keys = {
            PlanKey(
                num_qo_heads, kv_cache_spec.num_kv_heads, kv_cache_spec.head_size, window, kv_dtype=float8
            )
        }
    return sorted(keys, key=str)


def has_8_bits(kv_cache_spec: Any) -> bool:
    """Whether the elements of a cache have 8 bits.

    Their dtype is what vLLM stores them as, uint8: the layers know which they are.
    """
    return bool(kv_cache_spec.dtype.itemsize == 1)


def query_dtype(vllm_config: Any, kv_cache_spec: Any) -> torch.dtype:
    dtype: torch.dtype = getattr(vllm_config.model_config, "dtype", kv_cache_spec.dtype)
    return dtype


def unsupported_cache(vllm_config: Any, kv_cache_spec: Any) -> str | None:
    """What keeps a KV cache from being read; None if nothing."""
    model_dtype = query_dtype(vllm_config, kv_cache_spec)
    is_mixed = {kv_cache_spec.dtype, model_dtype} == {torch.bfloat16, torch.float16}
    if kv_cache_spec.dtype != model_dtype and not is_mixed and not has_8_bits(kv_cache_spec):
        return f"a KV cache of {kv_cache_spec.dtype} for a model of {model_dtype}"
    return None


def unsupported_invariance(max_batch: int, device: torch.device) -> str | None:
    """What keeps VLLM_BATCH_INVARIANT from being served; None if nothing, or if it is not set."""
    if not compat.batch_invariant() or device.type != "cuda" or max_batch <= MAX_CUDA_INVARIANT_BATCH:
        return None
    advice = (
        f"pass smaller --max-num-seqs and --max-cudagraph-capture-size, {MAX_CUDA_INVARIANT_BATCH} at most"
    )
    return f"VLLM_BATCH_INVARIANT with batches of {max_batch} requests ({advice})"


def workspace_maxima(vllm_config: Any) -> tuple[int, int]:
    """The most rows and the most requests of any batch, padding for CUDA graphs included."""
    scheduler = vllm_config.scheduler_config
    largest_graph = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    speculative = getattr(vllm_config, "speculative_config", None)
    draft_tokens = getattr(speculative, "num_speculative_tokens", None) or 0
    max_rows = max(
        scheduler.max_num_batched_tokens, largest_graph, scheduler.max_num_seqs * (1 + draft_tokens)
    )
    return max_rows, max(scheduler.max_num_seqs, largest_graph)
