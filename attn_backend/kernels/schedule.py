"""Reading a schedule: what `plan` left in the workspace (csrc/include/attn/schedule.h), as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ERRORS = (
    (1 << 0, "qo_indptr decreases, does not start at 0 or ends beyond max_rows; must be a prefix sum of query lengths"),
    (1 << 1, "kv_indptr decreases, does not start at 0 or ends beyond kv_indices; must be a prefix sum of page counts"),
    (1 << 2, "kv_lens has a length that is negative or longer than the table; must be in [0, pages of the table's row * page_size]"),
    (1 << 3, "kv_last_page_len has a length outside [1, page_size]"),
    (1 << 4, "rows has a row outside the table"),
    (1 << 5, "a page id is outside the cache; must be in [0, pages of the cache)"),
)


def describe_errors(errors: int) -> str:
    """One sentence for each ScheduleError bit."""
    return "; ".join(text for bit, text in _ERRORS if errors & bit)


@dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule, copied to the CPU.

    Attributes:
        groups: int32 [batch, 4]: qo_begin, qo_len, kv_len, tile_begin.
        table_begin: int64 [batch]: where the request's pages start in the page indices.
        tiles: int32 [tiles, 6]: group, kind, packed_begin, kv_begin, kv_end, num_kv_tiles.
        cost_begin: int64 [tiles]: cost of everything before the tile.
        positions: int32 [num_ctas + 1, 3]: tile, head, kv_tile where each CTA's interval starts.
        errors: ScheduleError bits.
        causal, window_left, entry_step: as planned.
        num_ctas, kv_tile, max_kind, max_tiles, min_share, kv_tile_cost, pair_cost: the fixed configuration.
    """

    groups: torch.Tensor
    table_begin: torch.Tensor
    tiles: torch.Tensor
    cost_begin: torch.Tensor
    positions: torch.Tensor
    errors: int
    causal: bool
    window_left: int
    entry_step: int
    num_ctas: int
    kv_tile: int
    max_kind: int
    max_tiles: int
    min_share: int
    kv_tile_cost: tuple[int, ...]
    pair_cost: tuple[int, ...]

    @classmethod
    def read(cls, workspace: torch.Tensor, config: list[int]) -> Schedule:
        """Reads the bytes of a workspace (uint8, CPU); `config` comes from the host library's schedule_config()."""
        num_ctas, kv_tile, max_kind, max_tiles, min_share, *rest = config
        *costs, groups_at, tiles_at, positions_at = rest
        num_groups, num_tiles, errors, causal, window_left, entry_step = workspace[:24].view(torch.int32).tolist()
        groups = workspace[groups_at : groups_at + 24 * num_groups].view(torch.int32).view(num_groups, 6)
        tiles = workspace[tiles_at : tiles_at + 32 * num_tiles].view(torch.int32).view(num_tiles, 8)
        positions = workspace[positions_at : positions_at + 12 * (num_ctas + 1)].view(torch.int32).view(num_ctas + 1, 3)
        return cls(
            groups=groups[:, 2:].clone(),
            table_begin=groups[:, :2].contiguous().view(torch.int64).flatten(),
            tiles=tiles[:, 2:].clone(),
            cost_begin=tiles[:, :2].contiguous().view(torch.int64).flatten(),
            positions=positions.clone(),
            errors=errors,
            causal=bool(causal),
            window_left=window_left,
            entry_step=entry_step,
            num_ctas=num_ctas,
            kv_tile=kv_tile,
            max_kind=max_kind,
            max_tiles=max_tiles,
            min_share=min_share,
            kv_tile_cost=tuple(costs[: len(costs) // 2]),
            pair_cost=tuple(costs[len(costs) // 2 :]),
        )
