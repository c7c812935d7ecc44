"""integration/start_up.py without an engine: its figures, and the lines of a log that it prints."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest

from integration import other_plugin, start_up
from integration.engines.base import OURS, REPOSITORY, STOCK
from integration.model import Model
from integration.server import ServerError

READY = (
    "attn_backend 1.2: hopper kernels (5 shipped), cascade on, batch invariance off, KV bfloat16, ready in"
)
MODEL = Model("tiny", Path("tiny"), random_weights=True)


def test_backends_take_turns_and_the_first_round_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def start(given: object, launch: start_up.Launch, log: Path) -> float:
        started.append(launch.backend)
        log.write_text(f"INFO {READY} 0.2{len(started)} s.\n" if launch.backend == OURS else "")
        return 10.0 + len(started)

    monkeypatch.setattr(start_up, "start_once", start)
    given = start_up.parse_arguments(["--engine", "vllm", "--rounds", "3"])
    assert start_up.measure(given, MODEL, tmp_path)
    assert started == [OURS, STOCK] * 4
    out = capsys.readouterr().out
    assert f"| {OURS} | 15.0 | 13.0 | 17.0 |" in out
    assert f"| {STOCK} | 16.0 | 14.0 | 18.0 |" in out
    assert "reports 0.25 s" in out
    assert json.loads((tmp_path / "start_up.json").read_text())["seconds"][OURS] == [13.0, 15.0, 17.0]


def test_lines_about_this_package(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    kept = [
        f"INFO [metrics.py:63] {READY} 0.10 s.",
        "WARNING It belongs to a.B, not to attn_backend: pass X. Remove attn_backend.",
        "WARNING attn_backend's counters are not in /metrics",
    ]
    dropped = [
        "INFO model /root/.cache/attn_backend/models/tiny",
        "INFO --attention-backend 'attn_backend'",
        '  File "/src/attn_backend/adapters/served.py", line 72',
        "INFO Registered: ATTN_BACKEND -> attn_backend.adapters.vllm.plugin.Backend",
        f"INFO attn_backend{' ' * start_up.LONGEST_LINE}",
        f"DEBUG {READY} 0.10 s.",  # of another process
    ]
    log.write_text("\n".join(["$ serve attn_backend model", kept[0], *dropped, *kept[1:]]))
    assert start_up.own_lines(log) == kept
    assert start_up.seconds_of_ours(log) == 0.1


def test_a_model_with_its_own_kernels_must_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuses, last_line = True, f"attn_backend was chosen, but {start_up.REFUSAL} 2 attention layers"

    def start(given: object, launch: start_up.Launch, log: Path) -> float:
        log.write_text(f"$\n{last_line}\n")
        environment = dict(launch.environment)
        assert environment.pop("PYTHONPATH").endswith(f"{os.pathsep}{REPOSITORY}")
        if refuses and environment == {"OTHER_PLUGIN": "layers"}:
            raise ServerError("the server ended")
        return 1.0

    monkeypatch.setattr(start_up, "start_once", start)
    given = start_up.parse_arguments(["--engine", "sglang", "--logs"])
    assert start_up.show_logs(given, MODEL, tmp_path)
    last_line = "TypeError"
    assert not start_up.show_logs(given, MODEL, tmp_path)
    capsys.readouterr()
    refuses = False
    assert not start_up.show_logs(given, MODEL, tmp_path)
    assert "## a model with its own kernels: WRONG" in capsys.readouterr().out


def test_engines_find_the_other_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_plugin.write_metadata(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for group in other_plugin.GROUPS:
        (entry,) = importlib.metadata.entry_points(group=group, name="other")
        assert callable(entry.load())
