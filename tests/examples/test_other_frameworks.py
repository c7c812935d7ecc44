"""examples/other_frameworks.py."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_each_framework_is_right(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = import_module("other_frameworks")
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(example.frameworks())
    assert all(float(line.split()[-1]) < 2e-3 for line in lines), lines
