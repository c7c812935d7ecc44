"""What bench_client.py adds to the engines' clients: given arrivals, and answers of one request that are
measured one by one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from integration.arrivals import mean_rate, of_requests, poisson
from integration.bench_client import ShareRequests
from integration.benchmark import Load, Settings, describe, new_client
from integration.datasets import make_workload
from integration.engines import ENGINES, Sampling
from integration.engines.base import bench_client
from integration.model import REPOSITORY, Model
from integration.serve_benchmark import parse_arguments
from integration.tokenizer import write_word_tokenizer

VLLM_DRAWS = """
import numpy as np
ends = np.cumsum([np.random.gamma(shape=1.0, scale=1.0 / rate) for _ in range(count + more)])[:count]
print([round(float(end) * count / rate / float(ends[-1]), 3) for end in ends])
"""
SGLANG_DRAWS = """
import time, numpy as np
begin, sent = time.monotonic(), []
for _ in range(count + more):
    sent.append(time.monotonic() - begin)
    # The client's own work does not add up.
    time.sleep(0.01)
    time.sleep(np.random.exponential(1.0 / rate))
print([round(moment, 3) for moment in sent[:count]])
"""


@pytest.mark.parametrize("more", [0, 2])  # draws after the last request
@pytest.mark.parametrize("draws", [VLLM_DRAWS, SGLANG_DRAWS, "print([])"])
def test_a_client_sends_its_requests_at_the_given_times(draws, more, tmp_path):
    pytest.importorskip("numpy")
    arrivals = [0.0, 0.0, 0.3, 0.35, 0.9]
    (tmp_path / "arrivals.json").write_text(json.dumps(arrivals))
    (tmp_path / "some_client.py").write_text(f"count, more, rate = 5, {more}, {mean_rate(arrivals)}\n{draws}")
    options = {"keep_order": False, "sampling": None, "seed": 0, "wait_for": None}
    options["arrivals"] = str(tmp_path / "arrivals.json")
    script = str(REPOSITORY / "integration" / "bench_client.py")
    done = subprocess.run(
        [sys.executable, script, "some_client", json.dumps(options)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if draws.startswith("print"):
        assert "some_client did not draw the times of its requests" in done.stderr
        assert done.returncode == 1
    else:
        late = [sent - asked for sent, asked in zip(json.loads(done.stdout), arrivals, strict=True)]
        assert all(-0.002 < delay < 1 for delay in late)


def test_arrivals_have_the_rate_and_the_seed():
    times = poisson(50, 4.0, seed=1)
    assert times[0] == 0
    assert times == sorted(times)
    assert times == poisson(50, 4.0, seed=1) != poisson(50, 4.0, seed=2)
    assert mean_rate(times) == pytest.approx(4.0, rel=0.1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert 0.5 < (sum(gap**2 for gap in gaps) / len(gaps)) / (2 * (sum(gaps) / len(gaps)) ** 2) < 2
    assert of_requests([0.0, 2.0], 3) == [0.0, 0.0, 0.0, 2.0, 2.0, 2.0]
    assert mean_rate([0.0, 0.0]) == float("inf")


@pytest.fixture
def settings(tmp_path):
    write_word_tokenizer(tmp_path, 5000)
    return Settings("vllm", ["stock"], "none", tmp_path, [Load()], sampling=Sampling())


def new(settings, workload, rate):
    folder = settings.results
    return new_client(settings, Model("none", folder, True), 1, workload, rate, 3, folder / "client.json")


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_recorded_arrivals_reach_the_client(engine, settings, tmp_path):
    lines = [
        {"timestamp": 100 * n, "input_length": 9, "output_length": 4, "hash_ids": [n]} for n in (1, 3, 4)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    workload = make_workload(f"trace:{tmp_path / 't.jsonl'}", 3, None, tmp_path, 0, samples=2)
    command = engine.client_command(new(settings, workload, None))
    path = json.loads(command[3])["arrivals"]
    arrivals = json.loads((tmp_path / "client.arrivals.json").read_text())
    assert path == str(tmp_path / "client.arrivals.json")
    assert arrivals == pytest.approx([0, 0, 0.2, 0.2, 0.3, 0.3])
    assert float(command[command.index("--request-rate") + 1]) == pytest.approx(6 / 0.3)
    assert describe(workload, None).endswith("; 3 prompts as they arrived, 2 answers to each")


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_copies_of_a_prompt_become_one_request(engine, settings, tmp_path):
    workload = make_workload("uniform:5-9", 3, "4", tmp_path, 0, samples=4)
    client = new(replace(settings, n_best=True), workload, 2.0)
    command = engine.client_command(client)
    assert json.loads(command[3])["answers"] == 4
    arrivals = json.loads((tmp_path / "client.arrivals.json").read_text())
    assert arrivals == of_requests(poisson(3, 2.0, 3), 4)
    assert ("--warmup-requests" if engine.name == "sglang" else "--ready-check-timeout-sec") in command
    assert describe(workload, 2.0, n_best=True).endswith(
        "; 3 prompts at 2/s, 4 answers by one request with n"
    )
    at_once = engine.client_command(new(replace(settings, n_best=True), workload, float("inf")))
    assert "arrivals" not in json.loads(at_once[3])
    copies = new(settings, workload, 2.0)
    assert (copies.arrivals, copies.n_best) == (None, False)
    one_answer = replace(client, workload=make_workload("uniform:5-9", 3, "4", tmp_path, 0), n_best=False)
    assert "answers" not in json.loads(bench_client(one_answer, "client", keep_order=True)[3])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--n-best --samples 4", "--n-best needs --sampling"),
        ("--n-best --sampling top_k=5 --max-concurrency 4", "--n-best does not go with --max-concurrency"),
        ("--request-rate sometimes", "--request-rate: invalid"),
    ],
)
def test_options_that_do_not_go_together_are_refused(line, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--engine", "vllm", "--backends", "stock", *line.split()])
    assert message in capsys.readouterr().err


def test_recorded_is_a_rate():
    given = parse_arguments(
        [
            "--engine",
            "vllm",
            "--backends",
            "stock",
            "--dataset",
            "trace:t.jsonl",
            "--request-rate",
            "recorded",
        ]
    )
    assert [load.request_rate for load in given.loads] == [None]


def events(engine, num_answers, length):
    """The interleaved stream of a server's answers, the later ones first."""
    for token in range(1, length + 1):
        for answer in reversed(range(num_answers)):
            if engine == "vllm":
                yield {"choices": [{"index": answer, "text": f" {answer}.{token}"}]}
            else:
                text = "".join(f" {answer}.{number}" for number in range(1, token + 1))
                yield {"index": answer, "text": text, "meta_info": {"completion_tokens": token}}
    if engine == "vllm":
        yield {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": num_answers * length}}


async def serve_and_ask(engine, prompts, num_answers, status=200):
    """The lines that a client reads from each answer, and the bodies of the server's requests."""
    from aiohttp import ClientSession, web

    bodies = []

    async def answer(request):
        bodies.append(await request.json())
        if status != 200:
            return web.Response(status=status, reason="Refused", text="n is too large")
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events(engine, num_answers, 3):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0.001)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/answer", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]

    async def ask(prompt):
        body = {"prompt": prompt} if engine == "vllm" else {"text": prompt, "sampling_params": {"top_k": 3}}
        url = f"http://127.0.0.1:{port}/answer"
        async with ClientSession() as session, session.post(url=url, json=body, headers={}) as response:
            if response.status != 200:
                return f"{response.status} {response.reason}: {await response.text()}"
            read = response.content.iter_any() if engine == "vllm" else response.content
            return [line.strip().removeprefix(b"data: ").decode() async for line in read if line.strip()]

    try:
        return await asyncio.gather(*map(ask, prompts)), bodies
    finally:
        await runner.cleanup()


