"""Trees of draft tokens, and drafts with branches, inside a small engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")
from fake_engine import FakeEngine
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang_steps import check
from torch import Tensor

from attn_backend.adapters.sglang.backend import SGLangAttentionBackend
from attn_backend.adapters.sglang.drafts import DraftStepsBackend

NODES = 7


TREES = {
    "spec.speculative_algorithm": "EAGLE",
    "spec.speculative_eagle_topk": 3,
    "spec.speculative_num_draft_tokens": NODES,
}


def random_tree(generator: torch.Generator) -> Tensor:
    """bool [NODES, NODES]: a node sees itself and those above it; each comes after its parent."""
    visible = torch.eye(NODES, dtype=torch.bool)
    for node in range(1, NODES):
        visible[node] |= visible[int(torch.randint(node, (), generator=generator))]
    return visible


def without_prefixes(trees: list[Tensor]) -> Tensor:
    return torch.cat([tree.flatten() for tree in trees])


def eagle(mask: Tensor) -> EagleVerifyInput:
    fields: dict[str, Any] = dict.fromkeys(
        [
            "draft_token",
            "positions",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "retrieve_cum_len",
        ]
    )
    return EagleVerifyInput(
        **fields,
        custom_mask=mask,
        spec_steps=3,
        topk=3,
        draft_token_num=NODES,
        capture_hidden_mode=None,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def verify(
    engine: FakeEngine,
    backend: SGLangAttentionBackend,
    requests: list[int],
    trees: list[Tensor],
    spec_info: object,
) -> None:
    """One verifying step through all layers."""
    new_lens = [NODES] * len(requests)
    batch = engine.batch(ForwardMode.TARGET_VERIFY, requests, new_lens, spec_info)
    backend.init_forward_metadata(batch)
    for layer_id, layer in enumerate(engine.model):
        q, k, v = engine.tensors(batch, layer_id)
        engine.remember(requests, new_lens, layer_id, k, v)
        check(
            backend.forward(q, k, v, layer, batch), engine.reference(requests, new_lens, layer_id, q, trees)
        )
    engine.advance(requests, new_lens)


def clear_padding(engine: FakeEngine) -> None:
    """Padded requests write slot 0 and read the slots in row 0 of the table."""
    for layer_id in range(len(engine.model)):
        for buffer in engine.buffers(layer_id):
            buffer[: engine.page_size] = 0.0
    engine.req_to_token_pool.req_to_token[0] = 0


def static_batch(mode: ForwardMode, size: int, rows: int, device: str, spec_info: object) -> SimpleNamespace:
    """The tensors of a captured graph: their addresses do not change."""
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=size,
        req_pool_indices=torch.zeros(size, dtype=torch.int64, device=device),
        seq_lens=torch.ones(size, dtype=torch.int64, device=device),
        out_cache_loc=torch.zeros(rows, dtype=torch.int64, device=device),
        spec_info=spec_info,
        _attn_output=None,
    )


def fill_static(static: SimpleNamespace, batch: SimpleNamespace, num_requests: int, rows: int) -> None:
    for name, count, padding in (
        ("req_pool_indices", num_requests, 0),
        ("seq_lens", num_requests, 1),
        ("out_cache_loc", rows, 0),
    ):
        getattr(static, name).fill_(padding)[:count] = getattr(batch, name)


TOPK, STEPS = 3, 4


class Draft:
    """The draft of several requests: each has branches, in the layout of SGLang's allocator."""

    def __init__(self, engine: FakeEngine, requests: list[int], topk: int) -> None:
        self.engine, self.requests, self.topk = engine, requests, topk
        page, table = engine.page_size, engine.req_to_token_pool.req_to_token
        slots = []
        for request in (engine.requests[i] for i in requests):
            in_page = request.length % page
            branch_len = -(-(in_page + STEPS) // page) * page
            for branch in range(topk):
                begin = request.length - in_page + branch * branch_len
                slots.append(table[request.row, begin + in_page : begin + in_page + STEPS])
                for layer_id in range(len(engine.model)):  # the end of the prefix, again
                    for buffer in engine.buffers(layer_id):
                        source = table[request.row, request.length - in_page : request.length].long()
                        buffer[table[request.row, begin : begin + in_page].long()] = buffer[source]
        self.out_cache_loc = torch.cat(slots).long()
        self.k = [
            [[engine.requests[i].k[layer] for layer in range(len(engine.model))] for _ in range(topk)]
            for i in requests
        ]
        self.v = [
            [[engine.requests[i].v[layer] for layer in range(len(engine.model))] for _ in range(topk)]
            for i in requests
        ]

    def batch(self) -> SimpleNamespace:
        lens = torch.tensor([self.engine.requests[i].length for i in self.requests])
        rows = torch.tensor([self.engine.requests[i].row for i in self.requests])
        device = self.engine.device
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(self.requests),
            req_pool_indices=rows.to(device),
            seq_lens=lens.to(device),
            out_cache_loc=self.out_cache_loc,
            positions=lens.repeat_interleave(self.topk).to(device),
            spec_info=None,
            _attn_output=None,
        )

    def reference(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """In float64. Each branch is a separate request of one token."""
        outputs = []
        for row in range(q.shape[0]):
            place, branch = divmod(row, self.topk)
            keys, values = self.k[place][branch], self.v[place][branch]
            new_k, new_v = (self.engine.held(x[row : row + 1].cpu(), None) for x in (k, v))
            keys[layer_id] = torch.cat([keys[layer_id], new_k])
            values[layer_id] = torch.cat([values[layer_id], new_v])
            alone = self.engine.requests[self.requests[place]]
            kept = alone.k[layer_id], alone.v[layer_id]
            alone.k[layer_id], alone.v[layer_id] = keys[layer_id], values[layer_id]
            outputs.append(self.engine.reference([self.requests[place]], [1], layer_id, q[row : row + 1]))
            alone.k[layer_id], alone.v[layer_id] = kept
        return torch.cat(outputs)


def draft(engine: FakeEngine, backend: DraftStepsBackend, requests: list[int]) -> None:
    drafted = Draft(engine, requests, backend.topk)
    batch = drafted.batch()
    backend.init_forward_metadata(batch)  # all steps, before the first
    of_steps = per_step_draft_out_cache_loc(batch.out_cache_loc, len(requests), backend.topk, STEPS)
    for i, attention in enumerate(backend.attn_backends):
        batch.out_cache_loc = of_steps[i]
        for layer_id, layer in enumerate(engine.model):
            q, k, v = engine.tensors(batch, layer_id)
            expected = drafted.reference(layer_id, q, k, v)
            check(attention.forward(q, k, v, layer, batch), expected)
        batch.positions += 1
