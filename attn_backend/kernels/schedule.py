"""Reading a schedule: what `plan` left in the workspace (csrc/planner/schedule.h), as tensors."""

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
    (1 << 7, "the search for shared prefixes did not end in time, or metadata changed while it was planned; must stay as it is until the plan has run"),
)


def describe_errors(errors: int) -> str:
    """One sentence for each ScheduleError bit."""
    return "; ".join(text for bit, text in _ERRORS if errors & bit)


_IN_TURN = 1 << 1  # of ScheduleFlag
_REASONS = ("taken", "saves too little", "no room for its states", "too many levels", "the whole forest saves too little")


@dataclass(frozen=True)
class PrefixNode:
    """Leading pages that several requests of a batch share (csrc/planner/forest.h), and whether a row group reads them for all.

    Attributes:
        request: smallest request that shares them: its row of the page table names the pages.
        begin_page, end_page: the pages of that request which the node covers: from its parent's end to its own.
        parent: index of the node above in `Schedule.forest`; -1: none.
        num_requests, num_rows: that share the pages.
        group: row group of the schedule; -1: not taken.
        first_page: page where the row group begins, or would: a node that is not taken leaves its pages to those below.
        saved, added: cost units for each KV head.
        reason: why it was taken or not.
    """

    request: int
    begin_page: int
    end_page: int
    parent: int
    num_requests: int
    num_rows: int
    group: int
    first_page: int
    saved: int
    added: int
    reason: str


def _read_forest(records: torch.Tensor) -> tuple[PrefixNode, ...]:
    """records: int32 [requests, 12]: PrefixNode of csrc/planner/schedule.h."""
    numbers = records[:, :8].tolist()
    costs = records[:, 8:].contiguous().view(torch.int64).view(-1, 2).tolist()
    index: dict[int, int] = {}  # of node n in the result
    for n, fields in enumerate(numbers):
        if fields[0] >= 0:
            index[n] = len(index)
    nodes = []
    for n in index:
        leader, parent, first_page, end_page, num_requests, num_rows, group, reason = numbers[n]
        begin_page = numbers[parent][3] if parent >= 0 else 0
        above = index[parent] if parent >= 0 else -1
        saved, added = costs[n]
        nodes.append(PrefixNode(leader, begin_page, end_page, above, num_requests, num_rows, group, first_page, saved, added, _REASONS[reason]))
    return tuple(nodes)


@dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule, copied to the CPU.

    Attributes:
        groups: int32 [row groups, 7]: qo_begin, qo_len, kv_len, tile_begin, level, kind, state_begin; level by level.
        table_begin: int64 [row groups]: where the group's pages start in the page indices.
        tiles: int32 [tiles, 6]: group, kind, packed_begin, kv_begin, kv_end, num_kv_tiles.
        cost_begin: int64 [tiles]: cost of everything before the tile.
        positions: int32 [num_ctas + 1, 3]: tile, head, kv_tile where each CTA's interval starts.
        links: int32 [links, merge rows, 2]: the row groups of each row that is in several (-1: none), and the row's number in them. Row i of `links` is row i
            of Q in a composition of several levels; with a forest they are the rows of all requests in taken nodes, one after another; in a batch
            invariant schedule requests.
        rows: int32: row list of the forest's row groups.
        forest: the shared prefixes that were found.
        errors: ScheduleError bits.
        levels: (entry_step, causal, window_left, group_begin) of each level.
        in_turn: whether a GPU's CTAs take pairs in turn; the intervals are then of whole pairs, and nobody need keep to them.
        num_ctas, kv_tile, max_kind, max_tiles, turns, min_share, kv_tile_cost, pair_cost: the fixed configuration; costs by cost_kinds().
    """

    groups: torch.Tensor
    table_begin: torch.Tensor
    tiles: torch.Tensor
    cost_begin: torch.Tensor
    positions: torch.Tensor
    links: torch.Tensor
    rows: torch.Tensor
    forest: tuple[PrefixNode, ...]
    errors: int
    levels: tuple[tuple[int, int, int, int], ...]
    in_turn: bool
    num_ctas: int
    kv_tile: int
    max_kind: int
    max_tiles: int
    turns: int
    min_share: int
    kv_tile_cost: tuple[int, ...]
    pair_cost: tuple[int, ...]

    @classmethod
    def read(cls, workspace: torch.Tensor, config: list[int]) -> Schedule:
        """Reads the bytes of a workspace (uint8, CPU); `config` comes from the host library's schedule_config()."""
        _, _, kv_tile, max_kind, num_ctas, _, _, max_tiles, _, max_merge_rows, _, _, _, _, turns, min_share, *costs = config[:34]
        groups_at, tiles_at, positions_at, links_at, rows_at, nodes_at = config[34:]

        def int32(begin: int, count: int, size: int) -> torch.Tensor:
            return workspace[begin : begin + 4 * count * size].view(torch.int32).view(count, size)

        num_groups, num_tiles, errors, num_levels, num_merge_rows, num_links, flags, _, num_requests, _ = int32(0, 1, 10)[0].tolist()
        levels = int32(128, num_levels, 10)
        groups = int32(groups_at, num_groups, 10)
        tiles = int32(tiles_at, num_tiles, 8)
        links = int32(links_at, num_links * max_merge_rows if num_merge_rows else 0, 2)
        listed = int(groups[groups[:, 6] == 1, 3].sum()) if num_requests else 0
        return cls(
            groups=groups[:, 2:9].clone(),
            table_begin=groups[:, :2].contiguous().view(torch.int64).flatten(),
            tiles=tiles[:, 2:].clone(),
            cost_begin=tiles[:, :2].contiguous().view(torch.int64).flatten(),
            positions=int32(positions_at, num_ctas + 1, 4)[:, :3].clone(),
            links=links.view(-1, max_merge_rows, 2)[:, :num_merge_rows].clone() if num_merge_rows else links.view(0, 0, 2),
            rows=int32(rows_at, listed, 1).flatten().clone(),
            forest=_read_forest(int32(nodes_at, num_requests, 12)),
            errors=errors,
            levels=tuple((step, causal, window, begin) for step, causal, window, begin in levels[:, 6:].tolist()),
            in_turn=bool(flags & _IN_TURN),
            num_ctas=num_ctas,
            kv_tile=kv_tile,
            max_kind=max_kind,
            max_tiles=max_tiles,
            turns=turns,
            min_share=min_share,
            kv_tile_cost=tuple(costs[:8]),
            pair_cost=tuple(costs[8:16]),
        )

    def cost_kinds(self) -> torch.Tensor:
        """int64 [tiles]: index into kv_tile_cost and pair_cost: the tile's kind, and 4 more where its rows leave states."""
        group, kind = self.tiles[:, 0].long(), self.tiles[:, 1].long()
        return kind + 4 * (self.groups[group, 6] >= 0)
