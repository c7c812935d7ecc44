"""Reading a schedule: what `plan` left in the workspace (csrc/include/attn/schedule.h), as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ERRORS = (
    (1 << 0, "qo_indptr decreases, does not start at 0 or ends beyond max_rows or the level's rows; must be a prefix sum of query lengths"),
    (1 << 1, "kv_indptr decreases, does not start at 0 or ends beyond kv_indices; must be a prefix sum of page counts"),
    (1 << 2, "kv_lens has a length that is negative or longer than the table; must be in [0, pages of the table's row * page_size]"),
    (1 << 3, "kv_last_page_len has a length outside [1, page_size]"),
    (1 << 4, "rows has a row outside the table"),
    (1 << 5, "a page id is outside the cache; must be in [0, pages of the cache)"),
    (1 << 6, "rows (the row list of a level) has a row outside [0, max_rows)"),
)


def describe_errors(errors: int) -> str:
    """One sentence for each ScheduleError bit."""
    return "; ".join(text for bit, text in _ERRORS if errors & bit)


@dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule, copied to the CPU.

    Attributes:
        groups: int32 [row groups, 6]: qo_begin, qo_len, kv_len, tile_begin, level, kind; level by level.
        table_begin: int64 [row groups]: where the group's pages start in the page indices.
        tiles: int32 [tiles, 6]: group, kind, packed_begin, kv_begin, kv_end, num_kv_tiles.
        cost_begin: int64 [tiles]: cost of everything before the tile.
        positions: int32 [num_ctas + 1, 3]: tile, head, kv_tile where each CTA's interval starts.
        links: int32 [levels, max_rows, 2]: row group of each row in each level (-1: none), and the row's number in it; only with several levels.
        errors: ScheduleError bits.
        levels: (entry_step, causal, window_left, group_begin) of each level.
        num_ctas, kv_tile, max_kind, max_tiles, min_share, kv_tile_cost, pair_cost: the fixed configuration.
    """

    groups: torch.Tensor
    table_begin: torch.Tensor
    tiles: torch.Tensor
    cost_begin: torch.Tensor
    positions: torch.Tensor
    links: torch.Tensor
    errors: int
    levels: tuple[tuple[int, int, int, int], ...]
    num_ctas: int
    kv_tile: int
    max_kind: int
    max_tiles: int
    min_share: int
    kv_tile_cost: tuple[int, ...]
    pair_cost: tuple[int, ...]

    @classmethod
    def read(cls, workspace: torch.Tensor, config: list[int], max_rows: int) -> Schedule:
        """Reads the bytes of a workspace (uint8, CPU); `config` comes from the host library's schedule_config()."""
        num_ctas, kv_tile, max_kind, max_tiles, min_share, *rest = config
        *costs, groups_at, tiles_at, positions_at, links_at = rest
        num_groups, num_tiles, errors, num_levels = workspace[:16].view(torch.int32).tolist()
        levels = workspace[56 : 56 + 40 * num_levels].view(torch.int32).view(num_levels, 10)
        groups = workspace[groups_at : groups_at + 32 * num_groups].view(torch.int32).view(num_groups, 8)
        linked = num_levels if num_levels > 1 else 0
        links = workspace[links_at : links_at + 8 * linked * max_rows].view(torch.int32).view(linked, max_rows, 2)
        tiles = workspace[tiles_at : tiles_at + 32 * num_tiles].view(torch.int32).view(num_tiles, 8)
        positions = workspace[positions_at : positions_at + 12 * (num_ctas + 1)].view(torch.int32).view(num_ctas + 1, 3)
        return cls(
            groups=groups[:, 2:].clone(),
            table_begin=groups[:, :2].contiguous().view(torch.int64).flatten(),
            tiles=tiles[:, 2:].clone(),
            cost_begin=tiles[:, :2].contiguous().view(torch.int64).flatten(),
            positions=positions.clone(),
            links=links.clone(),
            errors=errors,
            levels=tuple((step, causal, window, begin) for step, causal, window, begin in levels[:, 6:].tolist()),
            num_ctas=num_ctas,
            kv_tile=kv_tile,
            max_kind=max_kind,
            max_tiles=max_tiles,
            min_share=min_share,
            kv_tile_cost=tuple(costs[: len(costs) // 2]),
            pair_cost=tuple(costs[len(costs) // 2 :]),
        )
