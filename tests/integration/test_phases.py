"""The parts of `make test`, one after the other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from integration import phases

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.fixture
def start(tmp_path):
    """A function that starts `integration.phases` with a script instead of make."""

    def started(name, script):
        make = tmp_path / "make"
        make.write_text(f"#!/bin/sh\n{script}\n")
        make.chmod(0o755)
        variables = os.environ | {"MAKE": str(make), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "integration.phases", name, "KERNELS=--distinct"]
        return subprocess.Popen(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return started


@pytest.mark.parametrize("name", phases.PHASES)
def test_each_part_is_a_target_and_its_time_is_told(name, start):
    targets = [target for target, _ in phases.PHASES[name]]
    for target in targets:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
    process = start(name, 'echo "made $2 $3"')
    out = process.communicate(timeout=60)[0]
    lines = out.splitlines()
    assert lines[0].startswith(f"make {name} takes about ")
    assert [line.split()[0] for line in lines[1 : 1 + len(targets)]] == targets
    assert [line for line in lines if line.startswith("made")] == [
        f"made {target} KERNELS=--distinct" for target in targets
    ]
    assert re.fullmatch(
        rf"==> make {name}: passed. "
        + ", ".join(rf"{target} \d+ s" for target in targets)
        + r"; together \d+ s",
        lines[-1],
    )
    assert process.returncode == 0


def test_the_first_part_that_fails_is_the_last(start):
    process = start("test", '[ "$2" != unit ] || exit 2')
    out = process.communicate(timeout=60)[0]
    assert re.fullmatch(
        r"==> make test: failed in unit. environment \d+ s, lint \d+ s, kernels-and-sources \d+ s, "
        r"unit \d+ s; together \d+ s",
        out.splitlines()[-1],
    )
    assert process.returncode == 2


def test_an_interrupt_is_answered_at_once(start, tmp_path):
    process = start("test", f"touch {tmp_path}/started; exec sleep 600")
    while not (tmp_path / "started").exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert err == "\nstopping…\n"
    assert "==> make test: interrupted. environment" in out.splitlines()[-1]
    assert process.returncode == 130
