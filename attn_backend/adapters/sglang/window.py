"""Hybrid sliding-window pools: the window's layers have a pool of their own, with other slot numbers, which
holds only the end of each request.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from attn_backend import PageTable


class WindowSlots:
    """Slots in the numbering of a hybrid pool's window half.

    Captured prefills read them at every replay, so they stay where they are.
    """

    def __init__(self, pool: SWAKVPool, device: torch.device) -> None:
        self._pool = pool
        self._device = device

    def allocate(self, max_rows: int) -> None:
        """Makes the buffer, before anything is captured."""
        self._buffer = torch.zeros(max_rows, dtype=torch.int64, device=self._device)

    @property
    def mapping(self) -> Tensor:
        """int64 [slots of the full pool + 1], from those of the full pool."""
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

    What lies before them is left out of the table and of its lengths: a query's position counts from the end
    of its request, so neither the causal mask nor the window moves.

    Shapes depend on host values only: no synchronisation, and it may be captured in a CUDA graph.

    Args:
        req_to_token: int32 [requests, max_tokens], slots of the full pool.
        rows: int32 or int64 [batch], row of each request in req_to_token.
        kv_lens: int32 or int64 [batch], tokens, the queries' own included.
        qo_lens: int32 or int64 [batch], or the one length that all have.
        max_qo_len: no entry of qo_lens is larger.
        window_left: tokens to the left of a query that it sees.
        full_to_window: int64 [slots of the full pool + 1], the engine's mapping. Slots outside the window may
            map anywhere.
        page_size: tokens.

    Returns:
        The table, and int32 [batch]: the tokens of each request in front of it, which masks over positions
            must know of.
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
