"""Slots of tokens that sparse attention has selected."""

from __future__ import annotations

from torch import Tensor

from .structure import INT32, table_tensor


def count_slots(slots: Tensor) -> Tensor:
    """int32 [rows]: the slots of each row that are none of -1."""
    return (table_tensor("slots", slots, "[rows, topk]") >= 0).sum(1, dtype=INT32[0])
