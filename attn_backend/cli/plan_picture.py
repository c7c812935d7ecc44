"""The picture of a plan: the BSR view, the prefix forest beside it (same rows), and below them what each CTA does when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from ..kernels.schedule import PrefixNode
from .picture import FAINT, INK, Picture, text_width
from .planned import Planned, count, decision

DECODE = ("#9ecae1", "#5b9bd0")  # row groups of requests with one row, by turns
PREFILL = ("#a8d5a2", "#6fb56a")  # and with more
TAKEN = ("#e6550d", "#c2457f", "#d4a017", "#7b3294", "#8c564b", "#f2795c")  # row groups of shared prefixes, by turns
NOT_TAKEN = "#e4e4e4"

_WIDTH = 1280
_LEFT, _RIGHT = 96, 24  # margins; the left one holds the names of the rows
_GAP = 48  # between the view and the forest
_LISTED = 8  # nodes of the forest in words


def draw(planned: Planned) -> Picture:
    """Draws it: about 1300 pixels wide, as high as the batch needs."""
    lines = planned.summary()
    nodes = planned.ranked_forest()
    listed = [f"{_extent(node)}, {count(node.num_requests, 'request')}: {decision(node)}; saves {node.saved}, adds {node.added}" for node in nodes[:_LISTED]]
    listed += [f"... and {len(nodes) - _LISTED} more"] * (len(nodes) > _LISTED)
    slots = _slots(planned)
    rows_height = slots[-1][1]
    num_ctas = planned.schedule.num_ctas
    cta_height = min(max(400 / num_ctas, 1.0), 14.0)

    rows_top = 30 + 15 * len(lines) + 56
    list_top = rows_top + rows_height + 52
    ctas_top = list_top + 14 * len(listed) + 40
    picture = Picture(_WIDTH, math.ceil(ctas_top + cta_height * num_ctas + 44))
    picture.text(16, 24, "attn-backend plan", size=15, bold=True)
    for i, line in enumerate(lines):
        picture.text(16, 44 + 15 * i, line[:12].strip())
        picture.text(_LEFT, 44 + 15 * i, line[12:])
    panel = (_WIDTH - _LEFT - _RIGHT - _GAP) / 2
    _legend(picture, rows_top - 36)
    _draw_view(picture, planned, slots, _LEFT, rows_top, panel)
    _draw_forest(picture, planned, slots, _LEFT + panel + _GAP, rows_top, panel)
    for i, line in enumerate(listed):
        picture.text(_LEFT, list_top + 14 * i, line, size=10)
    _draw_ctas(picture, planned, ctas_top, cta_height)
    return picture


def _slots(planned: Planned) -> list[tuple[float, float]]:
    """(top, bottom) in the panels of the place of each request in planned.order(): higher for many rows of Q, but not in proportion."""
    weights = [1 + math.log2(max(planned.batch.qo_lens[request], 1)) / 3 for request in planned.order()]
    unit = min(max(420 / sum(weights), 2.0), 26.0)
    slots, top = [], 0.0
    for weight in weights:
        slots.append((top, top := top + unit * weight))
    return slots


def _color(node: PrefixNode) -> str:
    return TAKEN[node.group % len(TAKEN)] if node.group >= 0 else NOT_TAKEN


def _own_color(planned: Planned, request: int) -> str:
    return (PREFILL if planned.batch.qo_lens[request] > 1 else DECODE)[request % 2]


def _extent(node: PrefixNode) -> str:
    return f"pages {node.begin_page} - {node.end_page} x {count(node.num_rows, 'row')}"


def _legend(picture: Picture, y: float) -> None:
    x: float = _LEFT
    for colors, name in (
        (DECODE, "own row group of a request with one row"),
        (PREFILL, "of a request with more"),
        (TAKEN, "shared prefix, taken: one row group reads it for all its rows (colors by turns)"),
        ((NOT_TAKEN,), "shared prefix, not taken: what is below it reads it"),
    ):
        for i, color in enumerate(colors):
            picture.rect(x + 12 * i / len(colors), y - 9, 12 / len(colors), 10, color)
        picture.rect(x, y - 9, 12, 10, "none", stroke=FAINT)
        picture.text(x + 17, y, name, size=10)
        x += 30 + text_width(name, 10)


def _draw_view(picture: Picture, planned: Planned, slots: Sequence[tuple[float, float]], left: float, top: float, width: float) -> None:
    """Rows of Q x pages, in the order in which the rows drawn first use them: what several rows share stands in the same columns."""
    order = planned.order()
    columns = _columns([planned.batch.block_table[request] for request in order])
    num_pages = max((int(row.max()) + 1 for row in columns if len(row)), default=0)
    scale = width / max(num_pages, 1)
    picture.text(left, top - 10, f"BSR view: {count(sum(planned.batch.qo_lens), 'row')} of Q x {count(num_pages, 'page')}", bold=True)
    for place, (request, row, (y, bottom)) in enumerate(zip(order, columns, slots, strict=True)):
        own_begin = 0
        readers = [node for node in planned.path(request) if node.group >= 0]
        for node in readers:
            pages, title = row[node.first_page : node.end_page], f"request {request}, row group {node.group}"
            _draw_pages(picture, pages, left, top + y, scale, bottom - y, _color(node), title)
            own_begin = node.end_page
        title = f"request {request}, row group {request}"
        _draw_pages(picture, row[own_begin:], left, top + y, scale, bottom - y, _own_color(planned, request), title)
        _name_row(picture, planned, request, left, top, slots, place)
    picture.rect(left, top, width, slots[-1][1], "none", stroke=FAINT)
    picture.text(left + width / 2, top + slots[-1][1] + 16, "pages, by first use", size=10, color=FAINT, anchor="middle")


def _name_row(picture: Picture, planned: Planned, request: int, left: float, top: float, slots: Sequence[tuple[float, float]], place: int) -> None:
    """Names a row where there is room: every one, or every k-th."""
    step = math.ceil(11 * len(slots) / slots[-1][1])
    if place % step == 0:
        y, bottom = slots[place]
        middle = (y + bottom) / 2 if step == 1 else y + 5
        picture.text(left - 6, top + middle + 3.5, f"{request}: {count(planned.batch.qo_lens[request], 'row')}", size=9, anchor="end")


def _draw_pages(picture: Picture, columns: torch.Tensor, left: float, top: float, scale: float, height: float, color: str, title: str) -> None:
    """Runs of neighbouring columns as one rectangle each; never too thin to be seen."""
    if not len(columns):
        return
    begins = [0, *((columns.diff() != 1).nonzero().flatten() + 1).tolist()]
    for begin, end in pairwise([*begins, len(columns)]):
        text = f"{title}: {count(end - begin, 'page')}"
        picture.rect(left + int(columns[begin]) * scale, top, max((end - begin) * scale, 0.6), height * 0.92, color, title=text)


def _columns(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Page ids renumbered by first use."""
    pages = torch.cat(list(rows))
    ids, inverse = pages.unique(return_inverse=True)
    first = torch.full_like(ids, len(pages), dtype=torch.int64).scatter_reduce(0, inverse, torch.arange(len(pages)), "amin")
    return first.argsort().argsort()[inverse].split([len(row) for row in rows])


