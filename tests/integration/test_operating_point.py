"""Operating points of simulated backends: the measured rates, an interrupted command, and the report. No
engine is started.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from health_server import SERVE_HEALTH

from integration import benchmark as serving
from integration import operating_point
from integration.engines import Metrics
from integration.model import Model
from integration.operating_point import Measurements, Plan, find, parse_arguments, seed_of
from integration.rate_search import RateSearch
from integration.tokenizer import write_word_tokenizer

CAPACITY = {"fast": 20.0, "slow": 7.0, "late": 0.1, "drops": 20.0}  # prompts per second, of each backend


class SimulatedEngine:
    """P99 TTFT is 100 ms at half of a backend's capacity, and 200 ms at its capacity."""

    name = "simulated"

    def __init__(self):
        self.starts, self.sent, self.forgotten, self.ports = [], [], 0, {}

    def stock_backend(self, device):
        return "stock"

    def server_command(self, launch):
        self.ports[launch.port] = launch.backend
        return [sys.executable, "-c", SERVE_HEALTH, str(launch.port)]

    def server_environment(self, launch):
        if launch.environment != self.forgetting_environment():
            raise AssertionError(launch.environment)
        self.starts.append(launch.backend)
        return {}

    def forgetting_environment(self):
        return {"FORGETS": "1"}

    def forget_prefixes(self, url):
        self.forgotten += 1
        return self.forgotten % 10 != 0  # now and then it still has requests

    def sample(self, *_, **__):
        return [1]

    def client_command(self, client):
        self.sent.append(
            (self.ports[client.port], client.request_rate, client.workload.num_prompts, client.seed)
        )
        return [sys.executable, "-c", f"open({str(client.result)!r}, 'w').write('{{}}')"]

    def client_environment(self, device):
        return {}

    def read_result(self, client):
        backend, rate = self.ports[client.port], client.request_rate
        failed = int(backend == "drops" and rate > 5)
        ttft = 200 * rate / CAPACITY[backend]
        return Metrics(
            client.workload.num_prompts, failed, ttft / 2, ttft, rate, 2 * rate, 10 * rate, 0.1, 9, 9
        )


@pytest.fixture
def real_processes(tmp_path, monkeypatch):
    write_word_tokenizer(tmp_path, 1000)
    engine = SimulatedEngine()
    monkeypatch.setattr(serving, "ENGINES", {"vllm": engine})
    monkeypatch.setattr(serving, "resolve_model", lambda *_: Model("none", tmp_path, True))
    monkeypatch.setattr(serving, "package_versions", lambda python: {"torch": "2"})
    return engine


@pytest.fixture
def engine(real_processes, monkeypatch):
    """Without processes."""
    engine = real_processes

    @contextmanager
    def ready_server(engine, launch, log, timeout_s, meanwhile):
        engine.server_command(launch)
        engine.server_environment(launch)
        yield SimpleNamespace(launch=launch, url="", raise_if_dead=lambda: None)

    def run_client(engine, client, device, log, timeout_s):
        engine.client_command(client)
        return engine.read_result(client)

    monkeypatch.setattr(operating_point, "ready_server", ready_server)
    monkeypatch.setattr(operating_point, "run_client", run_client)
    return engine


def plan(tmp_path, *backends, more=""):
    line = (
        f"--engine vllm --backends {' '.join(backends)} --dataset uniform:5-9 --output-len 4 --num-prompts 10"
    )
    return parse_arguments(
        [*line.split(), "--device", "cpu", "--results", str(tmp_path / "r"), *more.split()]
    )


def report(tmp_path):
    return json.loads((tmp_path / "r" / "report.json").read_text())


