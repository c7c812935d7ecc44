"""Tables on the command line: plain text, and colors on a terminal."""

from __future__ import annotations

import sys

import pytest

from attn_backend.cli.console import print_table

ROWS = [("[ok]", "a", "1"), ("[!!]", "longer", "22")]


def test_plain_text_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(ROWS, ("mark", "name", "n"), right=(2,))
    assert capsys.readouterr().out == "mark  name     n\n[ok]  a        1\n[!!]  longer  22\n"
    print_table([("a", ""), ("bb", "c")])
    assert capsys.readouterr().out == "a\nbb  c\n"
    print_table([])
    assert capsys.readouterr().out == ""


def test_colors_on_a_terminal_and_plain_text_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_table(ROWS)
    out = capsys.readouterr().out
    assert "\x1b[32m[ok]\x1b[0m" in out
    assert "longer" in out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    print_table(ROWS)
    assert capsys.readouterr().out == "[ok]  a       1\n[!!]  longer  22\n"
