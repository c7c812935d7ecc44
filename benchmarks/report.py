"""Code that the benchmarks share: command line options, tables, files."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate


def options(description: str | None, repeats: int = 50, peers: Iterable[str] = ()) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark.

    Args:
        repeats: default number of timed replays.
        peers: names that --peer takes; none: no --peer option.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", action="append", default=[], help="only lines whose name contains this; repeatable"
    )
    if peers:
        parser.add_argument(
            "--peer",
            action="append",
            choices=[*peers, "none"],
            default=[],
            help="only this peer, or none; repeatable; default: all that import",
        )
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser


def wanted(name: str, arguments: argparse.Namespace) -> bool:
    """Whether --case selects this line."""
    return not arguments.case or any(text in name for text in arguments.case)


def asked_peers(peers: Iterable[str], arguments: argparse.Namespace) -> tuple[str, ...]:
    """The peers that --peer selects."""
    return tuple(peer for peer in peers if not arguments.peer or peer in arguments.peer)


def fastest_of(line: Mapping[str, Any], columns: Iterable[str]) -> float | None:
    """The smallest time of these columns; None if none was measured."""
    return min((line[column] for column in columns if line.get(column) is not None), default=None)


def ratio(dividend: float | None, divisor: float | None) -> float | None:
    """None if one of the two was not measured."""
    return None if dividend is None or divisor is None else dividend / divisor


def number(value: float | None, digits: int = 1) -> str:
    """A cell of a table; '-' if it was not measured."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column left-aligned, numbers right-aligned."""
    return tabulate(
        rows,
        columns,
        tablefmt="pipe",
        disable_numparse=True,
        colalign=["left", *["right"] * (len(columns) - 1)],
    )


def brief(line: dict[str, object]) -> dict[str, object]:
    """A line to print: four digits are enough."""
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}


def save(arguments: argparse.Namespace, text: str, data: object) -> None:
    """Writes the files that --markdown and --json name.

    Called after every line, so that results outlive a peer that crashes the process.
    """
    if arguments.json:
        arguments.json.write_text(json.dumps(data, indent=1))
    if arguments.markdown:
        arguments.markdown.write_text(text)
