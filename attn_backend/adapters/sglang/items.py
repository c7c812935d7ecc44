"""Multi-item scoring (--enable-mis): a prompt, followed by items between delimiters; the items do not see
each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALL = 2**30  # a prompt so long that nothing follows it


class Items(NamedTuple):
    """What the variant multi_item_scoring is given.

    Attributes:
        prefix_len: int32 [batch], tokens of each prompt.
        token_pos_in_items: uint16 [batch, longest part after a prompt].
    """

    prefix_len: Tensor
    token_pos_in_items: Tensor


def items_of(forward_batch: Any, batch_size: int, device: torch.device) -> Items:
    """The items of a step.

    Also moves the positions of their tokens, as SGLang has its FlashInfer backend do: each item continues the
    prompt.

    Lengths and delimiters are on the host, so nothing waits for the device.

    Args:
        forward_batch: of SGLang; `multi_item_delimiter_indices` has the places of each request's delimiters
            among its new tokens, or is None.
    """
    delimiters = forward_batch.multi_item_delimiter_indices
    if delimiters is None or not forward_batch.forward_mode.is_extend():
        return Items(
            torch.full((batch_size,), _ALL, dtype=torch.int32, device=device),
            torch.zeros(batch_size, 1, dtype=torch.uint16, device=device),
        )
    lens = forward_batch.extend_seq_lens_cpu
    prefixes = forward_batch.extend_prefix_lens_cpu or [0] * batch_size
    prefix_len, in_items, moved = [], [], []
    begin = 0
    for new_len, cached, places in zip(lens, prefixes, delimiters, strict=True):
        first = int(places[0]) if len(places) else new_len
        offsets = torch.arange(new_len - first)
        last_delimiter = (
            places[(torch.searchsorted(places - first, offsets, right=True) - 1).clamp(min=0)] - first
            if len(places)
            else offsets
        )
        in_item = offsets - last_delimiter
        prefix_len.append(cached + first if len(places) else _ALL)
        in_items.append(in_item)
        moved.append((begin + first, begin + new_len, cached + first - 1 + in_item))
        begin += new_len
    longest = max(1, *(len(in_item) for in_item in in_items))
    table = torch.zeros(batch_size, longest, dtype=torch.uint16)
    for row, in_item in zip(table, in_items, strict=True):
        row[: len(in_item)] = in_item.to(torch.uint16)
    for start, end, positions in moved:
        forward_batch.positions[start:end] = positions.to(device, non_blocking=True)
    return Items(
        torch.tensor(prefix_len, dtype=torch.int32).to(device, non_blocking=True),
        table.to(device, non_blocking=True),
    )
