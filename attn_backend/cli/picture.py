"""Matplotlib pictures: shared helpers, and the picture of a plan."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline

from ..kernels.schedule import PrefixNode
from .planned import Planned, count, decision

INK = "#222222"
FAINT = "#707070"  # readable on white, and on the dark pages of the documentation
DPI = 100  # pixels, in which sizes and places are given
TEXT, TITLE = 9, 10  # points: readable where 1280 pixels are shown on 870


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in pixels."""
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def add_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a position in pixels from the upper left corner."""
    full_width, full_height = figure.get_size_inches() * DPI
    axes = figure.add_axes(
        (left / full_width, 1 - (top + height) / full_height, width / full_width, height / full_height)
    )
    axes.tick_params(labelsize=TEXT, colors=FAINT, length=3)
    for spine in axes.spines.values():
        spine.set_color(FAINT)
    return axes


def write(figure: Figure, path: Path, form: str = "") -> None:
    """Writes the figure. `form`: svg, png or another matplotlib format; default: the path's suffix.

    Text in an SVG stays text.
    """
    form = form or path.suffix[1:]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "attn-backend"}):
        figure.savefig(path, format=form, dpi=160, metadata={"Date": None} if form == "svg" else None)


class Rectangles:
    """Merges rectangles of one color into one shape, so that a picture of thousands stays small."""

    def __init__(self, axes: Axes, **style: Any) -> None:
        """style: arguments of matplotlib's patches."""
        self.axes, self.style = axes, {"linewidth": 0, "snap": False, **style}
        self._corners: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)

    def add(self, color: str, x: float, y: float, width: float, height: float) -> None:
        self._corners[color].append((x, y, x + width, y + height))

    def draw(self) -> None:
        for color, corners in self._corners.items():
            x0, y0, x1, y1 = np.array(corners).T
            polygons = np.stack(
                [np.stack(point, -1) for point in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))], 1
            )
            self.axes.add_patch(
                PathPatch(Outline.make_compound_path_from_polys(polygons), facecolor=color, **self.style)
            )


DECODE = ("#9ecae1", "#5b9bd0")  # alternating colors of row groups of requests with one row
PREFILL = ("#a8d5a2", "#6fb56a")  # and with more rows
# alternating colors of row groups of shared prefixes
TAKEN = ("#e6550d", "#c2457f", "#d4a017", "#7b3294", "#8c564b", "#f2795c")
NOT_TAKEN = "#e4e4e4"

_WIDTH = 1280
# Margins. The left margin holds the row names.
_LEFT, _RIGHT = 112, 24
# Width of the view, and of the forest.
_PANEL = (_WIDTH - _LEFT - _RIGHT - 48) / 2
# Pixels from a line of text to the next.
_LINE = 18
# Nodes of the forest with a description.
_LISTED = 8
_LEGEND = (
    (DECODE[1], "own row group of a request with one row"),
    (PREFILL[1], "of a request with more rows"),
    (TAKEN[0], "shared prefix, taken: one row group reads it for all its rows (alternating colors)"),
    (NOT_TAKEN, "shared prefix, not taken: the nodes below read it"),
)

Slots = list[tuple[float, float]]


