"""SGLang's attention backend: plans once a step from the engine's device tensors, runs once a layer.

New tokens are written to the pool first; then one schedule reads everything from it, prefix and new tokens alike. Nothing is copied to the host, gathered into
index lists or merged afterwards: the page table is the engine's own req_to_token.

CUDA graphs: decode steps plan inside the captured graph (`init_forward_metadata_in_graph`), so a replay costs no host time. Those kernels read req_to_token
until the replay ends. Releases that ask are told so; 0.5.17 lets its scheduler go on earlier. What it writes then is never what a running request still reads:
new tokens lie behind the planned length, a prefix that moved into the radix tree has the same keys and values in its new slots, and the row of a
finished request is computed for nothing anyway.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor
from torch.nn import Module

from attn_backend import Attention, BSRView, KVCache, PageTable, append_kv
from attn_backend.adapters.capability import warn_if_untried
from attn_backend.adapters.layer_variants import variant_of, visibility_of
from attn_backend.adapters.options import use_cascade
from attn_backend.adapters.plan_key import PlanKey
from attn_backend.adapters.spans import Spans
from attn_backend.kernels.attention_config import MAX_CUDA_INVARIANT_BATCH
from attn_backend.metadata.kv_cache import FLOAT8_DTYPES

from . import compat
from .encoder_table import decoder_page_table
from .items import Items, items_of
from .layer_cache import LayerCache, quantise
from .mla import append_latents, has_latents
from .support import attention_layers, check_runner, drafts_are_trees, longest_extend, plan_key, refuse, slopes_of, tree_key, wants_spans
from .tree_mask import TreeMask, is_chain, mask_has_prefixes
from .window import window_page_table

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Batch:
    """One step as the engine describes it. Tensors stay where the engine keeps them."""

    num_rows: int  # of Q
    qo_indptr: Tensor  # int32 [batch + 1]
    qo_lens: Tensor | int  # [batch], or the one length of all
    max_qo_len: int
    kv_lens: Tensor  # [batch], new tokens included
    rows: Tensor  # [batch], of req_to_token
    encoder_lens: Tensor | None = None  # [batch], tokens of the encoder, which come first in req_to_token
    items: Items | None = None  # with --enable-mis
    spans: Spans | None = None  # where images see both sides
    has_prefixes: bool = True  # whether a request may have tokens that are not in Q
    tree: Tensor | None = None  # TreeMask.visible, where the new tokens are trees
    slots: Tensor | None = None  # instead of req_to_token: see branch_slots


class Plan:
    """What the layers of one key share: the plan of each step."""

    def __init__(self, key: PlanKey, attention: Attention) -> None:
        self.key = key
        self.attention = attention  # captured by graphs: never replaced once there are any
        self.large: Attention | None = None  # for a batch beyond that one's bounds
        self.current: Attention | None = None  # the one that holds this step's plan
        self.of_trees: Plan | None = None  # for steps that verify trees
        self.logits_soft_cap = 0.0  # of this step's plan
        self.arguments: dict[str, Tensor | int] | None = None  # of this step, for the variant; slopes excepted, which each layer has for itself


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
        self._is_encoder_decoder = bool(runner.model_config.is_encoder_decoder)
        self.page_size: int = 1 if self._is_encoder_decoder else runner.page_size or 1  # decoders' tokens begin anywhere in a page
        self.device: torch.device = self.req_to_token_pool.req_to_token.device
        self.dtype: torch.dtype = runner.dtype
        self.kv_dtype: torch.dtype = runner.kv_cache_dtype
        self._is_float8 = self.kv_dtype in FLOAT8_DTYPES
        self.forward_metadata: Batch | None = None  # the name that the engine clears on idle steps
        self._window_pool: Any = self.token_to_kv_pool if isinstance(self.token_to_kv_pool, SWAKVPool) else None
        self._has_latents = has_latents(runner)
        self._copies_to_slots = self._has_latents or compat.copies_to_slots(self.token_to_kv_pool)
        self._append = append_latents if self._has_latents else append_kv
        self._window_slots: Tensor | None = None  # where this step's tokens go in the window pool
        self._attention_chunk_size: int | None = getattr(runner.model_config, "attention_chunk_size", None)
        self._draft_tokens = int(compat.setting("spec.speculative_num_draft_tokens", 0) or 0)

        self.max_context_len: int = runner.model_config.context_len  # the engine asks for it where it makes masks
        self._max_batch = -(-self.req_to_token_pool.size // 32) * 32 * max(1, branches)  # the engine pads batches to what its graphs and its ranks need
        if compat.deterministic() and self.device.type == "cuda" and self._max_batch > MAX_CUDA_INVARIANT_BATCH:
            raise refuse(f"--enable-deterministic-inference for {self._max_batch} requests at once", f"pass --max-running-requests {MAX_CUDA_INVARIANT_BATCH}")
        self._max_rows = self._max_batch if branches else longest_extend(runner) + self._max_batch * max(1, self._draft_tokens)
        self._has_trees = drafts_are_trees() and not runner.is_draft_worker
        self._verifies = self._draft_tokens > 0 and not runner.is_draft_worker
        self._plans: dict[PlanKey, Plan] = {}
        self._layers: dict[RadixAttention, Layer] = {}
        self._caches: dict[int, LayerCache] = {}
        warn_if_untried(self.device, logger)
        self._has_spans = wants_spans(runner)
        self._large_spans: Spans | None = None
        self._large_tree: TreeMask | None = None
        self._has_items = bool(compat.setting("exec.features.enable_mis", False))
        self._allocate_buffers()
        for layer, parent in attention_layers(runner.model, self._is_encoder_decoder):
            self._remember(layer, parent)

    # What the engine asks.

    def support_triton(self) -> bool:
        return self.device.type == "cuda"

    def shared_read_ends(self, fm: Any) -> Any:
        """Until when the engine must not write req_to_token, for the releases that ask."""
        return compat.shared_reads_end_after_replay() if fm.is_decode() or fm.is_target_verify() else super().shared_read_ends(fm)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called before anything of these sizes is captured."""
        if max_bs > self._max_batch or max_num_tokens > self._max_rows:
            self._max_batch, self._max_rows = max(max_bs, self._max_batch), max(max_num_tokens, self._max_rows)
            self._allocate_buffers()
            for plan in self._plans.values():
                plan.attention = self._make_attention(plan.key, self._max_rows, self._max_batch)
                if plan.of_trees is not None:
                    plan.of_trees = self._make_plan_of_trees(plan.key)

    @property
    def verify_mask(self) -> Any:
        """Where the engine's drafts write the mask of their trees; None: nothing is verified."""
        return None if self._tree is None else self._tree.offered

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """What was prepared beside the draft: nothing that depends on it."""

    # Planning. `init_forward_metadata` of the base class calls both.

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Extends are planned here: the runner that captures whole prefills calls nothing else. Masks of trees are taken over here: graphs read ours."""
        if self._has_trees and forward_batch.forward_mode.is_target_verify():
            self._take_trees(forward_batch)
        if not _is_uniform(forward_batch.forward_mode):
            self._plan(self._describe(forward_batch), forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Decode and verify steps are planned here, inside the graph when there is one."""
        if _is_uniform(forward_batch.forward_mode):
            self._plan(self._describe(forward_batch), forward_batch)

    def plan_draft(self, batch: Batch | None) -> None:
        """Plans one step of a draft model. None: nothing to attend to."""
        self.forward_metadata = batch
        if batch is not None:
            for plan in self._plans.values():
                self._plan_layers(plan, batch)

    def _take_trees(self, forward_batch: Any) -> None:
        spec_info, lens = forward_batch.spec_info, forward_batch.seq_lens[: forward_batch.batch_size]
        if spec_info is None or spec_info.custom_mask is None or is_chain(spec_info):
            return
        tree = self._tree_for(lens.shape[0], spec_info)
        tree.fill(spec_info.custom_mask, lens, mask_has_prefixes(spec_info, self.device))

    def _tree_for(self, batch_size: int, spec_info: Any) -> TreeMask:
        nodes = int(spec_info.draft_token_num)
        if self._tree is None or not self._has_trees or nodes != self._tree.num_nodes:
            raise refuse(f"drafts that are trees of {nodes} tokens: the server's settings say nothing of them", "use --speculative-eagle-topk 1")
        if batch_size * nodes <= self._tree.visible.shape[0]:
            return self._tree
        if self._large_tree is None or batch_size * nodes > self._large_tree.visible.shape[0]:  # no graph was captured for so many
            self._large_tree = TreeMask(2 * batch_size, nodes, False, self.device)
        return self._large_tree

    def _describe(self, forward_batch: Any) -> Batch | None:
        """None: nothing to attend to."""
        batch = self._describe_rows(forward_batch)
        if batch is None:
            return None
        if self._is_encoder_decoder:
            batch = replace(batch, encoder_lens=forward_batch.encoder_lens[: batch.rows.shape[0]])
        if self._has_items:
            batch = replace(batch, items=items_of(forward_batch, batch.rows.shape[0], self.device))
        if self._has_spans:
            batch = replace(batch, spans=self._fill_spans(forward_batch, batch))
        return batch

    def _fill_spans(self, forward_batch: Any, batch: Batch) -> Spans:
        spans = self._spans
        if spans.max_rows < batch.num_rows:  # no graph was captured for so many
            if self._large_spans is None or self._large_spans.max_rows < batch.num_rows:
                self._large_spans = Spans(2 * batch.num_rows, self.device)
            spans = self._large_spans
        if _is_uniform(forward_batch.forward_mode):  # may be inside a graph
            spans.clear(batch.num_rows)
        else:
            spans.fill(compat.image_spans(forward_batch), batch.qo_indptr, batch.kv_lens)
        return spans

    def _describe_rows(self, forward_batch: Any) -> Batch | None:
        mode = forward_batch.forward_mode
        batch_size: int = forward_batch.batch_size
        if batch_size == 0 or mode.is_idle():
            return None
        rows, kv_lens = forward_batch.req_pool_indices[:batch_size], forward_batch.seq_lens[:batch_size]
        if mode.is_decode():
            return Batch(batch_size, self.one_row_each(batch_size), 1, 1, kv_lens, rows)
        if mode.is_target_verify():
            spec_info = forward_batch.spec_info
            draft_len = int(spec_info.draft_token_num)
            tree = None if is_chain(spec_info) else self._tree_for(batch_size, spec_info).visible
            qo_indptr = torch.arange(0, (batch_size + 1) * draft_len, draft_len, dtype=torch.int32, device=self.device)
            return Batch(batch_size * draft_len, qo_indptr, draft_len, draft_len, kv_lens + draft_len, rows, tree=tree)
        if mode.is_dllm_extend():
            raise refuse(f"the forward mode {mode.name}")
        qo_lens = forward_batch.extend_seq_lens[:batch_size]
        num_rows = forward_batch.positions.shape[0]
        host_lens = forward_batch.extend_seq_lens_cpu
        max_qo_len = num_rows if host_lens is None else int(max(host_lens))
        prefix_lens = forward_batch.extend_prefix_lens_cpu
        return Batch(num_rows, self._prefix_sum(qo_lens), qo_lens, max_qo_len, kv_lens, rows, has_prefixes=prefix_lens is None or any(prefix_lens))

    def _plan(self, batch: Batch | None, forward_batch: Any) -> None:
        self.forward_metadata = batch
        if batch is None:
            return
        if self._window_pool is not None and forward_batch.out_cache_loc is not None:
            self._window_slots = self._translate(forward_batch.out_cache_loc)
        for plan in self._plans.values():
            if plan.key.of_this_step and batch.has_prefixes:
                plan.current = None  # the model goes the other way
            else:
                self._plan_layers(plan, batch)

    def _plan_layers(self, plan: Plan, batch: Batch) -> Attention:
        planned = plan
        if batch.tree is not None:
            assert plan.of_trees is not None
            planned = plan.of_trees
        key = planned.key
        plan.current = self._attention_for(planned, batch)
        plan.logits_soft_cap = 0.0 if key.needs_variant else key.logits_soft_cap  # a variant knows its own
        plan.arguments = _arguments(key, batch)
        causal, window = visibility_of(key, causal=True)
        table, tokens_before = self._page_table(key, batch)
        view = BSRView(batch.qo_indptr, table, causal=causal, window_left=window, kv_offsets=tokens_before if key.needs_variant else None)
        plan.current.plan(view, variant_args=None if key.has_alibi else plan.arguments)
        return plan.current

    def _page_table(self, key: PlanKey, batch: Batch) -> tuple[PageTable, Tensor | None]:
        """The tokens of each request, and how many are in front of the table; None: none."""
        req_to_token = self.req_to_token_pool.req_to_token if batch.slots is None else batch.slots
        if key.of_this_step:
            return PageTable.ragged(batch.qo_indptr), None
        if key.of_encoder:
            assert batch.encoder_lens is not None
            return PageTable.token_slots(req_to_token, batch.rows, batch.encoder_lens, self.page_size), None
        if batch.encoder_lens is not None:
            return decoder_page_table(req_to_token, batch.rows, batch.kv_lens, batch.encoder_lens), None
        if not key.in_window_pool:
            return PageTable.token_slots(req_to_token, batch.rows, batch.kv_lens, self.page_size), None
        mapping = self._window_pool.full_to_swa_index_mapping
        window = key.chunk - 1 if key.chunk else key.window_left
        return window_page_table(req_to_token, batch.rows, batch.kv_lens, batch.qo_lens, batch.max_qo_len, window, mapping, self.page_size)

    # Running.

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: RadixAttention, forward_batch: Any, save_kv_cache: bool = True, **extra: Any
    ) -> Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, extra)

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: RadixAttention, forward_batch: Any, save_kv_cache: bool = True, **extra: Any
    ) -> Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, extra)

    def _forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: RadixAttention, forward_batch: Any, save_kv_cache: bool, extra: dict[str, Any]
    ) -> Tensor:
        """q: [rows, num_qo_heads * head_dim]; k: [rows, num_kv_heads, head_dim], v: [rows, num_kv_heads, head_dim_v]; k and v None where
        another layer's cache is read.

        Returns [rows, num_qo_heads * head_dim_v].
        """
        sinks = self._sinks(layer, extra) if extra else None
        known = self._layers.get(layer) or self._remember(layer)
        attention = known.plan.current or self._plan_late(known.plan)  # before append_kv, which run() relies on
        if known.plan.key.of_this_step:
            return self._forward_of_this_step(q, k, v, known, attention, _output(q, known, forward_batch))
        pool = self.token_to_kv_pool
        k_buffer, v_buffer = pool.get_kv_buffer(layer.layer_id)  # at every step: it waits for KV that is still being loaded
        if self._is_float8:
            kv = known.cache.float8_view(layer, k_buffer, v_buffer, self.page_size, writes=k is not None)
        else:
            kv = known.cache.view(k_buffer, v_buffer, self.page_size)
        slots = forward_batch.encoder_out_cache_loc if known.of_encoder else forward_batch.out_cache_loc
        appended = False
        if save_kv_cache and k is not None:  # False with k given: the model's rotary kernel has written them already
            assert v is not None
            appended = self._copies_to_slots and k.dtype == v.dtype and (self._is_float8 or k.dtype == k_buffer.dtype)  # the pool converts others
            if appended:
                self._append(k, v, kv, slots.contiguous())  # those of a draft step are a column of a table
            else:
                if self._is_float8:
                    k, v = quantise(k, kv.k_scale, kv.dtype), quantise(v, kv.v_scale, kv.dtype)
                pool.set_kv_buffer(layer, KVWriteLoc(slots, self._window_slots), k, v)
        num_rows, out = q.shape[0], _output(q, known, forward_batch)
        arguments = known.plan.arguments
        if known.slopes is not None:
            arguments = {"slopes": known.slopes, **(arguments or {})}
        attention.run(
            q.view(num_rows, known.num_qo_heads, known.head_dim),
            kv,
            out=out.view(num_rows, known.num_qo_heads, known.head_dim_v),
            sm_scale=known.sm_scale,
            logits_soft_cap=known.plan.logits_soft_cap,
            after_append=appended,
            variant_args=arguments,
            sinks=sinks,
        )
        return out

    @staticmethod
    def _forward_of_this_step(q: Tensor, k: Tensor | None, v: Tensor | None, known: Layer, attention: Attention, out: Tensor) -> Tensor:
        """Attention among a step's own tokens, whose latents the model has written."""
        assert k is not None
        assert v is not None
        heads, rows = known.plan.key.num_kv_heads, out.shape[0]
        kv = KVCache.from_ragged(k.view(-1, heads, known.head_dim), v.view(-1, heads, known.head_dim_v))
        attention.run(q.view(rows, known.num_qo_heads, known.head_dim), kv, out=out.view(rows, known.num_qo_heads, known.head_dim_v), sm_scale=known.sm_scale)
        return out

    # Layers, workspaces, buffers.

    def _remember(self, layer: RadixAttention, parent: Module | None = None) -> Layer:
        in_window_pool = self._window_pool is not None and self._window_pool.layers_mapping[layer.layer_id][1]
        chunk = self._attention_chunk_size
        key = plan_key(layer, parent, in_window_pool=in_window_pool, attention_chunk_size=chunk, has_spans=self._has_spans)
        if self._is_float8 and not key.of_this_step:  # whose keys and values are in no cache
            key = key._replace(kv_dtype=self.kv_dtype)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = Plan(key, self._make_attention(key, self._max_rows, self._max_batch))
            if self._has_trees and not key.of_this_step:
                plan.of_trees = self._make_plan_of_trees(key)
        slopes = slopes_of(parent)
        slopes = None if slopes is None else slopes.to(self.device, torch.float32)
        cache = self._caches.setdefault(layer.layer_id, LayerCache(makes_v_anew=self._has_latents))
        known = self._layers[layer] = Layer(layer, plan, slopes, cache)
        return known

    def _sinks(self, layer: RadixAttention, extra: dict[str, Any]) -> Tensor | None:
        """float32 [num_qo_heads], of what the model hands over besides q, k and v.

        Raises:
            ValueError: anything else than sinks, or sinks of which nothing was known when the engine started.
        """
        sinks: Tensor | None = extra.pop("sinks", None)
        _refuse_extras(extra)
        if sinks is None:
            return None
        known = self._layers.get(layer)
        if known is None or not known.plan.key.has_sinks:
            raise refuse(f"attention sinks that layer {layer.layer_id} of this model did not show when the engine started")
        return sinks.detach().float()  # at every step: weights may be updated in place, under captured graphs

    def _plan_late(self, plan: Plan) -> Attention:
        """For a layer that the model did not show when the engine started: the step is planned already, for the others."""
        if self.forward_metadata is None:
            raise RuntimeError("a layer's forward was called before init_forward_metadata")
        if plan.key.of_this_step and self.forward_metadata.has_prefixes:
            raise refuse("decompressed keys and values behind a cached prefix")
        return self._plan_layers(plan, self.forward_metadata)

    def _attention_for(self, plan: Plan, batch: Batch) -> Attention:
        batch_size = batch.qo_indptr.shape[0] - 1
        if batch.num_rows <= self._max_rows and batch_size <= self._max_batch:
            return plan.attention
        if plan.large is None or batch.num_rows > plan.large.max_rows or batch_size > plan.large.max_batch:
            plan.large = self._make_attention(plan.key, 2 * max(batch.num_rows, self._max_rows), max(batch_size, self._max_batch))
        return plan.large

    def _make_plan_of_trees(self, key: PlanKey) -> Plan:
        key = tree_key(key)
        return Plan(key, self._make_attention(key, self._max_batch * self._draft_tokens, self._max_batch))

    def _make_attention(self, key: PlanKey, max_rows: int, max_batch: int) -> Attention:
        return Attention(
            key.num_qo_heads,
            key.num_kv_heads,
            key.head_dim,
            head_dim_v=key.head_dim_v,
            dtype=self.dtype,
            kv_dtype=key.kv_dtype,
            device=self.device,
            max_rows=max_rows,
            max_batch=max_batch,
            cascade=use_cascade(),
            batch_invariant=compat.deterministic(),
            variant=variant_of(key),
            sinks=key.has_sinks,
        )

    def _allocate_buffers(self) -> None:
        self._arange = torch.arange(self._max_batch + 1, dtype=torch.int32, device=self.device)
        self._qo_indptr = torch.zeros(self._max_batch + 1, dtype=torch.int32, device=self.device)
        self._tree = TreeMask(self._max_batch, self._draft_tokens, not self._has_trees, self.device) if self._verifies else None
        self._large_tree = None
        self._spans = Spans(self._max_rows if self._has_spans else 0, self.device)
        self._one_qo_indptr, self._one_qo_len = self._qo_indptr[:2], self._qo_indptr[1:2]
        # Captured prefills read it at every replay, so it stays where it is.
        self._window_slot_buffer = torch.zeros(self._max_rows if self._window_pool is not None else 0, dtype=torch.int64, device=self.device)

    def one_row_each(self, batch_size: int) -> Tensor:
        """int32 [batch_size + 1], the qo_indptr of a step with one token of each request."""
        if batch_size > self._max_batch:
            return torch.arange(batch_size + 1, dtype=torch.int32, device=self.device)
        return self._arange[: batch_size + 1]

    def _prefix_sum(self, lens: Tensor) -> Tensor:
        batch_size = lens.shape[0]
        if batch_size == 1:  # a prompt that is computed alone waits for this: a copy is launched sooner than a scan
            self._one_qo_len.copy_(lens)
            return self._one_qo_indptr
        fits = batch_size <= self._max_batch
        indptr = self._qo_indptr[: batch_size + 1] if fits else torch.zeros(batch_size + 1, dtype=torch.int32, device=self.device)
        torch.cumsum(lens, dim=0, dtype=torch.int32, out=indptr[1:])
        return indptr

    def _translate(self, slots: Tensor) -> Tensor:
        """Slots of the full pool in the window pool's numbering."""
        mapping = self._window_pool.full_to_swa_index_mapping
        count = slots.shape[0]
        if count > self._window_slot_buffer.shape[0]:
            return mapping[slots]
        self._window_slot_buffer[count:].zero_()  # a captured prefill writes its padding rows too: to slot 0, which no request has
        return torch.index_select(mapping, 0, slots, out=self._window_slot_buffer[:count])


