"""A soak of a fake server: its requests, its counts, and the faults that it must detect."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from integration import memory, soak, soak_load
from integration.engines import ENGINES
from integration.memory import growth, of_processes
from integration.model import Model
from integration.soak import AFTER_PREFIX, OTHERS, UNDISTURBED, Replay
from integration.soak_load import LONGEST, Requests, check_json
from integration.text import TextMaker
from integration.tokenizer import write_word_tokenizer

PERSON = {"name": "Ada", "age": 36, "likes": ["tea"]}


class Answers(BaseHTTPRequestHandler):
    """Answers requests with the server's `fault`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        server = self.server
        with server.lock:
            server.asked += 1
            asked = server.asked
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("stream"):
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            with contextlib.suppress(OSError):  # a client that hangs up does not read everything
                for _ in range(100):
                    self.wfile.write(b'data: {"text": "x"}\n')
            return
        text = (
            json.dumps(PERSON)
            if "response_format" in body
            else f"{sum(body['prompt'])} {body['max_tokens']} {body.get('seed')}"
        )
        prompt, salt = tuple(body["prompt"]), body.get("cache_salt")
        cached = (
            next((len(prompt[:count]) for count in (3, 2, 1) if (salt, prompt[:count]) in server.seen), 0)
            if server.fault.startswith("prefixes")
            else 0
        )
        server.seen |= {(salt, prompt[:count]) for count in (1, 2, 3)}
        if server.fault == "forgets" or (server.fault == "prefixes change" and cached):
            text = text if "response_format" in body else f"{text} {asked}"
        elif server.fault == "no json" and "response_format" in body:
            text = '{"name": "Ada"'
        if server.fault == "refuses" and asked % 7 == 0:
            self._send(500, {"error": "out of memory"})
        else:
            usage = {
                "completion_tokens": min(3, body["max_tokens"]),
                "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
            }
            self._send(200, {"choices": [{"text": text, "finish_reason": "stop"}], "usage": usage})

    def _send(self, status, answer):
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def run_soak(monkeypatch, tmp_path):
    """Runs the command against a server with this fault. `grows`: MiB of growth at each memory reading.
    `preempted`: the counts at each reading of its preemptions; None: it does not answer.
    """

    def counted(preempted):
        count = next(preempted) if preempted else 3
        if count is None:
            raise RuntimeError("the server does not answer")
        return count

    def run(fault="", *arguments, grows=0.0, preempted=None, traceback=False, spells_json=True):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        server.fault, server.asked, server.lock, server.seen = fault, 0, threading.Lock(), set()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        write_word_tokenizer(tmp_path, 4096, None, 1)
        monkeypatch.setattr(TextMaker, "reads_text", spells_json)
        monkeypatch.setattr(soak, "resolve_model", lambda name, python: Model("model", tmp_path, True))
        found = itertools.count(100.0, grows)
        monkeypatch.setattr(soak, "memory_of", lambda pid, device: next(found))
        monkeypatch.setattr(soak, "smallest_gap", lambda engine, url, request: 0.0125)
        monkeypatch.setattr(type(ENGINES["vllm"]), "preemptions", lambda self, url: counted(preempted))

        @contextlib.contextmanager
        def ready_server(engine, launch, log, timeout_s):
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("ready\n")
            yield SimpleNamespace(
                url=f"http://127.0.0.1:{server.server_port}", process=SimpleNamespace(pid=1)
            )

        monkeypatch.setattr(soak, "ready_server", ready_server)
        if traceback:
            counts = iter([0, 1])
            monkeypatch.setattr(soak, "server_tracebacks", lambda log: next(counts))
        given = [
            "--engine",
            "vllm",
            "--device",
            "cpu",
            "--minutes",
            "0.01",
            "--warm-up",
            "0.1",
            "--sample-every",
            "0.02",
            "--replay-every",
            "1",
        ]
        try:
            return soak.run(
                soak.parse_arguments([*given, "--results", str(tmp_path / "results"), *arguments])
            )
        finally:
            server.shutdown()

    return run


def test_a_server_that_holds_out(run_soak, tmp_path, capsys):
    assert run_soak()
    assert "all holds" in capsys.readouterr().out
    written = json.loads((tmp_path / "results" / "soak.json").read_text())
    assert all(written["finished"].values())
    assert written["errors"] == []
    assert len(written["replays"]) == len(written["kept"]) >= 5
    assert written["complete_json"] == written["finished"]["guided"]


def test_the_load_goes_on_until_a_request_was_preempted(run_soak, capsys):
    assert run_soak(preempted=itertools.chain(itertools.repeat(0, 5), itertools.repeat(1)))
    assert "all holds" in capsys.readouterr().out


