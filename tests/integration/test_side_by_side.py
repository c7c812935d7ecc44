"""All servers at once, load after load: the order, the requests before it, the cost of a failure, and
prepared clients. No engine is started.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from health_server import SERVE_HEALTH

from integration import benchmark as serving
from integration import side_by_side, warm_up
from integration.benchmark import Load, Settings
from integration.client import RunningClient
from integration.engines import Client, Metrics, Sampling
from integration.model import REPOSITORY, Model
from integration.serve_benchmark import parse_left_out
from integration.server import ServerError
from integration.side_by_side import benchmark_side_by_side, side_by_side_turns
from integration.tokenizer import write_word_tokenizer
from integration.workload import Prompt, Workload

MAY_FAIL = """
import sys, time
if sys.argv[2] == "fails":
    sys.exit("cannot load the model")
time.sleep(float(sys.argv[3]))
"""

CLIENT = """
import json, sys, time, urllib.request
port, result, outcome = sys.argv[1:]
prepared = time.time()
urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()
if outcome == "breaks":
    sys.exit("no answer")
open(result, "w").write(json.dumps({"prepared": prepared, "sent": time.time()}))
time.sleep(0.2)
"""


class FakeEngine:
    """Servers and clients of a few lines.

    The server of the backend "fails" ends at once, the one of "mute" does not answer; clients of "breaks"
    fail.
    """

    name = "fake"

    def __init__(self, folder):
        (folder / "fake_client.py").write_text(CLIENT)
        self.folder, self.times, self.warmed, self.ports = folder, {}, defaultdict(list), {}

    def stock_backend(self, device):
        return "stock"

    def server_command(self, launch):
        self.ports[launch.port] = launch.backend
        return [
            sys.executable,
            "-c",
            MAY_FAIL + SERVE_HEALTH,
            str(launch.port),
            launch.backend,
            "4.0" if launch.backend == "slow" else "0",
        ]

    def server_environment(self, launch):
        return {}

    def client_command(self, client):
        options = json.dumps(
            {
                "keep_order": False,
                "sampling": None,
                "seed": 0,
                "wait_for": client.wait_for and str(client.wait_for),
            }
        )
        outcome = "breaks" if "breaks" in client.result.name else "answers"
        script = str(REPOSITORY / "integration" / "bench_client.py")
        return [sys.executable, script, "fake_client", options, str(client.port), str(client.result), outcome]

    def client_environment(self, device):
        return {"PYTHONPATH": str(self.folder)}

    def sample(self, url, prompt, max_tokens, sampling, seed, logprobs):
        backend = self.ports[int(url.rpartition(":")[2])]
        if backend == "mute":
            raise RuntimeError("no answer to a first request")
        self.warmed[backend].append((time.time(), prompt, max_tokens, sampling, logprobs))
        return [*prompt, seed if backend != "forgetful" else len(self.warmed[backend])]

    def read_result(self, client):
        self.times[client.result.stem] = json.loads(client.result.read_text())
        return Metrics(1, 0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1, 1)


class Numbered(Workload):
    """Prompt number i of seed s is the tokens s % 100, i."""

    def prompts(self, seed):
        return [
            Prompt(f"t{seed % 100:03} t{number:03}", 6 * number + 1, "") for number in range(self.num_prompts)
        ]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that measures some backends with two loads, side by side by default; returns the engine, and
    the raised error.
    """
    engine = FakeEngine(tmp_path)
    model = Model("none", tmp_path, True)
    write_word_tokenizer(tmp_path, 1000)
    monkeypatch.setattr(side_by_side, "CLIENTS_AHEAD", 2)
    monkeypatch.setattr(serving, "ENGINES", {"fake": engine})
    monkeypatch.setattr(serving, "resolve_model", lambda name, python: model)
    monkeypatch.setattr(
        serving, "make_workload", lambda dataset, number, *_: Numbered(number, 2, dataset, tmp_path)
    )

    def measured(backends, measure=benchmark_side_by_side, **changes):
        loads = [Load("first", 2), Load("second", 20)]
        settings = Settings(
            "fake", backends, "none", tmp_path / "results", loads, start_timeout_s=30, **changes
        )
        try:
            measure(settings)
        except ServerError as error:
            return SimpleNamespace(engine=engine, error=str(error))
        return SimpleNamespace(engine=engine, error=None)

    return measured


def rows(tmp_path):
    report = json.loads((tmp_path / "results" / "report.json").read_text())
    return [
        (row["backend"], row["workload"].partition(";")[0], len(row["repeats"])) for row in report["rows"]
    ]


def test_each_load_goes_to_all_before_the_next(run, tmp_path):
    outcome = run(["quick", "slow", "third"], repeats=2)
    assert outcome.error is None
    assert rows(tmp_path) == [
        (backend, load, 2) for load in ("first", "second") for backend in ("quick", "slow", "third")
    ]
    times = outcome.engine.times
    sent = sorted(times, key=lambda name: times[name]["sent"])
    orders = [
        ("quick", "slow", "third"),
        ("slow", "third", "quick"),
        ("third", "quick", "slow"),
        ("quick", "slow", "third"),
    ]
    runs = [(load, repeat) for load in (0, 1) for repeat in (0, 1)]
    assert sent == [
        f"client-{backend}-{load}-{repeat}"
        for (load, repeat), order in zip(runs, orders, strict=True)
        for backend in order
    ]
    first = times["client-quick-0-0"]
    assert first["sent"] - first["prepared"] > 0.2  # it waited for the slow server, too
    for before, after in itertools.pairwise(sent):
        assert times[after]["sent"] - times[before]["sent"] > 0.2  # one at a time


