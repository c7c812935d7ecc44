"""A picture of a benchmark: time to first token, time between tokens and throughput, one bar a backend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
    figure, axes = plt.subplots(1, len(PANELS), figsize=(14, 4.5), layout="constrained")
    figure.suptitle(title)
    for axis, (heading, bars) in zip(axes, PANELS.items(), strict=True):
        width = 0.8 / len(rows)
        for index, row in enumerate(rows):
            values = [getattr(row.metrics, name) for name in bars.values()]
            places = [group + (index - (len(rows) - 1) / 2) * width for group in range(len(bars))]
            drawn = axis.bar(places, values, width * 0.92, label=row.backend)
            axis.bar_label(drawn, fmt="%.1f", fontsize=8)
        axis.set_title(heading, fontsize=10)
        axis.set_xticks(range(len(bars)), list(bars))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
