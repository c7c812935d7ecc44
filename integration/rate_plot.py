"""A picture of an operating point: time between tokens and P99 time to first token against the request rate,
one curve for each backend.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from integration.engines import Metrics

Curves = dict[str, dict[float, Metrics]]  # medians by backend and rate
PANELS = {"itl_p50_ms": "Time between tokens, p50, ms", "ttft_p99_ms": "Time to first token, p99, ms"}


def plot_rates(
    path: Path, title: str, curves: Curves, limit: tuple[str, float], common_rate: float | None
) -> Path:
    """Draw `curves` into the PNG file `path`. Less is better in both panels.

    limit: a field of Metrics, and its limit in ms.
    """
    figure = draw_rates(title, curves, limit, common_rate)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)
    return path


def draw_rates(title: str, curves: Curves, limit: tuple[str, float], common_rate: float | None) -> Figure:
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axis, (name, heading) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for number, (backend, medians) in enumerate(curves.items()):
            rates = sorted(medians)
            values = [getattr(medians[rate], name) for rate in rates]
            axis.plot(rates, values, "o-", color=f"C{number % 10}", label=backend, markersize=4)
        if name.startswith("ttft"):
            axis.set_yscale("log")
        if name == limit[0]:
            axis.axhline(
                limit[1], color="black", linestyle="--", linewidth=1, label=f"limit: {limit[1]:g} ms"
            )
        if common_rate is not None:
            axis.axvline(common_rate, color="gray", linestyle=":", label=f"common rate: {common_rate:g}/s")
        axis.set_xscale("log")
        for scale in (axis.xaxis, axis.yaxis) if name.startswith("ttft") else (axis.xaxis,):
            scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
            scale.set_major_formatter(FormatStrFormatter("%g"))
            scale.set_minor_formatter(NullFormatter())
        axis.set_xlabel("prompts per second")
        axis.set_title(f"{heading}, less is better", fontsize=10)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8)
    return figure
