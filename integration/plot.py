"""A picture of a benchmark: time to first token, time between tokens and throughput of each backend, one row
of panels for each load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from integration.results import Row, by_load

LATENCIES = {"Time to first token": "ttft", "Time between tokens": "itl"}
SHORTEST_MS = 1e-3  # a logarithmic axis cannot show 0


def plot_rows(path: Path, title: str, rows: list[Row]) -> Path:
    """Draw `rows` into the PNG file `path`."""
    figure = draw_rows(title, rows)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)
    return path


def draw_rows(title: str, rows: list[Row]) -> Figure:
    """A backend's color depends on its place among all backends, so it is the same in all loads."""
    loads = by_load(rows)
    backends = list(dict.fromkeys(row.backend for row in rows))
    heights = [1.5 + 0.45 * len(of_load) for of_load in loads.values()]
    figure = Figure(figsize=(15, 0.5 + sum(heights)), layout="constrained")
    figure.suptitle(title)
    lines = figure.subfigures(len(loads), 1, squeeze=False, height_ratios=heights)[:, 0]
    for (load, of_load), line in zip(loads.items(), lines, strict=True):
        line.suptitle(load, fontsize=11, fontweight="bold")
        colors = [f"C{backends.index(row.backend) % 10}" for row in of_load]
        axes = line.subplots(1, len(LATENCIES) + 1, sharey=True)
        for axis, (name, field) in zip(axes, LATENCIES.items(), strict=False):
            draw_latency(axis, name, field, of_load, colors)
        draw_throughput(axes[-1], of_load, colors)
        axes[0].set_yticks(range(len(of_load)), [row.backend for row in of_load], fontsize=9)
        axes[0].set_ylim(len(of_load) - 0.4, -0.6)
    return figure


def draw_latency(axis: Any, name: str, field: str, rows: list[Row], colors: list[str]) -> None:
    """For each backend a bar from p50 to p99.

    The axis is logarithmic, so one slow p99 leaves the others readable.
    """
    for place, (row, color) in enumerate(zip(rows, colors, strict=True)):
        p50, p99 = (
            max(getattr(row.metrics, f"{field}_{percentile}_ms"), SHORTEST_MS)
            for percentile in ("p50", "p99")
        )
        axis.plot([p50, p99], [place, place], color=color, linewidth=3, alpha=0.4, solid_capstyle="butt")
        axis.plot([p50], [place], "o", color=color)
        axis.plot([p99], [place], "|", color=color, markersize=13, markeredgewidth=2.5)
        axis.annotate(
            _three_digits(p50),
            (p50, place),
            (-7, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
        )
        axis.annotate(
            _three_digits(p99),
            (p99, place),
            (6, 0),
            textcoords="offset points",
            ha="left",
            va="center",
            fontsize=8,
        )
    axis.set_xscale("log")
    axis.margins(x=0.25)
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    _finish(axis, f"{name}: p50 (dot) to p99 (bar), ms, less is better")


def draw_throughput(axis: Any, rows: list[Row], colors: list[str]) -> None:
    bars = axis.barh(range(len(rows)), [row.metrics.tokens_per_s for row in rows], 0.6, color=colors)
    axis.bar_label(bars, fmt=_three_digits, fontsize=8, padding=3)
    axis.margins(x=0.15)
    _finish(axis, "Generated tokens per second, more is better")


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _finish(axis: Any, heading: str) -> None:
    axis.set_title(heading, fontsize=10)
    axis.grid(axis="x", alpha=0.3)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