def _output(q: Tensor, known: Layer, forward_batch: Any) -> Tensor:
    """[rows, num_qo_heads * head_dim_v], the engine's if it has made one."""
    out: Tensor | None = getattr(forward_batch, "_attn_output", None)
    return q.new_empty((q.shape[0], known.num_qo_heads * known.head_dim_v)) if out is None or out.shape[0] != q.shape[0] else out


def _is_uniform(mode: Any) -> bool:
    """Whether all requests have the same number of rows, so that the step may run as a captured graph of a fixed batch size."""
    return bool(mode.is_decode_or_idle() or mode.is_target_verify())


def _arguments(key: PlanKey, batch: Batch) -> dict[str, Tensor | int] | None:
    """What the variant of a key is given in this step."""
    if key.has_tree and batch.tree is not None:
        return {"visible": batch.tree}
    if key.has_items and batch.items is not None:
        return batch.items._asdict()
    if key.has_spans and batch.spans is not None:
        return {"span_begin": batch.spans.begin, "span_end": batch.spans.end, "window": key.window_left}
    return None


def _refuse_extras(extra: dict[str, Any]) -> None:
    given = sorted(name for name, value in extra.items() if value is not None)
    if given:
        raise refuse(f"what this model's attention asks for ({', '.join(given)})")