def test_backends_are_compared_at_the_rate_that_all_keep(engine, tmp_path):
    assert find(plan(tmp_path, "fast", "slow", more="--duration 2"))
    common = report(tmp_path)["settings"]["common_rate"]
    assert 7.0 / 1.05 < common <= 7.0
    rows = report(tmp_path)["rows"]
    assert [row["backend"].partition(",")[0] for row in rows] == ["fast", "slow"] * 2
    at_common, at_highest = rows[:2], rows[2:]
    assert {len(row["repeats"]) for row in rows} == {3}
    assert [row["median"]["itl_p50_ms"] for row in at_common] == [common, common]
    assert at_common[0]["workload"] == (
        f"Common rate: prompts of 5-9 tokens, outputs of 4; 20 prompts at {common:g}/s"
    )
    assert 20 / 1.05 < at_highest[0]["median"]["itl_p50_ms"] <= 20
    assert at_highest[1]["backend"] == f"slow, {common:g}/s"
    assert engine.starts == ["fast", "slow", "fast"], "the first again, for the common rate"
    assert engine.forgotten >= len(engine.sent)
    for backend, rate, num_prompts, _ in engine.sent:
        assert num_prompts == max(10, -(-2 * rate // 10) * 10), (backend, rate)
    seeds = [seed for backend, rate, _, seed in engine.sent if backend == "fast"]
    assert len({*seeds}) == len(seeds), "other prompts in each run"
    of_common = [
        {seed for name, rate, _, seed in engine.sent if (name, rate) == (backend, common)}
        for backend in CAPACITY
    ]
    assert of_common[0] == of_common[1], "the same for all backends"
    text = (tmp_path / "r" / "report.md").read_text()
    assert "| highest rate with P99 TTFT <= 200 ms " in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "r" / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_the_slower_one_first_needs_no_third_server(engine, tmp_path):
    assert find(plan(tmp_path, "slow", "fast"))
    assert engine.starts == ["slow", "fast"]


def test_servers_and_clients_are_processes(real_processes, tmp_path):
    assert find(plan(tmp_path, "slow", "fast", more="--highest-rate 8 --repeats 1 --tolerance 0.5"))
    assert real_processes.starts == ["slow", "fast"]
    assert report(tmp_path)["settings"]["common_rate"] == 5.66


def test_an_interrupted_command_goes_on(engine, tmp_path, monkeypatch):
    given = plan(tmp_path, "fast", "slow")
    assert find(given)
    complete, sent = report(tmp_path)["rows"], engine.sent
    files = sorted((tmp_path / "r" / "measurements").glob("*.json"))
    assert len(files) == len(sent)
    # a few measurements at a time
    for path in files:
        path.unlink()
    engine.sent = []
    read_result = engine.read_result
    for _ in range(len(files)):
        left = iter(range(8))

        def read_a_few(client, left=left):
            if next(left, None) is None:
                raise RuntimeError("the machine went away")
            return read_result(client)

        engine.read_result = read_a_few
        try:
            assert find(given)
            break
        except RuntimeError:
            assert len(list((tmp_path / "r" / "measurements").glob("*.json"))) % 8 == 0
    assert report(tmp_path)["rows"] == complete
    assert {*engine.sent} == {*sent}
    starts = len(engine.starts)
    assert find(given), "again: nothing is left to measure"
    assert len(engine.starts) == starts


def test_a_command_ends_before_its_time_is_over(engine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(operating_point, "START_S", 0.1)
    given = replace(plan(tmp_path, "fast", "slow"), seconds=1000.0)
    times = iter([0.0, *[1.0] * 12])  # then the time is over
    monkeypatch.setattr(
        operating_point.Clock, "left", property(lambda clock: 1000 - 1000 * (next(times, None) is None))
    )
    assert not find(given)
    printed = capsys.readouterr().out
    assert "Not all is measured: the same command goes on." in printed
    assert 0 < len(engine.sent) < 12
    assert "next: " in printed


def test_a_measurement_that_no_command_could_do_is_refused(engine, tmp_path, monkeypatch):
    too_long = "seconds: 70, but a server's start and a measurement take longer"
    with pytest.raises(ValueError, match=too_long):
        find(replace(plan(tmp_path, "fast"), seconds=70.0))
    assert not engine.starts
    monkeypatch.setattr(operating_point, "START_S", -60.0)  # its start takes longer than estimated
    with pytest.raises(ValueError, match=too_long):
        find(replace(plan(tmp_path, "fast"), seconds=70.0, duration_s=30.0))
    assert (engine.starts, engine.sent) == (["fast"], [])


def test_limits_that_no_rate_keeps_or_breaks(engine, tmp_path):
    assert find(plan(tmp_path, "fast", "late", "drops", more="--highest-rate 12 --lowest-rate 0.5"))
    text = (tmp_path / "r" / "report.md").read_text()
    fast, late = (
        next(line for line in text.splitlines() if line.startswith(f"| {name} ")) for name in ("fast", "late")
    )
    assert "no rate breaks the limit" in fast
    assert "| 12/s, 120.0 ms " in fast
    assert "no rate keeps the limit" in late
    assert 4.7 < report(tmp_path)["settings"]["common_rate"] <= 5, "a rate with failed requests is not kept"
    assert {row["backend"].partition(",")[0] for row in report(tmp_path)["rows"]} == {"fast", "drops"}


def test_the_limit_may_be_of_the_time_between_tokens(engine, tmp_path):
    """Its median is the rate here."""
    assert find(plan(tmp_path, "slow", "fast", more="--limit-of itl_p50_ms --limit 5.5"))
    assert 5.5 / 1.05 < report(tmp_path)["settings"]["common_rate"] <= 5.5
    assert "highest rate with median ITL <= 5.5 ms" in (tmp_path / "r" / "report.md").read_text()
    sent = len(engine.sent)
    assert find(plan(tmp_path, "slow", more="--limit-of itl_p50_ms --limit 5.5"))
    assert len(engine.sent) == sent
    assert find(plan(tmp_path, "slow", more="--limit 150")), "measurements serve other limits, too"
    assert 5.25 / 1.05 < report(tmp_path)["settings"]["common_rate"] <= 5.25


def test_measurements_with_other_settings_are_not_mixed(engine, tmp_path):
    assert find(plan(tmp_path, "slow"))
    assert find(plan(tmp_path, "slow", "fast")), "more backends are"
    with pytest.raises(ValueError, match=r"has measurements with duration_s 30\.0, not 5\.0: choose another"):
        find(plan(tmp_path, "slow", more="--duration 5"))
    with pytest.raises(ValueError, match=r"has measurements with loads .*uniform:5-9"):
        find(
            replace(
                changed := plan(tmp_path, "slow"),
                settings=replace(changed.settings, loads=[replace(changed.load, dataset="uniform:5-8")]),
            )
        )


def test_unfinished_files_are_no_measurements(tmp_path):
    one = Metrics(1, 0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7, 8)
    measurements = Measurements.read(tmp_path)
    measurements.add("attn_backend@fp8_e4m3", 2.5, one)
    measurements.add("attn_backend@fp8_e4m3", 2.5, replace(one, failed=1))
    (tmp_path / "attn_backend-4-0.unfinished").write_text("{")
    again = Measurements.read(tmp_path)
    assert again.of_backends == measurements.of_backends
    assert again.count("attn_backend@fp8_e4m3", 2.5) == 2


def test_seeds_differ():
    seeds = {seed_of(0, rate, repeat) for rate in (1, 2.5, 4, 4.01) for repeat in range(3)}
    assert len(seeds) == 12


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--repeats 2", "repeats: 2, must be odd"),
        ("--first-rate 0.1", "rates: lowest 0.25, first 0.1"),
        ("--num-prompts 0", "num_prompts is 0"),
    ],
)
def test_wrong_options_are_refused(more, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        plan(tmp_path, "stock", more=more)
    assert message in capsys.readouterr().err


def test_the_folder_must_be_named(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--engine", "vllm", "--backends", "stock"])
    assert "--results is missing" in capsys.readouterr().err


def test_the_exit_status_says_whether_to_go_on(monkeypatch):
    monkeypatch.setattr(operating_point, "parse_arguments", lambda: Plan(None, RateSearch(1.0), 1.0))
    monkeypatch.setattr(operating_point, "find", lambda plan: False)
    with pytest.raises(SystemExit) as ended:
        operating_point.run()
    assert ended.value.code == operating_point.GO_ON
