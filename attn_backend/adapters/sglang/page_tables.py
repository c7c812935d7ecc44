"""The page table of each kind of layer, in a step."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backend import PageTable
from attn_backend.adapters.plan_key import PlanKey

from .batch import Batch
from .window import WindowSlots, window_page_table


def page_table(
    key: PlanKey, batch: Batch, req_to_token: Tensor, page_size: int, window_slots: WindowSlots | None
) -> tuple[PageTable, Tensor | None]:
    """The tokens of each request, and how many are in front of the table; None: none."""
    if batch.slots is not None:
        req_to_token = batch.slots
    if key.of_this_step:
        return PageTable.ragged(batch.qo_indptr), None
    if key.of_encoder:
        assert batch.encoder_lens is not None
        return PageTable.token_slots(req_to_token, batch.rows, batch.encoder_lens, page_size), None
    if batch.encoder_lens is not None:
        return _decoder_page_table(req_to_token, batch.rows, batch.kv_lens, batch.encoder_lens), None
    if not key.in_window_pool:
        return PageTable.token_slots(req_to_token, batch.rows, batch.kv_lens, page_size), None
    assert window_slots is not None
    window = key.chunk - 1 if key.chunk else key.window_left
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


def _decoder_page_table(
    req_to_token: Tensor, rows: Tensor, kv_lens: Tensor, encoder_lens: Tensor
) -> PageTable:
    """The tokens of an encoder-decoder model's decoder: SGLang keeps the encoder's in front of them in a
    request's row of req_to_token.

    In pages of one token: they do not begin at a multiple of a page. May be captured in a CUDA graph.

    Args:
        req_to_token: int32 [requests, max_tokens].
        rows: int32 or int64 [batch], row of each request.
        kv_lens: int32 or int64 [batch], tokens of the decoder.
        encoder_lens: int32 or int64 [batch], tokens of the encoder.
    """
    max_tokens = req_to_token.shape[1]
    columns = encoder_lens[:, None] + torch.arange(max_tokens, device=rows.device)
    return PageTable.block_table(req_to_token[rows[:, None], columns.clamp_(max=max_tokens - 1)], kv_lens, 1)
