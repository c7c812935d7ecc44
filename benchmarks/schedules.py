"""What a schedule says about the work: its cost, and how evenly the CTAs share it."""

from __future__ import annotations

import torch

from attn_backend.kernels.schedule import Schedule


def cta_costs(schedule: Schedule, num_kv_heads: int) -> torch.Tensor:
    """Cost of each CTA's interval of the line of work (csrc/include/attn/schedule.h), in the schedule's units: int64 [num_ctas]; they add up to the line."""
    kinds, kv_tiles = schedule.tiles[:, 1].long(), schedule.tiles[:, 5].long()
    weight = torch.tensor(schedule.kv_tile_cost)[kinds]     # of one KV tile, for each row tile
    pair = torch.tensor(schedule.pair_cost)[kinds]
    of_head = pair + kv_tiles * weight
    line = (of_head * num_kv_heads).sum().view(1)
    begin = torch.cat([schedule.cost_begin, line])          # the last position may be behind the last row tile
    nothing = torch.zeros(1, dtype=torch.int64)
    weight, pair, of_head = (torch.cat([cost, nothing]) for cost in (weight, pair, of_head))
    tile, head, kv_tile = schedule.positions.long().unbind(1)
    inside = torch.where(kv_tile > 0, pair[tile] + kv_tile * weight[tile], 0)     # a pair's own cost lies before its KV tiles
    return (begin[tile] + head * of_head[tile] + inside).diff()


def total_cost(schedule: Schedule, num_kv_heads: int) -> int:
    """Cost of the whole line of work, over all KV heads."""
    return int(cta_costs(schedule, num_kv_heads).sum())


def balance(schedule: Schedule, num_kv_heads: int) -> float:
    """Cost of the CTA with most work ÷ mean of all CTAs: 1 is perfect. CTAs without work count."""
    costs = cta_costs(schedule, num_kv_heads).double()
    return float(costs.max() / costs.mean()) if costs.sum() > 0 else 1.0


def taken_prefixes(schedule: Schedule) -> int:
    """Shared prefixes that plan() found by itself and made row groups of."""
    return sum(node.group >= 0 for node in schedule.forest)
