"""`make demo` without an engine: its choices, its messages, and Ctrl-C at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiers import mostly_slow

from integration.benchmark import note_on
from integration.demo import demo_settings, what_to_expect
from integration.engines import ENGINES, Launch
from integration.engines.base import OURS, STOCK
from integration.model import Model
from integration.processes import own_modules
from integration.serve_benchmark import parse_arguments
from integration.tokenizer import write_word_tokenizer

STOP_WITHIN_S = 10  # a server that ignores nothing ends at once; the rest allows for a slow machine
SAY_WITHIN_S = 2

# A server that answers GET at once, and POST after its second argument in seconds.
SERVER = """
import http.server, json, sys, tempfile, time
tempfile.mkdtemp()
port, seconds, starts = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
print("server started", flush=True)
if starts == "never":
    time.sleep(600)
class Slow(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": "Tokyo"}}]}).encode())
    do_GET = answer
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"messages" not in body:
            print("a request arrived", flush=True)
            time.sleep(seconds)
        self.answer()
http.server.ThreadingHTTPServer(("127.0.0.1", port), Slow).serve_forever()
"""
CLIENT = "import sys, time; print('the client measures', flush=True); time.sleep(600)"

DEMO = f"""
import sys
from integration import benchmark, demo
from integration.engines import ENGINES
from integration.http import post_json

class FakeEngine:
    name = "fake"
    def stock_backend(self, device): return "stock"
    def server_command(self, launch):
        return [sys.executable, "-c", {SERVER!r}, str(launch.port), seconds, starts]
    def server_environment(self, launch): return {{}}
    def client_command(self, client): return [sys.executable, "-c", {CLIENT!r}]
    def client_environment(self, device): return {{}}
    def sample(self, url, *_, **__): return post_json(url, {{}})

ENGINES["vllm"] = FakeEngine()
benchmark.package_versions = lambda python: {{}}
make_workload = benchmark.make_workload
benchmark.make_workload = lambda dataset, *others: make_workload(model + "/chats.json", *others)
demo.find_device = lambda: "cpu"
import integration.server
integration.server.library_is_loaded = lambda group: True
seconds, starts, model, results = sys.argv[1:]
sys.argv = ["demo", "--model", model, "--results", results, "--num-prompts", "12"]
demo.main()
"""

# Seconds until the server answers, the time when it starts to listen, and the log line after which Ctrl-C
# comes.
MOMENTS = {
    "start": ("0", "never", "server started"),
    "warm-up": ("600", "at once", "a request arrived"),
    "measurement": ("0", "at once", "the client measures"),
}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write_word_tokenizer(folder, 5000)
    (folder / "config.json").write_text('{"vocab_size": 5000}')
    chats = [
        {
            "conversations": [
                {"from": "human", "value": f"tell me story {i}"},
                {"from": "gpt", "value": "once upon a time"},
            ]
        }
        for i in range(30)
    ]
    (folder / "chats.json").write_text(json.dumps(chats))
    return folder


def processes_in(folder):
    """The processes that run in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(is_true, timeout_s=120):
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("moment", mostly_slow(["warm-up", "start", "measurement"], fast=1))
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_ends_the_demo_at_once(moment, number, model, tmp_path):
    seconds, starts, line = MOMENTS[moment]
    results, temporary, output = tmp_path / "results", tmp_path / "tmp", tmp_path / "output"
    temporary.mkdir()
    environment = os.environ | own_modules() | {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", DEMO, seconds, starts, str(model), str(results)]
    with output.open("w") as file:
        demo = subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: (
                demo.poll() is not None
                or any(line in log.read_text().partition("\n")[2] for log in results.glob("*.log"))
            )
        )
        assert demo.poll() is None, output.read_text()
        time.sleep(0.5)  # until the other requests of the warm-up are in flight, too
        os.killpg(demo.pid, number)  # the whole foreground group, as a terminal does
        begin = time.monotonic()
        wait_until(lambda: "stopping…" in output.read_text(), SAY_WITHIN_S)
        assert demo.wait(STOP_WITHIN_S) == 128 + number
        assert time.monotonic() - begin < STOP_WITHIN_S
        assert not processes_in(results)
        assert not list(temporary.iterdir())
        assert "Traceback" not in output.read_text()
    finally:
        for process in (
            [*processes_in(results), psutil.Process(demo.pid)]
            if demo.poll() is None
            else processes_in(results)
        ):
            process.kill()
        demo.wait()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("flags", ["avx2", "avx2 avx512_bf16"])
def test_both_backends_get_the_dtype_that_suits_the_cpu(engine, flags, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr("attn_backend.machine.CPUINFO", tmp_path / "cpuinfo")
    expected = "auto" if "bf16" in flags else "float32"
    settings = demo_settings(engine, "smollm2", "cpu", None, tmp_path)
    benchmarked = parse_arguments(["--engine", engine, "--backends", OURS, "--device", "cpu"])
    assert (settings.dtype, benchmarked.dtype) == (expected, expected)
    assert (
        parse_arguments(
            ["--engine", engine, "--backends", OURS, "--device", "cpu", "--dtype", "bfloat16"]
        ).dtype
        == "bfloat16"
    )
    assert parse_arguments(["--engine", engine, "--backends", OURS, "--device", "cuda"]).dtype == "auto"
    for backend in settings.backends:
        command = ENGINES[engine].server_command(
            Launch("python", Model("none", tmp_path, True), backend, "cpu", 1, settings.dtype)
        )
        assert command[command.index("--dtype") + 1] == expected
        # SGLang is eager by default
        assert ("--enforce-eager" in command) == (engine == "vllm")
        assert "--enable-torch-compile" not in command
    assert settings.backends == [OURS, STOCK]
    for text in (what_to_expect(settings), note_on(settings)):
        assert ("float32 (this CPU has neither avx512_bf16 nor amx_bf16)" in text) == (expected == "float32")
        assert "eager mode" in text
    assert "not how fast a GPU is" in note_on(settings)
    on_gpu = demo_settings(engine, "smollm2", "cuda", None, tmp_path)
    assert (on_gpu.dtype, note_on(on_gpu)) == ("auto", "")
