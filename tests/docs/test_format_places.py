"""docs/internals/add_format.md lists the files whose code names a format of the cache. Docstrings, comments
and tests are not searched.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_backend.metadata import kv_cache
from attn_backend.stored_formats import FORMATS, StoredFormat

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/internals/add_format.md").read_text()
LISTED = set(re.findall(r"`([^`]+)`", PAGE))
FOUR_BITS = [stored for stored in FORMATS if stored.head_columns]
# Formats of SGLang are in more files, which the page names together; the benchmark has cases over some.
ELSEWHERE = ("attn_backend/adapters/sglang/", "attn_backend/cli/bench.py", "attn_backend/flashinfer/")
MOST_PLACES = 12


def code_of(path: Path) -> str:
    """A file without comments and docstrings."""
    text = path.read_text()
    if path.suffix != ".py":
        return re.sub(r"//.*|^#include.*", "", text, flags=re.MULTILINE)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(
        token.string for token in tokens if token.type != tokenize.COMMENT and 3 * '"' not in token.string
    )


def sources() -> Iterator[Path]:
    for folder, suffixes in (("csrc", (".h", ".cuh", ".cu", ".cpp")), ("attn_backend", (".py",))):
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes)


def names_of(stored: StoredFormat) -> re.Pattern[str]:
    constants = [name for name, value in vars(kv_cache).items() if name.isupper() and value == stored.dtype]
    assert len(constants) == 1
    return re.compile(rf"\b(k?{stored.struct}|{stored.dtype}|{stored.element}|{constants[0]})\b")


@pytest.mark.parametrize("stored", FOUR_BITS, ids=lambda stored: stored.dtype)
def test_files_that_name_a_format(stored: StoredFormat) -> None:
    names = names_of(stored)
    files = [str(path.relative_to(ROOT)) for path in sources() if names.search(code_of(path))]
    missing = [file for file in files if not file.startswith(ELSEWHERE) and file not in LISTED]
    assert missing == [], "files that name a format, but are not on the page"


def test_a_4_bit_format_takes_few_places() -> None:
    table = PAGE[PAGE.index("| file | edit |") :].split("\n\n")[0]
    rows = table.splitlines()[2:]
    assert 0 < len(rows) <= MOST_PLACES
