"""Tokens that sparse attention has selected for each query: their places in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .structure import INT32, INT32_OR_INT64, check_int, check_same_device, index_tensor, refuse, table_tensor


def selected_slots(
    indices: Tensor,
    block_table: Tensor | None = None,
    requests: Tensor | None = None,
    page_size: int = 1,
    *,
    page_stride: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The slots of selected tokens, as `BSRView.selected` takes them: those that there are, in the order of `indices`, and -1 behind them.

    A few torch operations on the current stream: no synchronisation; may be captured in a CUDA graph. One whose entry of the table is negative is left out.

    Args:
        indices: int32 [rows, topk]: for each row of Q the tokens of its request that it attends to, in any order; a negative one is none, wherever it stands.
        block_table: int32 [batch, max_pages]: page j of request i is block_table[i, j]. None: indices are slots.
        requests: int32 or int64 [rows], the request of each row; None, only where block_table is None or has a row of its own for each row of Q: row i.
        page_size: tokens of a page of block_table.
        page_stride: slots from one page to the next, at least page_size (`KVCache.page_stride`); None: page_size.
        out: int32 [rows, topk], written and returned; may be `indices` itself. None: a new tensor.

    Raises:
        ValueError: a tensor of the wrong dtype, shape, strides or device.
    """
    rows, topk = table_tensor("indices", indices, "[rows, topk]").shape
    check_int("page_size", page_size, 1)
    page_stride = page_size if page_stride is None else check_int("page_stride", page_stride, page_size)
    if out is None:
        out = indices.new_empty(rows, topk)
    elif table_tensor("out", out, "[rows, topk]").shape != indices.shape:
        refuse("out", out, f"of indices' shape {list(indices.shape)}")
    check_same_device("out", out, "indices", indices.device)
    slots = indices.long()
    if block_table is not None:
        slots = _through_table(slots, table_tensor("block_table", block_table, "[batch, max_pages]"), requests, page_size, page_stride)
    elif requests is not None:
        refuse("requests", requests, "None without a block_table")
    if topk == 0:
        return out
    # Each goes to the place that as many before it take; what is none goes to a column behind all of them.
    is_there = slots >= 0
    place = torch.where(is_there, is_there.cumsum(1) - 1, topk)
    packed = slots.new_full((rows, topk + 1), -1).scatter_(1, place, torch.where(is_there, slots, -1))
    return out.copy_(packed[:, :topk])


def _through_table(tokens: Tensor, block_table: Tensor, requests: Tensor | None, page_size: int, page_stride: int) -> Tensor:
    """int64 [rows, topk]: slots, -1 where there is no token."""
    rows = tokens.shape[0]
    check_same_device("block_table", block_table, "indices", tokens.device)
    if requests is None:
        if block_table.shape[0] != rows:
            refuse("requests", requests, f"an int32 or int64 tensor [rows = {rows}]: block_table has {block_table.shape[0]} rows")
        requests = torch.arange(rows, device=tokens.device)
    index_tensor("requests", requests, INT32_OR_INT64, "[rows]", rows)
    check_same_device("requests", requests, "indices", tokens.device)
    if block_table.numel() == 0:
        return torch.full_like(tokens, -1)
    column = tokens.clamp(min=0) // page_size
    pages = block_table[requests.long().clamp(0, block_table.shape[0] - 1)[:, None], column.clamp(max=block_table.shape[1] - 1)].long()
    is_there = (tokens >= 0) & (column < block_table.shape[1]) & (pages >= 0)
    return torch.where(is_there, pages * page_stride + tokens % page_size, -1)


def count_slots(slots: Tensor) -> Tensor:
    """int32 [rows]: the slots of each row that are none of -1."""
    return (table_tensor("slots", slots, "[rows, topk]") >= 0).sum(1, dtype=INT32[0])
