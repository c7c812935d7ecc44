"""The forest that `plan` finds, and its row groups, compared with the radix tree of the page tables.

Most tests need no K and V.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import attention_kernels
import numpy
import pytest
import torch
from compositions import Shape
from forests import Batch, make_problem, naming, place_requests, radix_tree, random_batch
from tiers import mostly_slow

from attn_backend import Attention, BSRView, PageTable
from attn_backend.kernels.schedule import TILE_ROWS, PrefixNode, Schedule
from attn_backend.metadata.views import MAX_LEVELS

MODES = [True, "always"]
MAX_COMPARISONS = 16  # kMaxComparisons in csrc/planner/forest.h


def plan_only(
    rng: numpy.random.Generator, device: torch.device, batch: Batch, cascade: object
) -> tuple[Attention, BSRView]:
    kernels = [
        kernel
        for kernel in attention_kernels.GPU_KERNELS
        if device.type == "cpu" or attention_kernels.is_available(kernel)
    ]
    heads = int(rng.choice([1, 2, 4, 8]))
    attention = Attention(
        heads * int(rng.choice([1, 2, 4, 8])),
        heads,
        int(rng.choice([64, 128, 256])),
        device=device,
        max_rows=batch.rows + 1,
        max_batch=len(batch.pages) + int(rng.integers(9)),
        num_ctas=[None, 1, 3, 37, 264][rng.integers(5)],
        cascade=cascade,
        kernel=rng.choice([*kernels, None]),
    )
    view = batch.view(rng, device)
    attention.plan(view)
    return attention, view


@pytest.mark.parametrize("block", mostly_slow(range(20), fast=8, without_gpu=8))
def test_forest_is_the_radix_tree(device: torch.device, block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        rng = numpy.random.default_rng([seed, 2])
        batch = random_batch(rng, int(rng.choice([1, 1, 2, 3, 8, 16, 64])))
        attention, _ = plan_only(rng, device, batch, MODES[seed % 2])
        schedule = attention.schedule()
        with naming(seed):
            # By cost, requests that fill the largest row tile do not share, since that would save nothing.
            full_tile = TILE_ROWS[schedule.max_kind] * attention.num_kv_heads / attention.num_qo_heads
            check_forest(batch, schedule.forest, math.inf if MODES[seed % 2] == "always" else full_tile)


@pytest.mark.parametrize(
    ("requests", "prefix", "suffix", "parts"),
    [(64, 2048, 256, 2), (128, 8192, 256, 2), (16, 8192, 128, 11), (16, 1024, 128, 8), (256, 2048, 128, 0)],
)
def test_one_prefix_is_cut_evenly(
    device: torch.device, requests: int, prefix: int, suffix: int, parts: int
) -> None:
    """`parts`: CTAs for each pair of the prefix; 0: too many pairs for that."""
    attention = Attention(
        32,
        8,
        128,
        device=device,
        max_rows=requests,
        max_batch=requests,
        num_ctas=132,
        kernel="hopper" if device.type == "cpu" else None,
    )
    if device.type == "cuda" and attention.schedule().kv_tile != 128:
        pytest.skip("a schedule of the Hopper kernel")
    own = prefix // 16 + torch.arange(requests * suffix // 16, dtype=torch.int32).view(requests, -1)
    pages = torch.cat([torch.arange(prefix // 16, dtype=torch.int32).expand(requests, -1), own], 1)
    lengths = torch.full((requests,), prefix + suffix, dtype=torch.int32, device=device)
    view = BSRView(
        torch.arange(requests + 1, dtype=torch.int32, device=device),
        PageTable.block_table(pages.to(device), lengths, 16),
    )
    attention.plan(view)
    schedule = attention.schedule()
    assert len(schedule.groups) == requests + 1
    tiles_of_prefix = [
        tile for tile, group in enumerate(schedule.of_tiles("group").tolist()) if group == requests
    ]
    kv_tiles = prefix // schedule.kv_tile
    begins: dict[tuple[int, int], list[int]] = {}
    # CTAs without work start at the next CTA's position
    for tile, head, kv_tile in sorted({tuple(position) for position in schedule.positions[:-1].tolist()}):
        if tile in tiles_of_prefix:
            begins.setdefault((tile, head), []).append(kv_tile)
    all_pairs = [(tile, head) for tile in tiles_of_prefix for head in range(8)]
    if parts == 0:
        assert sorted(begins) != all_pairs
        return
    assert sorted(begins) == all_pairs
    for of_pair in begins.values():
        assert len(of_pair) == parts
        sizes = [end - begin for begin, end in pairwise([*of_pair, kv_tiles])]
        assert sizes[1:] == [-(-kv_tiles // parts)] * (parts - 1)
        assert 0 < sizes[0] <= -(-kv_tiles // parts)


def check_forest(batch: Batch, forest: tuple[PrefixNode, ...], row_limit: float = math.inf) -> None:
    """Nodes in any order.

    If requests are compared with more others than a plan has time for, some nodes may be missing.
    """
    tree = radix_tree(batch, row_limit)
    expected = {(node.members[0], node.end_page): node for node in tree}
    found = {(node.request, node.end_page): node for node in forest}
    assert len(found) == len(forest), "a node was found twice"
    same_first_page = max((len(node.members) for node in tree if node.parent < 0), default=0)
    if batch.is_tree or same_first_page <= MAX_COMPARISONS:
        assert found.keys() == expected.keys()
    for key, node in found.items():
        rows = sum(batch.qo_lens[i] for i in expected[key].members)
        above = key_of(forest, node.parent)
        if found.keys() == expected.keys():
            parent = expected[key].parent
            assert above == (None if parent < 0 else (tree[parent].members[0], tree[parent].end_page))
            assert (node.num_requests, node.num_rows) == (len(expected[key].members), rows)
        assert 2 <= node.num_requests <= len(expected[key].members)
        assert node.num_rows <= rows
        assert node.begin_page == (0 if above is None else above[1]) < node.end_page
        taken = nearest_taken(forest, node.parent)
        if node.group >= 0:
            assert node.first_page == (0 if taken is None else taken.end_page)
            assert node.reason == "taken"
        else:
            assert node.reason != "taken"


def key_of(forest: tuple[PrefixNode, ...], index: int) -> tuple[int, int] | None:
    return None if index < 0 else (forest[index].request, forest[index].end_page)


def nearest_taken(forest: tuple[PrefixNode, ...], index: int) -> PrefixNode | None:
    """The node with this index, or its nearest ancestor that was taken."""
    for _ in forest:
        if index < 0 or forest[index].group >= 0:
            break
        index = forest[index].parent
    else:
        raise AssertionError("nodes are above themselves")
    return forest[index] if index >= 0 else None


@pytest.mark.parametrize("block", mostly_slow(range(10), fast=5, without_gpu=5))
def test_every_pair_is_covered_once(device: torch.device, block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        rng = numpy.random.default_rng([seed, 3])
        batch = random_batch(rng, int(rng.choice([1, 2, 3, 8, 16, 64])), budget=2e5)
        attention, view = plan_only(rng, device, batch, MODES[seed % 2])
        with naming(seed):
            check_cover(batch, view, attention.schedule())


def check_cover(batch: Batch, view: BSRView, schedule: Schedule) -> None:
    """The KV that row groups read for a row, combined, is its request's KV; and the links of a row lead to
    exactly these groups.
    """
    # (page, tokens in it) that groups read for each row
    seen: list[list[tuple[int, int]]] = [[] for _ in range(batch.rows)]
    groups_of: list[list[tuple[int, int]]] = [[] for _ in range(batch.rows)]
    indices = view.table.indices
    assert indices is not None
    flat = indices.cpu().flatten()  # rows of these tables are contiguous
    for number, (qo_begin, qo_len, kv_len, _, level, *_) in enumerate(schedule.groups.tolist()):
        table_begin, step = int(schedule.table_begin[number]), view.table.entry_step
        pages = flat[table_begin : table_begin - (-kv_len // batch.page_size) * step : step].tolist()
        reads = [
            (page // step, min(batch.page_size, kv_len - j * batch.page_size)) for j, page in enumerate(pages)
        ]
        rows = (
            schedule.rows[qo_begin : qo_begin + qo_len].tolist()
            if level == 1
            else range(qo_begin, qo_begin + qo_len)
        )
        for index, row in enumerate(rows):
            seen[row] += reads
            groups_of[row].append((number, index))
    row = 0
    for qo_len, kv_len, pages in zip(batch.qo_lens, batch.kv_lens, batch.pages, strict=True):
        expected = sorted(
            (page, min(batch.page_size, kv_len - j * batch.page_size)) for j, page in enumerate(pages)
        )
        for _ in range(qo_len):
            assert sorted(seen[row]) == expected, f"row {row}"
            row += 1
    merged = set()
    for links in schedule.links.transpose(0, 1).tolist():
        linked = sorted((group, index) for group, index in links if group >= 0)
        own, index = linked[0]
        row = schedule.of_groups("qo_begin")[own].item() + index
        assert linked == sorted(groups_of[row]), f"row {row}"
        merged.add(row)
    assert merged == {row for row, groups in enumerate(groups_of) if len(groups) > 1}
    assert {node.group for node in schedule.forest} - {-1} == {
        number for number, group in enumerate(schedule.groups.tolist()) if group[4] == 1
    }


def test_always_takes_a_node_of_one_page(device: torch.device) -> None:
    batch = Batch(1, [1, 1], [2, 3], [[5, 1], [5, 2, 3]], 6)
    attention, _ = plan_only(numpy.random.default_rng(0), device, batch, "always")
    (node,) = attention.schedule().forest
    assert (node.request, node.begin_page, node.end_page, node.num_requests, node.num_rows, node.group) == (
        0,
        0,
        1,
        2,
        2,
        2,
    )
    attention, _ = plan_only(numpy.random.default_rng(0), device, batch, True)
    (node,) = attention.schedule().forest
    assert (node.group, node.reason) == (-1, "saves too little")


def test_a_long_prefix_pays(device: torch.device) -> None:
    """64 requests with 8192 tokens in common: the cost model takes them."""
    pages = [[*range(512), 512 + i] for i in range(64)]
    batch = Batch(16, [1] * 64, [8192 + 1 + i % 16 for i in range(64)], pages, 600)
    attention, _ = plan_only(numpy.random.default_rng(0), device, batch, True)
    (node,) = attention.schedule().forest
    assert (node.end_page, node.num_requests, node.group) == (512, 64, 64)


@pytest.mark.parametrize(
    ("groups", "requests", "common", "of_group", "own", "taken"),
    [(2, 16, 4096, 256, 128, 3), (8, 16, 1024, 4096, 256, 9), (2, 2, 256, 256, 128, 0)],
)
def test_levels_pay_together(
    device: torch.device, groups: int, requests: int, common: int, of_group: int, own: int, taken: int
) -> None:
    """Prefixes below a prefix: their total saving counts, and rows of a deeper prefix pay for their states
    once.
    """
    count = groups * requests
    batch = place_requests(
        16,
        [-1, *([0] * groups)],
        [common, *([of_group] * groups)],
        [1 + i % groups for i in range(count)],
        [1] * count,
        [own] * count,
    )
    attention = Attention(
        32,
        8,
        128,
        device=device,
        max_rows=count,
        max_batch=count,
        num_ctas=132,
        kernel="hopper" if device.type == "cpu" else None,
    )
    attention.plan(batch.view(numpy.random.default_rng(0), device))
    assert len(attention.schedule().forest) == groups + 1
    assert sum(node.group >= 0 for node in attention.schedule().forest) == taken


def chain(num_requests: int, step: int) -> Batch:
    """Request i shares `step` more pages with later requests than with earlier ones: a path with one node
    less than there are requests.
    """
    pages = [[*range(step * (i + 1)), 10**5 + i] for i in range(num_requests)]
    return Batch(4, [1] * num_requests, [len(own) * 4 for own in pages], pages, 10**5 + num_requests)


@pytest.mark.parametrize("order", ["shallow first", "deep first", "random"])
@pytest.mark.parametrize("num_requests", [2, 8, 9, 17, 60])
def test_long_paths(device: torch.device, num_requests: int, order: str) -> None:
    """More nodes on a path than a row can link to, and more branches than a plan examines."""
    rng = numpy.random.default_rng(num_requests)
    batch = compact(chain(num_requests, 3))
    requests = {
        "shallow first": list(range(num_requests)),
        "deep first": list(range(num_requests))[::-1],
        "random": rng.permutation(num_requests).tolist(),
    }
    batch = batch.select(requests[order])
    problem = make_problem(rng, Shape(2, 4, 64, torch.bfloat16, 4, None), batch, device)
    attention, view = problem.attention(cascade="always", max_rows=1000), batch.view(rng, device)
    problem.run(attention, view)
    problem.check()
    schedule = attention.schedule()
    check_forest(replace(batch, is_tree=False), schedule.forest)
    check_cover(batch, view, schedule)
    depth = max(taken_depth(schedule.forest, i) for i in range(len(schedule.forest)))
    assert depth == min(num_requests - 1, MAX_LEVELS - 1)
    assert ("too many levels" in {node.reason for node in schedule.forest}) == (len(schedule.forest) > depth)


def taken_depth(forest: tuple[PrefixNode, ...], index: int) -> int:
    return 0 if index < 0 else taken_depth(forest, forest[index].parent) + (forest[index].group >= 0)


def compact(batch: Batch) -> Batch:
    """Pages numbered without gaps."""
    place = {page: i for i, page in enumerate(sorted({page for own in batch.pages for page in own}))}
    return replace(batch, pages=[[place[page] for page in own] for own in batch.pages], num_pages=len(place))


@pytest.mark.parametrize(("requests", "rows"), [(31, 1), (32, 1), (33, 1), (8, 8), (9, 8)])
def test_prefix_of_all_requests(device: torch.device, requests: int, rows: int) -> None:
    """Rows that fill row tiles of 128 need no row list, others do; NaN follows them in Q."""
    rng = numpy.random.default_rng([requests, rows])
    pages = [[*range(20), 20 + i] for i in range(requests)]
    batch = Batch(
        16, [rows] * requests, [20 * 16 + rows + i % 8 for i in range(requests)], pages, 20 + requests
    )
    problem = make_problem(rng, Shape(2, 4, 128, torch.bfloat16, 16, None), batch, device)
    attention = problem.attention(cascade="always")
    problem.run(attention, batch.view(rng, device))
    problem.check()
    (node,) = attention.schedule().forest
    assert node.group >= 0
    assert node.num_rows == requests * rows


@pytest.mark.parametrize("num_requests", [1023, 1024, 1025])
def test_forest_of_very_many_requests(device: torch.device, num_requests: int) -> None:
    """Above 1024 requests plan does not look for a forest."""
    if (
        device.type == "cuda"
        and torch.cuda.get_device_properties(device).shared_memory_per_block_optin < 163 * 1024
    ):
        pytest.skip("this GPU's blocks have shared memory for the forest of 736 requests")
    rng = numpy.random.default_rng(0)
    pages = [[i % 3, 3 + i % 31, 34 + i % 217, 1000 + i] for i in range(num_requests)]
    batch = Batch(
        16, [1] * num_requests, [50 + i % 14 for i in range(num_requests)], pages, 1000 + num_requests
    )
    problem = make_problem(rng, Shape(1, 2, 64, torch.bfloat16, 16, None), batch, device)
    attention, view = problem.attention(cascade="always"), batch.view(rng, device)
    problem.run(attention, view)
    problem.check()
    schedule = attention.schedule()
    if num_requests > 1024:
        assert schedule.forest == ()
    else:
        check_forest(batch, schedule.forest)
        check_cover(batch, view, schedule)
