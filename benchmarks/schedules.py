"""The work of a schedule: its cost, and how evenly the CTAs share it."""

from __future__ import annotations

from attn_backend.cli.planned import ScheduleCosts
from attn_backend.kernels.schedule import Schedule


def total_cost(schedule: Schedule, num_kv_heads: int) -> int:
    """Cost of the whole line of work (csrc/planner/schedule.h) over all KV heads, in the schedule's units."""
    return ScheduleCosts.of(schedule, num_kv_heads).total


def balance(schedule: Schedule, num_kv_heads: int) -> float:
    """Cost of the busiest CTA ÷ mean of all: 1 is perfect. CTAs without work count, and so does Q that a CTA
    loads again.
    """
    return ScheduleCosts.of(schedule, num_kv_heads).balance


def taken_prefixes(schedule: Schedule) -> int:
    """Shared prefixes that plan() found by itself and made row groups of."""
    return sum(node.group >= 0 for node in schedule.forest)
