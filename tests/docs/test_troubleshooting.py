"""docs/troubleshooting.md: each message that it explains is one that the package, or an engine, still has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
NOT_IN_SOURCES = {
    "CPU FP8 KV cache requires ...",  # SGLang's own
    "...: CUDA_ERROR_... (...)",  # the driver's name of an error
    "kv.k.dtype is float8_e4m3fn, must be ...",  # put together from a name and two dtypes
}


def messages() -> list[str]:
    """What stands in backquotes in the first column of the tables."""
    rows = re.findall(r"^\| (.*?) \| ", PAGE.read_text(), re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row) if message not in NOT_IN_SOURCES]


def said() -> str:
    """The sources, with their messages in one piece: neither broken into lines nor interrupted by values."""
    files = [*sorted((ROOT / "attn_backend").rglob("*.py")), *sorted((ROOT / "csrc").rglob("*.cpp")), *sorted((ROOT / "csrc").rglob("*.h"))]
    text = "\n".join(file.read_text() for file in files)
    text = re.sub(r'"\s*(<<\s*)?\n?\s*f?"', "", text)
    return text


SAID = said()


def parts(message: str) -> list[str]:
    """The words between the values, which stand as `...`, or in capitals."""
    pieces = (piece.strip(" :;,()") for piece in re.split(r"\.\.\.|\b[A-Z]{4,}\b", message))
    return [piece for piece in pieces if len(piece) > 5]


@pytest.mark.parametrize("message", messages())
def test_a_message_is_still_in_the_sources(message: str) -> None:
    missing = [part for part in parts(message) if part not in SAID]
    assert not missing


def test_messages_are_found() -> None:
    assert len(messages()) > 50
