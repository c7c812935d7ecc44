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
from integration.client import ClientTimeout
from integration.engines import Metrics
from integration.model import Model
from integration.operating_point import Measurements, Plan, find, parse_arguments, seed_of
from integration.rate_search import RateSearch
from integration.server import ServerError, ServerTimeout
from integration.tokenizer import write_word_tokenizer

CAPACITY = {"fast": 20.0, "slow": 7.0, "late": 0.1, "drops": 20.0}  # prompts per second, of each backend


class SimulatedEngine:
    """P99 TTFT is 100 ms at half of a backend's capacity, and 200 ms at its capacity."""

    name = "simulated"

    def __init__(self):
        self.starts, self.sent, self.forgotten, self.ports = [], [], 0, {}
        self.slow_above = float("inf")  # the rate: its clients do not end in time
        self.limits = []  # of the servers' starts and the clients, seconds

    def is_slow(self, client):
        return client.request_rate > self.slow_above

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
        wait = "import time; time.sleep(60); " if self.is_slow(client) else ""
        return [sys.executable, "-c", f"{wait}open({str(client.result)!r}, 'w').write('{{}}')"]

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
        engine.limits.append(timeout_s)
        yield SimpleNamespace(launch=launch, url="", raise_if_dead=lambda: None)

    def run_client(engine, client, device, log, timeout_s):
        engine.client_command(client)
        engine.limits.append(timeout_s)
        if engine.is_slow(client):
            raise ClientTimeout("was not done")
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


def test_a_client_that_is_not_done_in_time_breaks_the_limit(engine, tmp_path, capsys):
    engine.slow_above = 1.0
    given = replace(plan(tmp_path, "fast", more="--tolerance 0.5"), seconds=1000.0)
    assert find(given)
    measured = [json.loads(path.read_text()) for path in (tmp_path / "r" / "measurements").glob("*.json")]
    ended = [one["metrics"] for one in measured if one["rate"] > 1]
    assert len(ended) > 3
    assert {one["requests"] for one in ended} == {0}
    assert {one["failed"] for one in ended} == {50, 60, 120}, "all"
    assert all(970 < one["duration_s"] < 980 for one in ended)
    assert report(tmp_path)["settings"]["common_rate"] == 1.0
    text = (tmp_path / "r" / "report.md").read_text()
    assert "| 1/s, 10.0 ms " in text
    assert "| 1.41/s, not done in time |" in text
    assert "the client was not done after 98" in capsys.readouterr().out
    sent = len(engine.sent)
    assert find(given)
    assert len(engine.sent) == sent


def test_a_command_goes_on_after_a_client_that_took_all_its_time(engine, tmp_path, monkeypatch):
    engine.slow_above = 1.0
    given = replace(plan(tmp_path, "fast", more="--tolerance 1 --repeats 1"), seconds=300.0)
    begin = len(engine.sent)

    def left(clock):
        slow = any(rate > engine.slow_above for _, rate, _, _ in engine.sent[begin:])
        return 0.0 if slow else 280.0

    monkeypatch.setattr(operating_point.Clock, "left", property(left))
    complete = []
    while not complete or not complete[-1]:
        begin = len(engine.sent)
        complete.append(find(given))
    assert complete == [False, False, True], "at 4/s, at 2/s, at 1/s"
    assert [rate for _, rate, _, _ in engine.sent] == [4.0, 2.0, 1.0]


def test_a_backend_whose_clients_are_never_done(engine, tmp_path):
    engine.slow_above = 0.0
    assert find(plan(tmp_path, "fast", more="--lowest-rate 2"))
    assert "| 2/s, not done in time | no rate keeps the limit |" in (tmp_path / "r" / "report.md").read_text()
    assert report(tmp_path)["rows"] == []


def test_a_client_process_is_ended_when_the_time_is_over(real_processes, tmp_path, monkeypatch):
    real_processes.slow_above = 2.0
    monkeypatch.setattr(operating_point, "CLIENT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(operating_point.Clock, "estimate_s", lambda *_: 0.5)
    assert find(plan(tmp_path, "fast", more="--repeats 1 --tolerance 1"))
    assert report(tmp_path)["settings"]["common_rate"] == 2.0
    assert [rate for _, rate, _, _ in real_processes.sent] == [4.0, 2.0]


def test_a_client_that_had_too_little_time_says_nothing(engine, tmp_path, monkeypatch, capsys):
    given = replace(plan(tmp_path, "fast"), seconds=1000.0)
    left_s = 980.0

    def forget_slowly(engine, url):
        nonlocal left_s
        if engine.sent:
            left_s, engine.slow_above = 1.0, 0.0

    monkeypatch.setattr(operating_point.Clock, "left", property(lambda clock: left_s))
    monkeypatch.setattr(operating_point, "forget_prefixes", forget_slowly)
    assert not find(given)
    assert len(engine.sent) == 2
    assert len(list((tmp_path / "r" / "measurements").glob("*.json"))) == 1
    printed = capsys.readouterr().out
    assert "the time is over, and the client is not done" in printed
    assert "Not all is measured: the same command goes on." in printed


def test_without_an_end_a_client_has_its_estimated_time(engine, tmp_path):
    assert find(plan(tmp_path, "slow", more="--highest-rate 4 --repeats 1 --num-prompts 100"))
    assert find(plan(tmp_path / "many", "slow", more="--highest-rate 4 --repeats 1 --num-prompts 10000"))
    assert engine.limits == [900.0, 3600.0, 900.0, 1.5 * 10000 / 4 + 30]


def test_a_start_ends_when_the_time_is_over(engine, tmp_path, monkeypatch, capsys):
    started = operating_point.ready_server

    @contextmanager
    def first_only(engine, launch, log, timeout_s, meanwhile):
        if engine.starts:
            engine.limits.append(timeout_s)
            raise ServerTimeout("was not ready")
        with started(engine, launch, log, timeout_s, meanwhile) as server:
            yield server

    monkeypatch.setattr(operating_point, "ready_server", first_only)
    given = plan(tmp_path, "fast", "slow")
    assert not find(replace(given, seconds=500.0)), "the same command goes on"
    assert 479 < engine.limits[0] <= 480
    assert 470 < engine.limits[-1] <= 480
    assert "simulated with slow: the time is over, and the server is not ready" in capsys.readouterr().out
    with pytest.raises(ValueError, match="seconds: 500, but a server's start and a measurement take longer"):
        find(replace(given, seconds=500.0))
    with pytest.raises(ServerError, match="was not ready"):
        find(given)
    assert engine.limits[-1] == 900.0


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
