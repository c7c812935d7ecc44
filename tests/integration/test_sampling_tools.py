"""The tools that examine sampling: servers with and without this package's sampler, clients that send seeds,
comparisons. No engine is started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from integration.bench_client import AddSampling
from integration.benchmark import describe, label
from integration.compare_sampling import Outcome, all_at_once, compare_answers, make_requests, one_at_a_time
from integration.datasets import make_workload
from integration.engines import ENGINES, Client, Launch, Sampling
from integration.engines.base import OURS, OURS_STOCK_SAMPLER, STOCK, bench_client
from integration.model import REPOSITORY, Model
from integration.processes import process_environment
from integration.serve_benchmark import parse_arguments
from integration.tokenizer import write_word_tokenizer


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_whose_sampler_it_is(engine, device, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_BACKEND_SAMPLER", "0")
    ours, stock_sampler, stock = (
        Launch("python", Model("none", tmp_path, True), backend, device, 1)
        for backend in (OURS, OURS_STOCK_SAMPLER, STOCK)
    )
    assert process_environment(engine.server_environment(ours))["ATTN_BACKEND_SAMPLER"] == "1"
    assert process_environment(engine.server_environment(stock_sampler))["ATTN_BACKEND_SAMPLER"] == "0"
    asks = [
        command[-1] if "--sampling-backend" in command else None
        for command in map(engine.server_command, (ours, stock_sampler, stock))
    ]
    assert asks == ([OURS, None, None] if (engine.name, device) == ("sglang", "cuda") else [None] * 3)
    attention = [
        [part for part in engine.server_command(launch) if part in (OURS, "CUSTOM")][:1]
        for launch in (ours, stock_sampler)
    ]
    assert attention[0] == attention[1]
    assert label(engine, OURS_STOCK_SAMPLER, device) == "attn_backend, the engine's sampler"


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_modes_of_a_server(engine, tmp_path):
    plain = Launch("python", Model("none", tmp_path, True), OURS, "cuda", 1)
    exact = Launch(
        "python", Model("none", tmp_path, True), OURS, "cuda", 1, prefix_caching=False, batch_invariant=True
    )
    added = set(engine.server_command(exact)) - set(engine.server_command(plain))
    assert added == (
        {"--no-enable-prefix-caching"}
        if engine.name == "vllm"
        else {"--disable-radix-cache", "--enable-deterministic-inference"}
    )
    assert ("VLLM_BATCH_INVARIANT" in engine.server_environment(exact)) == (engine.name == "vllm")


def test_sampling_parameters_are_read_and_sent():
    sampling = Sampling.parse("temperature=0.8,top_p=0.95,top_k=40")
    assert sampling == Sampling()
    assert str(sampling) == "temperature 0.8, top_p 0.95, top_k 40"
    assert sampling.parameters() == {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.0}
    assert Sampling.parse("min_p=0.1").parameters() == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.1,
    }
    for wrong in ("top_k=x", "top_q=1", "temperature"):
        with pytest.raises(ValueError, match="sampling: "):
            Sampling.parse(wrong)


def test_clients_are_changed_only_where_their_options_do_not_do(tmp_path):
    workload = make_workload("prefix:10+5", 4, "8", tmp_path, 0)
    greedy = Client(
        "python", Model("none", tmp_path, True), 1, workload, 1.0, None, 3, tmp_path / "client.json"
    )
    sampled = Client(
        "python",
        Model("none", tmp_path, True),
        1,
        workload,
        1.0,
        None,
        3,
        tmp_path / "client.json",
        sampling=Sampling(),
    )
    assert bench_client(greedy, "engine.client") == ["python", "-m", "engine.client"]
    unchanged = {"keep_order": False, "sampling": None, "seed": 3_000_000, "wait_for": None}
    assert json.loads(bench_client(greedy, "engine.client", keep_order=True)[3]) == unchanged | {
        "keep_order": True
    }
    assert json.loads(bench_client(sampled, "engine.client")[3]) == unchanged | {"sampling": {}}
    assert json.loads(bench_client(sampled, "engine.client", no_option=("top_k",))[3]) == unchanged | {
        "sampling": {"top_k": 40}
    }
    waits = replace(greedy, wait_for=tmp_path / "go")
    assert json.loads(bench_client(waits, "engine.client")[3]) == unchanged | {
        "wait_for": str(tmp_path / "go")
    }


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_each_sampling_parameter_reaches_the_server_on_one_way(engine, tmp_path):
    """By a client option, or added to each request by bench_client.py."""
    (tmp_path / "chats.json").write_text(
        json.dumps([{"conversations": [{"value": "a b c d e"}, {"value": "f g h i j"}]}] * 4)
    )
    write_word_tokenizer(tmp_path, 5000)
    workload = make_workload(str(tmp_path / "chats.json"), 2, None, tmp_path, 0)
    client = Client(
        "python",
        Model("none", tmp_path, True),
        1,
        workload,
        1.0,
        None,
        3,
        tmp_path / "client.json",
        sampling=Sampling(0.7, 0.9, 0, 0.1),
    )
    command = engine.client_command(client)
    by_option = dict(
        part[2:].split("=") for part in command if part.startswith(("--temperature=", "--top-", "--min-p="))
    )
    added = json.loads(command[3])["sampling"]
    sent = {name.replace("-", "_"): float(value) for name, value in by_option.items()}
    assert sent | added == {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.1}
    assert len(sent) + len(added) == 4
    assert "--temperature=0" in engine.client_command(replace(client, sampling=None))


def test_every_request_of_a_client_gets_a_seed_of_its_own():
    pytest.importorskip("aiohttp")
    import aiohttp

    original = aiohttp.ClientSession.post
    try:
        added = AddSampling({"temperature": 0.8, "top_k": 40}, 100)
    finally:
        aiohttp.ClientSession.post = original
    sglang = {"text": "a", "sampling_params": {"temperature": 0.0, "max_new_tokens": 5}}
    assert added.add_to(sglang)["sampling_params"] == {
        "temperature": 0.8,
        "max_new_tokens": 5,
        "top_k": 40,
        "sampling_seed": 100,
    }
    openai = {"model": "m", "prompt": "a", "temperature": 0, "max_tokens": 5}
    assert added.add_to(openai) == {**openai, "temperature": 0.8, "top_k": 40, "seed": 101}
    assert added.add_to({"profile": True}) == {"profile": True}
    assert added.requests == 2
    assert sglang["sampling_params"]["temperature"] == 0.0


def test_the_client_is_run_with_what_was_asked_for(tmp_path):
    """The whole path, with a client of a few lines; modules of integration/ must not shadow the standard
    library's.
    """
    shuffles = "numbers = list(range(50)); random.shuffle(numbers)"
    prints = "print(numbers == sorted(numbers), http.HTTPStatus.OK.value, sys.argv[1:])"
    (tmp_path / "some_client.py").write_text(f"import http, random, sys\n{shuffles}\n{prints}")
    for keep_order in (True, False):
        options = json.dumps({"keep_order": keep_order, "sampling": None, "seed": 0, "wait_for": None})
        command = [
            sys.executable,
            str(REPOSITORY / "integration" / "bench_client.py"),
            "some_client",
            options,
            "--port",
            "1",
        ]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"{keep_order} 200 ['--port', '1']"


def test_a_client_is_gone_when_it_is_done_and_one_that_fails_says_so(tmp_path):
    """Nothing waits for the engine's exit handlers, for example those that stop its processes."""
    (tmp_path / "slow_end.py").write_text(
        "import atexit, time\natexit.register(time.sleep, 60)\nprint('result')"
    )
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    options = json.dumps({"keep_order": False, "sampling": None, "seed": 0, "wait_for": None})
    for module, status, output in (("slow_end", 0, "result\n"), ("fails", 3, "")):
        command = [sys.executable, str(REPOSITORY / "integration" / "bench_client.py"), module, options]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=30
        )
        assert (done.returncode, done.stdout) == (status, output)


