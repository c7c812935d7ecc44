"""Requests below a tree of prefixes on a GPU, as an engine serves them."""

from __future__ import annotations

import numpy
import torch
from forests import Batch
from gate_problem import HEAD_DIM, KV_HEADS, QO_HEADS

from attn_backend import Attention, BSRView, KVCache, PageTable

PAGE_SIZE = 16


class Served:
    """64 requests below a tree of prefixes, as block tables whose tensors never move."""

    def __init__(self, cascade: object = True, num_requests: int = 64) -> None:
        self.rng = numpy.random.default_rng(0)
        pages = [[0, 1, 2, 3, *([4, 5, 6] if i % 2 else [7, 8]), 20 + i] for i in range(num_requests)]
        self.batch = Batch(
            PAGE_SIZE, [1] * num_requests, [PAGE_SIZE * len(own) for own in pages], pages, 20 + num_requests
        )
        width = max(map(len, pages))
        table = torch.zeros(num_requests, width, dtype=torch.int32)
        for row, own in zip(table, pages, strict=True):
            row[: len(own)] = torch.tensor(own)
        self.table = table.cuda()
        self.kv_lens = torch.tensor(self.batch.kv_lens, dtype=torch.int32, device="cuda")
        self.qo_indptr = torch.arange(num_requests + 1, dtype=torch.int32, device="cuda")
        self.attention = Attention(
            QO_HEADS, KV_HEADS, HEAD_DIM, max_rows=num_requests, max_batch=num_requests, cascade=cascade
        )  # type: ignore[arg-type]
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (self.batch.num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.kv = KVCache.from_pair(
            *(torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(2))
        )
        self.q = torch.randn(num_requests, QO_HEADS, HEAD_DIM, device="cuda", generator=generator).bfloat16()
        self.view = BSRView(self.qo_indptr, PageTable.block_table(self.table, self.kv_lens, PAGE_SIZE))

    def run(self) -> torch.Tensor:
        self.attention.plan(self.view)
        return self.attention.run(self.q, self.kv)
