"""Which layers of a model can share a plan."""

from __future__ import annotations

from typing import NamedTuple


class PlanKey(NamedTuple):
    """Layers with the same key share a plan: the same heads over the same tokens.

    Attributes:
        window_left: tokens to the left of the query that stay visible; -1: all.
        causal: whether a query sees no token behind its own.
        in_window_pool: whether K and V lie in the sliding-window half of SGLang's hybrid pool, which numbers its slots differently.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    window_left: int
    causal: bool = True
    in_window_pool: bool = False
