"""A batch with its schedule, and its summary."""

from __future__ import annotations

import argparse
import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import ValidationError

from ..jit.manifest import CUDA_HEAD_DIMS_TEXT, HeadDims
from ..kernels.attention import Attention
from ..kernels.schedule import TILE_ROWS, PrefixNode, Schedule
from ..settings import refusal
from ..validation import require
from .batches import Batch, PlanOptions


@dataclass(frozen=True)
class Part:
    """The work of one CTA in one row group; begin and end in cost units from the CTA's start."""

    cta: int
    group: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class ScheduleCosts:
    """Costs in the schedule's own units (Schedule.kv_tile_cost has the units of a KV tile).

    Attributes:
        total: cost of all the work, without repeated work.
        parts: the work of each CTA, in order. If its interval starts inside a (row tile, head), the CTA pays
            for that Q again. With a work queue, pairs are assigned as if each took exactly its cost.
        ctas: int64 [num_ctas]: cost of each CTA's work.
        kv_tokens: tokens of KV that the row groups read; each group reads its tokens once.
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
        """Cost of the busiest CTA over the mean: 1 is a perfect split; 1 if there is no work."""
        return float(self.ctas.max() / self.ctas.double().mean()) if self.ctas.any() else 1.0


def _from_queue(schedule: Schedule, num_kv_heads: int, head_cost: torch.Tensor) -> list[Part]:
    """The parts of CTAs that take (row tile, head) pairs from a queue.

    Pairs are ordered by group; in a group the last row tile comes first; in a row tile by head. The CTAs take
    the first pairs in order, the next ones in reverse order. Then each CTA requests its next pair when it
    starts one (WorkQueue in csrc/attention/feed/work_queue.cuh).
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
    # Positions after the last row tile belong to CTAs without work: a separate entry for them.
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
            while group_begins[group + 1] <= on_line:  # also skips groups without rows
                group += 1
            until = min(end, group_begins[group + 1])
            cost = until - on_line + (reload if at == 0 else 0)
            parts.append(Part(cta, group, at, at + cost))
            on_line, at = until, at + cost
    return parts


FOREST_COLUMNS = ("pages", "requests", "rows", "saves", "adds", "decision (cost units for each KV head)")
_MOST_NODES = 40  # nodes of the forest in the text
_MOST_FOREST_REQUESTS = 1024  # kMaxForestRequests in csrc/planner/forest.h
_MOST_HEAD_ROWS = 1 << 27  # the text and the picture of a plan grow with its (row tile, head) pairs


def read_options(arguments: argparse.Namespace, batch: Batch) -> PlanOptions:
    """Options take precedence over the batch's file, which takes precedence over the defaults.

    Raises:
        ValueError: an error, with the name of the option or field.
    """
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name in PlanOptions.model_fields and value is not None
    }
    given |= {"page_size": batch.page_size} | ({"cascade": False} if arguments.no_cascade else {})
    try:
        options = PlanOptions.model_validate(batch.settings | given)
    except ValidationError as error:
        raise ValueError(refusal(error)) from None
    require(
        sum(batch.qo_lens) * options.num_qo_heads <= _MOST_HEAD_ROWS,
        "sum(qo_lens)",
        sum(batch.qo_lens),
        f"at most {_MOST_HEAD_ROWS // options.num_qo_heads} with {options.num_qo_heads} query heads",
    )
    dims = HeadDims(options.head_dim, options.head_dim_v or options.head_dim)
    require(
        options.costs == "cpu" or dims.runs_on_cuda,
        "head_dim",
        options.head_dim,
        f"{CUDA_HEAD_DIMS_TEXT} with the costs of a GPU",
    )
    return options


