"""Queries of prompts over an e4m3 cache, rounded to its type: kernels then multiply them by K as it lies,
instead of widening K and V for each row tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backend.adapters.float8_queries import multiplies_float8
from attn_backend.adapters.options import use_fp8_queries
from attn_backend.adapters.plan_key import PlanKey
from attn_backend.kernels.append import append_rounded
from attn_backend.metadata import KVCache

from . import compat


def rounds_queries(key: PlanKey, device: torch.device) -> bool:
    """Whether the queries of extends get the cache's type in these layers.

    Those of decodes and of drafts that are verified never do: they wait for bytes.

    All extends of a server do or none does: SGLang replays what it captured of one as another, and has
    decodes among prompts. So none does under --enable-deterministic-inference, where a token's bits must not
    depend on the prompts beside it.
    """
    if not use_fp8_queries() or compat.deterministic() or key.head_dim_v is not None:
        return False
    return multiplies_float8(key.kv_dtype, key.head_dim, device)


class QueryRounder:
    """Rounds queries as append_kv rounds K, in one launch that reads them where they are: in the projection's
    output.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        """Makes the buffer, before anything is captured."""
        self._all_slots = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._slots = self._all_slots[:0]  # of the last call: layers of a step have the same rows

    def round(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """q: [rows, num_qo_heads, head_dim].

        Returns the nearest numbers of dtype, a float8. What is beyond its largest number becomes that one.
        """
        num_rows = q.shape[0]
        if num_rows != self._slots.shape[0]:
            fits = num_rows <= self._all_slots.shape[0]
            self._slots = (
                self._all_slots[:num_rows]
                if fits
                else torch.arange(num_rows, dtype=torch.int32, device=q.device)
            )
        rounded = torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        pages = rounded.unsqueeze(1)  # of one token: a row
        append_rounded(q, None, KVCache.as_given(pages, pages), self._slots)
        return rounded
