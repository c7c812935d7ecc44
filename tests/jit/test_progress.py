"""The visible progress of work that takes minutes."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from attn_backend.jit import progress


def test_status_writes_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.1)
    with progress.status("demo", "starting") as tell:
        time.sleep(0.25)
        tell("requests 3 of 4")
        time.sleep(0.25)
    lines = capsys.readouterr().out.splitlines()
    assert [*dict.fromkeys(line.rpartition(" (")[0] for line in lines)] == [
        "demo: starting",
        "demo: requests 3 of 4",
    ]
    assert len(lines) <= 5
    time.sleep(0.2)
    assert capsys.readouterr().out == ""


def test_items_are_counted_on_stderr_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.1)
    seen = []
    for item in progress.tracked(["a", "b"], "measuring"):
        seen.append(item)
        time.sleep(0.3 if item == "b" else 0)
    assert seen == ["a", "b"]
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"attn_backend: measuring 2 of 2 \(\d s\)\n", err)


def test_status_moves_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.status("demo", "starting [fast]") as tell:
        tell("requests [3] of 4")
        time.sleep(1.5)
    # importing rich may take a second
    assert re.search(r"demo: starting \[fast\] \(\d s\)", terminal.getvalue())
    assert re.search(r"demo: requests \[3\] of 4 \(\d s\)", terminal.getvalue())


def test_status_moves_on_a_terminal_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the first installation."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    monkeypatch.setenv("COLUMNS", "20")
    with progress.status("pip", "starting") as tell:
        tell("looking for a package")
        time.sleep(1.5)
    shown = terminal.getvalue().split("\r\x1b[K")
    assert shown[:3] == ["", "pip: starting (0 s)", "pip: looking for a "]
    assert shown[-1] == "", "the line goes when the work is done"
    assert "\n" not in terminal.getvalue()
