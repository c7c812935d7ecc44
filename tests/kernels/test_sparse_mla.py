"""Sparse MLA: each query token attends to a different selection of tokens, anywhere in the cache, compared
with the oracle."""

from __future__ import annotations

from typing import Any, NamedTuple

import attention_kernels
import oracle
import pytest
import torch
from torch import Tensor

from attn_backend import (
    Attention,
    BSRView,
    Composition,
    KVCache,
    PageTable,
    SelectedTokens,
    Variant,
    selected_slots,
)

pytestmark = pytest.mark.usefixtures("kernel")

SCALE = 192**-0.5


def attention(device: torch.device, rows: int, heads: int, **options: object) -> Attention:
    kernel: Any = attention_kernels.kernel_of(device)
    return Attention(
        heads, 1, 576, head_dim_v=512, device=device, max_rows=rows, max_batch=rows, kernel=kernel, **options
    )  # type: ignore[arg-type]


class Expected(NamedTuple):
    """float64, of some rows."""

    o: Tensor
    lse: Tensor
    # the effect of rounding on o: each probability, and then the output, by half of bfloat16's last bit
    rounding: Tensor


def expected_rows(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> Expected:
    """All rows over all tokens."""
    o, lse = oracle.attention(q, k, v, causal=False, sm_scale=sm_scale)
    weighed, _ = oracle.attention(q, k, v.abs(), causal=False, sm_scale=sm_scale)
    return Expected(o, lse, torch.finfo(torch.bfloat16).eps / 2 * (weighed + o.abs()))


def joined(parts: list[Expected]) -> Expected:
    return Expected(*(torch.cat(of_rows) for of_rows in zip(*parts, strict=True)))


def expected(q: Tensor, tokens: Tensor, slots: Tensor) -> Expected:
    """tokens: [slots, 576]. slots: [rows, topk]; duplicates count."""
    parts = []
    for row, chosen in zip(q, slots.tolist(), strict=True):
        keys = tokens[[slot for slot in chosen if slot >= 0]][:, None]
        parts.append(expected_rows(row[None], keys, keys[..., :512], SCALE))
    return joined(parts)


def check(found: tuple[Tensor, Tensor], wanted: Expected) -> None:
    o, lse, rounding = wanted
    empty = lse.isneginf()
    assert found[1][empty].isneginf().all()
    assert (found[0][empty] == 0).all()
    assert ((found[0].double() - o).abs() <= rounding + 1e-4).all()
    torch.testing.assert_close(found[1][~empty].double(), lse[~empty], rtol=2e-3, atol=2e-3)


def random_indices(generator: torch.Generator, counts: list[int], topk: int, tokens: int) -> Tensor:
    """int32 [rows, topk], unsorted, with empty entries anywhere between."""
    indices = torch.full((len(counts), topk), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        places = torch.randperm(topk, generator=generator)[:count]
        indices[row, places] = torch.randperm(tokens, generator=generator)[:count].int()
    return indices


@pytest.mark.parametrize(
    ("heads", "topk", "counts"),
    [(16, 96, [96, 40, 0, 1, 64, 65]), (128, 40, [40, 0, 33]), (3, 300, [300, 299, 7, 0, 129] * 5)],
)
@pytest.mark.parametrize(
    "options", [{}, {"cascade": "always"}, {"batch_invariant": True}, {"num_ctas": 3}], ids=str
)
def test_any_tokens_in_any_order(
    device: torch.device, heads: int, topk: int, counts: list[int], options: dict[str, object]
) -> None:
    generator = torch.Generator().manual_seed(heads)
    cache = torch.randn(30, 16, 576, generator=generator).bfloat16().to(device)
    q = torch.randn(len(counts), heads, 576, generator=generator).bfloat16().to(device)
    slots = selected_slots(random_indices(generator, counts, topk, 480).to(device))
    attn = attention(device, len(counts), heads, **options)
    attn.plan(BSRView.selected(slots))
    found = attn.run(q, KVCache.from_latent(cache).by_slot(), sm_scale=SCALE, return_lse=True)
    check(found, expected(q, cache.flatten(0, 1), slots))


def test_one_plan_serves_layers_that_select_other_tokens(device: torch.device) -> None:
    """Through the block table; on a GPU the second and third layers replay a graph.

    Rows that select the same tokens share no prefix in the plan, since the next layer's tokens differ.
    """
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
        selected = SelectedTokens(indices, block_table, on_device, page_size)
        attn.run(q, KVCache.from_latent(cache).by_slot(), out=out, lse=lse, sm_scale=SCALE, selected=selected)

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
        check((out, lse), joined(parts))


def test_a_token_that_is_selected_twice_counts_twice(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(6)
    cache = torch.randn(8, 1, 576, generator=generator).bfloat16().to(device)
    q = torch.randn(1, 16, 576, generator=generator).bfloat16().to(device)
    slots = torch.tensor([[3, 5, 3, 3, -1]], dtype=torch.int32, device=device)
    attn = attention(device, 1, 16)
    attn.plan(BSRView.selected(slots))
    check(
        attn.run(q, KVCache.from_latent(cache), sm_scale=SCALE, return_lse=True),
        expected(q, cache[:, 0], slots),
    )


def test_slots_beyond_the_cache_are_refused_on_a_cpu() -> None:
    attn = attention(torch.device("cpu"), 1, 16)
    attn.plan(BSRView.selected(torch.tensor([[3, 8]], dtype=torch.int32)))
    with pytest.raises(ValueError, match=r"block_table: page 1 of request 0 is 8, must be in \[0, 8\)"):
        attn.run(torch.zeros(1, 16, 576).bfloat16(), KVCache.from_latent(torch.zeros(8, 1, 576).bfloat16()))


# The number of tokens of each row in the plan, and in the layers. A batch invariant plan splits the first row
# into KV chunks.
PLANNED = [1300, 130, 64, 65, 1, 0, 200, 97]
LAYERS = {
    "as planned": PLANNED,
    "fewer": [1030, 129, 0, 64, 0, 0, 63, 96],
    "none": [0] * 8,
    "one": [1, 1, 1, 1, 1, 0, 1, 1],
    "other rows": [300, 0, 63, 1, 1, 0, 128, 5],
}


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_layers_that_select_fewer_than_were_planned(
    device: torch.device, heads: int, batch_invariant: bool
) -> None:
    """Each row attends to the available tokens in each layer: in one graph, on a GPU.

    Empty entries are anywhere; some tokens appear twice.
    """
    topk, rows = 1300, len(PLANNED)
    generator = torch.Generator().manual_seed(heads)
    cache = torch.randn(1500, 1, 576, generator=generator).bfloat16().to(device)
    q = torch.randn(rows, heads, 576, generator=generator).bfloat16().to(device)
    attn = attention(device, rows, heads, cascade=False, batch_invariant=batch_invariant, num_ctas=13)
    slots = torch.full((rows, topk), 10**6, dtype=torch.int32, device=device)  # left by a previous step
    attn.plan(BSRView.selected(slots, torch.tensor(PLANNED, device=device)))
    indices, out, lse = (
        torch.empty_like(slots),
        q.new_empty(rows, heads, 512),
        torch.empty(rows, heads, device=device),
    )
    graph = None
    for name, counts in [*LAYERS.items(), *LAYERS.items()]:
        indices.copy_(random_indices(generator, counts, topk, 1500))
        indices[0] = torch.where(indices[0] > 1100, indices[0] - 400, indices[0])  # some twice
        out.fill_(torch.nan)
        if graph is not None:
            graph.replay()
        else:
            attn.run(
                q,
                KVCache.from_latent(cache),
                out=out,
                lse=lse,
                sm_scale=SCALE,
                selected=SelectedTokens(indices),
            )
        if name == "as planned" and device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                attn.run(
                    q,
                    KVCache.from_latent(cache),
                    out=out,
                    lse=lse,
                    sm_scale=SCALE,
                    selected=SelectedTokens(indices),
                )
        check((out, lse), expected(q, cache[:, 0], indices))
        assert slots.equal(selected_slots(indices)), name
    attn.raise_for_errors()


@pytest.mark.parametrize("after_append", [False, True])
def test_slots_that_were_written_by_hand(device: torch.device, after_append: bool) -> None:
    """A run without a selection packs the content of the plan's slots, and counts it."""
    generator = torch.Generator().manual_seed(8)
    cache = torch.randn(300, 1, 576, generator=generator).bfloat16().to(device)
    q = torch.randn(3, 16, 576, generator=generator).bfloat16().to(device)
    attn = attention(device, 3, 16)
    slots = torch.full((3, 150), -1, dtype=torch.int32, device=device)
    attn.plan(BSRView.selected(slots, torch.full((3,), 150, device=device)))
    for counts in ([150, 64, 0], [1, 0, 149], [0, 0, 0], [150, 150, 150]):
        slots.copy_(random_indices(generator, counts, 150, 300))
        wanted = expected(q, cache[:, 0], slots)
        check(
            attn.run(
                q, KVCache.from_latent(cache), sm_scale=SCALE, return_lse=True, after_append=after_append
            ),
            wanted,
        )
        assert slots.ge(0).sum(1).tolist() == counts
    attn.raise_for_errors()


def test_fewer_rows_than_were_planned(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(9)
    cache = torch.randn(100, 1, 576, generator=generator).bfloat16().to(device)
    q = torch.randn(4, 16, 576, generator=generator).bfloat16().to(device)
    attn = attention(device, 4, 16)
    slots = torch.full((4, 40), 99, dtype=torch.int32, device=device)
    attn.plan(BSRView.selected(slots))
    for rows in (2, 4, 1):
        indices = random_indices(generator, [40, 7, 0, 33][:rows], 40, 100).to(device)
        found = attn.run(
            q[:rows],
            KVCache.from_latent(cache),
            sm_scale=SCALE,
            return_lse=True,
            selected=SelectedTokens(indices),
        )
        check(found, expected(q[:rows], cache[:, 0], indices))
    with pytest.raises(ValueError, match=r"^indices.shape\[0\] is 1, must be at least the rows of q: 4"):
        attn.run(q, KVCache.from_latent(cache), selected=SelectedTokens(indices))


def test_more_than_were_planned_are_reported(device: torch.device) -> None:
    cache = torch.randn(16, 1, 576).bfloat16().to(device)
    q = torch.randn(2, 16, 576).bfloat16().to(device)
    attn = attention(device, 2, 16)
    slots = torch.tensor([[3, 5, -1], [1, 2, 9]], dtype=torch.int32, device=device)
    attn.plan(BSRView.selected(slots))
    more = SelectedTokens(slots.flip(0).contiguous())

    def run() -> None:
        attn.run(q, KVCache.from_latent(cache), selected=more)
        attn.raise_for_errors()

    with pytest.raises(
        ValueError, match="a row has selected more tokens than were planned; must be at most kv_lens"
    ):
        run()
    attn.plan(BSRView.selected(slots, torch.full((2,), 3, device=device)))
    fewer = torch.tensor([[3, -1, -1], [1, 2, 9]], dtype=torch.int32, device=device)
    check(
        attn.run(
            q, KVCache.from_latent(cache), sm_scale=SCALE, return_lse=True, selected=SelectedTokens(fewer)
        ),
        expected(q, cache[:, 0], fewer),
    )
    attn.raise_for_errors()


def test_one_of_several_levels(device: torch.device) -> None:
    """Selected tokens together with a window of the request's last ones: the states merge."""
    generator = torch.Generator().manual_seed(10)
    cache = torch.randn(64, 1, 576, generator=generator).bfloat16().to(device)
    q = torch.randn(3, 16, 576, generator=generator).bfloat16().to(device)
    attn = attention(device, 3, 16, max_levels=2)
    slots = torch.full((3, 40), 5, dtype=torch.int32, device=device)
    last = torch.tensor([[60, 61], [62, 63], [50, 51]], dtype=torch.int32, device=device)
    indptr = torch.arange(4, dtype=torch.int32, device=device)
    near = BSRView(indptr, PageTable.block_table(last, torch.full_like(indptr[1:], 2), 1), causal=False)
    for levels in ([near, BSRView.selected(slots)], [BSRView.selected(slots), near]):
        slots.fill_(5)
        attn.plan(Composition(levels))
        for counts in ([40, 3, 0], [0, 40, 1]):
            slots.copy_(random_indices(generator, counts, 40, 50))
            wanted = expected(q, cache[:, 0], torch.cat([slots, last], 1))
            check(attn.run(q, KVCache.from_latent(cache), sm_scale=SCALE, return_lse=True), wanted)
        with pytest.raises(
            ValueError, match=r"^selected is given, must be None, or the plan of a BSRView\.selected"
        ):
            attn.run(q, KVCache.from_latent(cache), selected=SelectedTokens(slots))


def halved(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 0.5


@pytest.mark.parametrize("has_variant", [False, True])
def test_heads_that_are_no_latents(device: torch.device, has_variant: bool) -> None:
    """Any attention may run over selected tokens: grouped heads, separate K and V."""
    variant = Variant.from_functions(halved) if has_variant else None
    generator = torch.Generator().manual_seed(11)
    k, v = (torch.randn(400, 1, 2, 128, generator=generator).bfloat16().to(device) for _ in range(2))
    q = torch.randn(5, 8, 128, generator=generator).bfloat16().to(device)
    kernel: Any = attention_kernels.kernel_of(device)
    attn = Attention(
        8, 2, 128, device=device, max_rows=5, max_batch=5, num_ctas=7, variant=variant, kernel=kernel
    )
    slots = torch.zeros(5, 300, dtype=torch.int32, device=device)
    attn.plan(BSRView.selected(slots, torch.full((5,), 300, device=device)))
    for counts in ([300, 299, 128, 1, 0], [0, 129, 127, 200, 3]):
        indices = random_indices(generator, counts, 300, 400).to(device)
        out, lse = attn.run(q, KVCache.from_pair(k, v), return_lse=True, selected=SelectedTokens(indices))
        parts = []
        for row, chosen in zip(q, indices.tolist(), strict=True):
            at = [slot for slot in chosen if slot >= 0]
            scale = 128**-0.5 * (1.0 if variant is None else 0.5)
            parts.append(expected_rows(row[None], k[at, 0], v[at, 0], scale))
        check((out, lse), joined(parts))


def test_selections_that_are_refused() -> None:
    attn = attention(torch.device("cpu"), 2, 16)
    q, kv = torch.zeros(2, 16, 576).bfloat16(), KVCache.from_latent(torch.zeros(8, 1, 576).bfloat16())
    slots = torch.zeros(2, 4, dtype=torch.int32)
    attn.plan(BSRView.selected(slots))
    wide = torch.zeros(2, 8, dtype=torch.int32)
    for argument, selected in [
        ("indices", SelectedTokens(wide)),
        ("indices", SelectedTokens(slots.long())),
        ("indices", SelectedTokens(slots[:1])),
        ("indices", SelectedTokens(slots.view(1, 8)[:, 2:6].expand(2, 4))),
        ("indices", SelectedTokens(7)),  # type: ignore[arg-type]
        ("selected", slots),
        ("block_table", SelectedTokens(slots, slots.float())),
        ("kv_lens", SelectedTokens(slots, kv_lens=slots)),
        ("page_size", SelectedTokens(slots, slots, page_size=0)),
        ("page_stride", SelectedTokens(slots, slots, page_size=4, page_stride=2)),
    ]:
        with pytest.raises(ValueError, match=rf"^{argument}\S* is .*must be "):
            attn.run(q, kv, selected=selected)  # type: ignore[arg-type]
    attn.plan(BSRView(torch.tensor([0, 1, 2]), PageTable.block_table(slots, torch.tensor([1, 1]), 1)))
    with pytest.raises(
        ValueError, match=r"^selected is given, must be None, or the plan of a BSRView\.selected"
    ):
        attn.run(q, kv, selected=SelectedTokens(slots))
