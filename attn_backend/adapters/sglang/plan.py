"""Plans of a step: page tables, and the Attention that layers with one spec share."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from attn_backend import Attention, BSRView, PageTable
from attn_backend.adapters.layers import LayerSpec, attention_of, layer_visibility, variant_args_of

from . import compat
from .batch import Step
from .support import tree_spec


class StepPlanner:
    """Plans each step for the layers with one spec.

    Attributes:
        attention: graphs hold it, so it is not replaced after a capture.
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
        self.logits_soft_cap = spec.run_soft_cap
        self.arguments: dict[str, Tensor | int] | None = None
        self._needs_variant = spec.needs_variant
        self._nodes_of_trees = nodes_of_trees
        self._large: Attention | None = None  # for steps beyond the bounds of `attention`

    def grow(self, max_rows: int, max_batch: int) -> None:
        """Makes room before anything is captured."""
        self.attention = self.attention.with_room(max_rows=max_rows, max_batch=max_batch)
        if self.of_trees is not None:
            self.of_trees.grow(max_batch * self._nodes_of_trees, max_batch)

    def plan(
        self, batch: Step, req_to_token: Tensor, page_size: int, window_slots: WindowSlots | None
    ) -> Attention:
        """Plans a step for these layers, on the current stream.

        Args:
            req_to_token: int32 [requests, max_tokens], slots.
            page_size: tokens.
            window_slots: of a hybrid pool.
        """
        planned = self
        if batch.tree is not None:
            assert self.of_trees is not None
            planned = self.of_trees
        spec = planned.spec
        table, tokens_before = page_table(spec, batch, req_to_token, page_size, window_slots)
        self.current = planned._attention_for(batch)
        self.logits_soft_cap = spec.run_soft_cap
        self.arguments = variant_args_of(spec, spans=batch.spans, items=batch.items, tree=batch.tree)
        causal, window = layer_visibility(spec, causal=True)
        view = BSRView(
            batch.qo_indptr,
            table,
            causal=causal,
            window_left=window,
            kv_offsets=tokens_before if planned._needs_variant else None,
        )
        self.current.plan(view, variant_args=None if spec.has_alibi else self.arguments)
        return self.current

    def _attention_for(self, batch: Step) -> Attention:
        batch_size = batch.qo_indptr.shape[0] - 1
        if batch.num_rows <= self.attention.max_rows and batch_size <= self.attention.max_batch:
            return self.attention
        large = self._large or self.attention
        if batch.num_rows > large.max_rows or batch_size > large.max_batch:
            large = large.with_room(max_rows=2 * batch.num_rows, max_batch=batch_size)
        self._large = large
        return large


def page_table(
    spec: LayerSpec, batch: Step, req_to_token: Tensor, page_size: int, window_slots: WindowSlots | None
) -> tuple[PageTable, Tensor | None]:
    """The page table of these layers, and the tokens of each request in front of it; None: no tokens."""
    if batch.slots is not None:
        req_to_token = batch.slots
    if spec.of_this_step:
        return PageTable.ragged(batch.qo_indptr), None
    if spec.of_encoder:
        assert batch.encoder_lens is not None
        return PageTable.token_slots(req_to_token, batch.rows, batch.encoder_lens, page_size), None
    if batch.encoder_lens is not None:
        return decoder_page_table(req_to_token, batch.rows, batch.kv_lens, batch.encoder_lens), None
    if not spec.in_window_pool:
        return PageTable.token_slots(req_to_token, batch.rows, batch.kv_lens, page_size), None
    assert window_slots is not None
    window = spec.chunk - 1 if spec.chunk else spec.window_left
    return window_page_table(
        req_to_token,
        batch.rows,
        batch.kv_lens,
        batch.qo_lens,
        batch.max_qo_len,
        window,
        window_slots.mapping,
        page_size,
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

    Returns:
        The table, and int32 [batch]: the tokens of each request in front of it, for masks over positions.
    """
    max_tokens = req_to_token.shape[1]
    first_page = (kv_lens - qo_lens - window_left).clamp_(min=0)
    if page_size > 1:
        first_page = torch.div(first_page, page_size, rounding_mode="floor")
    # page_size - 1: the first page may start before the window does
    visible = min(max_qo_len + window_left + page_size - 1, max_tokens)
    pages_per_row = -(-visible // page_size)
    columns = (first_page[:, None] + torch.arange(pages_per_row, device=rows.device)) * page_size
    slots = req_to_token[rows[:, None], columns.clamp_(max=max_tokens - 1)]
    pages = full_to_window[slots]
    if page_size > 1:
        pages = torch.div(pages, page_size, rounding_mode="floor")
    tokens_before = first_page * page_size
    return PageTable.block_table(pages.to(torch.int32), kv_lens - tokens_before, page_size), tokens_before.to(
        torch.int32
    )
