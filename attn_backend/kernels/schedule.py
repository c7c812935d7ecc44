"""Reads a schedule, which `plan` left in the workspace (csrc/planner/schedule.h): as tensors on the CPU, or
as counts that stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch

from ..validation import MAX_INT32
from .native import dtype_of, values_of

# Messages by the names in ScheduleError (csrc/planner/schedule.h).
ERRORS = {
    "kQoIndptrInvalid": "qo_indptr decreases, does not start at 0 or ends beyond max_rows or the level's "
    "rows; must be a prefix sum of query lengths",
    "kKvIndptrInvalid": "kv_indptr decreases, does not start at 0 or ends beyond kv_indices; must be a "
    "prefix sum of page counts",
    "kKvLengthInvalid": "kv_lens has a length that is negative or longer than the table; must be in [0, "
    "pages of the table's row * page_size]",
    "kLastPageLenInvalid": "kv_last_page_len has a length outside [1, page_size]",
    "kTableRowInvalid": "rows has a row outside the table",
    "kPageIndexInvalid": "a page id is outside the cache; must be in [0, pages of the cache)",
    "kRowInvalid": "rows (the row list of a level) has a row outside [0, max_rows)",
    "kPrefixSearchFailed": (
        "the search for shared prefixes did not end in time, or metadata changed while it was planned; must "
        "stay as it is until the plan has run"
    ),
    "kSelectionTooLong": "a row has selected more tokens than were planned; must be at most kv_lens of "
    "BSRView.selected",
}

# Messages by the names in NodeReason.
REASONS = {
    "kNodeTaken": "taken",
    "kNodeSavesTooLittle": "saves too little",
    "kNodeHasNoRoom": "no room for its states",
    "kNodeTooDeep": "too many levels",
    "kForestSavesTooLittle": "the whole forest saves too little",
}


def describe_errors(errors: int) -> str:
    return "; ".join(ERRORS[name] for name, bit in values_of("ScheduleError").items() if errors & bit)


@dataclass(frozen=True)
class PrefixNode:
    """Leading pages that several requests of a batch share (csrc/planner/forest.h), and whether a row group
    reads them for all of these requests.

    Attributes:
        request: smallest request that shares them: its row of the page table lists the pages.
        begin_page: first page of that request that the node covers: its parent's end.
        end_page: page after the last.
        parent: index of the parent node in `Schedule.forest`; -1: none.
        num_requests: requests that share the pages.
        num_rows: their rows of Q.
        group: row group of the schedule; -1: not taken.
        first_page: first page of the row group, or of the group that it would get. The pages of a node that
            is not taken go to its children.
        saved: cost units saved by reading the pages once, for each KV head.
        added: cost units added.
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


def _read_forest(records: numpy.ndarray) -> tuple[PrefixNode, ...]:
    """records: one for each request; node n, if it exists, is record n."""
    exists = records["leader"] >= 0
    index = numpy.cumsum(exists) - 1  # index of node n in the result
    reasons = {value: REASONS[name] for name, value in values_of("NodeReason").items()}
    nodes = []
    for record in records[exists]:
        node = dict(zip(record.dtype.names, record.item(), strict=True))
        parent = node["parent"]
        nodes.append(
            PrefixNode(
                request=node["leader"],
                begin_page=int(records[parent]["end_page"]) if parent >= 0 else 0,
                end_page=node["end_page"],
                parent=int(index[parent]) if parent >= 0 else -1,
                num_requests=node["num_requests"],
                num_rows=node["num_rows"],
                group=node["group"],
                first_page=node["begin_page"],
                saved=node["saved"],
                added=node["added"],
                reason=reasons[node["reason"]],
            )
        )
    return tuple(nodes)


GROUP_COLUMNS = (
    "qo_begin",
    "qo_len",
    "kv_len",
    "tile_begin",
    "level",
    "kind",
    "state_begin",
    "kv_offset",
    "q_position",
    "request",
    "dequantized_row",
    "dequantized_token",
)
TILE_ROWS = (16, 32, 64, 128, 192)  # by kind
TILE_COLUMNS = ("group", "kind", "packed_begin", "kv_begin", "kv_end", "num_kv_tiles")
_POSITION_COLUMNS = ("tile", "head", "kv_tile")
_LINK_COLUMNS = ("group", "index")


def _columns(records: numpy.ndarray, names: tuple[str, ...]) -> torch.Tensor:
    """Fields as the columns of an int32 tensor."""
    columns = numpy.empty((*records.shape, len(names)), numpy.int32)
    for column, name in enumerate(names):
        columns[..., column] = records[name]
    return torch.from_numpy(columns)


@dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule, copied to the CPU.

    Attributes:
        groups: int32 [row groups, 12]: GROUP_COLUMNS of each row group, level by level (`of_groups`).
        table_begin: int64 [row groups]: where the group's pages start in the page indices.
        tiles: int32 [tiles, 6]: TILE_COLUMNS of each row tile (`of_tiles`).
        cost_begin: int64 [tiles]: cost of everything before the tile.
        positions: int32 [num_ctas + 1, 3]: tile, head, kv_tile where each CTA's interval starts.
        links: int32 [links, merge rows, 2]: the row groups of each row that is in several (-1: none), and the
            row's number in each group. In a composition of several levels, row i of `links` is row i of Q.
            With a forest, `links` lists the rows of all requests in taken nodes, one after another. In a
            batch invariant schedule it lists requests.
        rows: int32: row list of the forest's row groups.
        forest: the shared prefixes that were found.
        errors: ScheduleError bits.
        levels: (entry_step, causal, window_left, group_begin) of each level.
        uses_queue: whether a GPU's CTAs take pairs from a work queue; intervals then consist of whole pairs
            and CTAs need not keep to them.
        has_largest_tiles: whether some row tile is of the largest kind.
        num_ctas: parts that the work is split into.
        kv_tile: tokens per KV tile.
        max_kind: largest kind of row tile.
        max_tiles: capacity in row tiles.
        min_queue_pairs: a work queue is used if a CTA's share holds this many of the longest pairs; 0: never.
        min_share: smallest cost for which a separate CTA pays off.
        dequantized_tokens: capacity in tokens of an 8-bit cache that are dequantized before attention.
        min_dequantized_rows: packed rows of a row group whose tokens are.
        kv_tile_cost: cost of a KV tile, by cost_kinds().
        pair_cost: cost of a pair in addition to its KV tiles, by cost_kinds().
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
    uses_queue: bool
    has_largest_tiles: bool
    num_ctas: int
    kv_tile: int
    max_kind: int
    max_tiles: int
    min_queue_pairs: int
    min_share: int
    dequantized_tokens: int
    min_dequantized_rows: int
    kv_tile_cost: tuple[int, ...]
    pair_cost: tuple[int, ...]

    @classmethod
    def read(cls, workspace: torch.Tensor, config: Any, layout: Any) -> Schedule:
        """Reads the bytes of a workspace (uint8, CPU). config, layout: the Attention object's ScheduleConfig
        and ScheduleLayout.
        """
        data = workspace.numpy()

        def records(struct: str, array: str, count: int) -> numpy.ndarray:
            return numpy.frombuffer(data, dtype_of(struct), count, offset=int(layout[array]))

        header = numpy.frombuffer(data, dtype_of("ScheduleHeader"), 1)[0]
        groups = records("RowGroup", "groups", header["num_groups"])
        tiles = records("RowTile", "tiles", header["num_tiles"])
        num_merge_rows = int(header["num_merge_rows"])
        num_links, row_links = (
            (int(header["num_links"]), int(config["max_merge_rows"])) if num_merge_rows else (0, 0)
        )
        links = records("RowLink", "links", num_links * row_links).reshape(num_links, row_links)[
            :, :num_merge_rows
        ]
        listed = int(groups["qo_len"][groups["level"] == 1].sum()) if header["num_requests"] else 0
        return cls(
            groups=_columns(groups, GROUP_COLUMNS),
            table_begin=torch.from_numpy(groups["table_begin"].copy()),
            tiles=_columns(tiles, TILE_COLUMNS),
            cost_begin=torch.from_numpy(tiles["cost_begin"].copy()),
            positions=_columns(records("Position", "positions", config["num_ctas"] + 1), _POSITION_COLUMNS),
            links=_columns(links, _LINK_COLUMNS),
            rows=torch.from_numpy(
                numpy.frombuffer(data, numpy.int32, listed, offset=int(layout["rows"])).copy()
            ),
            forest=_read_forest(records("PrefixNode", "nodes", header["num_requests"])),
            errors=int(header["errors"]),
            levels=tuple(
                (
                    level["entry_step"].item(),
                    level["visibility"]["causal"].item(),
                    level["visibility"]["window_left"].item(),
                    level["group_begin"].item(),
                )
                for level in header["levels"][: header["num_levels"]]
            ),
            uses_queue=bool(header["flags"] & values_of("ScheduleFlag")["kUsesQueue"]),
            has_largest_tiles=bool(header["flags"] & values_of("ScheduleFlag")["kHasLargestTiles"]),
            num_ctas=int(config["num_ctas"]),
            kv_tile=int(config["kv_tile"]),
            max_kind=int(config["max_kind"]),
            max_tiles=int(config["max_tiles"]),
            min_queue_pairs=int(config["min_queue_pairs"]),
            min_share=int(config["min_share"]),
            dequantized_tokens=int(config["dequantized_tokens"]),
            min_dequantized_rows=int(config["min_dequantized_rows"]),
            kv_tile_cost=tuple(config["kv_tile_cost"].tolist()),
            pair_cost=tuple(config["pair_cost"].tolist()),
        )

    def of_groups(self, column: str) -> torch.Tensor:
        return self.groups[:, GROUP_COLUMNS.index(column)]

    def of_tiles(self, column: str) -> torch.Tensor:
        return self.tiles[:, TILE_COLUMNS.index(column)]

    def cost_kinds(self) -> torch.Tensor:
        """int64 [tiles]: index into kv_tile_cost and pair_cost. It is the tile's kind, plus the number of
        kinds if its rows leave states.
        """
        leaves_states = self.of_groups("state_begin")[self.of_tiles("group").long()] >= 0
        return self.of_tiles("kind").long() + len(self.kv_tile_cost) // 2 * leaves_states


