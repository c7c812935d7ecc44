"""The planners compared with the model of the schedule, and the invariants of every schedule."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path

import attention_kernels
import batches
import host_planner
import pytest
import schedule_model
import torch
from tiers import mostly_slow

from attn_backend import Attention, BSRView, PageTable
from attn_backend.kernels.schedule import Schedule

# (num_kv_heads, group_size, head_dim, num_ctas)
SHAPES = [
    (8, 4, 128, None),
    (3, 3, 64, None),
    (1, 1, 64, 1),
    (2, 16, 128, 132),
    (1, 5, 256, 264),
    (4, 7, 128, 7),
    (32, 1, 64, 500),
    (2, 2, 128, 2),
]
BATCHES = 150  # for each shape


@cache
def make_attention(
    shape: tuple[int, int, int, int | None],
    device: torch.device,
    max_levels: int = 1,
    cascade: object = False,
    batch_invariant: bool = False,
) -> Attention:
    num_kv_heads, group_size, head_dim, num_ctas = shape
    options = {
        "max_rows": batches.MAX_ROWS,
        "max_batch": batches.MAX_BATCH,
        "max_levels": max_levels,
        "cascade": cascade,
        "batch_invariant": batch_invariant,
    }
    # head_dim 256: the generic kernel, which has fewer kinds of row tiles there
    kernel = attention_kernels.kernel_of(device, SHAPES.index(shape) + 1)
    return Attention(
        num_kv_heads * group_size,
        num_kv_heads,
        head_dim,
        device=device,
        num_ctas=num_ctas,
        kernel=kernel,
        **options,
    )


@pytest.mark.parametrize("first", range(0, BATCHES, 50))
@pytest.mark.parametrize("shape", SHAPES)
def test_planner_agrees_with_model(
    device: torch.device, shape: tuple[int, int, int, int | None], first: int
) -> None:
    attention = make_attention(shape, device)
    num_kv_heads, group_size, _, _ = shape
    for i in range(first, first + 50):
        seed = SHAPES.index(shape) * BATCHES + i
        view = batches.random_view(seed, device)
        attention.plan(view)
        schedule = attention.schedule()
        model = schedule_model.plan(view, schedule, num_kv_heads, group_size, attention.max_rows)
        assert schedule.errors == 0, seed
        assert not schedule_model.differences(schedule, model), seed


@pytest.mark.parametrize("mib", [16, 64])
def test_long_row_groups_have_a_16_bit_copy(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    """As many as there is room for, in order, and none that is short."""
    monkeypatch.setenv("ATTN_BACKEND_DEQUANTIZED_MIB", str(mib))
    are_copied = []
    for shape in SHAPES[:5]:
        num_kv_heads, group_size, head_dim, num_ctas = shape
        attention = Attention(
            num_kv_heads * group_size,
            num_kv_heads,
            head_dim,
            kv_dtype=torch.float8_e4m3fn,
            device="cpu",
            kernel="hopper",
            num_ctas=132 if num_ctas is None else num_ctas,
            max_rows=batches.MAX_ROWS,
            max_batch=batches.MAX_BATCH,
            cascade=False,
        )
        for seed in range(30):
            view = batches.random_view(seed, "cpu")
            attention.plan(view)
            schedule = attention.schedule()
            model = schedule_model.plan(view, schedule, num_kv_heads, group_size, attention.max_rows)
            assert not schedule_model.differences(schedule, model), seed
            are_long = schedule.of_groups("qo_len") * group_size >= schedule.min_dequantized_rows
            is_copied = schedule.of_groups("dequantized_row") >= 0
            assert not is_copied[~are_long].any()
            are_copied += is_copied[are_long].tolist()
    assert any(are_copied)
    assert not all(are_copied)


@pytest.mark.parametrize(
    ("batch", "tokens", "whole"), [(16, 1024, True), (64, 4096, True), (8, 32768, False), (17, 4096, False)]
)
def test_batches_of_equal_lengths(device: torch.device, batch: int, tokens: int, whole: bool) -> None:
    """132 CTAs get whole pairs if that costs at most 4 %."""
    attention = Attention(32, 8, 128, device=device, num_ctas=132, max_rows=64, max_batch=64)
    pages = torch.arange(batch * tokens // 16, dtype=torch.int32, device=device).view(batch, -1)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    attention.plan(
        BSRView(
            torch.arange(batch + 1, dtype=torch.int32, device=device),
            PageTable.block_table(pages, lengths, 16),
        )
    )
    schedule = attention.schedule()
    assert (schedule.positions[:, 2] == 0).all() == whole
    assert schedule.positions[-1].tolist() == [batch, 0, 0]


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "uses_queue"),
    [
        ((512,) * 32, (512,) * 32, True),
        ((700, 20, 1, 300, 2000) * 8, (700, 20, 900, 300, 2500) * 8, True),
        ((4096,), (4096,), True),
        ((128,) * 16, (4096,) * 16, True),
        ((700,), (700,), True),
        ((300,) * 4, (300,) * 4, False),  # nothing would be cut
        ((300,), (300,), False),  # fewer pairs than CTAs
        ((256,), (4096,), False),  # too few, too long
        ((600,), (1700,), False),  # 152 pairs of about the same cost
        ((1024,), (4096,), True),  # 256: each CTA gets two, or almost
        ((1100,), (4096,), False),  # 280: three, since a share is a little over two
        ((3300,), (3300,), True),  # with unequal costs; a share holds more than three of the longest
        ((220,) * 16, (220,) * 16, True),  # no split would be needed, but there are many
        ((1,) * 256, (1024,) * 256, False),  # decode
        ((2048, *(1,) * 255), (4000, *(2000,) * 255), False),
    ],
)
def test_pairs_come_from_the_work_queue(
    device: torch.device, qo_lens: tuple[int, ...], kv_lens: tuple[int, ...], uses_queue: bool
) -> None:
    """The Hopper kernel uses them if the batch computes more than it reads; a CPU plans like that kernel."""
    if device.type == "cuda" and not attention_kernels.is_available("hopper"):
        pytest.skip("needs a GPU that runs the Hopper kernel")
    attention = Attention(
        32, 8, 128, device=device, num_ctas=132, max_rows=40000, max_batch=256, kernel="hopper"
    )
    lengths = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    pages = torch.arange(len(kv_lens) * 256, dtype=torch.int32, device=device).view(len(kv_lens), -1)
    qo_indptr = torch.tensor([0, *torch.tensor(qo_lens).cumsum(0).tolist()], dtype=torch.int32, device=device)
    view = BSRView(qo_indptr, PageTable.block_table(pages, lengths, 16))
    attention.plan(view)
    schedule = attention.schedule()
    assert schedule.uses_queue == uses_queue
    if uses_queue:
        assert (schedule.positions[:, 2] == 0).all()
    assert not schedule_model.differences(
        schedule, schedule_model.plan(view, schedule, 8, 4, attention.max_rows)
    )


def test_pairs_of_a_window_come_from_the_work_queue(device: torch.device) -> None:
    """A pair costs only the tokens that its rows see: under a window, a share holds many pairs of a long
    request."""
    if device.type == "cuda" and not attention_kernels.is_available("hopper"):
        pytest.skip("needs a GPU that runs the Hopper kernel")
    attention = Attention(
        32, 8, 128, device=device, num_ctas=140, max_rows=40000, max_batch=2, kernel="hopper"
    )
    table = PageTable.block_table(
        torch.arange(1024, dtype=torch.int32, device=device).view(1, -1),
        torch.tensor([16384], dtype=torch.int32, device=device),
        16,
    )
    for window_left, uses_queue in ((1023, True), (15000, False)):
        view = BSRView(
            torch.tensor([0, 4096], dtype=torch.int32, device=device), table, window_left=window_left
        )
        attention.plan(view)
        schedule = attention.schedule()
        assert schedule.uses_queue == uses_queue, window_left
        assert not schedule_model.differences(
            schedule, schedule_model.plan(view, schedule, 8, 4, attention.max_rows)
        )


@pytest.mark.parametrize(
    ("qo_len", "kv_len", "whole"), [(220, 220, True), (500, 500, True), (512, 8448, True), (256, 8448, False)]
)
def test_pairs_stay_whole_where_a_merge_takes_longer(
    device: torch.device, qo_len: int, kv_len: int, whole: bool
) -> None:
    """One prompt, or the last chunk of a prompt, with fewer pairs than CTAs."""
    if device.type == "cuda" and not attention_kernels.is_available("hopper"):
        pytest.skip("needs a GPU that runs the Hopper kernel")
    attention = Attention(
        32, 8, 128, device=device, num_ctas=132, max_rows=40000, max_batch=256, kernel="hopper"
    )
    pages = torch.arange(1024, dtype=torch.int32, device=device).view(1, -1)
    qo_indptr = torch.tensor([0, qo_len], dtype=torch.int32, device=device)
    view = BSRView(
        qo_indptr, PageTable.block_table(pages, torch.tensor([kv_len], dtype=torch.int32, device=device), 16)
    )
    attention.plan(view)
    schedule = attention.schedule()
    assert (schedule.positions[:, 2] == 0).all() == whole
    assert not schedule_model.differences(
        schedule, schedule_model.plan(view, schedule, 8, 4, attention.max_rows)
    )


@pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("valid", mostly_slow([True, False], fast=1))
@pytest.mark.parametrize(
    "options",
    mostly_slow([{}, {"cascade": True}, {"cascade": "always"}, {"batch_invariant": True}], fast=1),
    ids=["plain", "cascade", "always", "invariant"],
)
def test_planner_agrees_with_the_host_planner_bit_for_bit(
    device: torch.device, valid: bool, options: dict[str, object], tmp_path: Path
) -> None:
    """On a GPU: the device planner against the host planner, with the same batches and configuration."""
    library = host_planner.build(tmp_path)
    for shape in SHAPES:
        attention = make_attention(shape, device, **options)
        for i in range(BATCHES if device.type == "cuda" else BATCHES // 3):
            seed = SHAPES.index(shape) * BATCHES + i
            view = batches.random_view(seed, device, valid)
            # a CPU refuses wrong values; their clamped schedule exists all the same
            with contextlib.suppress(ValueError):
                attention.plan(view)
            schedule = attention.schedule()
            assert schedule_model.same(schedule, host_planner.plan(library, attention, view)), seed


@pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("shape", mostly_slow(SHAPES, fast=2))
def test_compositions_agree_with_model_and_host_planner(
    device: torch.device, shape: tuple[int, int, int, int | None], valid: bool, tmp_path: Path
) -> None:
    library = host_planner.build(tmp_path)
    attention = make_attention(shape, device, max_levels=4)
    num_kv_heads, group_size, _, _ = shape
    for i in range(30 if device.type == "cuda" else 12):
        seed = SHAPES.index(shape) * 30 + i
        composition = batches.random_composition(seed, device, valid)
        # a CPU refuses wrong values; their clamped schedule exists all the same
        with contextlib.suppress(ValueError):
            attention.plan(composition)
        schedule = attention.schedule()
        model = schedule_model.plan(composition, schedule, num_kv_heads, group_size, attention.max_rows)
        if valid:
            check_schedule(schedule, num_kv_heads)
            assert schedule.errors == 0, seed
            assert not schedule_model.differences(schedule, model), seed
        # Damaged prefix sums put a row into several groups of a level; it may be linked to any of them.
        assert schedule_model.same(
            schedule, host_planner.plan(library, attention, composition), links=valid
        ), seed


@pytest.mark.parametrize("shape", SHAPES)
def test_wrong_values_are_clamped_and_reported(
    device: torch.device, shape: tuple[int, int, int, int | None]
) -> None:
    """A CPU also refuses them."""
    attention = make_attention(shape, device)
    num_kv_heads, group_size, _, _ = shape
    met = 0
    for i in range(BATCHES):
        seed = SHAPES.index(shape) * BATCHES + i
        view = batches.random_view(seed, device, valid=False)
        model = schedule_model.plan(view, attention.schedule(), num_kv_heads, group_size, attention.max_rows)
        if model.errors and device.type == "cpu":
            with pytest.raises(ValueError, match=r"qo_indptr|kv_indptr|kv_lens|kv_last_page_len|rows"):
                attention.plan(view)
        else:
            attention.plan(view)
        assert not schedule_model.differences(attention.schedule(), model), seed
        met |= model.errors
    assert met == 0b11111


@pytest.mark.parametrize("shape", SHAPES)
def test_every_schedule_covers_all_work_once_and_evenly(
    device: torch.device, shape: tuple[int, int, int, int | None]
) -> None:
    attention = make_attention(shape, device)
    for seed in range(30):
        attention.plan(batches.random_view(seed, device))
        check_schedule(attention.schedule(), attention.num_kv_heads)


def check_schedule(schedule: Schedule, num_kv_heads: int) -> None:
    tiles = schedule.tiles.tolist()
    positions = [tuple(position) for position in schedule.positions.tolist()]
    assert len(positions) == schedule.num_ctas + 1
    assert positions[0] == (0, 0, 0)
    assert positions[-1] == (len(tiles), 0, 0)
    assert positions == sorted(positions)
    assert len(tiles) <= schedule.max_tiles
    assert [tile[2] for tile in tiles if tile[5] < 1] == []
    for tile, head, kv_tile in positions:
        assert (tile, head, kv_tile) == (len(tiles), 0, 0) or (
            tile < len(tiles) and head < num_kv_heads and kv_tile < tiles[tile][5]
        )

    # Walk every interval like an executor: each KV tile of each (row tile, head) once, in order.
    done = [[0] * num_kv_heads for _ in tiles]
    cost_kinds = schedule.cost_kinds().tolist()
    costs, partial_slots = [], 0
    for cta in range(schedule.num_ctas):
        (tile, head, kv_tile), end = positions[cta], positions[cta + 1]
        cost, slots = 0, set()
        while (tile, head, kv_tile) < end:
            kind, num_kv_tiles = cost_kinds[tile], tiles[tile][5]
            stop = end[2] if (tile, head) == end[:2] else num_kv_tiles
            assert done[tile][head] == kv_tile
            assert stop > kv_tile
            done[tile][head] = stop
            cost += (stop - kv_tile) * schedule.kv_tile_cost[kind] + (
                schedule.pair_cost[kind] if kv_tile == 0 else 0
            )
            if (kv_tile, stop) != (0, num_kv_tiles):
                slot = "starts inside" if kv_tile else "ends inside"
                assert slot not in slots
                slots.add(slot)
                partial_slots += 1
            tile, head, kv_tile = (
                (tile, head, stop)
                if stop < num_kv_tiles
                else (tile, head + 1, 0)
                if head + 1 < num_kv_heads
                else (tile + 1, 0, 0)
            )
        assert (tile, head, kv_tile) == end or positions[cta] == end
        costs.append(cost)
    assert all(done[tile] == [tiles[tile][5]] * num_kv_heads for tile in range(len(tiles)))
    assert partial_slots <= 2 * schedule.num_ctas

    # Even: a share of the cost, rounded up. It may vary at either end by a KV tile, by the cost before a
    # pair's first tile, or by an unsplit pair. With a work queue, by whole pairs.
    heaviest = max(
        (
            schedule.kv_tile_cost[kind] * (tile[5] if schedule.uses_queue else 1)
            + 2 * schedule.pair_cost[kind]
            for kind, tile in zip(cost_kinds, tiles, strict=True)
        ),
        default=0,
    )
    share = max(-(-sum(costs) // schedule.num_ctas), schedule.min_share)
    assert max(costs) < share + heaviest
    working = [cta for cta, cost in enumerate(costs) if cost]
    assert all(costs[cta] > share - heaviest for cta in working[:-1])


def test_replan_leaves_nothing_behind(device: torch.device) -> None:
    fresh = Attention(
        32, 8, 128, device=device, max_rows=batches.MAX_ROWS, max_batch=batches.MAX_BATCH, cascade="always"
    )
    used = Attention(
        32, 8, 128, device=device, max_rows=batches.MAX_ROWS, max_batch=batches.MAX_BATCH, cascade="always"
    )
    for seed in range(20):
        used.plan(batches.random_view(seed, device))
    fresh.plan(batches.random_view(100, device))
    used.plan(batches.random_view(100, device))
    assert schedule_model.same(fresh.schedule(), used.schedule())
