"""BSR views and the compositions made of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .page_table import PageTable
from .structure import INT32_OR_INT64, check_same_device, index_tensor, refuse


@dataclass(frozen=True, eq=False)
class BSRView:
    """Rows of Q x pages of KV: the rows qo_indptr[i]:qo_indptr[i+1] attend to the pages of request i.

    Row j of a request with n rows stands at position kv_len - n + j (below 0 for a query that is longer than its KV: such a row sees nothing if it is causal).

    Args:
        qo_indptr: int32 or int64 [batch + 1], prefix sum of query lengths.
        table: the pages of each request.
        causal: a row sees the tokens up to its position; else all.
        window_left: a row sees no token more than this many tokens before its position; -1: no limit.

    Raises:
        ValueError: an argument of the wrong structure, or on another device than the table.
    """

    qo_indptr: Tensor
    table: PageTable
    causal: bool = True
    window_left: int = -1

    @property
    def batch_size(self) -> int:
        """Requests."""
        return self.qo_indptr.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.qo_indptr.device

    def __post_init__(self) -> None:
        if not isinstance(self.table, PageTable):
            refuse("table", self.table, "a PageTable")
        qo_indptr = index_tensor("qo_indptr", self.qo_indptr, INT32_OR_INT64, "[batch + 1]", self.table.batch_size + 1)
        check_same_device("qo_indptr", qo_indptr, "the page table", self.table.device)
        if not isinstance(self.causal, bool):
            refuse("causal", self.causal, "True or False")
        if not isinstance(self.window_left, int) or self.window_left < -1:
            refuse("window_left", self.window_left, "an int: tokens, or -1 for no limit")


@dataclass(frozen=True, eq=False)
class Composition:
    """Levels over the same rows of Q that partition the (row, token) pairs; the result is the ⊕ of the levels' attention states.

    Raises:
        ValueError: no level, something that is no BSRView, or levels on different devices.
    """

    levels: tuple[BSRView, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.levels, tuple) or not self.levels or not all(isinstance(level, BSRView) for level in self.levels):
            refuse("levels", self.levels, "a tuple of at least one BSRView")
        for i, level in enumerate(self.levels):
            check_same_device(f"levels[{i}].qo_indptr", level.qo_indptr, "levels[0]", self.levels[0].device)
