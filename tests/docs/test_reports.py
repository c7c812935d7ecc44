"""Users' pages quote the reports: every line of numbers in a board is a line of a report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
# Reports do not have the columns that a page derives from others.
DERIVED = " / "
PAGES = ("benchmarks.md", "gallery.md")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def table_lines(text: str) -> Iterator[tuple[list[str], str]]:
    """The header and the text of each line of a table."""
    header: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells(line)
        elif line.strip("|-: "):
            yield header, line


def rows(text: str) -> list[list[str]]:
    """The cells of each table line with numbers, except derived columns."""
    return [
        [cell for name, cell in zip(header, cells(line), strict=True) if DERIVED not in name]
        for header, line in table_lines(text)
        if re.search(r"\|\s*\d+\.\d", line)
    ]


REPORTED = [
    cells(line) for report in (DOCS / "reports").glob("*.md") for line in report.read_text().splitlines()
]


def is_reported(row: list[str]) -> bool:
    """Whether a report has a line with this name and these numbers, in this order."""

    def holds(line: list[str]) -> bool:
        left = iter(line)
        return all(cell in left for cell in row)

    return any(holds(line) for line in REPORTED)


@pytest.mark.parametrize(
    ("page", "row"),
    [(page, row) for page in PAGES for row in rows((DOCS / page).read_text())],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_line_of_a_board_is_reported(page: str, row: list[str]) -> None:
    assert is_reported(row)


def test_boards_have_lines() -> None:
    assert len(rows((DOCS / "benchmarks.md").read_text())) > 25
    assert len(rows((DOCS / "gallery.md").read_text())) > 3


def test_another_number_is_found() -> None:
    row = rows((DOCS / "benchmarks.md").read_text())[0]
    assert is_reported(row)
    assert not is_reported([*row[:-1], "1234.5"])
    assert not is_reported([row[0], *reversed(row[1:])])


REPORTS = sorted({*(DOCS / "reports").glob("*.md")} - {DOCS / "reports/README.md"})


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem)
def test_a_table_has_its_command_and_the_report_is_linked(report: Path) -> None:
    text = report.read_text()
    has_table = re.search(r"^\|[\s:|-]+\|$", text, re.MULTILINE)
    assert not has_table or re.search(r"\bpython (?:-m [\w.]+|examples/\w+\.py)", text)
    others = (page for page in DOCS.rglob("*.md") if page != report)
    assert any(re.search(rf"\]\((?:\S*/)?{report.name}(?:#\S*)?\)", page.read_text()) for page in others)


PAPER = (DOCS / "reports/paper.md").read_text()
OTHERS = "\n".join(
    page.read_text()
    for page in [*(DOCS / "reports").glob("*.md"), DOCS / "examples.md"]
    if page.name != "paper.md"
)


@pytest.mark.parametrize(
    "row",
    [dict(zip(header, cells(line), strict=True)) for header, line in table_lines(PAPER)],
    ids=lambda row: next(iter(row.values()))[:40],
)
def test_a_row_of_the_paper_s_page_has_a_command_and_figures_of_a_report(row: dict[str, str]) -> None:
    """Or it is open, or outside of the scope. Ratios are derived from the figures."""
    names = set(re.findall(r"^    # ([A-Z](?:, [A-Z])*)\b", PAPER, re.MULTILINE))
    commands = {letter for name in names for letter in name.split(", ")}
    if row["ours"] not in ("open", "outside"):
        assert row["command"]
    assert {letter for letter in row["command"].split(", ") if letter} <= commands
    for number in re.findall(r"\d+\.\d+", re.sub(r"\[.*?\]\(.*?\)", "", row["ours"])):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", OTHERS), number
