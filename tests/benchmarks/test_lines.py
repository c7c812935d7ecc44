"""The loop of the benchmarks: the measured cases, and the written files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.lines import measure_lines
from benchmarks.report import options


def test_chosen_cases_are_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    arguments = options("").parse_args(
        ["--case", "b", "--json", str(tmp_path / "lines.json"), "--markdown", str(tmp_path / "lines.md")]
    )
    cases = [SimpleNamespace(name=name) for name in ("a", "b", "ab")]
    measure_lines(
        cases,
        lambda case: {"case": case.name, "ours": 1.23456},
        lambda lines: f"of {len(lines)}",
        "measured",
        arguments,
    )
    lines = [{"case": name, "ours": 1.23456} for name in ("b", "ab")]
    assert json.loads((tmp_path / "lines.json").read_text()) == {
        "header": "measured",
        "gpu": "a GPU",
        "lines": lines,
    }
    assert (tmp_path / "lines.md").read_text() == "of 2"
    assert capsys.readouterr().out.splitlines() == [
        "measured",
        "{'case': 'b', 'ours': 1.2346}",
        "{'case': 'ab', 'ours': 1.2346}",
        "of 2",
    ]
