"""The lines of a benchmark's table, measured one after another."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.report import brief, save, wanted

Line = dict[str, Any]


def measure_lines(
    cases: Iterable[Any],
    measure: Callable[[Any], Line],
    text: Callable[[list[Line]], str],
    header: str,
    arguments: argparse.Namespace,
) -> None:
    """Measures the cases that --case selects, prints each line, and at the end the whole table.

    Files are written after every line.

    Args:
        measure: makes the line of a case, which has a `name`.
        text: the lines with their header, as Markdown.
    """
    print(header, flush=True)
    lines: list[Line] = []
    for case in cases:
        if not wanted(case.name, arguments):
            continue
        lines.append(measure(case))
        print(brief(lines[-1]), flush=True)
        save(arguments, text(lines), {"header": header, "gpu": torch.cuda.get_device_name(), "lines": lines})
        torch.cuda.empty_cache()
    if lines:
        print(text(lines))
