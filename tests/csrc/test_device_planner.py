"""The device planner without a GPU: csrc/planner/device/plan.cu on fibers (tests/csrc/device_planner.cpp)
gives the bits of the host planner.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import batches
import host_planner
import numpy
import pytest
import schedule_model
import torch
from forests import Batch, random_batch
from planner_attentions import SHAPES, make_attention

from attn_backend import BSRView, PageTable

pytestmark = pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")

QO_INDPTR_INVALID = 1  # kQoIndptrInvalid in csrc/planner/schedule.h
OPTIONS = {
    "plain": {"cascade": False},
    "cascade": {"cascade": True},
    "always": {"cascade": "always"},
    "invariant": {"batch_invariant": True},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("planners")
    return host_planner.build(folder, device=True)


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_random_batches(library: ctypes.CDLL, options: dict[str, object], valid: bool) -> None:
    for seed in range(30):
        attention = make_attention(SHAPES[seed % len(SHAPES)], **options)
        view = batches.random_view(1000 + seed, "cpu", valid)
        assert schedule_model.same(
            host_planner.plan(library, attention, view, seed), host_planner.plan(library, attention, view)
        ), seed


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_16_bit_copies_of_long_row_groups(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    monkeypatch.setenv("ATTN_BACKEND_DEQUANTIZED_MIB", "256")
    num_copied = 0
    for seed in range(20):
        shape = SHAPES[seed % len(SHAPES)]
        attention = make_attention(shape, kv_dtype=torch.float8_e4m3fn, **options)
        view = batches.random_view(3000 + seed, "cpu")
        planned = host_planner.plan(library, attention, view)
        assert schedule_model.same(host_planner.plan(library, attention, view, seed), planned), seed
        num_copied += int((planned.of_groups("dequantized_row") >= 0).sum())
    assert num_copied > 0


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_requests_without_rows_have_no_row_tile_of_the_largest_kind(
    library: ctypes.CDLL, options: dict[str, object]
) -> None:
    """A batch invariant plan gives that kind to all requests except decodes.

    The Hopper kernel's producer reads the flag.
    """
    for seed, qo_lens in enumerate(
        [(0,), (0, 0, 0), (1, 0, 1), (0, 1), (1, 0, 300), (0, 300), (1, 1), (300,)]
    ):
        attention = make_attention(SHAPES[0], **options)
        qo_indptr = torch.tensor([0, *torch.tensor(qo_lens).cumsum(0).tolist()], dtype=torch.int32)
        pages = torch.arange(len(qo_lens) * 8, dtype=torch.int32).view(len(qo_lens), 8)
        view = BSRView(
            qo_indptr, PageTable.block_table(pages, torch.full((len(qo_lens),), 500, dtype=torch.int32), 64)
        )
        for device_seed in (None, seed):
            planned = host_planner.plan(library, attention, view, device_seed)
            assert (
                planned.has_largest_tiles
                == bool((planned.of_tiles("kind") == planned.max_kind).any())
                == (300 in qo_lens)
            ), qo_lens


@pytest.mark.parametrize("cascade", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_prefix_sums_that_give_all_rows_to_many_requests(
    library: ctypes.CDLL, causal: bool, cascade: bool
) -> None:
    """They decrease repeatedly, which is already an error, and produce more row tiles than the bound."""
    attention = make_attention(SHAPES[2], cascade=cascade)
    qo_indptr = torch.tensor([0, batches.MAX_ROWS] * 40 + [0], dtype=torch.int32)
    pages = torch.zeros(80, 50, dtype=torch.int32)
    view = BSRView(
        qo_indptr, PageTable.block_table(pages, torch.full((80,), 3200, dtype=torch.int32), 64), causal=causal
    )
    planned = host_planner.plan(library, attention, view)
    assert planned.errors == QO_INDPTR_INVALID
    assert len(planned.tiles) == planned.max_tiles
    assert schedule_model.same(host_planner.plan(library, attention, view, 1), planned)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_more_row_tiles_than_there_is_room_for(library: ctypes.CDLL, options: dict[str, object]) -> None:
    """The batch itself is valid.

    Tiles beyond the available room are dropped, which is an error. Nothing is written after them.
    """
    for seed in range(8):
        attention = make_attention(SHAPES[seed % len(SHAPES)], **options)
        view = batches.random_view(2000 + seed, "cpu")
        whole = host_planner.plan(library, attention, view)
        assert whole.errors == 0
        for max_tiles in {len(whole.tiles), len(whole.tiles) - 1, 1} - {-1, 0}:
            planned = host_planner.plan(library, attention, view, max_tiles=max_tiles)
            fits = max_tiles >= len(whole.tiles)
            assert planned.errors == (0 if fits else QO_INDPTR_INVALID), seed
            assert planned.tiles.tolist() == whole.tiles[:max_tiles].tolist(), seed
            assert planned.cost_begin.tolist() == whole.cost_begin[:max_tiles].tolist(), seed
            assert planned.positions[-1].tolist() == [min(max_tiles, len(whole.tiles)), 0, 0]
            assert not fits or schedule_model.same(planned, whole), seed
            assert schedule_model.same(
                host_planner.plan(library, attention, view, seed, max_tiles=max_tiles), planned
            ), seed


def test_random_compositions(library: ctypes.CDLL) -> None:
    for seed in range(15):
        attention = make_attention(SHAPES[seed % len(SHAPES)], max_levels=8)
        composition = batches.random_composition(seed, "cpu", most_levels=8)
        assert schedule_model.same(
            host_planner.plan(library, attention, composition, seed),
            host_planner.plan(library, attention, composition),
        ), seed


@pytest.mark.parametrize("mode", [True, "always"])
def test_random_forests(library: ctypes.CDLL, mode: object) -> None:
    for seed in range(60):
        rng = numpy.random.default_rng([seed, 5])
        batch = random_batch(rng, int(rng.choice([1, 1, 2, 3, 8, 16, 64])))
        attention = make_attention(
            SHAPES[seed % len(SHAPES)],
            max_rows=batch.rows + 1,
            max_batch=len(batch.pages) + int(rng.integers(9)),
            cascade=mode,
        )
        view = batch.view(rng, "cpu")
        assert schedule_model.same(
            host_planner.plan(library, attention, view, seed), host_planner.plan(library, attention, view)
        ), seed


@pytest.mark.parametrize("mode", [True, "always"])
def test_one_prefix(library: ctypes.CDLL, mode: object) -> None:
    """All requests, or some of them, share a single prefix."""
    for seed, num_requests in enumerate([2, 3, 16, 31, 32, 33, 64, 65, 200, 513, 640, 641]):
        rng = numpy.random.default_rng([seed, 6])
        prefix = list(range(int(rng.integers(1, 300))))
        share = rng.random(num_requests) < rng.choice([0.2, 0.9, 1])
        share[rng.permutation(num_requests)[:2]] = True
        pages = [[*(prefix if shares else []), 1000 + 2 * i, 1001 + 2 * i] for i, shares in enumerate(share)]
        qo_lens = [int(rng.integers(1, 4)) if seed % 2 else 1 for _ in pages]
        batch = Batch(16, qo_lens, [16 * len(own) - int(rng.integers(12)) for own in pages], pages, 5000)
        attention = make_attention(
            SHAPES[seed % len(SHAPES)], max_rows=batch.rows, max_batch=num_requests, cascade=mode
        )
        view = batch.view(rng, "cpu")
        planned = host_planner.plan(library, attention, view)
        assert len(planned.forest) == 1
        assert mode is True or planned.forest[0].group >= 0
        assert schedule_model.same(host_planner.plan(library, attention, view, seed), planned), seed


@pytest.mark.parametrize(
    ("requests", "rows", "alone", "listed"),
    [(31, 1, 0, 1), (32, 1, 0, 0), (33, 1, 0, 1), (8, 8, 0, 0), (9, 8, 0, 1), (32, 1, 32, 1), (512, 1, 0, 0)],
)
def test_only_rows_of_all_that_fill_row_tiles_need_no_list(
    library: ctypes.CDLL, requests: int, rows: int, alone: int, listed: int
) -> None:
    """`alone`: requests that share nothing, before `requests` that share a prefix.

    32 rows of 4 heads fill a row tile.
    """
    pages = [[*([900 + i] if i < alone else range(20)), 1000 + i] for i in range(alone + requests)]
    batch = Batch(16, [rows] * len(pages), [16 * len(own) - 16 + rows for own in pages], pages, 5000)
    attention = make_attention(SHAPES[0], max_rows=batch.rows, max_batch=len(pages), cascade="always")
    view = batch.view(numpy.random.default_rng(0), "cpu")
    planned, on_host = host_planner.plan_and_lists_rows(library, attention, view)
    of_device, on_device = host_planner.plan_and_lists_rows(library, attention, view, 1)
    assert on_host == on_device == bool(listed)
    assert schedule_model.same(of_device, planned)
    assert planned.rows.tolist() == list(range(alone * rows, len(pages) * rows))


@pytest.mark.parametrize("seed", range(12))
def test_prefix_that_does_not_begin_at_the_first_request(library: ctypes.CDLL, seed: int) -> None:
    """All requests share the same length with the first one, and some of them share more with each other."""
    rng = numpy.random.default_rng([seed, 7])
    num_requests = int(rng.choice([3, 33, 70, 500]))
    prefix = list(range(int(rng.integers(1, 20))))
    # the first has a separate one
    branch = numpy.concatenate(
        [[0], rng.permutation(num_requests - 1) % int(rng.integers(1, num_requests - 1)) + 1]
    )
    pages = [
        [*prefix, *(100 + 10 * int(own) + k for k in range(3)), 20_000 + i] for i, own in enumerate(branch)
    ]
    batch = Batch(
        16, [1] * num_requests, [16 * len(own) - int(rng.integers(12)) for own in pages], pages, 50_000
    )
    attention = make_attention(SHAPES[0], max_rows=batch.rows, max_batch=num_requests, cascade="always")
    view = batch.view(rng, "cpu")
    planned = host_planner.plan(library, attention, view)
    assert len(planned.forest) > 1
    assert schedule_model.same(host_planner.plan(library, attention, view, seed), planned)


@pytest.mark.parametrize("num_requests", [17, 18, 60])
def test_more_branches_on_a_path_than_a_request_is_compared_with(
    library: ctypes.CDLL, num_requests: int
) -> None:
    """Each request shares one page more with later requests than with earlier ones: 16 nodes are found, for
    batches of any size.
    """
    pages = [[*range(i + 1), 1000 + i] for i in range(num_requests)]
    batch = Batch(16, [1] * num_requests, [16 * len(own) for own in pages], pages, 2000)
    attention = make_attention(SHAPES[0], max_rows=num_requests, max_batch=num_requests, cascade="always")
    view = batch.view(numpy.random.default_rng(0), "cpu")
    planned = host_planner.plan(library, attention, view)
    assert len(planned.forest) == 16
    assert schedule_model.same(host_planner.plan(library, attention, view, num_requests), planned)


@pytest.mark.parametrize("num_requests", [512, 641, 1024])
@pytest.mark.parametrize("kind", ["levels", "pairs", "random"])
def test_very_many_requests(library: ctypes.CDLL, num_requests: int, kind: str) -> None:
    """More requests than a CTA has threads, and more prefixes than are linked at once."""
    rng = numpy.random.default_rng(num_requests)
    requests = range(num_requests)
    pages = {
        "levels": [[i % 3, 3 + i % 31, 34 + i % 217, 1000 + i] for i in requests],
        "pairs": [[i % (num_requests // 2), 5000 + i // 2, 20000 + i] for i in requests],
        "random": [[0, 1, 2 + int(rng.integers(40)), 100 + int(rng.integers(9)), 1000 + i] for i in requests],
    }[kind]
    qo_lens = [1 if kind != "random" else int(rng.integers(1, 4)) for _ in requests]
    batch = Batch(16, qo_lens, [16 * len(own) - int(rng.integers(12)) for own in pages], pages, 50_000)
    attention = make_attention(SHAPES[0], max_rows=batch.rows, max_batch=num_requests, cascade="always")
    view = batch.view(rng, "cpu")
    planned = host_planner.plan(library, attention, view)
    assert any(node.group >= 0 for node in planned.forest)
    assert schedule_model.same(host_planner.plan(library, attention, view, num_requests), planned)
