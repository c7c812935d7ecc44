"""What a schedule costs: its line of work, each CTA's interval of it, and the tokens that are read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from ..kernels.schedule import Schedule


@dataclass(frozen=True)
class Part:
    """What one CTA does in one row group; begin and end in cost units from the start of the CTA."""

    cta: int
    group: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class ScheduleCosts:
    """Costs in the schedule's own units (Schedule.kv_tile_cost says how many a KV tile has).

    Attributes:
        begins: int64 [num_ctas + 1]: where each CTA's interval starts on the line of work.
        reloads: int64 [num_ctas]: what a CTA pays again because its interval starts inside a (row tile, head): it loads that Q, too.
        group_begins: int64 [row groups + 1]: where each row group starts on the line.
        kv_tokens: tokens of KV that the row groups read, each group its tokens once.
    """

    begins: torch.Tensor
    reloads: torch.Tensor
    group_begins: torch.Tensor
    kv_tokens: int

    @classmethod
    def of(cls, schedule: Schedule, num_kv_heads: int) -> ScheduleCosts:
        group, _, _, kv_begin, kv_end, num_kv_tiles = schedule.tiles.long().unbind(1)
        cost_kind = schedule.cost_kinds()
        kv_tile_cost, pair_cost = torch.tensor(schedule.kv_tile_cost)[cost_kind], torch.tensor(schedule.pair_cost)[cost_kind]
        head_cost = pair_cost + num_kv_tiles * kv_tile_cost
        total = (head_cost * num_kv_heads).sum(0, keepdim=True)
        # Positions behind the last row tile are those of CTAs without work: an entry of its own for them.
        zero = torch.zeros(1, dtype=torch.int64)
        head_cost, pair_cost, kv_tile_cost = (torch.cat([cost, zero]) for cost in (head_cost, pair_cost, kv_tile_cost))
        tile_begins = torch.cat([schedule.cost_begin, total])
        tile, head, kv_tile = schedule.positions.long().unbind(1)
        reloads = torch.where(kv_tile > 0, pair_cost[tile], 0)
        begins = tile_begins[tile] + head * head_cost[tile] + reloads + kv_tile * kv_tile_cost[tile]

        num_groups = schedule.groups.shape[0]
        first_tile = torch.searchsorted(group.contiguous(), torch.arange(num_groups + 1))
        tokens = torch.zeros(num_groups, dtype=torch.int64)
        last = tokens.scatter_reduce(0, group, kv_end, "amax", include_self=False)
        first = tokens.scatter_reduce(0, group, kv_begin, "amin", include_self=False)
        return cls(begins, torch.where(begins[1:] > begins[:-1], reloads[:-1], 0), tile_begins[first_tile], int((last - first).sum()))

    @property
    def total(self) -> int:
        """Cost of all the work, without reloads."""
        return int(self.group_begins[-1])

    @property
    def ctas(self) -> torch.Tensor:
        """int64 [num_ctas]: cost of what each CTA does, with reloads."""
        return self.begins.diff() + self.reloads

    @property
    def balance(self) -> float:
        """Cost of the busiest CTA over the mean of all: 1 is a perfect split; 1 if there is no work."""
        ctas = self.ctas
        return float(ctas.max() / ctas.double().mean()) if ctas.any() else 1.0

    def parts(self) -> list[Part]:
        """What each CTA does, in order."""
        parts = []
        begins, reloads, group_begins = self.begins.tolist(), self.reloads.tolist(), self.group_begins.tolist()
        group = 0
        for cta, (begin, end) in enumerate(pairwise(begins)):
            on_line, at = begin, 0
            while on_line < end:
                while group_begins[group + 1] <= on_line:     # also steps over groups without rows
                    group += 1
                until = min(end, group_begins[group + 1])
                cost = until - on_line + (reloads[cta] if at == 0 else 0)
                parts.append(Part(cta, group, at, at + cost))
                on_line, at = until, at + cost
        return parts
