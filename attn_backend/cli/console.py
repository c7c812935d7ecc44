"""Tables on the command line, through rich on a terminal and as plain text elsewhere; and error texts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_COLORS = {"[ok]": "green", "[--]": "yellow", "[!!]": "bold red"}  # of the doctor's marks


def print_table(
    rows: Sequence[Sequence[str]], columns: Sequence[str] = (), right: Sequence[int] = ()
) -> None:
    """Prints rows of equal length. Columns with the given numbers are right-aligned."""
    if not rows:
        return
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            pass
        else:
            table = Table(box=None, show_header=bool(columns), pad_edge=False)
            for number, _ in enumerate(rows[0]):
                table.add_column(
                    columns[number] if columns else "",
                    justify="right" if number in right else "left",
                    overflow="fold",
                )
            for row in rows:
                table.add_row(*(Text(cell, style=_COLORS.get(cell, "")) for cell in row))
            Console().print(table)
            return
    lines = [columns, *rows] if columns else rows
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


def explained(error: Exception) -> str:
    """An error's text; for failed imports, with a hint to run the doctor."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{error}; run attn-backend doctor for a fix" if isinstance(error, ImportError) else str(error)
