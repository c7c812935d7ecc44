"""A small batch, for tests of concurrent use of an Attention."""

from __future__ import annotations

import torch
from attention_kernels import kernel_of
from torch import Tensor

from attn_backend import (
    Attention,
    BSRView,
    KVCache,
    PageTable,
)

ROWS, QO_HEADS, KV_HEADS, HEAD_DIM, PAGES, PAGE_SIZE = 4, 4, 2, 64, 8, 16


class Problem:
    def __init__(self, device: torch.device, **options: object) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).bfloat16().to(device)

        self.attention = Attention(
            QO_HEADS,
            KV_HEADS,
            HEAD_DIM,
            device=device,
            max_rows=8,
            max_batch=4,
            kernel=kernel_of(device),
            **options,
        )  # type: ignore[arg-type]
        self.q = random(ROWS, QO_HEADS, HEAD_DIM)
        self.kv = KVCache.from_pair(
            random(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM), random(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        )
        self.qo_indptr = torch.arange(ROWS + 1, dtype=torch.int32, device=device)
        self.block_table = torch.arange(ROWS, dtype=torch.int32, device=device)[:, None].contiguous()
        self.kv_lens = torch.full((ROWS,), PAGE_SIZE, dtype=torch.int32, device=device)
        self.view = BSRView(self.qo_indptr, PageTable.block_table(self.block_table, self.kv_lens, PAGE_SIZE))
        self.logits = torch.randn(3, 50, generator=generator).to(device)
        self.probs = self.logits.softmax(-1)

    def run(self) -> Tensor:
        self.attention.plan(self.view)
        return self.attention.run(self.q, self.kv)