COUNTS = (
    "clamped_plans",
    "plans",
    "kv_tokens",
    "kv_tokens_read",
    *(f"rows_{tile_rows}" for tile_rows in TILE_ROWS),
)


@dataclass
class Counted:
    """Counts of one Attention, which outlive it.

    Attributes:
        sums: int64 [len(COUNTS)] on its device. kv_tokens: tokens of KV that the requests would read without
            shared prefixes; kv_tokens_read: those that the row groups read, each once. Both are for one KV
            head, and leave out tokens outside a window. rows_N: rows of Q of the row groups with row tiles of
            N rows.
        refusals: plans that raised an error, and runs on a CPU that found wrong page ids. The host counts
            them.
    """

    sums: torch.Tensor
    refusals: int = 0


counted: list[Counted] = []  # of all Attentions of this process


class ScheduleCounts:
    """Counts the plans of one Attention.

    Torch operators update the sums without a wait, and a CUDA graph that captures a plan captures its update.
    """

    def __init__(self, workspace: torch.Tensor, config: Any, layout: Any) -> None:
        """workspace: uint8, the Attention's. config, layout: as for Schedule.read()."""

        def column(struct: str, begin: Any, count: int, name: str) -> torch.Tensor:
            dtype = dtype_of(struct)
            assert dtype.fields is not None
            records = workspace[int(begin) : int(begin) + count * dtype.itemsize].view(torch.int32)
            return records.view(count, dtype.itemsize // 4)[:, dtype.fields[name][1] // 4]

        def arange(count: int) -> torch.Tensor:
            return torch.arange(count, dtype=torch.int32, device=workspace.device)

        max_groups, max_nodes, max_tiles = (
            int(config[name]) for name in ("max_groups", "max_nodes", "max_tiles")
        )
        self._errors, self._num_groups, self._num_tiles, self._num_requests = (
            column("ScheduleHeader", 0, 1, name)
            for name in ("errors", "num_groups", "num_tiles", "num_requests")
        )
        self._qo_len, self._kv_len, self._kind = (
            column("RowGroup", layout["groups"], max_groups, name) for name in ("qo_len", "kv_len", "kind")
        )
        self._group_of_tile, self._kv_begin, self._kv_end = (
            column("RowTile", layout["tiles"], max_tiles, name) for name in ("group", "kv_begin", "kv_end")
        )
        self._leader, self._group_of_node, self._requests_of_node = (
            column("PrefixNode", layout["nodes"], max_nodes, name)
            for name in ("leader", "group", "num_requests")
        )
        self._groups, self._tiles, self._nodes = arange(max_groups), arange(max_tiles), arange(max_nodes)
        self._kinds = arange(len(TILE_ROWS))[:, None]
        with torch.inference_mode(False):  # an engine may make it inside the mode, and plan outside
            self.total = Counted(torch.zeros(len(COUNTS), dtype=torch.int64, device=workspace.device))
        self._has_plan = True  # whose errors are not counted yet; at first there are none
        counted.append(self.total)

    def before_plan(self) -> None:
        """Counts the errors of the previous plan and of its runs, before this plan clears them."""
        if self._has_plan:
            self.total.sums[:1] += self._errors != 0
        self._has_plan = False  # if this plan is refused, the errors are still the previous one's

    def after_plan(self) -> None:
        """Counts what the plan decided."""
        self._has_plan = True
        in_use = self._tiles < self._num_tiles
        group = torch.where(in_use, self._group_of_tile, 0).long()
        begin = torch.where(in_use, self._kv_begin.clamp(min=0), MAX_INT32)  # negative: with holes
        end = torch.where(in_use, self._kv_end, 0)
        first = torch.full_like(self._groups, MAX_INT32).scatter_reduce_(0, group, begin, "amin")
        last = torch.zeros_like(self._groups).scatter_reduce_(0, group, end, "amax")
        read = (last - first).clamp_(min=0).sum()

        exists = (self._nodes < self._num_requests) & (self._leader >= 0)
        taken = exists & (self._group_of_node >= 0)
        kv_len = self._kv_len[torch.where(taken, self._group_of_node, 0).long()]
        saved = (torch.where(taken, self._requests_of_node - 1, 0).long() * kv_len).sum()

        of_kind = (self._kind == self._kinds) & (self._groups < self._num_groups)
        rows = torch.where(of_kind, self._qo_len, 0).sum(1)
        self.total.sums[1:] += torch.cat((torch.stack((torch.ones_like(read), read + saved, read)), rows))
