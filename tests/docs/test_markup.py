"""Markdown that the site would render differently than intended: broken tables and commands, and lists that
begin within a paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LIST = re.compile(r"(- |\d+\. )")
_ABOVE_A_TABLES_ROWS = re.compile(r"\|[\s:|-]+\|")


def faults(text: str) -> Iterator[str]:
    lines = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        is_text = bool(line) and not line.startswith((" ", "|", "#", ":::")) and not _LIST.match(line)
        if is_text and not before and after.startswith("    "):
            yield f"the first line of a block of commands is not indented: {line}"
        if (
            line.startswith("|")
            and not before.startswith("|")
            and (before or not _ABOVE_A_TABLES_ROWS.fullmatch(after))
        ):
            yield f"a table's row that stands alone: {line}"
        if (
            _LIST.match(line)
            and before
            and not before.startswith(" ")
            and not _LIST.match(before)
            and not _in_list(lines, line)
        ):
            yield f"a list without an empty line before it: {line}"


def _in_list(lines: list[str], line: str) -> bool:
    """Whether the line's paragraph begins as an item, so that its items continue without indentation."""
    first = lines.index(line)
    while first > 0 and lines[first - 1]:
        first -= 1
    return bool(_LIST.match(lines[first]))


def wide_lines(text: str) -> Iterator[str]:
    """Lines of code that the site would clip."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif (fenced or (line.startswith("    ") and not _LIST.match(line.lstrip()))) and len(line) > 100:
            yield line


# Commands of reports stand as they ran; internals are read next to the code.
FOR_USERS = [
    page
    for page in PAGES
    if page.parent.name not in ("adr", "internals", "reports") and page.name != "notebook.md"
]


@pytest.mark.parametrize("page", FOR_USERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_fits_the_page(page: Path) -> None:
    assert not list(wide_lines(page.read_text()))


def test_wide_code_is_found() -> None:
    line = "x" * 101
    assert list(wide_lines(f"```bash\n{line}\n```\n\n    {line}\n\n{line}\n")) == [line, f"    {line}"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_shown_as_it_was_meant(page: Path) -> None:
    assert not list(faults(page.read_text()))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Words.\n\ncommand\n    command\n", "not indented"),
        ("| a |\n|---|\n| b |\n\n| c |\n", "stands alone"),
        ("Words:\n- one\n- two\n", "without an empty line"),
    ],
)
def test_faults_are_found(text: str, fault: str) -> None:
    assert [fault in found for found in faults(text)] == [True]


def test_good_pages_pass() -> None:
    assert not list(
        faults("Words.\n\n    command\n    command\n\n| a |\n|---|\n| b |\n\n- one\n- two\n  more\n")
    )


# A figure of a 400-pixel phone has 368 pixels; a wide one scrolls and has 1000 (docs/stylesheets).
_FIGURE = re.compile(r"!\[[^\]]*\]\(([^()\s]+\.svg)\)(\{ \.wide \})?")
_VIEW = re.compile(r'viewBox="0 0 ([\d.]+) ')
_SIZE = re.compile(r'font-size(?:: |=")([\d.]+)')
FIGURES = [(page, *figure) for page in PAGES for figure in _FIGURE.findall(page.read_text())]


@pytest.mark.parametrize(
    ("page", "figure", "wide"),
    FIGURES,
    ids=[f"{page.stem}-{Path(figure).stem}" for page, figure, _ in FIGURES],
)
def test_text_of_a_figure_is_readable_on_a_phone(page: Path, figure: str, wide: str) -> None:
    svg = (page.parent / figure).read_text()
    view = _VIEW.search(svg)
    assert view
    scale = (1000 if wide else 368) / float(view[1])
    assert min(map(float, _SIZE.findall(svg))) * scale >= 9
