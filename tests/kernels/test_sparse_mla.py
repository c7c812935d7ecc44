"""Sparse MLA: each query token attends to tokens of its own, anywhere in the cache, against the oracle."""

from __future__ import annotations

import oracle
import pytest
import torch
from torch import Tensor

from attn_backend import Attention, BSRView, KVCache, selected_slots

pytestmark = pytest.mark.usefixtures("kernel")

SCALE = 192**-0.5


def attention(device: torch.device, rows: int, heads: int, **options: object) -> Attention:
    return Attention(heads, 1, 576, head_dim_v=512, device=device, max_rows=rows, max_batch=rows, **options)  # type: ignore[arg-type]


def expected(q: Tensor, tokens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """tokens: [slots, 576]. slots: [rows, topk], each token as often as it stands there."""
    parts = []
    for row, chosen in zip(q, slots.tolist(), strict=True):
        keys = tokens[[slot for slot in chosen if slot >= 0]][:, None]
        parts.append(oracle.attention(row[None], keys, keys[..., :512], causal=False, sm_scale=SCALE))
    o, lse = zip(*parts, strict=True)
    return torch.cat(o), torch.cat(lse)


def check(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    o, lse = wanted
    empty = lse.isneginf()
    assert found[1][empty].isneginf().all()
    assert (found[0][empty] == 0).all()
    assert (found[0].double() - o).abs().max() <= 5e-3 * max(1.0, float(o.abs().max()))
    torch.testing.assert_close(found[1][~empty].double(), lse[~empty], rtol=2e-3, atol=2e-3)


def random_indices(generator: torch.Generator, counts: list[int], topk: int, tokens: int) -> Tensor:
    """int32 [rows, topk], unsorted; those that are none lie anywhere between."""
    indices = torch.full((len(counts), topk), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        places = torch.randperm(topk, generator=generator)[:count]
        indices[row, places] = torch.randperm(tokens, generator=generator)[:count].int()
    return indices


@pytest.mark.parametrize(("heads", "topk", "counts"), [(16, 96, [96, 40, 0, 1, 64, 65]), (128, 40, [40, 0, 33]), (3, 300, [300, 299, 7, 0, 129] * 5)])
@pytest.mark.parametrize("options", [{}, {"cascade": "always"}, {"batch_invariant": True}, {"num_ctas": 3}], ids=str)
def test_any_tokens_in_any_order(device: torch.device, heads: int, topk: int, counts: list[int], options: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(heads)
    cache = torch.randn(30, 16, 576, generator=generator).bfloat16().to(device)
    q = torch.randn(len(counts), heads, 576, generator=generator).bfloat16().to(device)
    slots = selected_slots(random_indices(generator, counts, topk, 480).to(device))
    attn = attention(device, len(counts), heads, **options)
    attn.plan(BSRView.selected(slots))
    found = attn.run(q, KVCache.from_latent(cache).by_slot(), sm_scale=SCALE, return_lse=True)
    check(found, expected(q, cache.flatten(0, 1), slots))


def test_one_plan_serves_layers_that_select_other_tokens(device: torch.device) -> None:
    """Through the block table; on a GPU the second and third layer replay a graph. Rows that select the same tokens share no prefix in the plan: those of the
    next layer differ."""
    generator = torch.Generator().manual_seed(5)
    page_size, lens, counts, topk = 4, [70, 33, 9], [32, 32, 32, 32, 9, 9], 32
    requests = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32)
    block_table = torch.randperm(60, generator=generator)[:54].view(3, 18).int().to(device)
    q = torch.randn(6, 16, 576, generator=generator).bfloat16().to(device)
    layers = [torch.randn(60, page_size, 576, generator=generator).bfloat16().to(device) for _ in range(3)]
    attn = attention(device, 6, 16, cascade="always")
    slots = torch.full((6, topk), -1, dtype=torch.int32, device=device)
    attn.plan(BSRView.selected(slots, torch.tensor(counts, dtype=torch.int32, device=device)))
    indices = torch.empty_like(slots)
    cache, out, lse = torch.empty_like(layers[0]), q.new_empty(6, 16, 512), torch.empty(6, 16, device=device)

    def layer() -> None:
        selected_slots(indices, block_table, on_device, page_size, out=slots)
        attn.run(q, KVCache.from_latent(cache).by_slot(), out=out, lse=lse, sm_scale=SCALE)

    on_device, graph = requests.to(device), None
    for number, latents in enumerate(layers):
        same = torch.randperm(lens[0], generator=generator)[:topk].int() if number == 0 else None
        for row, request in enumerate(requests.tolist()):
            chosen = torch.randperm(lens[request], generator=generator)[: counts[row]].int()
            indices[row] = -1
            indices[row, : counts[row]] = (same if same is not None and row < 2 else chosen).to(device)
        cache.copy_(latents)
        if graph is not None:
            graph.replay()
        else:
            layer()
        if number == 0 and device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                layer()
        tokens = [cache[block_table[request].long()].flatten(0, 1) for request in requests.tolist()]
        parts = [expected(q[row : row + 1], tokens[row], indices[row : row + 1]) for row in range(6)]
        check((out, lse), (torch.cat([o for o, _ in parts]), torch.cat([one for _, one in parts])))


def test_a_token_that_is_selected_twice_counts_twice(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(6)
    cache = torch.randn(8, 1, 576, generator=generator).bfloat16().to(device)
    q = torch.randn(1, 16, 576, generator=generator).bfloat16().to(device)
    slots = torch.tensor([[3, 5, 3, 3, -1]], dtype=torch.int32, device=device)
    attn = attention(device, 1, 16)
    attn.plan(BSRView.selected(slots))
    check(attn.run(q, KVCache.from_latent(cache), sm_scale=SCALE, return_lse=True), expected(q, cache[:, 0], slots))


def test_slots_beyond_the_cache_are_refused_on_a_cpu() -> None:
    attn = attention(torch.device("cpu"), 1, 16)
    attn.plan(BSRView.selected(torch.tensor([[3, 8]], dtype=torch.int32)))
    with pytest.raises(ValueError, match=r"block_table: page 1 of request 0 is 8, must be in \[0, 8\)"):
        attn.run(torch.zeros(1, 16, 576).bfloat16(), KVCache.from_latent(torch.zeros(8, 1, 576).bfloat16()))
