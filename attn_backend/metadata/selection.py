"""Slots of tokens that sparse attention has selected."""

from __future__ import annotations

from torch import Tensor

from .structure import INT32, table_tensor


def count_slots(slots: Tensor) -> Tensor:
    """int32 [rows]: how many slots of each row are not negative."""
    return (table_tensor("slots", slots, "[rows, topk]") >= 0).sum(1, dtype=INT32[0])
