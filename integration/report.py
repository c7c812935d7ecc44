"""The outcome of a benchmark as a table for people, JSON for programs, and a plot."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from integration.engines import Metrics

COLUMNS = {
    "requests": "finished",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
    "tokens_per_s": "tokens/s",
}
DECIMALS = {"itl_p50_ms": 2, "itl_p99_ms": 2}  # of the others 1. An ITL of 5 ms is told from another one in hundredths


@dataclass(frozen=True)
class Row:
    """One backend's results under one load, one `Metrics` for each repeat."""

    backend: str
    workload: str
    repeats: list[Metrics]

    @property
    def metrics(self) -> Metrics:
        """The median of each figure over the repeats."""
        values = {field.name: statistics.median(getattr(repeat, field.name) for repeat in self.repeats) for field in fields(Metrics)}
        return Metrics(**values)


def format_table(rows: list[Row]) -> str:
    """A table for each load with a line for each backend, in Markdown, so that it can be pasted."""
    tables = []
    for workload in dict.fromkeys(row.workload for row in rows):
        tables.append(f"{workload}\n\n{_format_load([row for row in rows if row.workload == workload])}")
    return "\n\n".join(tables)


def _format_load(rows: list[Row]) -> str:
    header = ["backend", *COLUMNS.values()]
    lines = []
    for row in rows:
        metrics = row.metrics
        finished = f"{metrics.requests:.0f} of {metrics.requests + metrics.failed:.0f}"
        lines.append([row.backend, finished, *(f"{getattr(metrics, name):.{DECIMALS.get(name, 1)}f}" for name in list(COLUMNS)[1:])])
    widths = [max(len(line[index]) for line in [header, *lines]) for index in range(len(header))]

    def join(cells: list[str]) -> str:
        return "| " + " | ".join([cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([join(header), rule, *map(join, lines)])


def write_tables(folder: Path, title: str, settings: dict[str, Any], rows: list[Row]) -> list[Path]:
    """Write `report.json` and `report.md` into `folder`. Returns what was written."""
    described = [asdict(row) | {"median": asdict(row.metrics)} for row in rows]
    report = {"title": title, "settings": settings, "rows": described}
    written = [folder / "report.json", folder / "report.md"]
    written[0].write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    written[1].write_text(f"# {title}\n\n{format_table(rows)}\n", encoding="utf-8")
    return written


def write_report(folder: Path, title: str, settings: dict[str, Any], rows: list[Row]) -> list[Path]:
    """Write the tables and, where matplotlib is installed, `report.png` into `folder`. Returns what was written."""
    written = write_tables(folder, title, settings, rows)
    try:
        from integration.plot import plot_rows
    except ImportError:
        print("No plot: matplotlib is not installed here.")
        return written
    written.append(plot_rows(folder / "report.png", title, rows))
    return written
