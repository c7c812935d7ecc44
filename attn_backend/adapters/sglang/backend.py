"""SGLang's attention backend: plans once a step from the engine's device tensors, runs once a layer.

New tokens are written to the pool first; then one schedule reads everything from it, prefix and new tokens
alike. Nothing is copied to the host, gathered into index lists or merged afterwards: the page table is the
engine's own req_to_token.

CUDA graphs: decode steps plan inside the captured graph (`init_forward_metadata_in_graph`), so a replay costs
no host time. Those kernels read req_to_token until the replay ends. Releases that ask are told so; 0.5.17
lets its scheduler go on earlier. What it writes then is never what a running request still reads: new tokens
lie beyond the planned length, a prefix that moved into the radix tree has the same keys and values in its new
slots, and the row of a finished request is computed for nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor
from torch.nn import Module

from attn_backend import Attention, KVCache, append_kv
from attn_backend.adapters.capability import warn_if_untried
from attn_backend.adapters.plan_key import PlanKey
from attn_backend.metadata.kv_cache import SCALED_DTYPES

from . import compat
from .batch import Batch, BatchReader, is_uniform
from .float8_queries import QueryRounder, rounds_queries
from .layer_cache import LayerCache, quantise
from .mla import append_latents, ask_for_parts, has_latents
from .page_tables import page_table
from .plan import Plan
from .support import (
    attention_layers,
    check_runner,
    cuts_spans,
    drafts_are_trees,
    drafts_in_blocks,
    longest_extend,
    most_requests,
    plan_key,
    refuse,
    slopes_of,
    verified_tokens,
    wants_spans,
)
from .window import WindowSlots

logger = logging.getLogger(__name__)


class Layer:
    """What is remembered of a layer between steps."""

    def __init__(self, layer: RadixAttention, plan: Plan, slopes: Tensor | None, cache: LayerCache) -> None:
        self.plan = plan
        self.slopes = slopes
        self.num_qo_heads: int = layer.tp_q_head_num
        self.head_dim: int = layer.head_dim
        self.head_dim_v: int = layer.v_head_dim
        self.sm_scale = float(layer.scaling)
        self.of_encoder = plan.key.of_encoder
        self.cache = cache


class SGLangAttentionBackend(AttentionBackend):
    """Raises ValueError in the constructor, that is while the engine starts, for what it cannot serve."""

    needs_cpu_seq_lens = False  # plans read lengths on the device
    extend_dummy_seqs_capped_by_req_pool = True  # workspaces are sized for the requests that the pool holds

    def __init__(self, runner: Any, branches: int = 0) -> None:
        """branches: of a draft model's one step, rows of each request; 0: a backend for all steps."""
        super().__init__()
        check_runner(runner)
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        is_encoder_decoder = bool(runner.model_config.is_encoder_decoder)
        # decoders' tokens begin anywhere in a page
        self.page_size: int = 1 if is_encoder_decoder else runner.page_size or 1
        self.device: torch.device = self.req_to_token_pool.req_to_token.device
        self.dtype: torch.dtype = runner.dtype
        self.kv_dtype: torch.dtype = runner.kv_cache_dtype
        # the engine asks for it where it makes masks
        self.max_context_len: int = runner.model_config.context_len
        self.forward_metadata: Batch | None = None  # the name that the engine clears on idle steps
        warn_if_untried(self.device, logger)

        self._is_float8 = self.kv_dtype in SCALED_DTYPES
        self._has_extends = branches == 0  # a draft model's one step is a decode
        # of K and V that are written to the pool without it
        self._appended_dtypes = (self.dtype, self.kv_dtype)
        self._has_latents = has_latents(runner)
        self._copies_to_slots = self._has_latents or compat.copies_to_slots(self.token_to_kv_pool)
        if self._has_latents:
            ask_for_parts(runner)
        self._of_model = {
            "has_spans": wants_spans(runner),
            "cuts_spans": cuts_spans(runner),
            "in_blocks": drafts_in_blocks(runner),
        }
        self._attention_chunk_size: int | None = getattr(runner.model_config, "attention_chunk_size", None)
        self._nodes_of_trees = verified_tokens(runner) if drafts_are_trees() else 0

        self._max_batch = most_requests(runner, branches)
        self._max_rows = (
            self._max_batch
            if branches
            else longest_extend(runner) + self._max_batch * max(1, compat.num_draft_tokens())
        )
        self._reader = BatchReader(runner, self.device)
        self._window = (
            WindowSlots(self.token_to_kv_pool, self.device)
            if isinstance(self.token_to_kv_pool, SWAKVPool)
            else None
        )
        self._window_slots: Tensor | None = None  # where this step's tokens go in the window pool
        self._allocate_buffers()
        self._plans: dict[PlanKey, Plan] = {}
        self._caches: dict[int, LayerCache] = {}
        self._layers: dict[RadixAttention, Layer] = {}
        for layer, parent in attention_layers(runner.model, is_encoder_decoder):
            self._remember(layer, parent)

    # What the engine asks.

    def support_triton(self) -> bool:
        return self.device.type == "cuda"

    def shared_read_ends(self, fm: Any) -> Any:
        """Until when the engine must not write req_to_token, for the releases that ask."""
        return (
            compat.shared_reads_end_after_replay()
            if fm.is_decode() or fm.is_target_verify()
            else super().shared_read_ends(fm)
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called before anything of these sizes is captured."""
        if max_bs > self._max_batch or max_num_tokens > self._max_rows:
            self._max_batch, self._max_rows = (
                max(max_bs, self._max_batch),
                max(max_num_tokens, self._max_rows),
            )
            self._allocate_buffers()
            for plan in self._plans.values():
                plan.grow(self._max_rows, self._max_batch)

    @property
    def verify_mask(self) -> Any:
        """Where the engine's drafts write the mask of their trees; None: nothing is verified."""
        return self._reader.trees.offered

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Does nothing: nothing that was prepared while the draft ran depends on it."""

    # Planning. `init_forward_metadata` of the base class calls both.

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Extends are planned here: the runner that captures whole prefills calls nothing else.

        Masks of trees are taken over here: graphs read ours.
        """
        if self._nodes_of_trees and forward_batch.forward_mode.is_target_verify():
            self._reader.trees.take(
                forward_batch.spec_info, forward_batch.seq_lens[: forward_batch.batch_size]
            )
        if not is_uniform(forward_batch.forward_mode):
            self._plan(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Decode and verify steps are planned here, inside the graph when there is one."""
        if is_uniform(forward_batch.forward_mode):
            self._plan(forward_batch)

    def plan_draft(self, batch: Batch | None) -> None:
        """Plans one step of a draft model. None: nothing to attend to."""
        self.forward_metadata = batch
        if batch is not None:
            for plan in self._plans.values():
                self._plan_layers(plan, batch)

    def one_row_each(self, batch_size: int) -> Tensor:
        """int32 [batch_size + 1], the qo_indptr of a step with one token of each request."""
        return self._reader.one_row_each(batch_size)

    def _plan(self, forward_batch: Any) -> None:
        batch = self.forward_metadata = self._reader.read(forward_batch)
        if batch is None:
            return
        if self._window is not None and forward_batch.out_cache_loc is not None:
            self._window_slots = self._window.translate(forward_batch.out_cache_loc)
        for plan in self._plans.values():
            if plan.key.of_this_step and batch.has_prefixes:
                plan.current = None  # the model attends to the latents in this step
            else:
                self._plan_layers(plan, batch)

    def _plan_layers(self, plan: Plan, batch: Batch) -> Attention:
        return plan.make(
            batch,
            *page_table(plan.key, batch, self.req_to_token_pool.req_to_token, self.page_size, self._window),
        )

    def _plan_late(self, plan: Plan) -> Attention:
        """For a layer that was not found in the model when the engine started: the step is already planned,
        for the others.
        """
        if self.forward_metadata is None:
            raise RuntimeError("a layer's forward was called before init_forward_metadata")
        if plan.key.of_this_step and self.forward_metadata.has_prefixes:
            raise refuse("decompressed keys and values after a cached prefix")
        return self._plan_layers(plan, self.forward_metadata)

    # Running.

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, extra)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, extra)

    def _forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool,
        extra: dict[str, Any],
    ) -> Tensor:
        """q: [rows, num_qo_heads * head_dim], or these elements in other dimensions: 0.5.17's Gemma 3 has [1,
        rows, num_qo_heads, head_dim]; k: [rows, num_kv_heads, head_dim], v: [rows, num_kv_heads, head_dim_v];
        k and v None where another layer's cache is read. extra: of latents q_rope [rows, num_qo_heads,
        rotated part] and k_rope [rows, 1, rotated part], where these are not in q and k.

        Returns [rows, num_qo_heads * head_dim_v], or the engine's output as it is.
        """
        # Whisper's forward() is not under torch.no_grad(), and SGLang captures decode graphs outside of it
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._forward(q, k, v, layer, forward_batch, save_kv_cache, extra)
        q_rope, k_rope = extra.pop("q_rope", None), extra.pop("k_rope", None)
        sinks = self._sinks(layer, extra) if extra else None
        known = self._layers.get(layer) or self._remember(layer)
        plan = known.plan
        attention = plan.current or self._plan_late(plan)  # before append_kv, which run() relies on
        q_heads = q.reshape(-1, known.num_qo_heads, known.head_dim if q_rope is None else known.head_dim_v)
        num_rows = q_heads.shape[0]
        out = _output(q, num_rows, known, forward_batch)
        out_heads = out.view(num_rows, known.num_qo_heads, known.head_dim_v)
        if plan.key.of_this_step:
            attention.run(q_heads, _new_tokens(k, v, known), out=out_heads, sm_scale=known.sm_scale)
            return out
        # at every step: it waits for KV that is still being loaded
        k_buffer, v_buffer = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if self._is_float8:
            kv = known.cache.float8_view(layer, k_buffer, v_buffer, self.page_size, writes=k is not None)
        else:
            kv = known.cache.view(k_buffer, v_buffer, self.page_size)
        if attention.q_dtype != self.dtype:
            # before append_kv, which is the only launch that run() may overlap with
            q_heads = self._rounder.round(q_heads, attention.q_dtype)
        appended = False
        # False with k given: the model's rotary kernel has written them already
        if save_kv_cache and k is not None:
            assert v is not None
            appended = self._write(
                k,
                k_rope,
                v,
                kv,
                layer,
                forward_batch.encoder_out_cache_loc if known.of_encoder else forward_batch.out_cache_loc,
            )
        arguments = plan.arguments
        if known.slopes is not None:
            arguments = {"slopes": known.slopes, **(arguments or {})}
        attention.run(
            q_heads,
            kv,
            q_rope=None
            if q_rope is None
            else q_rope.view(num_rows, known.num_qo_heads, known.head_dim - known.head_dim_v),
            out=out_heads,
            sm_scale=known.sm_scale,
            logits_soft_cap=plan.logits_soft_cap,
            after_append=appended,
            variant_args=arguments,
            sinks=sinks,
        )
        return out

    def _write(
        self, k: Tensor, k_rope: Tensor | None, v: Tensor, kv: KVCache, layer: RadixAttention, slots: Tensor
    ) -> bool:
        """Writes a layer's new tokens.

        Returns whether append_kv wrote them: run() may then start before they are in the cache.
        """
        # the pool converts others
        if (
            self._copies_to_slots
            and k.dtype == v.dtype
            and (self._is_float8 or k.dtype in self._appended_dtypes)
        ):
            slots = slots.contiguous()  # those of a draft step are a column of a table
            if self._has_latents:
                append_latents(k, k_rope, kv, slots)
            else:
                append_kv(k, v, kv, slots)
            return True
        if k_rope is not None:
            k = torch.cat((k, k_rope), -1)
        if self._is_float8:
            k, v = quantise(k, kv.k_scale, kv.dtype), quantise(v, kv.v_scale, kv.dtype)
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(slots, self._window_slots), k, v)
        return False

    def _sinks(self, layer: RadixAttention, extra: dict[str, Any]) -> Tensor | None:
        """float32 [num_qo_heads], of what the model hands over besides q, k and v.

        Raises:
            ValueError: anything else than sinks, or sinks of which nothing was known when the engine started.
        """
        sinks: Tensor | None = extra.pop("sinks", None)
        given = sorted(name for name, value in extra.items() if value is not None)
        if given:
            raise refuse(f"what this model's attention asks for ({', '.join(given)})")
        if sinks is None:
            return None
        known = self._layers.get(layer)
        if known is None or not known.plan.key.has_sinks:
            raise refuse(
                f"attention sinks that layer {layer.layer_id} of this model did not show when the engine "
                f"started"
            )
        return sinks.detach().float()  # at every step: weights may be updated in place, under captured graphs

    # Layers and buffers.

    def _remember(self, layer: RadixAttention, parent: Module | None = None) -> Layer:
        in_window_pool = self._window is not None and self._window.holds(layer.layer_id)
        chunk = self._attention_chunk_size
        key = plan_key(
            layer, parent, in_window_pool=in_window_pool, attention_chunk_size=chunk, **self._of_model
        )
        if self.kv_dtype != self.dtype and not key.of_this_step:  # whose keys and values are in no cache
            key = key._replace(kv_dtype=self.kv_dtype)
        plan = self._plans.get(key)
        if plan is None:
            nodes_of_trees = 0 if key.of_this_step else self._nodes_of_trees
            float8_extends = self._has_extends and rounds_queries(key, self.device)
            plan = self._plans[key] = Plan(
                key, self.dtype, self.device, self._max_rows, self._max_batch, nodes_of_trees, float8_extends
            )
        slopes = slopes_of(parent)
        slopes = None if slopes is None else slopes.to(self.device, torch.float32)
        cache = self._caches.setdefault(layer.layer_id, LayerCache(makes_v_anew=self._has_latents))
        known = self._layers[layer] = Layer(layer, plan, slopes, cache)
        return known

    def _allocate_buffers(self) -> None:
        self._reader.allocate(self._max_rows, self._max_batch)
        self._rounder = QueryRounder(self._max_rows, self.device)
        if self._window is not None:
            self._window.allocate(self._max_rows)


def _output(q: Tensor, num_rows: int, known: Layer, forward_batch: Any) -> Tensor:
    """[rows, num_qo_heads * head_dim_v], or the engine's output of this size in its own dimensions."""
    out: Tensor | None = getattr(forward_batch, "_attn_output", None)
    row = known.num_qo_heads * known.head_dim_v
    return q.new_empty((num_rows, row)) if out is None or out.numel() != num_rows * row else out


def _new_tokens(k: Tensor | None, v: Tensor | None, known: Layer) -> KVCache:
    """A step's own tokens, decompressed. The model has written their latents."""
    assert k is not None
    assert v is not None
    heads = known.plan.key.num_kv_heads
    return KVCache.from_ragged(k.view(-1, heads, known.head_dim), v.view(-1, heads, known.head_dim_v))
