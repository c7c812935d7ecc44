"""Layers over caches with the other 16-bit type than the model (--dtype float16 --kv-cache-dtype bfloat16,
and vice versa).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm.v1", reason="needs vLLM")

from mixed_cases import MIXTURES
from vllm_layer import NUM_PAGES, PAGE, make_batch, make_builder, make_cache, make_impl, make_spec
from vllm_steps import check


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
@pytest.mark.parametrize("memory", ["NHD", "padded"])
def test_mixed_batch(dtypes: tuple[torch.dtype, torch.dtype], memory: str) -> None:
    dtype, kv_dtype = dtypes
    impl = make_impl(kv_cache_dtype=str(kv_dtype).removeprefix("torch."))
    batch, cache = make_batch([1, 1, 7, 40, 3], [33, 64, 23, 40, 100]), make_cache(memory, dtype=kv_dtype)
    model = SimpleNamespace(dtype=dtype, get_num_attention_heads=lambda config: 6)
    builder = make_builder([impl], make_spec(dtype=kv_dtype), model_config=model)
    (plan,) = builder.planned.values()
    assert (plan.attention.dtype, plan.attention.kv_dtype) == dtypes
    k, v = torch.randn(2, NUM_PAGES * PAGE, 2, 64).to(dtype)
    for slots in (
        torch.cat([slots[: len(slots) - n] for n, slots in zip(batch.query_lens, batch.slots, strict=True)]),
        batch.metadata.slot_mapping,
    ):
        impl.do_kv_cache_update(None, k[slots], v[slots], cache, slots)
    query = torch.randn(sum(batch.query_lens), 6, 64).to(dtype)
    output = torch.full_like(query, torch.nan)
    impl.forward(None, query, None, None, cache, builder.build(0, batch.metadata), output)
    check(output, query, batch, k.to(kv_dtype).double(), v.to(kv_dtype).double(), dtype=torch.bfloat16)