def draw_plan(planned: Planned) -> Figure:
    """Draws the plan, 1280 pixels wide, as high as the batch needs."""
    nodes = planned.ranked_forest()
    listed = [
        f"{_extent(node)}, {count(node.num_requests, 'request')}: {decision(node)}; saves {node.saved}, adds "
        f"{node.added}"
        for node in nodes[:_LISTED]
    ]
    listed += [f"... and {len(nodes) - _LISTED} more"] * (len(nodes) > _LISTED)
    slots = _slots(planned)
    num_ctas = planned.schedule.num_ctas
    ctas_height = num_ctas * min(max(400 / num_ctas, 1.0), 14.0)

    lines = planned.summary()
    rows_top = 30 + _LINE * len(lines) + 84
    list_top = rows_top + slots[-1][1] + 66
    ctas_top = list_top + _LINE * len(listed) + 40
    height = math.ceil(ctas_top + ctas_height + 52)
    figure = new_figure(_WIDTH, height)

    def text(x: float, y: float, words: str, size: float, weight: str = "normal") -> None:
        figure.text(
            x / _WIDTH, 1 - y / height, words, fontsize=size, color=INK, parse_math=False, fontweight=weight
        )

    text(16, 24, "attn-backend plan", 12, weight="bold")
    for i, (name, words) in enumerate(lines):
        text(16, 46 + _LINE * i, name, TITLE)
        text(_LEFT, 46 + _LINE * i, words, TITLE)
    for i, line in enumerate(listed):
        text(_LEFT, list_top + _LINE * i, line, TEXT)
    handles = [Patch(facecolor=color, label=name) for color, name in _LEGEND]
    place = (_LEFT / _WIDTH, 1 - (rows_top - 72) / height)
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=place,
        ncols=2,
        frameon=False,
        fontsize=TEXT,
        borderpad=0,
        borderaxespad=0,
    )
    _draw_view(add_axes(figure, _LEFT, rows_top, _PANEL, slots[-1][1]), planned, slots)
    _draw_forest(add_axes(figure, _WIDTH - _RIGHT - _PANEL, rows_top, _PANEL, slots[-1][1]), planned, slots)
    _draw_ctas(add_axes(figure, _LEFT, ctas_top, _WIDTH - _LEFT - _RIGHT, ctas_height), planned)
    return figure


def _slots(planned: Planned) -> Slots:
    """(top, bottom) in pixels of each request in planned.order(). Requests with many rows of Q are higher,
    but not proportionally.
    """
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


def _set_up(axes: Axes, title: str, name: str, width: float, height: float) -> None:
    """Sets titles, and limits of x from 0 and of y from the top."""
    axes.set_title(title, loc="left", fontsize=TITLE, fontweight="bold", color=INK, parse_math=False)
    axes.set_xlabel(name, fontsize=TEXT, color=FAINT)
    axes.set_xlim(0, max(width, 1))
    axes.set_ylim(height, 0)


def _draw_view(axes: Axes, planned: Planned, slots: Slots) -> None:
    """Rows of Q x pages. Pages are in the order in which the drawn rows first use them, so shared pages line
    up in columns.
    """
    order = planned.order()
    columns = _columns([planned.batch.block_table[request] for request in order])
    num_pages = max((int(row.max()) + 1 for row in columns if len(row)), default=0)
    _set_up(
        axes,
        f"BSR view: {count(sum(planned.batch.qo_lens), 'row')} of Q x {count(num_pages, 'page')}",
        "pages, by first use",
        num_pages,
        slots[-1][1],
    )
    rectangles = Rectangles(axes)
    for request, row, (top, bottom) in zip(order, columns, slots, strict=True):
        own_begin = 0
        for node in planned.path(request):
            if node.group >= 0:
                _add_pages(
                    rectangles, _color(node), row[node.first_page : node.end_page], top, bottom, num_pages
                )
                own_begin = node.end_page
        _add_pages(rectangles, _own_color(planned, request), row[own_begin:], top, bottom, num_pages)
    rectangles.draw()
    # every row, or every k-th if there is not enough room
    named = range(0, len(order), math.ceil(13 * len(slots) / slots[-1][1]))
    names = [f"{order[place]}: {count(planned.batch.qo_lens[order[place]], 'row')}" for place in named]
    axes.set_yticks([sum(slots[place]) / 2 for place in named], names, color=INK)


def _add_pages(
    rectangles: Rectangles, color: str, columns: torch.Tensor, top: float, bottom: float, num_pages: int
) -> None:
    """Draws runs of neighboring columns as one rectangle each, never too thin to be seen."""
    if not len(columns):
        return
    begins = [0, *((columns.diff() != 1).nonzero().flatten() + 1).tolist()]
    for begin, end in pairwise([*begins, len(columns)]):
        rectangles.add(
            color, int(columns[begin]), top, max(end - begin, 0.6 * num_pages / _PANEL), (bottom - top) * 0.92
        )