@dataclass(frozen=True, eq=False)
class Planned:
    """A batch and its schedule.

    Attributes:
        batch: the requests.
        options: of the schedule.
        schedule: from Attention.schedule().
        costs: of the schedule.
        without: costs of the schedule without cascade.
        members: requests of each node of the forest, ascending.
    """

    batch: Batch
    options: PlanOptions
    schedule: Schedule
    costs: ScheduleCosts
    without: ScheduleCosts
    members: list[list[int]]

    @classmethod
    def make(cls, batch: Batch, options: PlanOptions) -> Planned:
        """Plans on the host.

        Raises:
            ValueError: an error in the batch or the options, by name.
        """
        schedule = _schedule(batch, options, options.cascade)
        costs = ScheduleCosts.of(schedule, options.num_kv_heads)
        without = (
            ScheduleCosts.of(_schedule(batch, options, False), options.num_kv_heads)
            if schedule.forest
            else costs
        )
        return cls(batch, options, schedule, costs, without, _members(batch, options, schedule))

    def path(self, request: int) -> list[PrefixNode]:
        """The nodes that contain a request, from the root down."""
        nodes = [
            node
            for node, members in zip(self.schedule.forest, self.members, strict=True)
            if request in members
        ]
        return sorted(nodes, key=lambda node: node.end_page)

    def pages(self, request: int) -> int:
        return -(-self.batch.kv_lens[request] // self.batch.page_size)

    def order(self) -> list[int]:
        """The requests, with the members of each node adjacent."""
        first = {
            id(node): members[0] for node, members in zip(self.schedule.forest, self.members, strict=True)
        }
        return sorted(
            range(len(self.batch.kv_lens)),
            key=lambda request: [*(first[id(node)] for node in self.path(request)), request],
        )

    def summary(self) -> list[tuple[str, str]]:
        """Named lines: the batch, the row groups and the KV that they read, the CTAs."""
        batch, options, schedule, costs = self.batch, self.options, self.schedule, self.costs
        requests, taken = len(batch.kv_lens), sum(node.group >= 0 for node in schedule.forest)
        kinds = Counter(schedule.of_tiles("kind").tolist())
        tiles = ", ".join(f"{number} of {TILE_ROWS[kind]} rows" for kind, number in sorted(kinds.items()))
        ctas = costs.ctas.double()
        shares = (
            f"busiest {ctas.max():.0f}, ideal {ctas.mean():.1f} units of the planner, not of time: "
            f"balance (busy / ideal) {costs.balance:.3f}"
        )
        rows, tokens, nodes = (
            count(sum(batch.qo_lens), "row"),
            count(sum(batch.kv_lens), "token"),
            count(len(schedule.forest), "node"),
        )
        of_any_cpu = (
            " (tasks that its threads take one after another: the same number on every CPU)"
            if options.ctas is None
            else ""
        )
        where = (
            f"{schedule.num_ctas} CTAs{of_any_cpu}, costs of "
            f"{'a CPU' if options.costs == 'cpu' else f'the {options.costs} kernel'}"
        )
        pages = f"{count(sum(map(self.pages, range(requests))), 'page')} of {batch.page_size}"
        return [
            ("batch", f"{batch.title}: {count(requests, 'request')}, {rows} of Q, {tokens} of KV in {pages}"),
            (
                "for",
                f"{options.num_qo_heads}/{options.num_kv_heads} heads, head_dim {options.head_dim}, {where}",
            ),
            (
                "row groups",
                f"{requests} of requests, {taken} of shared prefixes ({nodes} in the "
                f"forest{_unsought(requests)}); row tiles: {tiles or 'none'}",
            ),
            (
                "KV read",
                f"{costs.kv_tokens} tokens for each KV head{_less(costs.kv_tokens, self.without.kv_tokens)}",
            ),
            ("cost", f"{costs.total} units{_less(costs.total, self.without.total)}"),
            ("CTAs", f"{int((ctas > 0).sum())} of {len(ctas)} have work; {shares}"),
        ]

    def ranked_forest(self) -> list[PrefixNode]:
        """The nodes: taken ones first, then by savings, largest first."""
        return sorted(self.schedule.forest, key=lambda node: (node.group < 0, node.added - node.saved))

    def forest_rows(self) -> list[tuple[str, ...]]:
        """The cells of FOREST_COLUMNS for each node, each below its parent and indented. For a large forest,
        only the first nodes of `ranked_forest`.
        """
        forest, ranked = self.schedule.forest, self.ranked_forest()
        rank = {id(node): place for place, node in enumerate(ranked)}
        # ranks of the listed nodes on the path from a root to each listed node: sorting puts parents first
        paths = []
        for node in ranked[:_MOST_NODES]:
            path, above = [rank[id(node)]], node.parent
            while above >= 0:
                if rank[id(forest[above])] < _MOST_NODES:
                    path.insert(0, rank[id(forest[above])])
                above = forest[above].parent
            paths.append(path)
        rows = []
        for path in sorted(paths):
            node = ranked[path[-1]]
            numbers = (node.num_requests, node.num_rows, node.saved, node.added)
            rows.append(
                (
                    f"{2 * (len(path) - 1) * ' '}{node.begin_page} - {node.end_page}",
                    *map(str, numbers),
                    decision(node),
                )
            )
        return rows

    def forest_rest(self) -> str:
        """A line about the nodes that `forest_rows` leaves out; "" if there are none."""
        rest = self.ranked_forest()[_MOST_NODES:]
        return (
            f"... and {len(rest)} more, {sum(node.group >= 0 for node in rest)} of them taken" if rest else ""
        )


def decision(node: PrefixNode) -> str:
    if node.group < 0:
        return f"not taken: {node.reason}"
    handed = f", reads from page {node.first_page}" if node.first_page < node.begin_page else ""
    return f"taken: row group {node.group}{handed}"


def _schedule(batch: Batch, options: PlanOptions, cascade: bool | Literal["always"]) -> Schedule:
    attention = Attention(
        options.num_qo_heads,
        options.num_kv_heads,
        options.head_dim,
        device="cpu",
        head_dim_v=options.head_dim_v,
        max_rows=max(sum(batch.qo_lens), 1),
        max_batch=batch.max_batch or max(len(batch.qo_lens), 1),
        num_ctas=options.ctas,
        cascade=cascade,
        batch_invariant=options.batch_invariant,
        kernel=None if options.costs == "cpu" else options.costs,
    )
    attention.plan(batch.view(options.causal, options.window_left))
    return attention.schedule()


def _members(batch: Batch, options: PlanOptions, schedule: Schedule) -> list[list[int]]:
    """A request is in a node if it has the node's pages and all its rows see them. If the node was taken, the
    request must also leave the pages to the node's row group.
    """
    kv_lens = torch.tensor(batch.kv_lens)
    seen = kv_lens - torch.tensor(batch.qo_lens) + 1 if options.causal else kv_lens
    shareable = (seen.clamp(min=0) // batch.page_size).tolist()
    covered = ((kv_lens - schedule.of_groups("kv_len")[: len(kv_lens)]) // batch.page_size).tolist()
    rows = [row.numpy() for row in batch.block_table]
    # for each node, the requests that have its pages, and whose rows see them: a subset of its parent's
    have: dict[int, list[int]] = {-1: list(range(len(rows)))}
    for i in sorted(range(len(schedule.forest)), key=lambda i: schedule.forest[i].end_page):
        node = schedule.forest[i]
        begin, end = node.begin_page, node.end_page
        pages = rows[node.request][begin:end]
        candidates = [
            request
            for request in have[node.parent]
            if shareable[request] >= end and rows[request][begin] == pages[0]
        ]
        have[i] = [request for request in candidates if (rows[request][begin:end] == pages).all()]
    return [
        [request for request in have[i] if node.group < 0 or covered[request] >= node.end_page]
        for i, node in enumerate(schedule.forest)
    ]


def count(number: int, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _unsought(requests: int) -> str:
    return (
        f": no search with more than {_MOST_FOREST_REQUESTS} requests"
        if requests > _MOST_FOREST_REQUESTS
        else ""
    )


def _less(value: int, other: int) -> str:
    return f", {other} without cascade ({value / other - 1:+.1%})" if value != other else ""