def _draw_forest(picture: Picture, planned: Planned, slots: Sequence[tuple[float, float]], left: float, top: float, width: float) -> None:
    """Each node over its requests' places and its pages; behind the nodes what each request has for itself."""
    order = planned.order()
    place = {request: i for i, request in enumerate(order)}
    longest = max(map(planned.pages, order))
    scale = width / max(longest, 1)
    taken = sum(node.group >= 0 for node in planned.schedule.forest)
    picture.text(left, top - 10, f"prefix forest: {count(len(planned.schedule.forest), 'node')}, {taken} taken", bold=True)
    for request, (y, bottom) in zip(order, slots, strict=True):
        begin = max((node.end_page for node in planned.path(request)), default=0)
        pages = planned.pages(request) - begin
        if pages:
            title = f"request {request}: {count(pages, 'page')}"
            picture.rect(left + begin * scale, top + y, max(pages * scale, 0.6), (bottom - y) * 0.92, _own_color(planned, request), title=title)
    for node, members in zip(planned.schedule.forest, planned.members, strict=True):
        y, bottom = min(slots[place[request]][0] for request in members), max(slots[place[request]][1] for request in members)
        x, node_width = left + node.begin_page * scale, max((node.end_page - node.begin_page) * scale, 1.5)
        words = [_extent(node), decision(node), f"saves {node.saved}, adds {node.added}"]
        picture.rect(x, top + y, node_width, bottom - y, _color(node), stroke=INK, title=", ".join(words))
        _name_node(picture, words, x, top + y, node_width, bottom - y, node.group >= 0)
    picture.rect(left, top, width, slots[-1][1], "none", stroke=FAINT)
    _scale(picture, left, top + slots[-1][1], width, longest, f"pages of {planned.batch.page_size} tokens from the beginning")


