"""The costs of a schedule: of all its work, of each CTA's part, and the tokens that are read."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

import torch

from ..kernels.schedule import Schedule


@dataclass(frozen=True)
class Part:
    """The work of one CTA in one row group; begin and end in cost units from the start of the CTA."""

    cta: int
    group: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class ScheduleCosts:
    """Costs in the schedule's own units (Schedule.kv_tile_cost says how many a KV tile has).

    Attributes:
        total: cost of all the work, without what is done again.
        parts: what each CTA does, in order. Where its interval starts inside a (row tile, head) it pays for
            that Q again. Pairs that are taken in turn go to CTAs as they would come for them, if all did what
            they cost.
        ctas: int64 [num_ctas]: cost of what each CTA does.
        kv_tokens: tokens of KV that the row groups read, each group its tokens once.
    """

    total: int
    parts: list[Part]
    ctas: torch.Tensor
    kv_tokens: int

    @classmethod
    def of(cls, schedule: Schedule, num_kv_heads: int) -> ScheduleCosts:
        group, _, _, kv_begin, kv_end, num_kv_tiles = schedule.tiles.long().unbind(1)
        cost_kind = schedule.cost_kinds()
        kv_tile_cost, pair_cost = (
            torch.tensor(schedule.kv_tile_cost)[cost_kind],
            torch.tensor(schedule.pair_cost)[cost_kind],
        )
        head_cost = pair_cost + num_kv_tiles * kv_tile_cost
        parts = (
            _from_queue(schedule, num_kv_heads, head_cost)
            if schedule.uses_queue
            else _intervals(schedule, num_kv_heads, head_cost, pair_cost, kv_tile_cost)
        )
        ctas = torch.zeros(schedule.num_ctas, dtype=torch.int64)
        for part in parts:
            ctas[part.cta] = part.end

        tokens = torch.zeros(schedule.groups.shape[0], dtype=torch.int64)
        last = tokens.scatter_reduce(0, group, kv_end, "amax", include_self=False)
        first = tokens.scatter_reduce(0, group, kv_begin, "amin", include_self=False)
        return cls(int((head_cost * num_kv_heads).sum()), parts, ctas, int((last - first).sum()))

    @property
    def balance(self) -> float:
        """Cost of the busiest CTA over the mean of all: 1 is a perfect split; 1 if there is no work."""
        return float(self.ctas.max() / self.ctas.double().mean()) if self.ctas.any() else 1.0


def _from_queue(schedule: Schedule, num_kv_heads: int, head_cost: torch.Tensor) -> list[Part]:
    """The parts of CTAs that take (row tile, head) pairs from a queue: group by group, in a group the last
    row tile first, in a row tile head by head. The first pairs go to the CTAs in order, the next ones in
    reverse order; then each CTA asks for the next pair when it begins one (WorkQueue in
    csrc/attention/sm90/feed/work_queue.cuh).
    """
    tiles = defaultdict(list)
    for tile, group in enumerate(schedule.of_tiles("group").tolist()):
        tiles[group].append(tile)
    pairs = [
        (group, tile)
        for group, of_group in tiles.items()
        for tile in reversed(of_group)
        for _ in range(num_kv_heads)
    ]
    costs = head_cost.tolist()
    ctas = schedule.num_ctas
    asked = 2 * ctas
    takes = [(0, cta, cta) for cta in range(min(ctas, len(pairs)))]  # (time, CTA, pair)
    heapq.heapify(takes)
    parts = []
    while takes:
        begin, cta, pair = heapq.heappop(takes)
        group, tile = pairs[pair]
        end = begin + costs[tile]
        parts.append(Part(cta, group, begin, end))
        after = 2 * ctas - 1 - cta
        if pair >= ctas:
            after, asked = asked, asked + 1
        if after < len(pairs):
            heapq.heappush(takes, (end, cta, after))
    return parts


def _intervals(
    schedule: Schedule,
    num_kv_heads: int,
    head_cost: torch.Tensor,
    pair_cost: torch.Tensor,
    kv_tile_cost: torch.Tensor,
) -> list[Part]:
    # Positions after the last row tile are those of CTAs without work: an entry of its own for them.
    zero = torch.zeros(1, dtype=torch.int64)
    tile_begins = torch.cat([schedule.cost_begin, (head_cost * num_kv_heads).sum(0, keepdim=True)])
    head_cost, pair_cost, kv_tile_cost = (
        torch.cat([cost, zero]) for cost in (head_cost, pair_cost, kv_tile_cost)
    )
    tile, head, kv_tile = schedule.positions.long().unbind(1)
    reloads = torch.where(kv_tile > 0, pair_cost[tile], 0)
    begins = tile_begins[tile] + head * head_cost[tile] + reloads + kv_tile * kv_tile_cost[tile]
    first_tile = torch.searchsorted(
        schedule.of_tiles("group").contiguous(), torch.arange(schedule.groups.shape[0] + 1, dtype=torch.int32)
    )
    group_begins = tile_begins[first_tile].tolist()

    parts = []
    group = 0
    for cta, (begin, end, reload) in enumerate(
        zip(begins[:-1].tolist(), begins[1:].tolist(), reloads.tolist(), strict=False)
    ):
        on_line, at = begin, 0
        while on_line < end:
            while group_begins[group + 1] <= on_line:  # also steps over groups without rows
                group += 1
            until = min(end, group_begins[group + 1])
            cost = until - on_line + (reload if at == 0 else 0)
            parts.append(Part(cta, group, at, at + cost))
            on_line, at = until, at + cost
    return parts
