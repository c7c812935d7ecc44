"""From SGLang's ForwardBatch to plans: a Step, then a page table and a plan for each spec of layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from attn_backend import Attention, BSRView, PageTable
from attn_backend.adapters.layers import Items, LayerSpec, Spans, attention_of, variant_args_of

from . import compat
from .masks import TreeMasks, is_chain, items_of
from .support import drafts_are_trees, refuse, tree_spec, verified_tokens, wants_spans


@dataclass(frozen=True, eq=False)
class Step:
    """A step's batch. Its tensors stay where the engine keeps them.

    Attributes:
        num_rows: of Q.
        qo_indptr: int32 [batch + 1].
        qo_lens: [batch], or the one length of all requests.
        kv_lens: [batch], new tokens included.
        rows: [batch], of req_to_token.
        encoder_lens: [batch]. Tokens of the encoder come first in req_to_token.
        items: with --enable-mis.
        spans: image tokens of a span see each other.
        has_prefixes: whether a request may have tokens that are not in Q.
        tree: TreeMask.visible, if the new tokens are trees.
        slots: replace req_to_token (drafts.branch_slots()).
        prompts: BSRView.prompts, in deterministic mode.
    """

    num_rows: int
    qo_indptr: Tensor
    qo_lens: Tensor | int
    max_qo_len: int
    kv_lens: Tensor
    rows: Tensor
    encoder_lens: Tensor | None = None
    items: Items | None = None
    spans: Spans | None = None
    has_prefixes: bool = True
    tree: Tensor | None = None
    slots: Tensor | None = None
    prompts: Tensor | None = None


class BatchReader:
    """Makes a Step of a ForwardBatch.

    New tensors lie in buffers that captured graphs read at every replay.
    """

    def __init__(self, runner: Any, device: torch.device) -> None:
        self._device = device
        self._is_encoder_decoder = bool(runner.model_config.is_encoder_decoder)
        self._has_items = bool(compat.setting("exec.features.enable_mis", False))
        self._has_spans = wants_spans(runner)
        self._draft_tokens = verified_tokens(runner)
        self._is_deterministic = compat.deterministic()

    def allocate(self, max_rows: int, max_batch: int) -> None:
        """Makes the buffers, before anything is captured."""
        self._max_batch = max_batch
        self._arange = torch.arange(max_batch + 1, dtype=torch.int32, device=self._device)
        self._qo_indptr = torch.zeros(max_batch + 1, dtype=torch.int32, device=self._device)
        self._ones = torch.ones(max_batch, dtype=torch.int32, device=self._device)
        self._one_qo_indptr, self._one_qo_len = self._qo_indptr[:2], self._qo_indptr[1:2]
        self.trees = TreeMasks(max_batch, self._draft_tokens, drafts_are_trees(), self._device)
        self._spans = Spans(max_rows if self._has_spans else 0, self._device)
        self._large_spans: Spans | None = None

    def read(self, forward_batch: Any) -> Step | None:
        """None: there is nothing to attend to."""
        step = self._read_rows(forward_batch)
        if step is None:
            return None
        if self._is_encoder_decoder:
            step = replace(step, encoder_lens=forward_batch.encoder_lens[: step.rows.shape[0]])
        if self._has_items:
            step = replace(step, items=items_of(forward_batch, step.rows.shape[0], self._device))
        if self._has_spans:
            step = replace(step, spans=self._fill_spans(forward_batch, step))
        return step

    def one_row_each(self, batch_size: int) -> Tensor:
        """int32 [batch_size + 1], the qo_indptr of a step with one token of each request."""
        if batch_size > self._max_batch:
            return torch.arange(batch_size + 1, dtype=torch.int32, device=self._device)
        return self._arange[: batch_size + 1]

    def _read_rows(self, forward_batch: Any) -> Step | None:
        mode = forward_batch.forward_mode
        batch_size: int = forward_batch.batch_size
        if batch_size == 0 or mode.is_idle():
            return None
        rows, kv_lens = forward_batch.req_pool_indices[:batch_size], forward_batch.seq_lens[:batch_size]
        if mode.is_decode():
            return Step(batch_size, self.one_row_each(batch_size), 1, 1, kv_lens, rows)
        if mode.is_target_verify():
            return self._read_drafts(forward_batch.spec_info, kv_lens, rows)
        if mode.is_dllm_extend():
            refuse(f"the forward mode {mode.name}")
        qo_lens = forward_batch.extend_seq_lens[:batch_size]
        num_rows = forward_batch.positions.shape[0]
        host_lens = forward_batch.extend_seq_lens_cpu
        max_qo_len = num_rows if host_lens is None else int(max(host_lens))
        prefix_lens = forward_batch.extend_prefix_lens_cpu
        has_prefixes = prefix_lens is None or any(prefix_lens)
        return Step(
            num_rows,
            self._prefix_sum(qo_lens),
            qo_lens,
            max_qo_len,
            kv_lens,
            rows,
            has_prefixes=has_prefixes,
            prompts=self._all_prompts(batch_size) if self._is_deterministic else None,
        )

    def _all_prompts(self, batch_size: int) -> Tensor:
        """In extends all requests are prompts: rules.py refuses steps that mix them with decodes."""
        if batch_size > self._max_batch:
            return torch.ones(batch_size, dtype=torch.int32, device=self._device)
        return self._ones[:batch_size]

    def _read_drafts(self, spec_info: Any, prefix_lens: Tensor, rows: Tensor) -> Step:
        batch_size, draft_len = rows.shape[0], int(spec_info.draft_token_num)
        tree = None if is_chain(spec_info) else self.trees.of_step(batch_size, draft_len).visible
        qo_indptr = torch.arange(
            0, (batch_size + 1) * draft_len, draft_len, dtype=torch.int32, device=self._device
        )
        return Step(
            batch_size * draft_len, qo_indptr, draft_len, draft_len, prefix_lens + draft_len, rows, tree=tree
        )

    def _fill_spans(self, forward_batch: Any, step: Step) -> Spans:
        spans = self._spans
        if spans.max_rows < step.num_rows:  # no graph has this size
            if self._large_spans is None or self._large_spans.max_rows < step.num_rows:
                self._large_spans = Spans(2 * step.num_rows, self._device)
            spans = self._large_spans
        if is_uniform(forward_batch.forward_mode):  # may be inside a graph
            spans.clear(step.num_rows)
        else:
            spans.fill(compat.image_spans(forward_batch), step.qo_indptr, step.kv_lens)
        return spans

    def _prefix_sum(self, lens: Tensor) -> Tensor:
        batch_size = lens.shape[0]
        # a single prompt waits for this: the launch of a copy takes less time than the launch of a scan
        if batch_size == 1:
            self._one_qo_len.copy_(lens)
            return self._one_qo_indptr
        fits = batch_size <= self._max_batch
        indptr = (
            self._qo_indptr[: batch_size + 1]
            if fits
            else torch.zeros(batch_size + 1, dtype=torch.int32, device=self._device)
        )
        torch.cumsum(lens, dim=0, dtype=torch.int32, out=indptr[1:])
        return indptr


def is_uniform(mode: Any) -> bool:
    """Whether all requests of a step in this mode have the same number of rows, so that it may run as a
    captured graph of a fixed batch size.
    """
    return bool(mode.is_decode_or_idle() or mode.is_target_verify())


class StepPlanner:
    """Plans each step for the layers with one spec.

    Attributes:
        attention: what plans the steps. CUDA graphs hold it, so it is not replaced after a capture.
        of_trees: for steps that verify trees; None: there are no such steps.
        current: the Attention that holds this step's plan; None: there is no plan yet, or the model does not
            run these layers in this step.
        logits_soft_cap: argument of this step's runs.
        arguments: the variant's arguments in the runs of this step, without ALiBi slopes: each layer adds its
            own.
    """

    def __init__(
        self,
        spec: LayerSpec,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_batch: int,
        nodes_of_trees: int = 0,
    ) -> None:
        """
        Args:
            dtype: of the model.
            nodes_of_trees: tokens of the trees that are verified; 0: there are none.

        Raises:
            ValueError: these layers cannot be served, or not with trees.
        """
        self.spec = spec
        self.attention = attention_of(
            spec,
            dtype=dtype,
            device=device,
            max_rows=max_rows,
            max_batch=max_batch,
            batch_invariant=compat.deterministic(),
        )
        self.of_trees = (
            StepPlanner(tree_spec(spec), dtype, device, max_batch * nodes_of_trees, max_batch)
            if nodes_of_trees
            else None
        )
        self.current: Attention | None = None
        self.logits_soft_cap = self._soft_cap = spec.run_soft_cap
        self.arguments: dict[str, Tensor | int] | None = None
        self._causal, self._window_left = spec.visibility
        self._needs_variant = spec.needs_variant
        self._nodes_of_trees = nodes_of_trees
        self._large: Attention | None = None  # for steps beyond the bounds of `attention`

    def grow(self, max_rows: int, max_batch: int) -> None:
        """Makes room before anything is captured."""
        self.attention = self.attention.with_room(max_rows=max_rows, max_batch=max_batch)
        if self.of_trees is not None:
            self.of_trees.grow(max_batch * self._nodes_of_trees, max_batch)

    def plan(
        self, step: Step, req_to_token: Tensor, page_size: int, window_slots: WindowSlots | None
    ) -> Attention:
        """Plans a step for these layers, on the current stream.

        Args:
            req_to_token: int32 [requests, max_tokens], slots.
            page_size: tokens.
            window_slots: of a hybrid pool.
        """
        planner = self
        if step.tree is not None:
            assert self.of_trees is not None
            planner = self.of_trees
        spec = planner.spec
        table, tokens_before = page_table(spec, step, req_to_token, page_size, window_slots)
        self.current = planner._attention_for(step)
        self.logits_soft_cap = planner._soft_cap
        self.arguments = None
        if planner._needs_variant:
            self.arguments = variant_args_of(spec, spans=step.spans, items=step.items, tree=step.tree)
        view = BSRView(
            step.qo_indptr,
            table,
            causal=planner._causal,
            window_left=planner._window_left,
            kv_offsets=tokens_before if planner._needs_variant else None,
            prompts=step.prompts,
        )
        # layers add their slopes to runs, so plans under ALiBi do without arguments
        self.current.plan(view, variant_args=None if spec.has_alibi else self.arguments)
        return self.current

    def _attention_for(self, step: Step) -> Attention:
        batch_size = step.qo_indptr.shape[0] - 1
        if step.num_rows <= self.attention.max_rows and batch_size <= self.attention.max_batch:
            return self.attention
        large = self._large or self.attention
        if step.num_rows > large.max_rows or batch_size > large.max_batch:
            large = large.with_room(max_rows=2 * step.num_rows, max_batch=batch_size)
        self._large = large
        return large


# Tokens of a whole number of KV tiles of any kernel. In deterministic mode a row's KV tiles begin at the same
# tokens, whatever part of its prompt is cached.
_WHOLE_KV_TILES = 128


def page_table(
    spec: LayerSpec, step: Step, req_to_token: Tensor, page_size: int, window_slots: WindowSlots | None
) -> tuple[PageTable, Tensor | None]:
    """The page table of these layers, and the tokens of each request in front of it; None: no tokens."""
    if step.slots is not None:
        req_to_token = step.slots
    if spec.of_this_step:
        return PageTable.ragged(step.qo_indptr), None
    if spec.of_encoder:
        assert step.encoder_lens is not None
        return PageTable.token_slots(req_to_token, step.rows, step.encoder_lens, page_size), None
    if step.encoder_lens is not None:
        return decoder_page_table(req_to_token, step.rows, step.kv_lens, step.encoder_lens), None
    if not spec.in_window_pool:
        return PageTable.token_slots(req_to_token, step.rows, step.kv_lens, page_size), None
    assert window_slots is not None
    window = spec.chunk - 1 if spec.chunk else spec.window_left
    return window_page_table(
        req_to_token,
        step.rows,
        step.kv_lens,
        step.qo_lens,
        step.max_qo_len,
        window,
        window_slots.mapping,
        page_size,
        begins_at=_WHOLE_KV_TILES if compat.deterministic() else 1,
    )


def decoder_page_table(
    req_to_token: Tensor, rows: Tensor, kv_lens: Tensor, encoder_lens: Tensor
) -> PageTable:
    """The page table of an encoder-decoder model's decoder.

    In a request's row of req_to_token, SGLang keeps the decoder's tokens after the encoder's. They need not
    begin at a multiple of a page, so the table has pages of one token. May be captured in a CUDA graph.

    Args:
        req_to_token: int32 [requests, max_tokens].
        rows: int32 or int64 [batch], row of each request.
        kv_lens: int32 or int64 [batch], tokens of the decoder.
        encoder_lens: int32 or int64 [batch], tokens of the encoder.
    """
    max_tokens = req_to_token.shape[1]
    columns = encoder_lens[:, None] + torch.arange(max_tokens, device=rows.device)
    return PageTable.block_table(req_to_token[rows[:, None], columns.clamp_(max=max_tokens - 1)], kv_lens, 1)


class WindowSlots:
    """Slots in the numbering of a hybrid pool's window half.

    Such a pool has a second pool for the window's layers, with other slot numbers, which holds only the end
    of each request. Captured prefills read the slots at every replay, so the buffer keeps its address.
    """

    def __init__(self, pool: SWAKVPool, device: torch.device) -> None:
        self._pool = pool
        self._device = device

    def allocate(self, max_rows: int) -> None:
        """Makes the buffer, before anything is captured."""
        self._buffer = torch.zeros(max_rows, dtype=torch.int64, device=self._device)

    @property
    def mapping(self) -> Tensor:
        """int64 [slots of the full pool + 1], from slots of the full pool."""
        mapping: Tensor = self._pool.full_to_swa_index_mapping
        return mapping

    def holds(self, layer_id: int) -> bool:
        """Whether the window half has the keys and values of this layer."""
        return bool(self._pool.layers_mapping[layer_id][1])

    def translate(self, slots: Tensor) -> Tensor:
        """Where the new tokens of a step go. slots: int64 [rows], of the full pool."""
        count = slots.shape[0]
        if count > self._buffer.shape[0]:
            return self.mapping[slots]
        # a captured prefill writes its padding rows too: to slot 0, which no request has
        self._buffer[count:].zero_()
        return torch.index_select(self.mapping, 0, slots, out=self._buffer[:count])


def window_page_table(
    req_to_token: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    qo_lens: Tensor | int,
    max_qo_len: int,
    window_left: int,
    full_to_window: Tensor,
    page_size: int,
    begins_at: int = 1,
) -> tuple[PageTable, Tensor]:
    """The pages of the tokens that any query of a request can see, in the window pool's numbering.

    The table and its lengths leave out earlier tokens. A query's position counts from the end of its request,
    so neither the causal mask nor the window moves.

    Shapes depend only on host values: there is no synchronization, and a CUDA graph may capture it.

    Args:
        req_to_token: int32 [requests, max_tokens], slots of the full pool.
        rows: int32 or int64 [batch], row of each request in req_to_token.
        kv_lens: int32 or int64 [batch], tokens, the queries' own included.
        qo_lens: int32 or int64 [batch], or the one length that all have.
        max_qo_len: no entry of qo_lens is larger.
        window_left: tokens to the left of a query that it sees.
        full_to_window: int64 [slots of the full pool + 1], SGLang's mapping. Slots outside the window may map
            anywhere.
        page_size: tokens.
        begins_at: the table begins at a multiple of this number of tokens. Entries before the first page that
            a query sees repeat this page.

    Returns:
        The table, and int32 [batch]: the tokens of each request in front of it, for masks over positions.
    """
    max_tokens = req_to_token.shape[1]
    seen_page = (kv_lens - qo_lens - window_left).clamp_(min=0)
    if page_size > 1:
        seen_page = torch.div(seen_page, page_size, rounding_mode="floor")
    unit = lcm(page_size, begins_at)
    # unit - 1: the table may start before the window does
    visible = min(max_qo_len + window_left + unit - 1, max_tokens)
    pages_per_row = -(-visible // page_size)
    pages_of_row = torch.arange(pages_per_row, device=rows.device)
    if unit == page_size:
        first_page = seen_page
        columns = (first_page[:, None] + pages_of_row) * page_size
    else:
        pages_per_unit = unit // page_size
        first_page = torch.div(seen_page, pages_per_unit, rounding_mode="floor") * pages_per_unit
        columns = torch.maximum(first_page[:, None] + pages_of_row, seen_page[:, None]) * page_size
    slots = req_to_token[rows[:, None], columns.clamp_(max=max_tokens - 1)]
    pages = full_to_window[slots]
    if page_size > 1:
        pages = torch.div(pages, page_size, rounding_mode="floor")
    tokens_before = first_page * page_size
    return PageTable.block_table(pages.to(torch.int32), kv_lens - tokens_before, page_size), tokens_before.to(
        torch.int32
    )
