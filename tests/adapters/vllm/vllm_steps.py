"""Steps of a layer as vLLM runs it, compared with float64 attention."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.v1", reason="needs vLLM")
from vllm_layer import (
    NUM_PAGES,
    PAGE,
    Batch,
)

from attn_backend.adapters.vllm.attention import AttnImpl
from attn_backend.adapters.vllm.metadata import (
    AttnMetadata,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


# two decodes, a chunk of a prefill, a whole prefill, a speculative verification
MIXED = ([1, 1, 7, 40, 3], [33, 64, 23, 40, 100])


def fill_cache(cache: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Random K and V for all tokens of the batch; tokens before its queries are already in the cache.

    Returns them as slots [pages * PAGE, heads, head_size].
    """
    head_size = cache.shape[3] // 2
    k, v = (
        torch.full((NUM_PAGES * PAGE, cache.shape[1], head_size), torch.nan, dtype=cache.dtype)
        for _ in range(2)
    )
    for query_len, slots in zip(batch.query_lens, batch.slots, strict=True):
        k[slots], v[slots] = torch.randn(2, len(slots), cache.shape[1], head_size).to(cache.dtype)
        old = slots[: len(slots) - query_len]
        cache[old // PAGE, :, old % PAGE] = torch.cat([k[old], v[old]], dim=-1)
    return k, v


def run_layer(
    impl: AttnImpl,
    metadata: AttnMetadata,
    batch: Batch,
    cache: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    update: bool = True,
    padding: int = 0,
) -> tuple[Tensor, Tensor]:
    """One layer as vLLM runs it. Returns the queries and the output, both followed by `padding` rows; the
    output was full of NaN.
    """
    tokens = sum(batch.query_lens)
    query = torch.randn(tokens + padding, impl.num_heads, impl.head_size).to(cache.dtype)
    output = torch.full_like(query, torch.nan)
    if update:
        key, value = (
            torch.cat([x[batch.new_slots], torch.zeros(padding, *x.shape[1:], dtype=x.dtype)]) for x in (k, v)
        )
        impl.do_kv_cache_update(None, key, value, cache, metadata.slot_mapping)
    result = impl.forward(None, query, None, None, cache, metadata, output)
    assert result is output
    return query, output


def check(
    output: Tensor,
    query: Tensor,
    batch: Batch,
    k: Tensor,
    v: Tensor,
    *,
    dtype: torch.dtype | None = None,
    **mask: Any,
) -> None:
    """dtype: the dtype to which Q was rounded; None: Q's own dtype."""
    tokens = sum(batch.query_lens)
    expected, _ = oracle.paged_attention(query[:tokens], k, v, batch.query_lens, batch.slots, **mask)
    error = (output[:tokens].double() - expected).norm() / expected.norm()
    assert error <= TOLERANCE[dtype or query.dtype]
    assert output[tokens:].isnan().all()  # padding rows are left alone
