"""`attn-backend demo` and Ctrl-C: it ends at once, together with its server, and leaves nothing in the
temporary folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiers import mostly_slow

from attn_backend.cli import demo
from attn_backend.cli.main import main

STOP_WITHIN_S = 10
SAY_WITHIN_S = 2

# A server with a worker. It answers the question at once, and other requests after its second argument in
# seconds.
SERVER = """
import http.server, json, os, subprocess, sys, tempfile, time
tempfile.mkdtemp()
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", deaf])
events, port, seconds, starts = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
def note(event):
    with open(events, "a") as file:
        file.write(event + "\\n")
note(f"pids {os.getpid()} {worker.pid}")
note("the server starts")
if starts == "never":
    time.sleep(600)
class Slow(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.end_headers()
        if b"messages" in body:
            self.wfile.write(json.dumps({"choices": [{"message": {"content": "Tokyo"}}]}).encode())
            return
        note("a request arrived")
        for _ in range(2):
            time.sleep(seconds)
            self.wfile.write(b"data: {}\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", port), Slow).serve_forever()
"""
DEMO = f"""
import sys
from attn_backend.cli import demo, main
events, seconds, starts, model = sys.argv[1:]
demo.find_spec = lambda name: True
def server_command(engine, model, backend, port, *_):
    return [sys.executable, "-c", {SERVER!r}, events, str(port), seconds, starts], {{}}
demo.server_command = server_command
sys.exit(main.main(["demo", "--model", model, "--requests", "5", "--at-a-time", "3"]))
"""
MOMENTS = {"start": ("0", "never", "the server starts"), "load": ("600", "at once", "a request arrived")}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_true: Callable[[], bool], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("moment", mostly_slow(["load", "start"], fast=1))
def test_ctrl_c_ends_the_demo_at_once(moment: str, tmp_path: Path) -> None:
    seconds, starts, event = MOMENTS[moment]
    temporary, output, events = tmp_path / "tmp", tmp_path / "output", tmp_path / "events"
    temporary.mkdir()
    events.touch()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TMPDIR": str(temporary),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-c", DEMO, str(events), seconds, starts, str(tmp_path)]
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            start_new_session=True,
        )
    try:
        wait_until(lambda: process.poll() is not None or event in events.read_text())
        assert process.poll() is None, output.read_text()
        time.sleep(0.5)  # until the other requests are in flight, too
        os.killpg(process.pid, signal.SIGINT)
        wait_until(lambda: "stopping…" in output.read_text(), SAY_WITHIN_S)
        assert process.wait(STOP_WITHIN_S) == 130
        assert not any(alive(pid) for pid in pids(events))
        assert not list(temporary.iterdir())
        assert "Traceback" not in output.read_text()
    finally:
        for pid in [process.pid, *pids(events)]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def pids(events: Path) -> list[int]:
    return [
        int(word)
        for line in events.read_text().splitlines()
        if line.startswith("pids")
        for word in line.split()[1:]
    ]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_both_backends_get_the_same_dtype_and_mode(
    engine: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = [
        demo.server_command(engine, "model", backend, 1, "cpu", dtype, ["--dtype", "bfloat16"])[0]
        for backend in (demo.OURS, demo.STOCK)
    ]
    for command in commands:
        assert [command[place + 1] for place, word in enumerate(command) if word == "--dtype"] == [
            dtype,
            "bfloat16",
        ], "the user's stands last, which counts"
    assert len({"--enforce-eager" in command for command in commands}) == 1


@pytest.mark.parametrize("flags", ["avx2", "avx2 amx_bf16"])
def test_the_demo_says_which_dtype_it_chose(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr("attn_backend.machine.CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[str] = []

    def server_command(
        engine: str, model: str, backend: str, port: int, device: str, dtype: str, arguments: list[str]
    ) -> tuple[list[str], dict[str, str]]:
        seen.append(dtype)
        raise RuntimeError("no server here")

    monkeypatch.setattr(demo, "find_spec", lambda name: True)
    monkeypatch.setattr(demo, "server_command", server_command)
    assert main(["demo", "--model", str(tmp_path)]) == 1
    assert seen == ["auto" if "bf16" in flags else "float32"]
    assert ("neither avx512_bf16 nor amx_bf16" in capsys.readouterr().out) == (flags == "avx2")
    assert main(["demo", "--model", str(tmp_path), "--dtype", "float16"]) == 1
    assert seen[1:] == ["float16"]
    assert "Servers run in float16 and in eager mode" in capsys.readouterr().out
    assert not list(tmp_path.glob("attn_backend-*")), "no empty folder of logs"