class CountingEngine:
    """Answers with its arguments, so that the test can tell sent values from returned ones."""

    def sample(self, url, prompt, max_tokens, sampling, seed, logprobs):
        return [*prompt, seed % 1000]


def test_answers_are_compared_in_the_order_of_the_prompts():
    prompts = [[i] for i in range(20)]
    requests, others = make_requests(prompts, 0), make_requests(prompts, 1)
    assert len({request.seed for request in requests + others}) == 40
    assert any(request.seed > 2**60 for request in requests)
    assert make_requests(prompts, 0) == requests
    engine = CountingEngine()
    alone = one_at_a_time(engine, "url", requests, 4, Sampling())
    assert all_at_once(engine, "url", requests, 4, Sampling(), 8) == alone
    changed = [*alone[:-1], [0]]
    assert compare_answers(alone, alone, changed, [[0]] * 20) == Outcome(20, 20, 19, 0)
    assert not Outcome(20, 20, 19, 0).holds(same_logits=True)
    assert Outcome(20, 20, 19, 0).holds(same_logits=False)
    assert not Outcome(20, 19, 20, 0).holds(same_logits=False)
    assert not Outcome(20, 20, 20, 20).holds(same_logits=False)  # seeds without effect


def test_a_benchmark_says_how_it_sampled(tmp_path):
    settings = parse_arguments(
        ["--engine", "vllm", "--backends", OURS, "--sampling", "temperature=0.8,top_p=0.95,top_k=40"]
    )
    assert settings.sampling == Sampling()
    assert parse_arguments(["--engine", "vllm", "--backends", OURS]).sampling is None
    workload = make_workload("prefix:10+5", 4, "8", tmp_path, 0)
    assert describe(workload, 2.0, Sampling()).endswith(
        "4 prompts at 2/s; temperature 0.8, top_p 0.95, top_k 40, a seed for each request"
    )
