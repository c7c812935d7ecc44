"""What a user sees of work that takes minutes."""

from __future__ import annotations

import io
import sys
import time

import pytest

from attn_backend.kernels import progress


def test_status_writes_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.1)
    with progress.status("demo", "starting") as tell:
        time.sleep(0.25)
        tell("requests 3 of 4")
        time.sleep(0.25)
    lines = capsys.readouterr().out.splitlines()
    assert [*dict.fromkeys(line.rpartition(" (")[0] for line in lines)] == ["demo: starting", "demo: requests 3 of 4"]
    assert len(lines) <= 5
    time.sleep(0.2)
    assert capsys.readouterr().out == ""


def test_status_moves_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.status("demo", "starting [fast]") as tell:
        tell("requests [3] of 4")
        time.sleep(1.5)
    assert "demo: starting [fast] (0 s)" in terminal.getvalue()
    assert "demo: requests [3] of 4 (1 s)" in terminal.getvalue()
