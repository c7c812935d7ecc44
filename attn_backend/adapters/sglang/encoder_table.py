"""Encoder-decoder models: SGLang keeps the encoder's tokens in front of the decoder's in a request's row of req_to_token."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backend import PageTable


def decoder_page_table(req_to_token: Tensor, rows: Tensor, kv_lens: Tensor, encoder_lens: Tensor) -> PageTable:
    """The decoder's own tokens, in pages of one token: where they begin is no multiple of a page. May be captured in a CUDA graph.

    Args:
        req_to_token: int32 [requests, max_tokens].
        rows: int32 or int64 [batch], row of each request.
        kv_lens: int32 or int64 [batch], tokens of the decoder.
        encoder_lens: int32 or int64 [batch], tokens of the encoder.
    """
    max_tokens = req_to_token.shape[1]
    columns = encoder_lens[:, None] + torch.arange(max_tokens, device=rows.device)
    return PageTable.block_table(req_to_token[rows[:, None], columns.clamp_(max=max_tokens - 1)], kv_lens, 1)
