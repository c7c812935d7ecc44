"""Files, folders and functions named in the documents exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = (
    ".github",
    "attn_backend",
    "benchmarks",
    "csrc",
    "docs",
    "examples",
    "flashinfer_alias",
    "integration",
    "release",
    "tests",
)
SUFFIXES = (".py", ".h", ".cuh", ".cu", ".cpp", ".md", ".svg", ".yml", ".toml", ".jsonl")
# Created by a command, part of an installed package, chosen by the reader, or from an engine, a model or
# FlashInfer.
ELSEWHERE = re.compile(
    r"(results|dist|lib|build|\.build)(/|$)|.*(ENGINE|<engine>|sm100)|(vllm|sglang)/"
    r"|tokenizer\.json|BatchDecode/"
)
FLASHINFERS_TESTS = "## FlashInfer's own tests"


@cache
def entries() -> list[Path]:
    """Files and folders, relative to the root."""
    found = [path for folder in FOLDERS for path in (ROOT / folder, *(ROOT / folder).rglob("*"))]
    return [path.relative_to(ROOT) for path in (*found, *ROOT.iterdir())]


@cache
def words() -> set[str]:
    """All names in the sources, including our own comments."""
    texts = (ROOT / path for path in entries() if path.suffix in (".py", ".h", ".cuh", ".cu", ".cpp"))
    return {word for path in texts for word in re.findall(r"\w+", path.read_text())}


def missing(text: str) -> list[str]:
    """Code spans that look like paths or functions, but match none.

    A path may begin in the folder that the page describes; * is any text.
    """
    prose = re.sub(r"^```.*?^```$", "", text.partition(FLASHINFERS_TESTS)[0], flags=re.DOTALL | re.MULTILINE)
    found = []
    for span in re.findall(r"`([^`\n]+)`", prose):
        is_path = re.fullmatch(r"[\w.*<>-]+(/[\w.*<>-]+)*/?", span) and (
            "/" in span or span.endswith(SUFFIXES)
        )
        if (
            is_path
            and not ELSEWHERE.match(span)
            and not any(entry.match(span.rstrip("/")) for entry in entries())
        ):
            found.append(span)
        if (function := re.fullmatch(r"(?:[\w.:]*[.:])?(\w+)\(\)", span)) and function[1] not in words():
            found.append(span)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    assert not missing(page.read_text())


@pytest.mark.parametrize(
    "span",
    [
        "csrc/attention/sm70/",
        "attn_backend/nothing.py",
        "nothing.cuh",
        "docs/adr/9999-*.md",
        f"Attention.{'run' * 3}()",
    ],
)
def test_what_is_not_there_is_found(span: str) -> None:
    assert missing(
        f"As `{span}` says, `attn_backend/settings.py`, `plan()`, `csrc/attention/sm90/`, `design.h` and "
        f"`docs/adr/0001-*.md` do."
    ) == [span]
