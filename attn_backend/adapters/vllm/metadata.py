"""One plan for each batch: vLLM's metadata goes to plan()."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from attn_backend.adapters.layers import LayerSpec, Spans, attention_of, variant_args_of
from attn_backend.adapters.metrics import export_counts
from attn_backend.adapters.served import warn_if_untried
from attn_backend.kernels.attention import Attention
from attn_backend.metadata.views import BSRView, PageTable

from . import compat, sampler
from .compat import outside_memory_pools
from .dcp import ContextParallel, has_context
from .rules import BYTE_CACHES, ONE_RANK, ROTATED_DTYPES, TOKEN_SCALED_CACHES
from .support import (
    logger,
    refuse,
    refuse_if,
    tell_of_cascade,
    tell_when_ready,
    unsupported_context_parallelism,
    unsupported_feature,
    unsupported_invariance,
    workspace_maxima,
)


def window_left(sliding_window: int | None) -> int:
    """vLLM counts the query itself in a sliding window; BSRView does not."""
    return -1 if sliding_window is None else sliding_window - 1


class PlannedLayers(NamedTuple):
    """What layers with one spec share: the Attention that holds each step's plan, and arguments of its runs.

    Attributes:
        of_this_step: whether `attention` reads K and V of the step's own tokens, which are in no cache.
        causal, window_left: of views, in causal steps.
        logits_soft_cap: argument of runs; 0 if the variant has it.
        arguments: the variant's arguments of runs. ALiBi slopes are missing: each layer adds its own.
        plan_arguments: the variant's arguments of plans.
        context: None if no ranks share KV. Otherwise it has the heads of all ranks, and reads this rank's
            part of the KV. `attention` then reads the step's own tokens; it has no plan if every request has
            one token.
    """

    of_this_step: bool
    causal: bool
    window_left: int
    attention: Attention
    logits_soft_cap: float
    arguments: dict[str, torch.Tensor | int] | None = None
    plan_arguments: dict[str, torch.Tensor | int] | None = None
    context: Attention | None = None


@dataclass
class AttnMetadata(AttentionMetadata):
    """A planned batch.

    vLLM's speculators and KV connectors read some fields: they have the names of vLLM's own backends.

    num_actual_tokens counts padding rows when vLLM captures or replays a full CUDA graph.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # int32 [num_reqs + 1]
    seq_lens: torch.Tensor  # int32 [num_reqs]
    block_table: torch.Tensor  # int32 [num_reqs, max_blocks]
    slot_mapping: torch.Tensor  # int64 [tokens]
    causal: bool
    planned: dict[LayerSpec, PlannedLayers]  # by the spec of the layers
    prompts: torch.Tensor | None = None  # BSRView.prompts
    context_parallel: ContextParallel | None = None
    # With context_parallel:
    has_context: bool = True  # whether a request may have tokens before the step
    # whether every request has one token; during a capture, in all batches that the graph will serve
    single_tokens: bool = False