def _name_node(picture: Picture, lines: list[str], x: float, y: float, width: float, height: float, taken: bool) -> None:
    """As many of the lines as fit into the node."""
    lines = [line for line in lines if text_width(line, 10) < width - 6][: int((height - 2) // 12)]
    for i, line in enumerate(lines):
        middle = y + height / 2 - 6 * len(lines) + 12 * i + 9.5
        picture.text(x + width / 2, middle, line, size=10, color="white" if taken else INK, anchor="middle")


def _draw_ctas(picture: Picture, planned: Planned, top: float, height: float) -> None:
    """One line for each CTA: its row groups one after another, against the cost that a perfect split would give it."""
    costs, requests = planned.costs, len(planned.batch.kv_lens)
    left, width = _LEFT, _WIDTH - _LEFT - _RIGHT
    ctas = costs.ctas.tolist()
    longest, ideal = max(ctas), sum(ctas) / len(ctas)
    scale = width / max(longest * 1.02, 1)
    picture.text(left, top - 10, f"{len(ctas)} CTAs: busiest {longest} units, ideal {ideal:.1f}, balance {costs.balance:.3f}", bold=True)
    for part in costs.parts:
        color = _own_color(planned, part.group) if part.group < requests else TAKEN[part.group % len(TAKEN)]
        title = f"CTA {part.cta}: row group {part.group}, {part.end - part.begin} units"
        picture.rect(left + part.begin * scale, top + part.cta * height, max((part.end - part.begin) * scale - 0.6, 0.4), height * 0.88, color, title=title)
    bottom = top + len(ctas) * height
    for cta in range(0, len(ctas), max(1, math.ceil(len(ctas) / 16))):
        picture.text(left - 6, top + cta * height + 7, f"CTA {cta}", size=9, anchor="end")
    if ideal:
        picture.line(left + ideal * scale, top - 4, left + ideal * scale, bottom + 4, color=INK, width=1.4, dashed=True)
    _scale(picture, left, bottom, width, longest * 1.02, "cost units; dashed: ideal")


def _scale(picture: Picture, left: float, y: float, width: float, end: float, name: str) -> None:
    """Ticks at round numbers from 0 to `end`."""
    step = 10 ** math.floor(math.log10(max(end, 1) / 2))
    step *= next(factor for factor in (1, 2, 5, 10) if end / (step * factor) <= 8)
    for i in range(int(end // step) + 1):
        x = left + width * i * step / max(end, 1)
        picture.line(x, y, x, y + 4)
        picture.text(x, y + 15, f"{i * step:g}", size=9, color=FAINT, anchor="middle")
    picture.text(left + width / 2, y + 28, name, size=10, color=FAINT, anchor="middle")
