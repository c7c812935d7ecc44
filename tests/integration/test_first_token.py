"""integration/first_token.py without an engine: the answers of a process, and turns of backends."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from integration import first_token


def test_a_process_answers_each_length_on_its_own_stdout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts: list[list[int]] = []

    def start(options: object) -> object:
        os.write(1, b"an engine's own line\n")
        return prompts.append

    monkeypatch.setitem(first_token.ENGINES, "vllm", start)
    monkeypatch.setattr(sys, "stdin", io.StringIO("5\n7\n"))
    stdout = os.dup(1)
    try:
        first_token.main(["--engine", "vllm", "--serve", "folder", "--backend", "attn_backend"])
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    out, err = capfd.readouterr()
    ready, *times = out.splitlines()
    assert ready == "ready"
    assert len(times) == 2
    assert all(float(time) >= 0 for time in times)
    assert "an engine's own line" in err
    assert [len(prompt) for prompt in prompts] == [5, 7]


class Turns:
    def __init__(self, name: str, log: list[str], milliseconds: float) -> None:
        self.name, self._log, self._milliseconds = name, log, milliseconds

    def milliseconds(self, tokens: int) -> float:
        self._log.append(self.name)
        self._milliseconds += 1
        return self._milliseconds


def test_backends_take_turns_and_each_round_has_its_median() -> None:
    log: list[str] = []
    backends = [Turns("ours", log, 0.0), Turns("theirs", log, 10.0)]
    assert first_token.measure(backends, 8, repeats=3) == [[3.0, 13.0], [6.0, 16.0]]  # type: ignore[arg-type]
    assert log == ["ours", "theirs"] * 7


def test_a_backend_that_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    options = first_token.parse(["--engine", "vllm"])
    backend = first_token.Backend(options, "llama-3.1-8b", "FLASH_ATTN", tmp_path / "log")
    with pytest.raises(RuntimeError, match="FLASH_ATTN ended before its answer"):
        backend.answer()
