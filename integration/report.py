"""The outcome of a benchmark as a table for people, JSON for programs, and a plot."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

from integration.results import Row, by_load

# For each figure in the table: its heading and its decimals. Two ITLs of 5 ms differ in hundredths
COLUMNS = {
    "ttft_p50_ms": ("TTFT p50 ms", 1),
    "ttft_p99_ms": ("TTFT p99 ms", 1),
    "itl_p50_ms": ("ITL p50 ms", 2),
    "itl_p99_ms": ("ITL p99 ms", 2),
    "tokens_per_s": ("tokens/s", 1),
}
ACCEPT_LENGTH = {"accept_length": ("accept length", 2)}  # where answers are drafted


def format_table(rows: list[Row]) -> str:
    """A Markdown table for each load with a line for each backend, ready to paste."""
    return "\n\n".join(f"{load}\n\n{_format_load(of_load)}" for load, of_load in by_load(rows).items())


def _format_load(rows: list[Row]) -> str:
    columns = COLUMNS | (ACCEPT_LENGTH if any(row.metrics.accept_length != 1.0 for row in rows) else {})
    headers = ["backend", "finished", *(heading for heading, _ in columns.values())]
    lines = []
    for row in rows:
        metrics = row.metrics
        finished = f"{metrics.requests:.0f} of {metrics.requests + metrics.failed:.0f}"
        lines.append(
            [
                row.backend,
                finished,
                *(f"{getattr(metrics, name):.{decimals}f}" for name, (_, decimals) in columns.items()),
            ]
        )
    return tabulate(
        lines,
        headers,
        tablefmt="pipe",
        disable_numparse=True,
        colalign=["left", *["right"] * (len(headers) - 1)],
    )


def write_tables(
    folder: Path, title: str, settings: dict[str, Any], rows: list[Row], note: str = ""
) -> list[Path]:
    """Write `report.json` and `report.md` into `folder`. Returns the JSON content.

    Args:
        note: appears above the tables.
    """
    described = [asdict(row) | {"median": asdict(row.metrics)} for row in rows]
    report = {"title": title, "note": note, "settings": settings, "rows": described}
    written = [folder / "report.json", folder / "report.md"]
    written[0].write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    written[1].write_text(
        "\n\n".join(filter(None, [f"# {title}", note, format_table(rows)])) + "\n", encoding="utf-8"
    )
    return written


def write_report(
    folder: Path, title: str, settings: dict[str, Any], rows: list[Row], note: str = ""
) -> list[Path]:
    """Write the tables and, where matplotlib is installed, `report.png` into `folder`.

    Returns what was written.
    """
    written = write_tables(folder, title, settings, rows, note)
    try:
        from integration.plot import plot_rows
    except ImportError:
        print("No plot: matplotlib is not installed here.")
        return written
    written.append(plot_rows(folder / "report.png", title, rows))
    return written
