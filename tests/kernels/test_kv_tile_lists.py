"""Masks with holes: KV tiles in which no row of a row tile sees anything are skipped, and no result
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import case_tensors
import cases
import forests
import numpy
import oracle
import pytest
import torch
from attention_kernels import kernel_of
from cases import Spec
from tiers import mostly_slow
from torch import Tensor
from workspace import workspace_of

from attn_backend import Attention, BSRView, KVCache, PageTable, Variant
from attn_backend.jit import compilers
from attn_backend.kernels.schedule import TILE_ROWS, Schedule
from attn_backend.variants import builtin

pytestmark = [
    pytest.mark.usefixtures("kernel"),
    pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler"),
]

BLOCK = 128  # tokens in the patterns below: a KV tile on Hopper


def block_sparse(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return blocks[b, q_idx // BLOCK, kv_idx // BLOCK] & (kv_idx <= q_idx)  # type: ignore[name-defined]  # noqa: F821


def dilated(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    """Every `step`-th block, starting at the query's own, different ones for each head."""
    return ((q_idx // BLOCK - kv_idx // BLOCK) % step == h % 2) & (kv_idx <= q_idx)  # type: ignore[name-defined]  # noqa: F821


def a_shape(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (kv_idx <= q_idx) & ((kv_idx < first_tokens[b]) | (q_idx - kv_idx < 100))  # type: ignore[name-defined]  # noqa: F821


BLOCK_SPARSE = Variant.from_functions(mask_mod=block_sparse, tensors={"blocks": (torch.bool, 3)})
DILATED = Variant.from_functions(mask_mod=dilated, tensors={"step": int})
A_SHAPE = Variant.from_functions(mask_mod=a_shape, tensors={"first_tokens": torch.int32})
STREAMING = builtin.streaming_llm(100, 4)
DOCUMENTS = builtin.document()


@dataclass(frozen=True)
class Mask:
    """A variant, its arguments, and the same mask for the oracle."""

    variant: Variant
    arguments: dict[str, Any]
    expected: oracle.Variant


def _mask(variant: Variant, arguments: dict[str, Any], seen: Callable[[oracle.Pairs], Tensor]) -> Mask:
    return Mask(variant, arguments, oracle.Variant(mask=seen))


def masks(rng: numpy.random.Generator, batch: int, longest: int, device: torch.device) -> Iterator[Mask]:
    """One of each kind."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    batch, longest = max(batch, 1), max(longest, 1)
    pieces = torch.randint(3, (batch, longest // 200 + 1), generator=generator, dtype=torch.int32)
    ids = pieces.repeat_interleave(200, dim=1).to(device)  # documents in pieces
    yield _mask(
        DOCUMENTS,
        {"document_ids": ids},
        lambda at: ids[at.request][at.position.clamp(0)] == ids[at.request][at.token],
    )
    near = lambda at, width: (at.token <= at.position) & (at.position - at.token < width)  # noqa: E731
    yield _mask(STREAMING, {}, lambda at: (at.token <= at.position) & (near(at, 100) | (at.token < 4)))
    num_blocks = longest // BLOCK + 1
    blocks = (torch.rand(batch, num_blocks, num_blocks, generator=generator) < rng.choice([0.05, 0.3])).to(
        device
    )
    yield _mask(
        BLOCK_SPARSE,
        {"blocks": blocks},
        lambda at: (
            blocks[at.request][(at.position.clamp(0) // BLOCK), at.token // BLOCK] & (at.token <= at.position)
        ),
    )
    step = int(rng.integers(3, 7))
    div = lambda x: torch.div(x, BLOCK, rounding_mode="floor")  # noqa: E731
    yield _mask(
        DILATED,
        {"step": step},
        lambda at: ((div(at.position) - div(at.token)) % step == at.head % 2) & (at.token <= at.position),
    )
    first_tokens = torch.randint(80, (batch,), generator=generator, dtype=torch.int32).to(device)
    yield _mask(
        A_SHAPE,
        {"first_tokens": first_tokens},
        lambda at: (at.token <= at.position) & ((at.token < int(first_tokens[at.request])) | near(at, 100)),
    )


NUM_MASKS = 5


def listed(attention: Attention) -> int:
    """Row tiles with holes between their KV tiles."""
    return int((attention.schedule().tiles[:, 3] < 0).sum())


@pytest.mark.parametrize("seed", mostly_slow(range(100), fast=10, without_gpu=50))
def test_random_cases(device: torch.device, seed: int) -> None:
    rng = numpy.random.default_rng([seed, 71])
    spec = cases.random_spec(6 * 10**6 + seed, device.type).with_(
        logits_soft_cap=0.0, dtype=torch.bfloat16, head_dim=64
    )
    case = case_tensors.build(spec, device)
    mask = list(masks(rng, len(spec.qo_lens), max(spec.kv_lens, default=1), device))[seed % NUM_MASKS]
    attention = case.attention(
        variant=mask.variant, batch_invariant=seed % 3 == 0, cascade=["always", False][seed % 2]
    )
    for to_plan in (mask.arguments, None):
        attention.plan(case.view, variant_args=to_plan)
        case.run(attention, out=case.out, lse=case.lse, variant_args=mask.arguments)
        case_tensors.check(case, case.out, case.lse, case.expected(variant=mask.expected))
    case_tensors.check_padding(case)


@pytest.mark.parametrize("number", range(NUM_MASKS))
@pytest.mark.parametrize("options", [{"cascade": False}, {"batch_invariant": True}, {"num_ctas": 3}], ids=str)
def test_decodes_chunks_and_prefills_with_holes(
    device: torch.device, number: int, options: dict[str, Any]
) -> None:
    """In one batch; most of its row tiles have holes."""
    spec = Spec(
        (1, 300, 7, 1, 40), (2500, 700, 1300, 1100, 40), head_dim=64, dtype=torch.bfloat16, page_size=16
    )
    case = case_tensors.build(spec, device)
    mask = list(masks(numpy.random.default_rng(5), 5, 2500, device))[number]
    attention = case.attention(variant=mask.variant, **options)
    attention.plan(case.view, variant_args=mask.arguments)
    assert listed(attention) >= 3
    case.run(attention, out=case.out, lse=case.lse, variant_args=mask.arguments)
    case_tensors.check(case, case.out, case.lse, case.expected(variant=mask.expected))


@pytest.mark.parametrize("seed", mostly_slow(range(20), fast=4, without_gpu=10))
def test_with_shared_prefixes(device: torch.device, seed: int) -> None:
    rng = numpy.random.default_rng([seed, 72])
    problem = forests.random_problem(rng, device)
    shape = forests.replace(problem.shape, logits_soft_cap=0.0, dtype=torch.bfloat16, head_dim=64)
    problem = forests.make_problem(rng, shape, problem.batch, device)
    mask = list(masks(rng, len(problem.batch.kv_lens), max(problem.batch.kv_lens, default=1), device))[
        seed % NUM_MASKS
    ]
    attention = problem.attention(variant=mask.variant, cascade="always")
    attention.plan(problem.batch.view(rng, device), variant_args=mask.arguments)
    attention.run(
        problem.q,
        problem.memory.kv,
        out=problem.out,
        lse=problem.lse,
        sm_scale=problem.shape.sm_scale,
        variant_args=mask.arguments or None,
    )
    problem.check(problem.expected(variant=mask.expected))


def test_a_request_keeps_its_bits(device: torch.device) -> None:
    """With a batch invariant plan: by itself, and with others."""
    # split into chunks; on Hopper, where these have six KV tiles, some have holes between them
    tokens = 7000
    mask = next(masks(numpy.random.default_rng(3), 1, tokens, device))
    spec = Spec((1,), (tokens,), head_dim=64, dtype=torch.bfloat16)
    case = case_tensors.build(spec, device)
    alone = case.attention(variant=mask.variant, batch_invariant=True)
    alone.plan(case.view, variant_args=mask.arguments)
    assert listed(alone) > 0
    out = case.run(alone, variant_args=mask.arguments)
    table = case.view.table
    twice = BSRView(
        torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
        PageTable.csr(
            torch.cat([table.indptr, table.indptr[-1:] * 2]),
            torch.cat([table.indices[: int(table.indptr[-1])]] * 2),
            table.last_page_len.repeat(2),
            16,
        ),
    )
    arguments = {"document_ids": mask.arguments["document_ids"].expand(2, -1)}
    together = case.attention(variant=mask.variant, batch_invariant=True, max_rows=2, max_batch=2)
    together.plan(twice, variant_args=arguments)
    q = case.q[:1].expand(2, -1, -1).contiguous()
    both = together.run(q, case.kv, sm_scale=spec.sm_scale, variant_args=arguments)
    assert torch.equal(both[:1], out[:1])
    assert torch.equal(both[1:], out[:1])


def one_request(
    attention_heads: tuple[int, int], tokens: int, rows: int, device: torch.device
) -> tuple[BSRView, Tensor, Tensor, Tensor]:
    """A view of pages of 64 tokens in order, and q, k, v."""
    heads, kv_heads = attention_heads
    generator = torch.Generator().manual_seed(tokens)
    pages = -(-tokens // 64)
    make = lambda *shape: torch.randn(*shape, generator=generator).bfloat16().to(device)  # noqa: E731
    table = PageTable.block_table(
        torch.arange(pages, dtype=torch.int32, device=device)[None],
        torch.tensor([tokens], dtype=torch.int32, device=device),
        64,
    )
    view = BSRView(torch.tensor([0, rows], dtype=torch.int32, device=device), table)
    return view, make(rows, heads, 64), make(pages, 64, kv_heads, 64), make(pages, 64, kv_heads, 64)


@pytest.mark.parametrize("number", range(NUM_MASKS))
def test_as_many_kv_tiles_as_a_block_mask_keeps(device: torch.device, number: int) -> None:
    """A block mask of flex_attention, whose blocks are a row tile's queries and a KV tile's tokens.

    The KV tiles are the same, not just their number.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    tokens = 6144
    mask = list(masks(numpy.random.default_rng(8), 1, tokens, device))[number]
    view, *_ = one_request((8, 2), tokens, tokens, device)
    attention = Attention(
        8, 2, 64, max_rows=tokens, max_batch=1, variant=mask.variant, device=device, kernel=kernel_of(device)
    )
    attention.plan(view, variant_args=mask.arguments)
    schedule = attention.schedule()
    rows = TILE_ROWS[schedule.max_kind] // 4
    reference = mask.variant.reference()
    assert reference is not None

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return reference.mask(b, h, q_idx, kv_idx, mask.arguments)

    kept = torch.zeros(tokens // rows, tokens // schedule.kv_tile, dtype=torch.bool, device=device)
    full = torch.ones_like(kept)
    for head in (0, 1):  # tokens that some head sees, and that both see
        block_mask = create_block_mask(
            lambda b, h, q, k, head=head: seen(b, h + head, q, k),
            1,
            1,
            tokens,
            tokens,
            device,
            (rows, schedule.kv_tile),
        )
        kept |= block_mask.to_dense()[0, 0] != 0
        numbers, indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        assert numbers is not None
        assert indices is not None
        listed_first = torch.arange(kept.shape[1], device=device) < numbers[0, 0, :, None]
        full &= (
            torch.zeros_like(full, dtype=torch.int32).scatter_add_(
                1, indices[0, 0].long(), listed_first.int()
            )
            > 0
        )
    visited, marked, listed_tiles = (
        torch.zeros_like(kept),
        torch.zeros_like(kept),
        torch.zeros(len(kept), dtype=torch.bool, device=device),
    )
    for tile, (kv_tiles, whole) in enumerate(kv_tiles_of(attention, schedule)):
        visited[tile, kv_tiles] = True
        marked[tile, [kv_tile for kv_tile, is_seen in zip(kv_tiles, whole, strict=True) if is_seen]] = True
        listed_tiles[tile] = schedule.tiles[tile, 3] < 0
    assert torch.equal(visited, kept)
    # more may be listed: the mask is not evaluated for tokens that causality hides
    assert not bool((full & listed_tiles[:, None] & ~marked).any())
    assert int(schedule.tiles[:, 5].sum()) == int(kept.sum()) + int((~kept.any(1)).sum())
    first, last = kept.int().argmax(1), kept.shape[1] - kept.flip(1).int().argmax(1)
    assert int(kept.sum()) < 0.9 * int(((last - first) * kept.any(1)).sum())  # there are holes


def kv_tiles_of(attention: Attention, schedule: Schedule) -> Iterator[tuple[list[int], list[bool]]]:
    """For each row tile of one request: the numbers of the visited KV tiles, and those listed as visible to
    all rows.
    """
    memory = workspace_of(attention).row_ranges.view(torch.int32).cpu()
    for _, _, _, kv_begin, kv_end, num_kv_tiles in schedule.tiles.tolist():
        entry = (
            memory[~kv_begin : ~kv_begin + num_kv_tiles]
            if kv_begin < 0
            else kv_begin + schedule.kv_tile * torch.arange(num_kv_tiles)
        )
        entry = entry[(entry & 0x7FFFFFFF) < kv_end]
        yield ((entry & 0x7FFFFFFF) // schedule.kv_tile).tolist(), (entry < 0).tolist()


@pytest.mark.parametrize("rows", [1, 64, 200])
def test_holes_are_not_read(device: torch.device, rows: int) -> None:
    """V holds NaN there, which a mask would not hide."""
    tokens = 3000
    view, q, k, v = one_request((4, 1), tokens, rows, device)
    attention = Attention(
        4, 1, 64, max_rows=rows, max_batch=1, variant=STREAMING, device=device, kernel=kernel_of(device)
    )
    attention.plan(view)
    expected = attention.run(q, KVCache.from_pair(k, v))
    v[2 : (tokens - rows - 100) // 64 - 2] = torch.nan  # whole KV tiles: of 128 tokens on Hopper
    out = attention.run(q, KVCache.from_pair(k, v))
    assert not expected.isnan().any()
    assert torch.equal(out, expected)


def test_more_kv_tiles_than_are_listed(device: torch.device) -> None:
    """Every second KV tile of a very long request: all tiles are visited."""
    tokens = 128 * 2 * 1100
    view, q, k, v = one_request((1, 1), tokens, 1, device)
    every_second = Variant.from_functions(
        mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx // 128) % 2 == 1, name="every_second"
    )
    attention = Attention(
        1, 1, 64, max_rows=1, max_batch=1, variant=every_second, device=device, kernel=kernel_of(device)
    )
    attention.plan(view)
    assert listed(attention) == 0
    out = attention.run(q, KVCache.from_pair(k, v))
    seen = torch.arange(tokens, device=device) // 128 % 2 == 1
    keys, values = k.flatten(0, 1)[seen, 0].double(), v.flatten(0, 1)[seen, 0].double()
    expected = (q[0, 0].double() @ keys.T * 64**-0.5).softmax(-1) @ values
    assert (out[0, 0].double() - expected).norm() < 1e-2 * expected.norm()


def test_row_tiles_that_see_nothing(device: torch.device) -> None:
    """They are between row tiles that see tokens. Their outputs are zeros, their lse is -inf."""
    seen = lambda b, h, q_idx, kv_idx: ((q_idx // 256) % 2 == 0) & ((kv_idx // 200) % 3 == 1)  # noqa: E731
    variant = Variant.from_functions(mask_mod=seen, name="some_rows")
    case = case_tensors.build(
        Spec((1500, 1, 1), (1500, 257, 900), head_dim=64, dtype=torch.bfloat16, causal=False), device
    )
    attention = case.attention(variant=variant, cascade=False)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)
    expected = oracle.Variant(mask=lambda at: ((at.position // 256) % 2 == 0) & ((at.token // 200) % 3 == 1))
    case_tensors.check(case, case.out, case.lse, case.expected(variant=expected))
    assert (case.out[256:512] == 0).all()
    assert (case.lse[256:512] == -torch.inf).all()
    assert (case.out[1500] == 0).all()


def test_interval_masks_have_no_lists() -> None:
    for variant in (builtin.chunked_local(100), builtin.prefix_lm(), builtin.causal(), builtin.tree_mask()):
        assert not variant.skips_kv_tiles, variant
        assert "kSkipsTiles" not in variant.source
    for variant in (STREAMING, DOCUMENTS, BLOCK_SPARSE, builtin.custom_mask(), DOCUMENTS & builtin.causal()):
        assert variant.skips_kv_tiles, variant


@pytest.mark.gpu
def test_in_a_cuda_graph(device: torch.device) -> None:
    """Captured once: each replay finds moved holes again."""
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    case = case_tensors.build(Spec((300, 1, 40), (700, 1900, 40), head_dim=64, dtype=torch.bfloat16), device)
    ids = torch.zeros(3, 1900, dtype=torch.int32, device=device)
    attention = case.attention(variant=DOCUMENTS)
    graph = case_tensors.captured(case, attention, {"document_ids": ids})
    for seed in range(4):
        mask = next(masks(numpy.random.default_rng(seed), 3, 1899, device))
        ids.copy_(mask.arguments["document_ids"][:, :1900])
        graph.replay()
        assert listed(attention) > 0
        case_tensors.check(case, case.out, case.lse, case.expected(variant=mask.expected))
