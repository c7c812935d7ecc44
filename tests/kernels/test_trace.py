"""A step on a GPU in CUDA's own trace: only launches, no waits and no copies back."""

import pytest
import torch
from waits import traced

from attn_backend import Attention, BSRView, KVCache, PageTable, append_kv

STEPS = 100
LAYERS = 2
BATCH = 64


@pytest.mark.gpu
def test_a_hundred_decode_steps_neither_wait_nor_copy() -> None:
    attention = Attention(32, 8, 128, max_rows=BATCH, max_batch=BATCH)
    cache = KVCache.from_tensor(torch.randn(BATCH * 8, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda"))
    q = torch.randn(BATCH, 32, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(BATCH, 8, 128, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    table = torch.arange(BATCH * 8, dtype=torch.int32, device="cuda").view(BATCH, 8)
    kv_lens = torch.randint(1, 129, (BATCH,), dtype=torch.int32, device="cuda")
    slots = table[:, 0].long() * 16
    qo_indptr = torch.arange(BATCH + 1, dtype=torch.int32, device="cuda")

    def step() -> None:
        attention.plan(BSRView(qo_indptr, PageTable.block_table(table, kv_lens, 16)))
        for _ in range(LAYERS):
            append_kv(k, k, cache, slots)
            attention.run(q, cache, out=out)

    step()
    names, waits = traced(step, STEPS)
    assert sum(name in ("plan_kernel", "plan_forest_kernel") for name in names) == STEPS, (
        "the trace holds every plan"
    )
    assert not waits, waits[:5]
    assert not [name for name in names if "memcpy" in name.lower()]
