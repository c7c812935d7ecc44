"""The parts that all pictures share: figures measured in pixels, rectangles in a few colors, and files that
depend on nothing but their content.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

INK = "#222222"
FAINT = "#9a9a9a"
DPI = 100  # of the pixels that sizes and places are given in


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many pixels."""
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def add_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place in pixels from the upper left corner."""
    full_width, full_height = figure.get_size_inches() * DPI
    axes = figure.add_axes(
        (left / full_width, 1 - (top + height) / full_height, width / full_width, height / full_height)
    )
    axes.tick_params(labelsize=6.5, colors=FAINT, length=3)
    for spine in axes.spines.values():
        spine.set_color(FAINT)
    return axes


def write(figure: Figure, path: Path, form: str = "") -> None:
    """`form`: svg, png or another that matplotlib knows; without it the path's suffix says which.

    Text in an SVG stays text.
    """
    form = form or path.suffix[1:]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "attn-backend"}):
        figure.savefig(path, format=form, dpi=160, metadata={"Date": None} if form == "svg" else None)


class Rectangles:
    """Rectangles of one color become one shape: a picture of thousands stays small."""

    def __init__(self, axes: Axes, **style: Any) -> None:
        """style: of matplotlib's patches."""
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
