"""Servers are always stopped, and a server that does not use this package is not measured.

No engine is started.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from health_server import SERVE_HEALTH
from tiers import mostly_slow

from integration.engines import Launch
from integration.engines.base import OURS, OURS_NO_CASCADE
from integration.model import Model
from integration.processes import STOP_GRACE_S, STOP_SIGNALS, process_environment, start, stop_group
from integration.server import ServerError, free_port, running_server

WITH_WORKER = """
import os, signal, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", deaf])
print(f"workers {os.getpid()} {worker.pid}", flush=True)
if sys.argv[2] == "fails":
    sys.exit("cannot load the model")
"""


class FakeEngine:
    """An engine whose server is a few lines of Python, with one worker process that ignores INT."""

    name = "fake"

    def server_command(self, launch):
        return [sys.executable, "-c", WITH_WORKER + SERVE_HEALTH, str(launch.port), launch.backend]

    def server_environment(self, launch):
        return {}


@pytest.fixture
def launch(tmp_path):
    def make(backend):
        return Launch(sys.executable, Model("none", tmp_path, True), backend, "cpu", free_port())

    return make


def workers(log):
    return [
        int(word)
        for line in log.read_text().splitlines()
        if line.startswith("workers")
        for word in line.split()[1:]
    ]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", mostly_slow([None, RuntimeError, KeyboardInterrupt, SystemExit], fast=1))
def test_server_and_its_workers_are_gone_however_the_block_ends(ending, launch, tmp_path):
    log = tmp_path / "server.log"

    def serve():
        with running_server(FakeEngine(), launch("serves"), log, timeout_s=60):
            assert all(alive(pid) for pid in workers(log))
            if ending:
                raise ending("stop")

    if ending:
        with pytest.raises(ending):
            serve()
    else:
        serve()
    assert len(workers(log)) == 2
    assert not any(alive(pid) for pid in workers(log))


def test_servers_may_be_kept_by_threads(launch, tmp_path, monkeypatch):
    # Only the main thread can make a server receive INT if a shell has made this process ignore it. Such a
    # server stops after the grace period.
    monkeypatch.setattr("integration.processes.STOP_GRACE_S", 2)
    log = tmp_path / "server.log"

    def serve():
        with running_server(FakeEngine(), launch("serves"), log, timeout_s=60):
            return [alive(pid) for pid in workers(log)]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(serve).result() == [True, True]
    assert not any(alive(pid) for pid in workers(log))


def test_a_server_hears_interrupts_though_its_starter_ignores_them(launch, tmp_path):
    """Like a process that a shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        begin = time.monotonic()
        with running_server(FakeEngine(), launch("serves"), tmp_path / "server.log", timeout_s=60):
            pass
        assert time.monotonic() - begin < STOP_GRACE_S
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


STOPS_SLOWLY = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (time.sleep(2), sys.exit()))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_a_server_stops_takes_effect_afterwards(number, tmp_path, capfd):
    log = tmp_path / "log"
    process = start([sys.executable, "-c", STOPS_SLOWLY], log, {}, own_session=True)
    while not log.read_text().endswith("ready\n"):
        time.sleep(0.05)
    came = []
    before = signal.signal(number, lambda number, _: came.append((number, process.poll())))
    try:
        threading.Timer(1, os.kill, (os.getpid(), number)).start()
        stop_group(process)
        assert came == [(number, 0)]
    finally:
        signal.signal(number, before)
    assert "stopping…" in capfd.readouterr().err


def test_a_server_that_fails_shows_its_log_and_leaves_no_worker(launch, tmp_path, capsys):
    log = tmp_path / "server.log"
    begin = time.monotonic()
    with (
        pytest.raises(ServerError, match="exit status 1 before it was ready"),
        running_server(FakeEngine(), launch("fails"), log, timeout_s=60),
    ):
        pass
    assert "cannot load the model" in capsys.readouterr().err
    assert not any(alive(pid) for pid in workers(log))
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("backend", [OURS, OURS_NO_CASCADE])
def test_a_server_that_lacks_the_plugin_is_not_measured(backend, launch, tmp_path):
    server = running_server(FakeEngine(), launch(backend), tmp_path / "server.log", timeout_s=60)
    with pytest.raises(ServerError, match="runs, but without attn_backend"), server:
        pass


def test_pythonpath_is_absolute_and_joined(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"relative{os.pathsep}/absolute")
    joined = process_environment({"PYTHONPATH": "/first"})["PYTHONPATH"].split(os.pathsep)
    assert joined == ["/first", os.path.join(os.getcwd(), "relative"), "/absolute"]