def test_the_load_goes_on_until_the_memory_was_sampled_often_enough(run_soak, capsys):
    assert run_soak("", "--sample-every", "0.25")
    assert "all holds" in capsys.readouterr().out


def test_too_few_samples_of_the_memory_are_reported(run_soak, capsys):
    assert not run_soak("", "--minutes", "0.005", "--sample-every", "5")
    printed = capsys.readouterr().out
    assert "does not hold: the memory was sampled fewer than 4 times after the first 0.1 s" in printed
    assert "growth after 0.1 s: not known" in printed


def test_a_server_that_stops_answering_is_still_reported(run_soak, tmp_path):
    assert run_soak(preempted=itertools.chain([2], itertools.repeat(None)))
    assert json.loads((tmp_path / "results" / "soak.json").read_text())["preempted"] == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fault": "refuses"}, "requests failed"),
        ({"fault": "no json"}, "requests failed"),
        ({"fault": "forgets"}, "have another text when asked again alone"),
        ({"grows": 100.0}, "the memory grew by"),
        ({"preempted": itertools.repeat(0)}, "no request was preempted"),
        ({"traceback": True}, "1 tracebacks"),
    ],
)
def test_what_does_not_hold(given, message, run_soak, capsys):
    assert not run_soak(**given)
    assert message in capsys.readouterr().out


def test_other_logits_may_give_other_texts(run_soak, capsys):
    assert run_soak("forgets", "--dtype", "bfloat16")
    assert "0.0125 apart" in capsys.readouterr().out


def test_batch_invariance_is_demanded_of_undisturbed_requests(run_soak, capsys):
    invariant = ("--dtype", "bfloat16", "--batch-invariant")
    assert run_soak("", *invariant)
    assert not run_soak("forgets", *invariant)
    assert "have another text when asked again alone" in capsys.readouterr().out
    # one preemption between any two readings
    assert not run_soak("forgets", *invariant, preempted=itertools.count())
    printed = capsys.readouterr().out
    assert "no request was kept without a cached prefix while none was preempted" in printed
    assert "have another text" not in printed


def test_requests_after_a_prefix_are_counted(run_soak, capsys, tmp_path):
    invariant = ("--dtype", "bfloat16", "--batch-invariant")
    assert run_soak("prefixes change", *invariant)
    printed = capsys.readouterr().out
    assert "differs" in printed
    assert all(UNDISTURBED not in line for line in printed.splitlines() if "differs" in line)
    replays = json.loads((tmp_path / "results" / "soak.json").read_text())["replays"]
    assert {played["cached"] == played["cached_again"] for played in replays} == {True}
    assert {played["cached"] for played in replays} == {0, 3}


@pytest.mark.parametrize(
    ("cached", "cached_again", "preempted", "group"),
    [
        (0, 0, 0, UNDISTURBED),
        (0, 0, 1, OTHERS),
        (16, 16, 0, AFTER_PREFIX),
        (16, 0, 0, OTHERS),
        (16, 16, 2, OTHERS),
    ],
)
def test_what_a_request_has_gone_through(cached, cached_again, preempted, group):
    assert Replay(1, "greedy", True, None, cached, cached_again, preempted).group == group


def test_a_cache_that_cannot_hold_a_request_is_refused(run_soak):
    with pytest.raises(ValueError, match=f"cache-tokens: 300, must be {LONGEST + 64} or more"):
        run_soak("", "--cache-tokens", "300")


def test_a_tokenizer_of_made_up_words_is_refused(run_soak):
    with pytest.raises(ValueError, match=r"model: 'smollm2' has a tokenizer of made-up words"):
        run_soak(spells_json=False)


def test_requests_follow_from_the_seed_and_share_prefixes(tmp_path):
    write_word_tokenizer(tmp_path, 4096, None, 1)
    one, other = (Requests(TextMaker(tmp_path, 5), 5) for _ in range(2))
    made = [one.make(number) for number in range(60)]
    assert made == [other.make(number) for number in reversed(range(60))][::-1]
    assert {request.kind for request in made} == {"greedy", "sampled", "guided", "aborted"}
    assert all(len(request.prompt) + request.max_tokens <= LONGEST for request in made)
    assert len({tuple(request.prompt[:4]) for request in made}) == 4  # prefixes of that time
    assert one.make(60).prompt[:4] not in [request.prompt[:4] for request in made]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"name": "Ada", "age": 130, "likes": []}',
        '{"name": "Ada", "age": 3, "likes": ["beer"]}',
        "[1]",
    ],
)
def test_what_is_not_of_the_schema(text):
    check_json(json.dumps(PERSON))
    with pytest.raises(ValueError, match="its answer"):
        check_json(text)


