"""Which layers share a plan."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backend.adapters.options import use_cascade
from attn_backend.kernels.attention import Attention


class PlanKey(NamedTuple):
    """Layers with the same key share a plan: the same heads over the same tokens."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    window_left: int  # tokens to the left of the query that stay visible; -1: all
    causal: bool = True  # of SGLang's layers; vLLM says it of a batch
    in_window_pool: bool = False  # K and V lie in the sliding-window half of SGLang's hybrid pool, which numbers its slots differently

    def make_attention(self, dtype: torch.dtype, device: torch.device | str, max_rows: int, max_batch: int, batch_invariant: bool) -> Attention:
        return Attention(
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            dtype=dtype,
            device=device,
            max_rows=max_rows,
            max_batch=max_batch,
            cascade=use_cascade(),
            batch_invariant=batch_invariant,
        )
