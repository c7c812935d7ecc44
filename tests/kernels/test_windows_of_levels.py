"""Windows, and masks with holes, over all levels of a composition: they count in positions of the request;
compared with float64.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import oracle
import pytest
import torch
from cascades import Cascade
from compositions import Shape, check_states, make_attention
from tiers import mostly_slow
from torch import Tensor

from attn_backend import BSRView, Composition, PageTable, Variant
from attn_backend.cli.main import main
from attn_backend.jit import compilers
from attn_backend.variants import builtin

needs_cpp = pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler")

WINDOW = 100
SLIDING = builtin.sliding_window(WINDOW)
STREAMING = builtin.streaming_llm(WINDOW, 4)
SHAPE = Shape(2, 4, 64, torch.bfloat16, 16, None)


def in_window(request: int, position: int, at: Tensor) -> Tensor:
    return at >= position - WINDOW


def streaming(request: int, position: int, at: Tensor) -> Tensor:
    return (position - at < WINDOW) | (at < 4)


@needs_cpp
@pytest.mark.parametrize("num_levels", [2, 3])
@pytest.mark.parametrize("seed", mostly_slow(range(20), fast=3))
def test_a_window_counts_positions_over_all_levels(device: torch.device, seed: int, num_levels: int) -> None:
    cascade = Cascade.random(numpy.random.default_rng([seed, num_levels]), device, num_levels)
    attention = cascade.attention(SLIDING)
    for window_left in (WINDOW, -1):  # the variant's own, too
        attention.plan(Composition.cascade(**cascade.levels, causal=True, window_left=window_left))
        cascade.check(attention, in_window)


@needs_cpp
@pytest.mark.parametrize("num_levels", [2, 3])
@pytest.mark.parametrize("seed", mostly_slow(range(20), fast=3))
def test_a_mask_with_holes_over_several_levels(device: torch.device, seed: int, num_levels: int) -> None:
    cascade = Cascade.random(numpy.random.default_rng([seed, num_levels]), device, num_levels, longest=1500)
    attention = cascade.attention(STREAMING)
    attention.plan(Composition.cascade(**cascade.levels, causal=True))
    cascade.check(attention, streaming)


@needs_cpp
@pytest.mark.parametrize("variant", [SLIDING, STREAMING], ids=["window", "streaming"])
def test_kv_tiles_of_a_level_that_no_row_sees_are_not_visited(device: torch.device, variant: Variant) -> None:
    """In a shared level of 4096 tokens, the nearest row sees the end, and with Streaming-LLM all rows see the
    beginning. Another shared level is too far away.
    """
    rng = numpy.random.default_rng(0)
    cascade = Cascade(rng, SHAPE, device, [[4096, 4096], [30, 60, 90, 1000]], [[0, 0, 0, 1]], [1, 1, 2, 1])
    attention = cascade.attention(variant)
    attention.plan(Composition.cascade(**cascade.levels, causal=True))
    schedule = attention.schedule()
    tiles = {int(tile[0]): tile.tolist() for tile in schedule.tiles}  # one of each row group
    kv_tile = schedule.kv_tile
    first = (4096 + 30 - 1 - WINDOW) // kv_tile * kv_tile
    at_end = -(-(4096 - first) // kv_tile)
    has_sinks = variant is STREAMING
    assert tiles[0][5] == at_end + has_sinks
    assert (tiles[0][3] < 0) == has_sinks, "a hole"
    assert tiles[1][5] == 1, "the first tokens, or nothing"
    assert tiles[1][4] > tiles[1][3] if has_sinks else tiles[1][4] == 0
    cascade.check(attention, streaming if has_sinks else in_window)


@needs_cpp
def test_rows_of_which_a_window_leaves_nothing(device: torch.device) -> None:
    """Rows positioned after the last token: an empty state in a shared level, an output of zero in all
    levels.
    """
    cascade = Cascade(numpy.random.default_rng(1), SHAPE, device, [[64], [200, 7]], [[0, 0]], [1, 1])
    cascade.levels["positions"] += torch.tensor([0, 5000], dtype=torch.int32, device=device)
    attention = cascade.attention(SLIDING)
    attention.plan(Composition.cascade(**cascade.levels, causal=True))
    out, lse = attention.run(cascade.q, cascade.memory.kv, return_lse=True)
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    visible = cascade.slots[0][263 - WINDOW :]
    o_ref, lse_ref = oracle.attention(
        cascade.q[:1], cascade.memory.k_slots[visible], cascade.memory.v_slots[visible], causal=False
    )
    check_states(SHAPE, [0], out[:1], lse[:1], o_ref, lse_ref)


@needs_cpp
def test_trees(device: torch.device) -> None:
    """Each node of a tree is a group of a cascade; a row is at the end of its path."""
    rng = numpy.random.default_rng(3)
    cascade = Cascade(
        rng, SHAPE, device, [[70, 300], [90, 40, 20], [30, 60, 1]], [[0, 0, 1], [0, 1, 2]], [1, 1, 1]
    )
    table = cascade.memory.table(rng, list(range(8)))
    offsets = torch.cat(cascade.levels["kv_offsets"])
    tree = Composition.tree(
        [-1, -1, 0, 0, 1, 2, 3, 4],
        table,
        [5, 6, 7],
        kv_offsets=offsets,
        positions=cascade.levels["positions"],
    )
    attention = cascade.attention(SLIDING, max_batch=8)
    attention.plan(tree)
    cascade.check(attention, in_window)


@needs_cpp
def test_one_level_and_several_with_one_object(device: torch.device) -> None:
    """The same requests with their pages in one table, under the same window."""
    rng = numpy.random.default_rng(2)
    cascade = Cascade(rng, SHAPE, device, [[160], [40, 130]], [[0, 0]], [3, 1])
    pages = [cascade.memory.pages[0] + own for own in cascade.memory.pages[1:]]
    indices = torch.zeros(2, max(map(len, pages)), dtype=torch.int32, device=device)
    for row, own in zip(indices, pages, strict=True):
        row[: len(own)] = torch.tensor(own, dtype=torch.int32)
    table = PageTable.block_table(indices, torch.tensor([200, 290], dtype=torch.int32, device=device), 16)
    attention = cascade.attention(SLIDING)
    for plan in (
        BSRView(cascade.levels["qo_indptrs"][1], table, causal=True),
        Composition.cascade(**cascade.levels, causal=True, window_left=WINDOW),
    ):
        attention.plan(plan)
        cascade.check(attention, in_window)


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
    monkeypatch.setattr(compilers, "cpp_compiler", lambda: None)
    cascade = Cascade.random(numpy.random.default_rng(7), torch.device("cpu"), 3)
    for variant, seen in ((SLIDING & builtin.causal(), in_window), (STREAMING, streaming)):
        attention = cascade.attention(variant)
        attention.plan(Composition.cascade(**cascade.levels, causal=True))
        cascade.check(attention, seen)


@needs_cpp
def test_kernels_for_levels_are_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the command that the error on a machine without compilation names."""
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path))
    monkeypatch.setenv("ATTN_BACKEND_JIT", "0")
    cascade = Cascade.random(numpy.random.default_rng(0), torch.device("cpu"), 2)
    with pytest.raises(RuntimeError, match="attn-backend compile --variant") as error:
        cascade.attention(SLIDING)
    arguments = str(error.value).partition("`attn-backend ")[2].partition("`")[0].split()
    assert "--levels" in arguments
    assert main(arguments) == 0
    attention = cascade.attention(SLIDING)
    attention.plan(Composition.cascade(**cascade.levels, causal=True))
    cascade.check(attention, in_window)