def test_growth_is_between_the_first_and_the_last_quarter():
    samples = [(float(at), value) for at, value in enumerate([900.0, 100, 101, 103, 102, 150, 150, 104, 105])]
    assert growth(samples, warm_up_s=1) == 4
    assert growth(samples, warm_up_s=6) is None


def test_the_memory_of_a_gpu_is_that_of_the_servers_processes() -> None:
    listed = "12, 300\n13, 50\n99, 7000\n14, [N/A]\n"
    assert of_processes(listed, {12, 13, 14}) == 350
    assert of_processes(listed, {1}) == of_processes("", {12}) == 0


def test_where_processes_cannot_be_told_apart_the_memory_is_that_of_the_visible_gpus(monkeypatch) -> None:
    commands = []

    def answer(command, **_):
        commands.append(command)
        return SimpleNamespace(
            stdout="7, 1000\n" if "--query-compute-apps=pid,used_memory" in command else "300\n400\n"
        )

    monkeypatch.setattr(memory.subprocess, "run", answer)
    monkeypatch.setattr(memory, "group_members", lambda group: [SimpleNamespace(pid=8)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert memory.memory_of(8, "cuda") == 700
    assert all(command[-1] == "--id=1,2" for command in commands)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    memory.memory_of(8, "cuda")
    assert not any(word.startswith("--id") for word in commands[-1])


def test_a_load_ends_when_the_server_is_dead(monkeypatch) -> None:
    def refuse(url, request):
        raise RuntimeError("connection refused")

    monkeypatch.setattr(soak_load, "ask", refuse)
    requests = SimpleNamespace(make=lambda number: SimpleNamespace(number=number, kind="greedy", prompt=[]))
    load = soak_load.run_load(
        "", requests, 600, 4, 50, is_enough=lambda outcome: False, preemptions=lambda: 0
    )
    assert len(load.errors) < 1010


def test_some_requests_come_in_bursts(monkeypatch) -> None:
    clock = itertools.count(0, 5)
    monkeypatch.setattr(soak_load.time, "monotonic", lambda: next(clock))
    slept = []
    monkeypatch.setattr(soak_load.time, "sleep", slept.append)
    monkeypatch.setattr(soak_load, "ask", lambda url, request: ("text", True, 0))
    requests = SimpleNamespace(make=lambda number: SimpleNamespace(number=number, kind="greedy"))
    load = soak_load.run_load(
        "", requests, 600, 1, 50, is_enough=lambda outcome: True, preemptions=lambda: 0, resting=1
    )
    assert slept
    assert load.finished["greedy"] > 0
    asked = load.finished["greedy"]
    assert (
        soak_load.run_load(
            "", requests, 600, 1, 50, is_enough=lambda outcome: True, preemptions=lambda: 0
        ).finished["greedy"]
        > 2 * asked
    )


def test_a_load_tells_what_it_saw_each_minute(monkeypatch, capsys) -> None:
    clock = itertools.count(0, 10)
    monkeypatch.setattr(soak_load.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(soak_load, "ask", lambda url, request: ("text", True, 0))
    monkeypatch.setattr(soak_load, "read_and_leave", lambda *_: None)
    requests = SimpleNamespace(make=lambda number: SimpleNamespace(number=number, kind="greedy"))
    soak_load.run_load("", requests, 200, 1, 50, is_enough=lambda outcome: True, preemptions=lambda: 0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["1 min", "2 min", "3 min"]
    assert all(line.endswith(" requests, 0 errors") for line in lines)


def test_a_hybrid_with_drafts_from_the_last_token(tmp_path):
    pytest.importorskip("transformers", reason="needs the environment of `make test`")
    from safetensors.torch import load_file

    from integration.soak_model import make

    make(tmp_path, "qwen3_next_mtp")
    weights = load_file(tmp_path / "model.safetensors")
    from_embedding, from_state = weights["mtp.fc.weight"].chunk(2, dim=1)
    assert from_embedding.count_nonzero() == from_embedding.diagonal().count_nonzero() == len(from_embedding)
    assert not from_state.any()
    last = "layers.0.self_attn.q_proj.weight"
    assert weights[f"mtp.{last}"].equal(weights[f"model.{last}".replace("0", "3")])


def test_a_hybrid_whose_tokenizer_spells_json(tmp_path):
    pytest.importorskip("transformers", reason="needs the environment of `make test`")
    from integration.soak_model import make

    make(tmp_path, "falcon_h1")
    texts = TextMaker(tmp_path, 0)
    assert texts.reads_text
    text = json.dumps({"name": "Ada b", "age": 36})
    assert texts.tokenizer.decode(texts.tokenizer.encode(text).ids) == text
    assert len(texts.tokenizer.encode(texts.text(50)).ids) == 50
    assert all(
        texts.tokenizer.decode([token]).isprintable() for token in range(texts.tokenizer.get_vocab_size())
    )