def _columns(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Renumbers page ids by first use."""
    pages = torch.cat(list(rows))
    ids, inverse = pages.unique(return_inverse=True)
    first = torch.full_like(ids, len(pages), dtype=torch.int64).scatter_reduce(
        0, inverse, torch.arange(len(pages)), "amin"
    )
    return first.argsort().argsort()[inverse].split([len(row) for row in rows])


def _draw_forest(axes: Axes, planned: Planned, slots: Slots) -> None:
    """Draws each node at its requests and pages; after the nodes, each request's private pages."""
    order, forest = planned.order(), planned.schedule.forest
    place = {request: i for i, request in enumerate(order)}
    longest = max(map(planned.pages, order))
    title = f"prefix forest: {count(len(forest), 'node')}, {sum(node.group >= 0 for node in forest)} taken"
    _set_up(
        axes, title, f"pages of {planned.batch.page_size} tokens from the beginning", longest, slots[-1][1]
    )
    axes.set_yticks([])
    pixel = max(longest, 1) / _PANEL  # in pages
    own, nodes = Rectangles(axes), Rectangles(axes, edgecolor=INK, linewidth=0.5)
    for request, (top, bottom) in zip(order, slots, strict=True):
        begin = max((node.end_page for node in planned.path(request)), default=0)
        if planned.pages(request) > begin:
            own.add(
                _own_color(planned, request),
                begin,
                top,
                max(planned.pages(request) - begin, 0.6 * pixel),
                (bottom - top) * 0.92,
            )
    for node, members in zip(forest, planned.members, strict=True):
        top, bottom = (
            min(slots[place[request]][0] for request in members),
            max(slots[place[request]][1] for request in members),
        )
        width = max(node.end_page - node.begin_page, 1.5 * pixel)
        nodes.add(_color(node), node.begin_page, top, width, bottom - top)
        words = [_extent(node), decision(node), f"saves {node.saved}, adds {node.added}"]
        fitting = [line for line in words if 7.5 * len(line) < width / pixel - 6][
            : int((bottom - top - 2) // 15)
        ]
        middle = (node.begin_page + width / 2, (top + bottom) / 2)
        axes.text(
            *middle,
            "\n".join(fitting),
            fontsize=TEXT,
            color="white" if node.group >= 0 else INK,
            ha="center",
            va="center",
            parse_math=False,
        )
    own.draw()
    nodes.draw()


def _draw_ctas(axes: Axes, planned: Planned) -> None:
    """Draws one line per CTA: its row groups one after another, next to the cost of a perfect split."""
    costs, requests = planned.costs, len(planned.batch.kv_lens)
    ctas = costs.ctas.tolist()
    longest, ideal = max(ctas), sum(ctas) / len(ctas)
    title = f"{len(ctas)} CTAs: busiest {longest} units, ideal {ideal:.1f}, balance {costs.balance:.3f}"
    _set_up(axes, title, "cost units; dashed: ideal", longest * 1.02, len(ctas))
    pixel = max(longest * 1.02, 1) / (_WIDTH - _LEFT - _RIGHT)
    rectangles = Rectangles(axes)
    for part in costs.parts:
        color = _own_color(planned, part.group) if part.group < requests else TAKEN[part.group % len(TAKEN)]
        rectangles.add(
            color, part.begin, part.cta, max(part.end - part.begin - 0.6 * pixel, 0.4 * pixel), 0.88
        )
    rectangles.draw()
    named = range(0, len(ctas), max(1, math.ceil(len(ctas) / 16)))
    axes.set_yticks([cta + 0.5 for cta in named], [f"CTA {cta}" for cta in named], color=INK)
    if ideal:
        axes.axvline(ideal, color=INK, linewidth=1, linestyle="--")
