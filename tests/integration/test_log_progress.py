"""The progress of a process, from its log."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from integration import progress

OF_CLIENT = r"\b(\d+)/(32) \["
BAR = "\r  0%|          | 0/32 [00:00<?, ?it/s]\r 28%|##8       | 9/32 [01:10<02:59,  7.80s/it]"


@pytest.mark.parametrize(
    ("written", "counted", "expected"),
    [
        ("", OF_CLIENT, None),
        ("Waiting for endpoint to become up: 0%| | 0/600 [00:00<?]", OF_CLIENT, None),
        ("\N{FULL BLOCK}" * 3000 + BAR, OF_CLIENT, (9, 32)),
    ],
)
def test_last_count(written, counted, expected, tmp_path):
    log = tmp_path / "log"
    log.write_text(written, encoding="utf-8")
    assert progress.last_count(log, counted) == expected


def test_wait_for_shows_how_far_a_process_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("attn_backend.jit.progress.LINE_EVERY_S", 0.05)
    code = "import sys, time; time.sleep(0.3); print('| 7/32 [', flush=True); time.sleep(0.3); sys.exit(5)"
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output)
        assert progress.wait_for(process, log, "vllm", OF_CLIENT, "requests", "the client starts") == 5
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vllm: the client starts (0 s)"
    assert lines[-1].startswith("vllm: requests 7 of 32 (")


def test_wait_for_ends_in_time(tmp_path):
    log = tmp_path / "log"
    log.touch()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    begin = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            progress.wait_for(process, log, "vllm", OF_CLIENT, "requests", "", timeout_s=0.2)
        assert time.monotonic() - begin < 30
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