def test_every_server_has_met_every_load_before_one_is_measured(run):
    engine = run(["quick", "third"], seed=7).engine
    earliest = min(times["sent"] for times in engine.times.values())
    for backend in ("quick", "third"):
        times, prompts, num_tokens, samplings, logprobs = zip(*engine.warmed[backend], strict=True)
        assert max(times) < earliest
        # copies, other seeds than 7, 8, 1007, ...
        of_loads = [
            [[6, 0], [6, 0], [6, 1], [6, 1]],
            [[5, number // 2] for number in range(warm_up.REQUESTS)],
        ]
        assert prompts[0] == of_loads[0][0]
        assert [sorted(prompts[:4]), sorted(prompts[4:])] == of_loads
        assert all(
            tokens == min(6 * prompt[1] + 1, warm_up.MOST_TOKENS)
            for tokens, prompt in zip(num_tokens, prompts, strict=True)
        )
        assert set(samplings) == {warm_up.GREEDY}
        assert not any(logprobs)


def test_servers_one_after_another_are_warmed_up_alike(run, tmp_path):
    engine = run(["quick", "third"], measure=serving.benchmark, seed=7).engine
    assert rows(tmp_path) == [
        (backend, load, 1) for load in ("first", "second") for backend in ("quick", "third")
    ]
    sent = {backend: [prompt for _, prompt, *_ in engine.warmed[backend]] for backend in ("quick", "third")}
    assert sorted(sent["quick"]) == sorted(sent["third"])
    assert {prompt[0] for prompt in sent["quick"]} == {5, 6}, "prompts of other seeds than 7, 8, 1007, ..."
    for backend in ("quick", "third"):
        assert max(request[0] for request in engine.warmed[backend]) < min(
            times["sent"] for name, times in engine.times.items() if backend in name
        )


def test_servers_are_warmed_up_as_they_are_measured(run):
    assert {request[3] for request in run(["quick"], sampling=Sampling(0.5)).engine.warmed["quick"]} == {
        Sampling(0.5)
    }


def test_seeds_are_checked_after_the_loads(run, tmp_path, capsys):
    engine = run(["quick", "forgetful"], sampling=Sampling(), check_seeds=True).engine
    printed = capsys.readouterr().out
    assert (
        "quick: 4 of 4 answers are equal when asked for again, 4 when asked for all at once, 0 with another "
        "seed" in printed
    )
    assert "forgetful: 0 of 4 answers are equal when asked for again, 0 " in printed
    assert json.loads((tmp_path / "results" / "seeds-quick.json").read_text())["again"][0][:2] == [99, 0]
    last_load = max(times["sent"] for times in engine.times.values())
    assert sum(request[0] > last_load for request in engine.warmed["quick"]) == 16


def test_loads_wait_for_their_turn(run, tmp_path):
    def let_go():
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        time.sleep(1)
        (tmp_path / "go").touch()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(let_go)
        engine = run(["quick"], turn=tmp_path).engine
    assert (
        min(times["sent"] for times in engine.times.values())
        > max(request[0] for request in engine.warmed["quick"]) + 0.9
    )


def test_each_load_begins_with_another_backend(tmp_path):
    loads = [Load(str(number), 1) for number in range(7)]
    settings = Settings("fake", ["a", "b", "c"], "none", tmp_path, loads, left_out=(("b", 1), ("c", 2)))
    turns = side_by_side_turns(settings)
    orders = ["".join(backend for index, backend, _ in turns if index == load) for load in range(7)]
    assert orders == ["abc", "ca", "ab", "abc", "bca", "cab", "abc"]
    assert [index for index, _, _ in turns] == sorted(index for index, _, _ in turns)


def test_a_backend_that_fails_is_left_out(run, tmp_path, capsys):
    assert (
        run(["quick", "fails", "mute", "breaks", "third"]).error
        == "not measured, or not to the end: breaks, fails, mute"
    )
    assert rows(tmp_path) == [
        ("quick", "first", 1),
        ("third", "first", 1),
        ("quick", "second", 1),
        ("third", "second", 1),
    ]
    printed = capsys.readouterr()
    assert "cannot load the model" in printed.err
    assert "no answer" in printed.err
    assert "left out: no answer to a first request" in printed.out


def test_no_load_begins_after_the_time_limit(run, capsys):
    assert run(["slow", "quick"], time_limit_s=0.1).error == "no backend was measured (see above)"
    assert capsys.readouterr().out.count("not measured: ") == 4


def test_some_loads_are_left_out(run, tmp_path):
    assert run(["quick", "third"], left_out=parse_left_out(["third:1"], ["quick", "third"], 2)).error is None
    assert rows(tmp_path) == [("quick", "first", 1), ("quick", "second", 1), ("third", "second", 1)]
    for wrong in ("third", "third:0", "third:3", "other:1", "third:x"):
        with pytest.raises(ValueError, match=f"leave-out: '{wrong}'"):
            parse_left_out([wrong], ["quick", "third"], 2)


def test_a_client_waits_until_it_is_released(tmp_path):
    engine = FakeEngine(tmp_path)
    workload = Workload(1, 1, "load", tmp_path)
    go = tmp_path / "go"
    go.touch()  # left by an earlier run
    model = Model("none", tmp_path, True)
    client = RunningClient(
        engine,
        Client(sys.executable, model, 9, workload, 1.0, None, 0, tmp_path / "c.json", wait_for=go),
        "cpu",
        tmp_path / "c.log",
    )
    time.sleep(1)
    assert client.process.poll() is None
    client.stop()
    assert client.process.poll() is not None
    assert not os.path.exists(go)
