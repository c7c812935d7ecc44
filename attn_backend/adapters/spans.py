"""Spans of a prompt whose tokens see each other on both sides: images in prefix-LM models (Gemma 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Spans:
    """The span of each row of Q, in tensors that kernels read.

    The tensors keep their addresses, so captured graphs see every step's spans.

    Attributes:
        begin, end: int32 [max_rows], the tokens [begin, end) of the request's; equal for a row in no span.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._table = torch.zeros(2, max_rows, dtype=torch.int32, device=device)
        self.begin, self.end = self._table.unbind(0)
        self._is_clear = True

    @property
    def max_rows(self) -> int:
        return self._table.shape[1]

    def clear(self, num_rows: int | None = None) -> None:
        """None of the first rows is in a span; by default no row at all. May be captured."""
        self._table[:, :num_rows].zero_()

    def fill(self, spans: Sequence[tuple[int, int, int]], qo_indptr: Tensor, kv_lens: Tensor) -> None:
        """
        Sets the span of each row of a step. Does not wait for the device.

        Args:
            spans: (request, first token, last token), which do not overlap in a request.
            qo_indptr: int32 or int64 [batch + 1].
            kv_lens: int32 or int64 [batch], tokens of each request, with the step's tokens.
        """
        spans = [span for span in spans if span[1] < span[2]]
        if not spans:
            if not self._is_clear:
                self.clear()
                self._is_clear = True
            return
        device = self._table.device
        on_host = torch.tensor(spans, dtype=torch.int64, pin_memory=device.type == "cuda")
        request, first, last = on_host.to(device, non_blocking=True).unbind(1)
        end_row = qo_indptr[request + 1]
        row_of_token_0 = end_row - kv_lens[request]
        begin_row = torch.maximum(row_of_token_0 + first, qo_indptr[request])
        end_row = torch.minimum(row_of_token_0 + last + 1, end_row)
        rows = torch.arange(self._table.shape[1], device=device)
        inside = (rows >= begin_row[:, None]) & (rows < end_row[:, None])
        torch.sum(inside * first[:, None], dim=0, dtype=torch.int32, out=self.begin)
        torch.sum(inside * (last[:, None] + 1), dim=0, dtype=torch.int32, out=self.end)
        self._is_clear = False
