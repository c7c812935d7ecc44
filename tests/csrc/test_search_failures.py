"""The device planner distrusts messages between its CTAs: it accepts nothing from an earlier launch, and
nothing that contradicts what it has read itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import host_planner
import numpy
import pytest
import schedule_model
import torch
from forests import Batch, random_batch
from planner_attentions import SHAPES, make_attention
from workspace import config_of

from attn_backend import Attention, BSRView
from attn_backend.kernels.schedule import Schedule

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]

_SEARCH_FAILED = 1 << 7  # ScheduleError
_GUARD = 4096  # bytes after the schedule that no plan may touch


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("planners")
    return host_planner.build(folder, device=True)


def forests(count: int) -> Iterator[tuple[int, numpy.random.Generator, Batch, Attention]]:
    """Batches with shared prefixes: one, or a tree of them."""
    for seed in range(count):
        rng = numpy.random.default_rng([seed, 11])
        batch = random_batch(rng, int(rng.choice([2, 8, 16, 64])))
        shape = SHAPES[seed % len(SHAPES)]
        yield (
            seed,
            rng,
            batch,
            make_attention(
                shape,
                max_rows=batch.rows + 1,
                max_batch=len(batch.pages),
                cascade="always" if seed % 3 else True,
            ),
        )


def poisoned(library: ctypes.CDLL, attention: Attention, rng: numpy.random.Generator) -> torch.Tensor:
    size = host_planner.workspace_bytes(library, attention) + _GUARD
    fill = int(rng.integers(3))
    if fill == 0:
        return torch.full((size,), int(rng.choice([0, 1, 255])), dtype=torch.uint8)
    values = rng.integers(0, 256, size, dtype=numpy.uint8)
    if fill == 1:  # small numbers
        values.reshape(-1, 8)[:, 1:] = 0
    return torch.from_numpy(values)


def test_whatever_the_workspace_holds(library: ctypes.CDLL) -> None:
    for seed, rng, batch, attention in forests(25):
        view = batch.view(rng, "cpu")
        workspace = poisoned(library, attention, rng)
        guard = workspace[-_GUARD:].clone()
        planned = host_planner.plan(library, attention, view)
        for again in range(3):
            assert schedule_model.same(
                host_planner.plan(library, attention, view, seed + again, workspace=workspace), planned
            ), (seed, again)
        assert torch.equal(workspace[-_GUARD:], guard)


def test_a_search_that_does_not_end_leaves_a_plan_without_a_forest(library: ctypes.CDLL) -> None:
    """The result of one CTA gets lost. The plan still ends, reports it, and plans every request separately.

    The next plan is right again.
    """
    for seed, rng, batch, attention in forests(16):
        view = batch.view(rng, "cpu")
        workspace = poisoned(library, attention, rng)
        whole = host_planner.plan(library, attention, view)
        alone = host_planner.plan(
            library,
            make_attention(
                SHAPES[seed % len(SHAPES)], max_rows=batch.rows + 1, max_batch=len(batch.pages), cascade=False
            ),
            view,
        )
        lost = int(rng.integers(1, 1 + min(len(batch.pages), 128)))
        planned = host_planner.plan(library, attention, view, seed, workspace=workspace, lost=lost)
        # one request is planned without a search
        assert planned.errors == (_SEARCH_FAILED if len(batch.pages) > 1 else 0), seed
        assert planned.forest == ()
        for name in ("groups", "table_begin", "tiles", "cost_begin", "positions", "links"):
            assert torch.equal(getattr(planned, name), getattr(alone, name)), (seed, name)
        assert schedule_model.same(
            host_planner.plan(library, attention, view, seed, workspace=workspace), whole
        ), seed


def test_ctas_that_start_after_the_wait(library: ctypes.CDLL) -> None:
    """Some CTAs start after the first one has stopped waiting.

    Their messages reach no later plan, even if the batch has changed.
    """
    failures = 0
    for seed, rng, batch, attention in forests(24):
        if len(batch.pages) < 2:
            continue  # one request is planned without a search
        workspace = (
            poisoned(library, attention, rng)
            if seed % 2
            else torch.zeros(host_planner.workspace_bytes(library, attention) + _GUARD, dtype=torch.uint8)
        )
        view = batch.view(rng, "cpu")
        host_planner.plan(library, attention, view, seed, workspace=workspace)
        num_ctas = 1 + min(len(batch.pages), 128)
        for step in range(4):
            view = changed(rng, batch.view(rng, "cpu"))
            order = rng.permutation(num_ctas).tolist() if step % 2 == 0 else None
            planned = host_planner.plan(
                library, attention, view, seed + step, workspace=workspace, order=order
            )
            is_late = order is not None and order[-1] != 0
            failures += is_late
            if is_late:
                assert planned.errors & _SEARCH_FAILED, (seed, step)
                assert planned.forest == ()
            else:
                assert schedule_model.same(planned, host_planner.plan(library, attention, view)), (seed, step)
    assert failures > 30


def changed(rng: numpy.random.Generator, view: BSRView) -> BSRView:
    """`view` before or after the engine changed some of its metadata: pages, lengths, query lengths."""
    table = view.table
    tensors = {
        name: getattr(table, name) for name in ("indices", "indptr", "last_page_len", "kv_lens", "rows")
    }
    for name in ("indices", "kv_lens", "last_page_len"):
        if tensors[name] is None or tensors[name].numel() == 0 or rng.random() < 0.4:
            continue
        new = torch.empty_strided(
            tensors[name].shape, tensors[name].stride(), dtype=tensors[name].dtype
        ).copy_(tensors[name])
        some = torch.from_numpy(rng.random(tuple(new.shape)) < rng.choice([0.02, 0.3, 1]))
        if name == "indices":
            new[some] = new.flatten()[torch.from_numpy(rng.integers(0, new.numel(), int(some.sum())))]
        else:
            new[some] = (new[some] * float(rng.random())).to(new.dtype).clamp(min=1)
        tensors[name] = new
    qo_indptr = view.qo_indptr.clone()
    if rng.random() < 0.4:
        qo_indptr = torch.sort(
            torch.from_numpy(rng.integers(0, int(qo_indptr[-1]) + 1, len(qo_indptr)))
        ).values.to(qo_indptr.dtype)
        qo_indptr[0] = 0
    return BSRView(
        qo_indptr,
        type(table)(table.page_size, **tensors, entry_step=table.entry_step),
        causal=view.causal,
        window_left=view.window_left,
    )


def check_bounds(schedule: Schedule, library: ctypes.CDLL, attention: Attention) -> None:
    """No kernel that runs the plan reads or writes outside the workspace, the rows of Q, or the page
    table."""
    config = config_of(attention)
    max_groups, max_rows, max_tiles, max_states, max_merge_rows = (
        config[f"max_{of}"] for of in ("groups", "rows", "tiles", "states", "merge_rows")
    )
    num_groups = len(schedule.groups)
    qo_begin, qo_len, kv_len, level, state_begin = map(
        schedule.of_groups, ("qo_begin", "qo_len", "kv_len", "level", "state_begin")
    )
    group, num_kv_tiles = map(schedule.of_tiles, ("group", "num_kv_tiles"))
    assert num_groups <= max_groups
    assert len(schedule.tiles) <= max_tiles
    assert (kv_len >= 0).all()
    assert (qo_begin >= 0).all()
    assert ((qo_begin + qo_len)[level == 0] <= max_rows).all()
    assert ((qo_begin + qo_len)[level != 0] <= max_states).all()  # of the row list
    assert ((state_begin + qo_len)[state_begin >= 0] <= max_states).all()
    assert ((group >= 0) & (group < num_groups)).all()
    assert (num_kv_tiles >= 1).all()
    assert schedule.links.shape[1] <= max_merge_rows
    linked = schedule.links[..., 0]
    assert (linked < num_groups).all()
    positions = [tuple(position) for position in schedule.positions.tolist()]
    assert positions == sorted(positions)


def test_metadata_that_changes_during_a_plan(library: ctypes.CDLL) -> None:
    """The searching CTAs have read different metadata than the planning CTA. The plan ends in bounds, and the
    next one is right.
    """
    failures = 0
    for seed, rng, batch, attention in forests(80):
        view = batch.view(rng, "cpu")
        other = changed(rng, view)
        workspace = poisoned(library, attention, rng)
        guard = workspace[-_GUARD:].clone()
        planned = host_planner.plan(library, attention, view, seed, workspace=workspace, searched=other)
        check_bounds(planned, library, attention)
        assert planned.errors in (0, _SEARCH_FAILED)
        failures += planned.errors != 0
        assert schedule_model.same(
            host_planner.plan(library, attention, view, seed, workspace=workspace),
            host_planner.plan(library, attention, view),
        ), seed
        assert torch.equal(workspace[-_GUARD:], guard)
    assert failures > 3
