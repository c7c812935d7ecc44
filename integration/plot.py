"""A picture of a benchmark: time to first token, time between tokens and throughput, one bar a backend, one line of panels a load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")  # no display
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from integration.report import Row

PANELS = {
    "Time to first token (ms, less is better)": {"p50": "ttft_p50_ms", "p99": "ttft_p99_ms"},
    "Time between tokens (ms, less is better)": {"p50": "itl_p50_ms", "p99": "itl_p99_ms"},
    "Generated tokens per second (more is better)": {"": "tokens_per_s"},
}


def plot_rows(path: Path, title: str, rows: list[Row]) -> Path:
    """Draw `rows` into the PNG file `path`."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    backends = list(dict.fromkeys(row.backend for row in rows))
    figure = plt.figure(figsize=(14, 4.5 * len(workloads)), layout="constrained")
    figure.suptitle(title)
    lines = figure.subfigures(len(workloads), 1, squeeze=False)[:, 0]
    for workload, line in zip(workloads, lines, strict=True):
        line.suptitle(workload, fontsize=11, fontweight="bold")
        draw_load(line.subplots(1, len(PANELS)), [row for row in rows if row.workload == workload], backends)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def draw_load(axes: Any, rows: list[Row], backends: list[str]) -> None:
    """Draw one load's rows into a line of panels. A backend's colour is its place in `backends`, so that it is the same in all loads."""
    width = 0.8 / len(rows)
    for axis, (heading, bars) in zip(axes, PANELS.items(), strict=True):
        for index, row in enumerate(rows):
            values = [getattr(row.metrics, name) for name in bars.values()]
            places = [group + (index - (len(rows) - 1) / 2) * width for group in range(len(bars))]
            drawn = axis.bar(places, values, width * 0.92, label=row.backend, color=f"C{backends.index(row.backend)}")
            axis.bar_label(drawn, fmt="%.1f", fontsize=8)
        axis.set_title(heading, fontsize=10)
        axis.set_xticks(range(len(bars)), list(bars))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8)
