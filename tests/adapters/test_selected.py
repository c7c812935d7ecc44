"""SelectedAttention: rows attend to selected tokens, layer after layer, compared with float64 attention; on a
GPU also from captured graphs.
"""

from __future__ import annotations

import latent_cases
import oracle
import pytest
import torch
from torch import Tensor

from attn_backend import KVCache, append_mla_kv
from attn_backend.adapters import selected
from attn_backend.adapters.selected import SelectedAttention, count_visible

SCALE = 192**-0.5
PAGE, NUM_PAGES, TOPK = 16, 40, 24
TOLERANCE = {"bf16": 5e-3, "e4m3": 1e-2, "latent": 1e-2}


class Step:
    """Requests whose last tokens are rows of Q, and an indexer's selection for each row: all visible tokens,
    at most TOPK.
    """

    def __init__(
        self,
        query_lens: list[int],
        kv_lens: list[int],
        device: torch.device,
        *,
        seed: int = 0,
        padding: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        pages = torch.randperm(NUM_PAGES, generator=self.generator)[
            : NUM_PAGES // len(kv_lens) * len(kv_lens)
        ]
        self.block_table = pages.view(len(kv_lens), -1).int().to(device)
        requests = [request for request, query_len in enumerate(query_lens) for _ in range(query_len)]
        self.seen = [
            kv_lens[i] - query_lens[i] + row + 1 for i in range(len(kv_lens)) for row in range(query_lens[i])
        ]
        self.requests = torch.tensor(requests + [0] * padding, dtype=torch.int32, device=device)
        self.qo_indptr = torch.tensor([0, *query_lens], dtype=torch.int32, device=device).cumsum(
            0, dtype=torch.int32
        )
        self.kv_lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
        self.device = device

    def seen_lens(self) -> Tensor:
        return count_visible(self.requests.shape[0], self.requests, self.qo_indptr, self.kv_lens)

    def select(self, is_complete: bool = True) -> Tensor:
        """int32 [rows, TOPK]: a layer's selection, with empty entries anywhere between. is_complete: each row
        has as many tokens as allowed. Otherwise fewer, perhaps none, mixed with tokens after the row's
        position.
        """
        indices = torch.full((self.requests.shape[0], TOPK), -1, dtype=torch.int32)
        for row, seen in enumerate(self.seen):
            count = (
                min(seen, TOPK)
                if is_complete
                else int(torch.randint(min(seen, TOPK) + 1, (), generator=self.generator))
            )
            if not is_complete:
                indices[row, ::3] = seen + row % 2
            indices[row, torch.randperm(TOPK, generator=self.generator)[:count]] = torch.randperm(
                seen, generator=self.generator
            )[:count].int()
        return indices.to(self.device)

    def check(
        self, out: Tensor, lse: Tensor, q: Tensor, tokens: Tensor, indices: Tensor, tolerance: float
    ) -> None:
        """tokens: the values that the cache represents."""
        for row in range(len(self.seen)):
            of_request = tokens[self.block_table[self.requests[row].long()].long()].flatten(0, 1)
            keys = of_request[indices[row][(indices[row] >= 0) & (indices[row] < self.seen[row])].long()][
                :, None
            ]
            o, wanted_lse = oracle.attention(
                q[row : row + 1], keys, keys[..., :512], causal=False, sm_scale=SCALE
            )
            assert (out[row].double() - o[0]).norm() <= tolerance * o.norm()
            torch.testing.assert_close(lse[row].double(), wanted_lse[0], rtol=1e-2, atol=1e-2)


def make_cache(
    form: str, generator: torch.Generator, device: torch.device, between: int = 0
) -> tuple[Tensor, KVCache, Tensor]:
    """Memory of a layer, its cache, and the values that it represents: float64 [NUM_PAGES, PAGE, 576].

    Args:
        between: pages of other layers between two of this one.
    """
    latents = torch.randn(NUM_PAGES, PAGE, 576, generator=generator).bfloat16().to(device)
    width, dtype = {
        "bf16": (576, torch.bfloat16),
        "e4m3": (576, torch.float8_e4m3fn),
        "latent": (656, torch.uint8),
    }[form]
    memory = (
        torch.zeros(NUM_PAGES, 1 + between, PAGE, width, dtype=torch.uint8, device=device)
        .repeat(1, 1, 1, dtype.itemsize)
        .view(dtype)[:, between]
    )
    cache = KVCache.from_latent(memory, scale=0.5 if form == "e4m3" else None)
    flat = latents.flatten(0, 1)
    append_mla_kv(flat[:, :512], flat[:, 512:], cache, torch.arange(len(flat), device=device))
    return memory, cache, latent_cases.numbers_of(memory, 0.5 if form == "e4m3" else 1.0)


def attention(device: torch.device, form: str = "bf16", max_rows: int = 64) -> SelectedAttention:
    kv_dtype = {"bf16": None, "e4m3": torch.float8_e4m3fn, "latent": torch.uint8}[form]
    return SelectedAttention(
        16, TOPK, max_rows=max_rows, dtype=torch.bfloat16, kv_dtype=kv_dtype, device=device
    )


@pytest.mark.parametrize("between", [0, 2])
@pytest.mark.parametrize("form", ["bf16", "e4m3", "latent"])
def test_layers_of_a_step(device: torch.device, form: str, between: int) -> None:
    """Decodes and a chunk of a prompt. Each layer selects different tokens; padding at the end."""
    step = Step([1, 5, 1], [90, 20, 3], device, padding=2)
    rows = attention(device, form)
    rows.plan(step.seen_lens())
    for is_complete in (True, False, True):
        _, cache, latents = make_cache(form, step.generator, device, between)
        indices = step.select(is_complete)
        q = torch.randn(9, 16, 576, generator=step.generator).bfloat16().to(device)
        lse = torch.empty(9, 16, device=device)
        out = rows.run(q, cache, indices, step.block_table, step.requests, lse=lse, sm_scale=SCALE)
        step.check(out, lse, q, latents, indices, TOLERANCE[form])
    first = rows.run(q[:3], cache, indices, step.block_table, step.requests[:3], sm_scale=SCALE)
    assert first.equal(out[:3]), "the first rows alone, through the same plan"


def test_steps_of_more_rows_than_a_plan_has(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected, "MAX_CUDA_BATCH", 4)
    rows = attention(device)
    for query_lens, kv_lens in (([1, 8, 1], [90, 30, 3]), ([1, 1], [7, 50])):
        step = Step(query_lens, kv_lens, device)
        rows.plan(step.seen_lens())
        for is_complete in (False, True):
            _, cache, latents = make_cache("bf16", step.generator, device)
            indices = step.select(is_complete)
            q = torch.randn(len(step.seen), 16, 576, generator=step.generator).bfloat16().to(device)
            lse = torch.empty(len(q), 16, device=device)
            out = rows.run(q, cache, indices, step.block_table, step.requests, lse=lse, sm_scale=SCALE)
            step.check(out, lse, q, latents, indices, TOLERANCE["bf16"])


@pytest.mark.parametrize("form", ["bf16", "latent"])
def test_bits_do_not_depend_on_the_batch(
    device: torch.device, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares each row of a step that is split with the same row by itself, whose tokens are in another
    order. Some rows have several KV chunks.
    """
    topk = 600
    monkeypatch.setattr(selected, "MAX_CUDA_INVARIANT_BATCH", 4)
    options = {
        "max_rows": 64,
        "dtype": torch.bfloat16,
        "kv_dtype": None if form == "bf16" else torch.uint8,
        "device": device,
        "batch_invariant": True,
    }
    rows = SelectedAttention(16, topk, **options)
    seen = [600, 3, 590, 64, 1, 300, 129]
    generator = torch.Generator().manual_seed(3)
    _, cache, latents = make_cache(form, generator, device)
    q = torch.randn(len(seen), 16, 576, generator=generator).bfloat16().to(device)
    slots = torch.full((len(seen), topk), -1, dtype=torch.int32)
    for row, count in enumerate(seen):
        slots[row, torch.randperm(topk, generator=generator)[:count]] = torch.randperm(
            NUM_PAGES * PAGE, generator=generator
        )[:count].int()
    slots = slots.to(device)
    rows.plan(torch.tensor(seen, device=device))
    together = rows.run(q, cache, slots, sm_scale=SCALE)
    for row, count in enumerate(seen):
        keys = latents.flatten(0, 1)[slots[row][slots[row] >= 0].long()][:, None]
        expected, _ = oracle.attention(q[row : row + 1], keys, keys[..., :512], causal=False, sm_scale=SCALE)
        assert (together[row].double() - expected[0]).norm() <= TOLERANCE[form] * expected.norm()
        rows.plan(torch.tensor([count], device=device))
        shuffled = slots[row : row + 1, torch.randperm(topk, generator=generator).to(device)]
        assert torch.equal(rows.run(q[row : row + 1], cache, shuffled, sm_scale=SCALE)[0], together[row])


def test_slots_that_the_engine_has_looked_up(device: torch.device) -> None:
    step = Step([1, 1], [40, 9], device)
    rows = attention(device)
    rows.plan(step.seen_lens())
    _, cache, latents = make_cache("bf16", step.generator, device)
    indices = step.select()
    q = torch.randn(2, 16, 576, generator=step.generator).bfloat16().to(device)
    lse = torch.empty(2, 16, device=device)
    for _ in range(2):
        slots = (
            step.block_table.gather(1, indices.clamp(min=0).long() // PAGE) * PAGE
            + indices.clamp(min=0) % PAGE
        )
        slots = torch.where(indices >= 0, slots, -1).int()
        step.check(
            rows.run(q, cache, slots, lse=lse, sm_scale=SCALE), lse, q, latents, indices, TOLERANCE["bf16"]
        )
        indices[0, ::2] = indices[1] = -1  # the next layer has fewer, and one row has none


def test_a_step_without_rows(device: torch.device) -> None:
    attention(device).plan(torch.empty(0, dtype=torch.int32, device=device))


def test_count_visible(device: torch.device) -> None:
    """Two rows of a request of 3 tokens, one of a request of 50, then padding."""
    step = Step([2, 1], [3, 50], device, padding=3)
    assert step.seen_lens().tolist() == [2, 3, 50, 0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16", "e4m3", "latent"])
def test_a_graph_serves_later_steps(device: torch.device, form: str) -> None:
    """As in engines: the step is planned before the graph of its layers is replayed. Selection and padding
    change each time.
    """
    if device.type != "cuda":
        pytest.skip("CUDA graphs")
    batch = 4
    rows = attention(device, form)
    memory, cache, _ = make_cache(form, torch.Generator().manual_seed(9), device, between=1)
    q, lse = (
        torch.zeros(batch, 16, 576, dtype=torch.bfloat16, device=device),
        torch.empty(batch, 16, device=device),
    )
    indices, block_table = (
        torch.full((batch, TOPK), -1, dtype=torch.int32, device=device),
        torch.zeros(batch, 20, dtype=torch.int32, device=device),
    )
    requests = torch.zeros(batch, dtype=torch.int32, device=device)

    def layer() -> Tensor:
        return rows.run(q, cache, indices, block_table, requests, lse=lse, sm_scale=SCALE)

    rows.plan(torch.ones(batch, dtype=torch.int32, device=device))
    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for seed, kv_lens in enumerate(([90, 3], [30, 20, 25, 1], [7])):
        step = Step([1] * len(kv_lens), kv_lens, device, seed=seed, padding=batch - len(kv_lens))
        other, _, latents = make_cache(form, step.generator, device, between=1)
        memory.copy_(other)
        rows.plan(step.seen_lens())
        indices.copy_(step.select(is_complete=seed != 1))
        width = min(20, step.block_table.shape[1])
        block_table[: len(kv_lens), :width] = step.block_table[:, :width]
        requests.copy_(step.requests)
        q.copy_(torch.randn(batch, 16, 576, generator=step.generator))
        graph.replay()
        step.check(out, lse, q, latents, indices, TOLERANCE[form])