class AttnMetadataBuilder(AttentionMetadataBuilder[AttnMetadata]):
    """Plans the batches of one group of layers, on the device, without waiting for it.

    The builder owns the workspaces that hold the plan. A CUDA graph reads them, so a graph captured for one
    batch serves every later batch: full graphs are good for decode, prefill and any mix. Sleep mode keeps the
    workspaces.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    reorder_batch_threshold: int | None = None
    supports_draft_decode_metadata_update: bool = True
    chunked: ClassVar[bool] = False  # whether its layers see the query's own chunk only

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """vLLM derives its builder for chunked local attention from this class. The derived builder splits
        requests at their chunks on the host, and has no full graphs: this undoes both.
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
            NotImplementedError: this package does not support the model or the deployment.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        group = compat.dcp_group(kv_cache_spec)
        max_rows, max_batch = workspace_maxima(vllm_config)
        refuse_if(
            unsupported_feature(vllm_config)
            or unsupported_dtypes(vllm_config, kv_cache_spec)
            or unsupported_invariance(max_batch, device)
            or unsupported_context_parallelism(vllm_config, 1 if group is None else group.world_size)
        )
        if group is not None and (self.chunked or compat.has_image_spans(vllm_config)):
            refuse(f"masks of chunks or images with decode context parallelism ({ONE_RANK})")

        self.page_size: int = kv_cache_spec.block_size
        self.context_parallel: ContextParallel | None = None
        if group is not None:
            self.context_parallel = outside_memory_pools(
                lambda: ContextParallel(
                    group,
                    vllm_config.parallel_config.cp_kv_cache_interleave_size,
                    compat.combine_of_ranks(vllm_config),
                    max_batch,
                    device,
                ),
                device,
            )
            # A captured loop of drafts would keep host values of its capture. vLLM's own backends do not
            # support it here either.
            self.supports_draft_decode_metadata_update = False
        warn_if_untried(device, logger)
        tell_of_cascade(logger)
        specs = layer_specs(vllm_config, kv_cache_spec, layer_names)
        head_size_v = compat.head_size_v(kv_cache_spec)
        if any(
            (getattr(impl, "dcp_world_size", 1) > 1) != (group is not None)
            for impl in compat.attention_impls(vllm_config, layer_names)
        ):
            refuse(f"some layers that share KV over ranks in a model where others do not ({ONE_RANK})")
        for spec in specs:
            if not spec.of_this_step and (spec.head_dim_v or spec.head_dim) != head_size_v:
                refuse(
                    f"values of another head size ({head_size_v}) than keys ({kv_cache_spec.head_size}) in "
                    f"layers without such values"
                )
        self.spans = (
            outside_memory_pools(lambda: Spans(max_rows, device), device)
            if compat.has_image_spans(vllm_config)
            else None
        )
        chunk = compat.chunk_of(kv_cache_spec) if self.chunked else 0

        kv_dtype = None if is_in_bytes(kv_cache_spec) else kv_cache_spec.dtype
        make = partial(
            attention_of,
            dtype=query_dtype(vllm_config, kv_cache_spec),
            device=device,
            max_rows=max_rows,
            max_batch=max_batch,
            batch_invariant=compat.batch_invariant(),
        )

        def make_layers(of_layers: LayerSpec) -> PlannedLayers:
            cuts_spans = self.spans is not None and compat.clamps_spans(vllm_config)
            # If windows cut spans, layers without a window have no spans.
            has_spans = (
                self.spans is not None and of_layers.causal and (of_layers.window_left >= 0 or not cuts_spans)
            )
            spec = of_layers._replace(has_spans=has_spans, cuts_spans=has_spans and cuts_spans, chunk=chunk)
            if kv_dtype is not None and not spec.of_this_step:
                spec = spec._replace(kv_dtype=kv_dtype)
            soft_cap, (causal, window_left) = spec.run_soft_cap, spec.visibility
            if self.context_parallel is None:
                args = variant_args_of(spec, spans=self.spans)
                # layers add their slopes to runs, so plans under ALiBi do without arguments
                of_plan = None if spec.has_alibi else args
                attention = make(spec)
                return PlannedLayers(
                    spec.of_this_step, causal, window_left, attention, soft_cap, args, of_plan
                )
            of_all_ranks = spec._replace(num_qo_heads=spec.num_qo_heads * self.context_parallel.size)
            new_tokens = spec._replace(of_this_step=True, kv_dtype=None, token_scales=False, rotation=False)
            context = make(of_all_ranks)
            own = make(new_tokens, cascade=False)
            return PlannedLayers(True, causal, window_left, own, soft_cap, context=context)

        self.planned = outside_memory_pools(lambda: {spec: make_layers(spec) for spec in specs}, device)
        sampler.install(device, vllm_config)
        tell_when_ready(vllm_config, layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **kwargs: Any,
    ) -> AttnMetadata:
        """Plans a step for every spec. common_prefix_len: not used, plans find shared prefixes."""
        cm = common_attn_metadata
        if not isinstance(cm.causal, bool):
            refuse("batches that mix causal and bidirectional requests")
        if not cm.causal and any(spec.window_left >= 0 and spec.window_right < 0 for spec in self.planned):
            way_out = "set use_non_causal in --attention-config, or choose another --attention-backend"
            refuse(
                "a sliding window to the left and right in layers that were made for causal steps", way_out
            )
        metadata = AttnMetadata(
            num_actual_tokens=cm.num_actual_tokens,
            max_query_len=cm.max_query_len,
            max_seq_len=cm.max_seq_len,
            query_start_loc=cm.query_start_loc,
            seq_lens=cm.seq_lens,
            block_table=cm.block_table_tensor,
            slot_mapping=cm.slot_mapping,
            causal=cm.causal,
            planned=self.planned,
            prompts=compat.prompts_of(cm),
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
        num_reqs = metadata.seq_lens.shape[0]
        qo_indptr, blocks = metadata.query_start_loc, metadata.block_table
        # Runners pad both for CUDA graphs. The lengths have the number of requests.
        if qo_indptr.shape[0] != num_reqs + 1:
            qo_indptr = qo_indptr[: num_reqs + 1]
        if blocks.shape[0] != num_reqs:
            blocks = blocks[:num_reqs]
        kv_lens = metadata.seq_lens
        if self.context_parallel is not None:
            kv_lens = self.context_parallel.local_lens(
                qo_indptr, metadata.seq_lens, single_tokens=metadata.single_tokens
            )
        table = PageTable.block_table(blocks, kv_lens, self.page_size)
        for layers in self.planned.values():
            if not metadata.single_tokens:
                view = BSRView(
                    qo_indptr,
                    PageTable.ragged(qo_indptr) if layers.of_this_step else table,
                    causal=layers.causal and metadata.causal,
                    window_left=layers.window_left,
                    prompts=metadata.prompts,
                )
                layers.attention.plan(view, variant_args=layers.plan_arguments)
            if layers.context is not None:
                layers.context.plan(BSRView(qo_indptr, table, causal=False))
        export_counts(logger)

    def update_draft_decode_metadata(self, metadata: AttnMetadata) -> None:
        """Plans again from the same tensors with new contents, inside the CUDA graph of a draft loop."""
        if self.spans is not None:
            self.spans.clear()
        metadata.prompts = None
        self.plan(metadata)


def layer_specs(vllm_config: Any, kv_cache_spec: Any, layer_names: list[str]) -> list[LayerSpec]:
    """The distinct specs of a group of layers: usually one.

    A group holds several windows when vLLM's hybrid KV cache manager is off.
    """
    specs = {
        impl.spec
        for impl in compat.attention_impls(vllm_config, layer_names)
        if isinstance(getattr(impl, "spec", None), LayerSpec)
    }
    if not specs:  # layers that are not the engine's: its attention tests
        num_qo_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        window = window_left(getattr(kv_cache_spec, "sliding_window", None))
        heads = num_qo_heads, kv_cache_spec.num_kv_heads, kv_cache_spec.head_size
        spec = LayerSpec(*heads, window)
        if is_in_bytes(kv_cache_spec):
            cache = vllm_config.cache_config.cache_dtype
            spec = spec._replace(
                kv_dtype=BYTE_CACHES[cache],
                token_scales=cache in TOKEN_SCALED_CACHES,
                rotation=TOKEN_SCALED_CACHES.get(cache) in ROTATED_DTYPES,
            )
        specs = {spec}
    return sorted(specs, key=str)


def is_in_bytes(kv_cache_spec: Any) -> bool:
    """Whether vLLM stores a cache in bytes: uint8 or int8. Layers know the dtype of the one or two elements
    of a byte.
    """
    return bool(kv_cache_spec.dtype.itemsize == 1)


def query_dtype(vllm_config: Any, kv_cache_spec: Any) -> torch.dtype:
    return getattr(vllm_config.model_config, "dtype", kv_cache_spec.dtype)


def unsupported_dtypes(vllm_config: Any, kv_cache_spec: Any) -> str | None:
    """Why a cache of another dtype than the model's cannot be read, or None."""
    model_dtype = query_dtype(vllm_config, kv_cache_spec)
    is_mixed = {kv_cache_spec.dtype, model_dtype} == {torch.bfloat16, torch.float16}
    if kv_cache_spec.dtype != model_dtype and not is_mixed and not is_in_bytes(kv_cache_spec):
        return f"a KV cache of {kv_cache_spec.dtype} for a model of {model_dtype}"
    return None
