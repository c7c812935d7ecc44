"""The schedule, computed from its definition (csrc/planner/schedule.h) with plain integers and whole arrays.
Both planners are compared with it.

Without a prefix forest and KV chunks. Other tests compare these between the planners, and with the forest of
tests/helpers/forests.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from attn_backend import BSRView, Composition
from attn_backend.kernels.schedule import TILE_ROWS, Schedule

QO_INDPTR, KV_INDPTR, KV_LENGTH, LAST_PAGE_LEN, TABLE_ROW = (1 << bit for bit in range(5))
ROW = 1 << 6
INT32_MAX = 2**31 - 1


@dataclass
class Model:
    """Fields as in Schedule."""

    groups: list[list[int]]
    table_begin: list[int]
    tiles: list[list[int]]
    cost_begin: list[int]
    positions: list[list[int]]
    links: list[list[list[int]]]
    errors: int
    uses_queue: bool
    has_largest_tiles: bool


def plan(
    composition: BSRView | Composition, config: Schedule, num_kv_heads: int, group_size: int, max_rows: int
) -> Model:
    """`config`: any schedule of the same Attention object; only its fixed fields are read."""
    levels = composition.levels if isinstance(composition, Composition) else (composition,)
    groups: list[list[int]] = []
    table_begin: list[int] = []
    tiles: list[list[int]] = []
    links = [[[-1, 0]] * max_rows for _ in levels] if len(levels) > 1 else []
    errors, num_merge_rows, dequantized = 0, 0, 0
    for number, view in enumerate(levels):
        of_level, begins, wrong = _read_groups(view, max_rows)
        table_begin += begins
        errors |= wrong
        rows = None if view.rows is None else view.rows.tolist()
        for request, (qo_begin, qo_len, kv_len) in enumerate(of_level):
            kind = next(
                (kind for kind in range(config.max_kind) if TILE_ROWS[kind] >= qo_len * group_size),
                config.max_kind,
            )
            tile_begin = len(tiles)
            tiles += _row_tiles(view, config, group_size, len(groups), kind, qo_len, kv_len)
            for index in range(qo_len if links or rows is not None else 0):
                row = qo_begin + index if rows is None else rows[qo_begin + index]
                if not 0 <= row < max_rows:
                    errors |= ROW
                elif links:
                    links[number][row] = [len(groups), index]
                    num_merge_rows = max(num_merge_rows, row + 1)
            state_begin = number * max_rows + qo_begin if links else -1
            offset = (
                0 if view.kv_offsets is None else _clamp(int(view.kv_offsets[request]), 0, 2**31 - 1 - kv_len)
            )
            first, room = _dequantized(view, config, group_size, qo_len, kv_len)
            has_room = 0 < room <= config.dequantized_tokens - dequantized
            groups.append(
                [
                    qo_begin,
                    qo_len,
                    kv_len,
                    tile_begin,
                    number,
                    kind,
                    state_begin,
                    offset,
                    offset + kv_len - qo_len,
                    request,
                    dequantized if has_room else -1,
                    first,
                ]
            )
            dequantized += room
    has_largest_tiles = any(kind == config.max_kind for _, kind, *_ in tiles)
    if len(tiles) > config.max_tiles:
        errors |= QO_INDPTR
        tiles = tiles[: config.max_tiles]
    longest = max(
        (
            (_pair_cost(config, kind + len(TILE_ROWS) * (groups[group][6] >= 0), count), kind)
            for group, kind, _, _, _, count in tiles
        ),
        default=(0, 0),
    )
    cost_begin, positions, uses_queue = _positions(
        config, num_kv_heads, groups, tiles, longest, num_merge_rows > 0
    )
    used = [of_level[:num_merge_rows] for of_level in links] if num_merge_rows else []
    return Model(
        groups, table_begin, tiles, cost_begin, positions, used, errors, uses_queue, has_largest_tiles
    )


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def _read_groups(view: BSRView, max_rows: int) -> tuple[list[tuple[int, int, int]], list[int], int]:
    """(qo_begin, qo_len, kv_len) of each row group, the start of its pages, and the errors."""
    if view.rows is not None:
        max_rows = min(max_rows, view.rows.shape[0])
    table, errors = view.table, 0
    qo_indptr = view.qo_indptr.tolist()
    lens = None if table.kv_lens is None else table.kv_lens.tolist()
    last_page_len = None if table.last_page_len is None else table.last_page_len.tolist()
    rows = None if table.rows is None else table.rows.tolist()
    indptr = None if table.indptr is None else table.indptr.tolist()
    groups, table_begin = [], []
    for i in range(view.batch_size):
        qo_begin = _clamp(qo_indptr[i], 0, max_rows)
        qo_end = _clamp(qo_indptr[i + 1], qo_begin, max_rows)
        if [qo_begin, qo_end] != qo_indptr[i : i + 2] or (i == 0 and qo_begin != 0):
            errors |= QO_INDPTR

        if indptr is not None:
            num_entries = INT32_MAX if table.indices is None else table.indices.shape[0]
            begin = _clamp(indptr[i], 0, num_entries)
            end = _clamp(indptr[i + 1], begin, num_entries)
            if [begin, end] != indptr[i : i + 2] or (i == 0 and begin != 0):
                errors |= KV_INDPTR
            table_begin.append(begin)
            kv_len = (end - begin) * table.page_size
            if last_page_len is not None and end > begin:
                last = _clamp(last_page_len[i], 1, table.page_size)
                errors |= LAST_PAGE_LEN * (last != last_page_len[i])
                kv_len += last - table.page_size
        else:
            wanted = i if rows is None else rows[i]
            row = _clamp(wanted, 0, table.indices.shape[0] - 1)
            errors |= TABLE_ROW * (row != wanted)
            table_begin.append(row * table.indices.stride(0))
            kv_len = _clamp(lens[i], 0, table.indices.shape[1] * (1 if rows is not None else table.page_size))
            errors |= KV_LENGTH * (kv_len != lens[i])
        groups.append((qo_begin, qo_end - qo_begin, kv_len))
    return groups, table_begin, errors


def _dequantized(
    view: BSRView, config: Schedule, group_size: int, qo_len: int, kv_len: int
) -> tuple[int, int]:
    """The first token of a row group that is dequantized before attention, and how many rows that takes."""
    if config.dequantized_tokens == 0 or qo_len * group_size < config.min_dequantized_rows:
        return 0, 0
    first = 0
    if view.window_left >= 0:
        first = _clamp(max(kv_len - qo_len, 0) - view.window_left, 0, kv_len)
    first = first // config.kv_tile * config.kv_tile
    return first, -(-(kv_len - first) // 8) * 8


def _row_tiles(
    view: BSRView, config: Schedule, group_size: int, group: int, kind: int, qo_len: int, kv_len: int
) -> list[list[int]]:
    packed_rows = qo_len * group_size
    tiles = []
    for begin in range(0, packed_rows, TILE_ROWS[kind]):
        end = min(begin + TILE_ROWS[kind], packed_rows)
        # Positions of the first and the last query of the tile, then the tokens that any of its queries sees.
        first, last = (kv_len - qo_len + row // group_size for row in (begin, end - 1))
        kv_end = max(min(kv_len, last + 1) if view.causal is not False else kv_len, 0)
        kv_begin = max(first - view.window_left, 0) if view.window_left >= 0 else 0
        half = config.kv_tile // 2
        kv_begin = min(kv_begin, kv_end) // half * half
        tiles.append(
            [group, kind, begin, kv_begin, kv_end, max(-(-(kv_end - kv_begin) // config.kv_tile), 1)]
        )
    return tiles


def _pair_cost(config: Schedule, kind: int, num_kv_tiles: int) -> int:
    return config.pair_cost[kind] + num_kv_tiles * config.kv_tile_cost[kind]


def _positions(
    config: Schedule,
    num_kv_heads: int,
    groups: list[list[int]],
    tiles: list[list[int]],
    longest: tuple[int, int],
    merges: bool,
) -> tuple[list[int], list[list[int]], bool]:
    """Lays every (row tile, head) out in the list of work. For each share it finds the first pair, or the
    first KV tile at or after the share's begin that may start an interval. `longest`: cost and kind of the
    longest pair. `merges`: some row is in several row groups.
    """

    def distribute_pairs(share: int, total: int) -> tuple[bool, bool]:
        """Whether pairs are whole, and whether there is a work queue.

        A split costs a merge (counted as five KV tiles) and the overhead of a pair.
        """
        cost, kind = longest
        if config.min_queue_pairs == 0 or kind != config.max_kind:
            return False, False
        own, weight, pairs = config.pair_cost[kind], config.kv_tile_cost[kind], len(tiles) * num_kv_heads
        most, slack = -(-pairs // config.num_ctas), share + own + 5 * weight
        if len(tiles) >= 4 * len(groups) and most > 1:
            slack += share // 16
        even, uncut = cost <= slack and most * total <= slack * pairs, cost <= min(share, 2 * own + weight)
        unequal = 4 * total <= 3 * cost * pairs
        whole = not merges and even and (not uncut or 2 * cost <= share)
        uses_queue = len(tiles) >= 2 * len(groups) and (
            cost * (2 if unequal else config.min_queue_pairs) <= share or (whole and most > 1)
        )
        return uses_queue or (whole and most == 1), uses_queue

    if not tiles:
        return [], [[0, 0, 0]] * (config.num_ctas + 1), distribute_pairs(config.min_share, 0)[1]
    counts = numpy.repeat(numpy.array(tiles)[:, 5], num_kv_heads)
    kinds = numpy.array(
        [kind + (len(TILE_ROWS) if groups[group][6] >= 0 else 0) for group, kind, *_ in tiles]
    )
    weights, pair_costs = (
        numpy.repeat(numpy.array(costs)[kinds], num_kv_heads)
        for costs in (config.kv_tile_cost, config.pair_cost)
    )
    ends = numpy.cumsum(pair_costs + counts * weights)
    starts, total = ends - pair_costs - counts * weights, int(ends[-1])

    share = max(-(-total // config.num_ctas), config.min_share)
    equal = -(-len(ends) // config.num_ctas) * int(ends[0])
    if total == len(ends) * int(ends[0]) and share <= equal <= share * 1.04:
        share = equal
    whole, uses_queue = distribute_pairs(share, total)
    points = []
    for cost in (cta * share for cta in range(config.num_ctas + 1)):
        pair, kv_tile = int(numpy.searchsorted(ends, cost, side="right")), 0
        if pair < len(ends):
            own, weight = int(pair_costs[pair]), int(weights[pair])
            kv_tile = -(-max(cost - int(starts[pair]) - own, 0) // weight)
            # the saving if another CTA takes all KV tiles but the first; that CTA also loads Q
            cut_saves = (int(counts[pair]) - 1) * weight
            uncut = whole or (
                counts[pair] <= 64 and cut_saves <= own and int(ends[pair] - starts[pair]) <= share
            )
            if kv_tile == counts[pair] or (uncut and kv_tile > 0):
                pair, kv_tile = pair + 1, 0
        points.append([*divmod(pair, num_kv_heads), kv_tile])
    return starts[::num_kv_heads].tolist(), points, uses_queue


def differences(schedule: Schedule, model: Model) -> list[str]:
    """Names of the fields in which they differ."""
    names = ["groups", "table_begin", "tiles", "cost_begin", "positions", "links"]
    different = [name for name in names if getattr(schedule, name).tolist() != getattr(model, name)]
    return different + [
        name
        for name in ("errors", "uses_queue", "has_largest_tiles")
        if getattr(schedule, name) != getattr(model, name)
    ]


def same(a: Schedule, b: Schedule, links: bool = True) -> bool:
    """Whether two schedules are equal bit for bit; with `links` False, ignoring links."""
    names = ["groups", "table_begin", "tiles", "cost_begin", "positions", "rows"] + ["links"] * links
    if any(
        getattr(a, name) != getattr(b, name)
        for name in ("errors", "forest", "uses_queue", "has_largest_tiles")
    ):
        return False
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)