def test_what_a_window_over_levels_needs() -> None:
    indptr, table = (
        torch.tensor([0, 3], dtype=torch.int32),
        PageTable.ragged(torch.tensor([0, 40], dtype=torch.int32)),
    )
    offsets, positions = torch.tensor([0], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    twice = ([indptr] * 2, [table] * 2)
    for given, missing in (({}, "kv_offsets"), ({"kv_offsets": [offsets] * 2}, "positions")):
        with pytest.raises(
            ValueError, match=f"window_left is 5, must be -1 for a cascade of 2 levels without {missing}"
        ):
            Composition.cascade(*twice, window_left=5, **given)  # type: ignore[arg-type]
    cascade = Composition.cascade(*twice, window_left=5, kv_offsets=[offsets] * 2, positions=positions)
    plain = make_attention(SHAPE, torch.device("cpu"), max_rows=3, max_batch=1, max_levels=2)
    with pytest.raises(
        ValueError,
        match=r"levels\[0\]: window_left is 5, must be -1, or that of the Attention: "
        r"variant=builtin.sliding_window\(5\)",
    ):
        plain.plan(cascade)


@needs_cpp
def test_what_a_variant_with_a_window_needs_of_levels() -> None:
    indptr, table = (
        torch.tensor([0, 3], dtype=torch.int32),
        PageTable.ragged(torch.tensor([0, 40], dtype=torch.int32)),
    )
    offsets, positions = torch.tensor([0], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    attention = make_attention(
        SHAPE, torch.device("cpu"), max_rows=3, max_batch=1, max_levels=2, variant=SLIDING
    )
    for given, missing in (({"positions": positions}, "kv_offsets"), ({"kv_offsets": offsets}, "positions")):
        with pytest.raises(
            ValueError,
            match=rf"levels\[0\]: {missing} is None, must be given: variant sliding_window has a window",
        ):
            attention.plan(Composition([BSRView(indptr, table, **given)] * 2))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"levels\[0\]: window_left is 5, must be -1, or that of the Attention"
    ):
        attention.plan(
            Composition([BSRView(indptr, table, window_left=5, kv_offsets=offsets, positions=positions)] * 2)
        )