@pytest.fixture
def share(monkeypatch):
    aiohttp = pytest.importorskip("aiohttp")
    monkeypatch.setattr(aiohttp.ClientSession, "post", aiohttp.ClientSession.post)  # restored at the end
    return ShareRequests


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_each_copy_gets_one_answer_of_a_request(engine, share):
    prompts = ["a", "a", "b", "b", "a", "a"]  # two requests may have the same prompt
    shared = share(2)
    (_, *answers), (test, *bodies) = asyncio.run(serve_and_ask(engine, ["a", *prompts], 2))
    assert "n" not in test | test.get("sampling_params", {}), "the client's test of the server"
    assert shared.requests == len(bodies) == 3
    assert not shared.incomplete
    asked = [body["n"] if engine == "vllm" else body["sampling_params"] for body in bodies]
    assert asked == [2 if engine == "vllm" else {"top_k": 3, "n": 2}] * 3
    for place, lines in enumerate(answers):
        assert lines[-1] == "[DONE]"
        read = [json.loads(line) for line in lines[:-1]]
        if engine == "vllm":
            assert [event["choices"][0]["text"] for event in read[:-1]] == [
                f" {place % 2}.{token}" for token in (1, 2, 3)
            ]
            assert read[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 3}
        else:
            assert [event["text"].split()[-1] for event in read] == [
                f"{place % 2}.{token}" for token in (1, 2, 3)
            ]


def test_each_copy_learns_that_its_request_was_refused(share):
    share(2)
    answers, bodies = asyncio.run(serve_and_ask("vllm", ["test", "a", "a"], 2, status=400))
    assert answers == ["400 Refused: n is too large"] * 3
    assert len(bodies) == 2


def test_each_copy_learns_that_its_server_is_gone(share):
    aiohttp = pytest.importorskip("aiohttp")
    share(2)

    async def ask():
        async with (
            aiohttp.ClientSession() as session,
            session.post("http://127.0.0.1:9/answer", json={"prompt": "a"}),
        ):
            pass

    async def all_of_them():
        return await asyncio.gather(ask(), ask(), ask(), return_exceptions=True)

    errors = asyncio.run(all_of_them())
    assert [isinstance(error, aiohttp.ClientError) for error in errors] == [True] * 3
