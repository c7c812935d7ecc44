"""The properties that Schedule reports of a plan, compared with the plan's own arithmetic."""

from __future__ import annotations

import re
from pathlib import Path

import batches
import pytest
import torch

from attn_backend import Attention
from attn_backend.kernels.schedule import TILE_ROWS, Schedule, describe_errors


def check_costs(schedule: Schedule, num_kv_heads: int) -> None:
    """A row tile begins where the previous one ends, at the costs of its kind. Rows that leave states have
    different costs.
    """
    kinds = schedule.cost_kinds()
    of_head = (
        torch.tensor(schedule.pair_cost)[kinds]
        + schedule.of_tiles("num_kv_tiles") * torch.tensor(schedule.kv_tile_cost)[kinds]
    )
    ends = (of_head * num_kv_heads).cumsum(0)
    assert schedule.cost_begin.tolist() == [0, *ends[:-1].tolist()][: len(ends)]


@pytest.mark.parametrize(
    "options",
    [{"max_levels": 4}, {"cascade": "always"}, {"batch_invariant": True}, {"cascade": False}],
    ids=str,
)
def test_cost_kinds(device: torch.device, options: dict[str, object]) -> None:
    kernel = "hopper" if device.type == "cpu" else None  # the costs of the two sorts of rows differ
    attention = Attention(
        24,
        3,
        128,
        device=device,
        max_rows=batches.MAX_ROWS,
        max_batch=batches.MAX_BATCH,
        num_ctas=132,
        kernel=kernel,
        **options,
    )
    met = set()
    for seed in range(30):
        attention.plan(
            batches.random_composition(seed, device)
            if "max_levels" in options
            else batches.random_view(seed, device)
        )
        schedule = attention.schedule()
        check_costs(schedule, 3)
        met |= set(schedule.cost_kinds().tolist())
    assert any(kind < len(TILE_ROWS) for kind in met)
    assert any(kind >= len(TILE_ROWS) for kind in met) == (options != {"cascade": False})


def test_every_error_has_a_sentence() -> None:
    """Every error of csrc/planner/schedule.h."""
    header = (Path(__file__).resolve().parents[2] / "csrc" / "planner" / "schedule.h").read_text()
    bits = [int(bit) for bit in re.findall(r"k\w+(?:Invalid|Failed) = 1u << (\d+)", header)]
    assert bits == list(range(8))
    assert all("must" in describe_errors(1 << bit) or "outside" in describe_errors(1 << bit) for bit in bits)
