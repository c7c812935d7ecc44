"""Find the highest request rate at which an engine's P99 time to first token keeps a limit, for one attention
backend after another. Then compare the backends at a rate that keeps it with all of them.

    python -m integration.operating_point --engine vllm --backends attn_backend FLASH_ATTN TRITON_ATTN \\
        --model llama-3.1-8b --dataset sharegpt --limit 200 --results results/operating-point --seconds 540

--limit-of chooses ITL instead. Then tokens/s at the highest rate are the throughput at this ITL.

Requests arrive as a Poisson process. A measurement is a run of the engine's own client, as in
integration/serve_benchmark.py: at least --num-prompts prompts, and enough for --duration seconds. The median
of --repeats measurements decides whether a rate keeps the limit. One with failed requests breaks it. So does
one whose client is not done when the time is over, if it had at least 1.5 times the time of the arrivals. The
search doubles or halves the rate, then bisects until the rates differ by --tolerance, and confirms the last
two rates. Servers forget their cached prefixes before each measurement, so no prompt of an earlier one is
answered from the cache.

The common rate is the lowest of the backends' highest rates. The report compares ITL, TTFT and tokens/s at
that rate, and at each backend's own highest rate. A second server of a backend starts only if the common rate
was not measured while its first one ran.

Each measurement is a file in --results. If a command ends early, or --seconds are over, run the same command
again: it continues. You may add --backends later. --results also gets the logs, the tables (report.md,
report.json) and the curves (rates.png).

Exit status: 0 if everything is measured, 75 if the same command must continue, 1 after an error.
"""

from __future__ import annotations

import json
import math
import sys
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tabulate import tabulate

from attn_backend.jit.progress import status
from attn_backend.settings import refusal
from integration import datasets
from integration.benchmark import CLIENT_TIMEOUT_S, Benchmark, Load, Settings, describe, label, new_client
from integration.client import ClientTimeout, run_client
from integration.command_line import exit_with, new_parser
from integration.datasets import RECORDED, make_workload
from integration.engines import Engine, Metrics
from integration.merge_reports import COMMON
from integration.rate_search import Found, RateSearch
from integration.report import format_table, write_tables
from integration.results import Row
from integration.server import Server, ServerTimeout, ready_server
from integration.serving_options import add_serving_options, check_serving_options, serving_settings
from integration.warm_up import warm_up

GO_ON = 75  # exit status: the same command continues
# settings that may not change between the measurements of a folder
FIXED = (*COMMON, "tensor_parallel_size", "client_arguments", "sampling", "n_best", "loads", "duration_s")
LIMITS = {"ttft_p99_ms": "P99 TTFT", "itl_p50_ms": "median ITL", "itl_p99_ms": "P99 ITL"}
START_S = 60.0  # of a server and a client, until the first ones have started
CLIENT_START_S = 30.0
STOP_S = 20.0  # of a server
FORGET_TIMEOUT_S = 30.0

Rates = dict[float, list[Metrics]]


@dataclass(frozen=True)
class Plan:
    """Which rates are measured, and how. `settings.loads` has one load, whose rate is not used.

    Attributes:
        duration_s: the prompts of a measurement arrive over at least this time.
        seconds: the command ends within this time. None: no limit.
        limited: the field of Metrics that the search limits.
    """

    settings: Settings
    search: RateSearch
    duration_s: float
    seconds: float | None = None
    limited: str = "ttft_p99_ms"

    @property
    def limit(self) -> str:
        return f"{LIMITS[self.limited]} <= {self.search.limit:g} ms"

    @property
    def load(self) -> Load:
        return self.settings.loads[0]

    def num_prompts(self, rate: float) -> int:
        """A multiple of the load's number, so that agents' turns stay whole."""
        return self.load.num_prompts * max(math.ceil(rate * self.duration_s / self.load.num_prompts), 1)


def seed_of(seed: int, rate: float, repeat: int) -> int:
    """The same for all backends; other prompts for each rate and repeat."""
    return seed + zlib.crc32(f"{rate:g} {repeat}".encode()) % 1_000_000_000


def not_done(num_requests: int, duration_s: float) -> Metrics:
    """A measurement whose client was ended after `duration_s`: without figures, all requests failed."""
    return Metrics(0, num_requests, 0.0, 0.0, 0.0, 0.0, 0.0, duration_s, 0, 0)


def done(repeats: list[Metrics]) -> list[Metrics]:
    """Those with figures."""
    return [one for one in repeats if one.requests]


@dataclass
class Measurements:
    """The measurements of a folder, by backend and rate. Each one is written at once."""

    folder: Path
    limited: str = "ttft_p99_ms"  # the field of Metrics that a search limits
    of_backends: dict[str, Rates] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, limited: str = "ttft_p99_ms") -> Measurements:
        measurements = cls(folder, limited)
        folder.mkdir(parents=True, exist_ok=True)
        found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
        for one in sorted(found, key=lambda one: (one["backend"], one["rate"], one["repeat"])):
            measurements.rates(one["backend"]).setdefault(one["rate"], []).append(Metrics(**one["metrics"]))
        return measurements

    def rates(self, backend: str) -> Rates:
        return self.of_backends.setdefault(backend, {})

    @property
    def total(self) -> int:
        return sum(len(repeats) for rates in self.of_backends.values() for repeats in rates.values())

    def count(self, backend: str, rate: float) -> int:
        return len(self.rates(backend).get(rate, []))

    def add(self, backend: str, rate: float, metrics: Metrics) -> None:
        repeat = self.count(backend, rate)
        described = {"backend": backend, "rate": rate, "repeat": repeat, "metrics": asdict(metrics)}
        path = self.folder / f"{backend}-{rate:g}-{repeat}.json"
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)
        self.rates(backend).setdefault(rate, []).append(metrics)

    def found(self, backend: str, search: RateSearch) -> Found:
        """Failed requests have no times: their rate does not keep the limit."""
        return search.look(
            {
                rate: [float("inf") if one.failed else getattr(one, self.limited) for one in repeats]
                for rate, repeats in self.rates(backend).items()
            }
        )

    def common_rate(self, backends: list[str], search: RateSearch) -> float | None:
        """The lowest of the highest rates of the backends whose search has ended with one."""
        found = [self.found(backend, search) for backend in backends]
        return min((one.low for one in found if one.next_rate is None and one.low is not None), default=None)

    def wanted(self, backend: str, backends: list[str], search: RateSearch) -> float | None:
        """The next rate to measure with a backend; None: nothing is missing, for now."""
        found = self.found(backend, search)
        if found.next_rate is not None or found.low is None:
            return found.next_rate
        for rate in (found.low, self.common_rate(backends, search)):
            if rate is not None and self.count(backend, rate) < search.repeats:
                return rate
        return None

    def next_backend(self, backends: list[str], search: RateSearch) -> str | None:
        """The next one to start: searches come first, because they decide the common rate."""
        searching = [one for one in backends if self.found(one, search).next_rate is not None]
        missing = [one for one in backends if self.wanted(one, backends, search) is not None]
        return next(iter(searching + missing), None)


class Clock:
    """Estimates whether the next step ends within the given seconds since the start of the command."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.begin, self.client_start_s = seconds, time.monotonic(), CLIENT_START_S

    @property
    def left(self) -> float:
        if self.seconds is None:
            return math.inf
        return self.seconds - (time.monotonic() - self.begin) - STOP_S

    def estimate_s(self, plan: Plan, rate: float) -> float:
        """Of a measurement. A server that cannot keep up with the rate takes longer than the arrivals."""
        return 1.5 * plan.num_prompts(rate) / rate + self.client_start_s

    def suffices_for(self, estimate_s: float) -> bool:
        return estimate_s <= self.left


def go_through(plan: Plan, run: Benchmark, measurements: Measurements) -> bool:
    """Measures until nothing is missing, or the time is over. Returns whether nothing is missing.

    Raises ValueError if the time does not suffice for one measurement.
    """
    clock, before = Clock(plan.seconds), measurements.total
    backends = plan.settings.backends
    while backend := measurements.next_backend(backends, plan.search):
        rate = measurements.wanted(backend, backends, plan.search)
        assert rate is not None
        if clock.suffices_for(START_S + clock.estimate_s(plan, rate)):
            serve_and_measure(plan, run, measurements, backend, clock)
        if measurements.wanted(backend, backends, plan.search) is None:
            continue
        if measurements.total == before:
            raise ValueError(
                f"seconds: {plan.seconds:g}, but a server's start and a measurement take longer: raise it, "
                f"or lower --num-prompts or --duration"
            )
        return False
    return True


def serve_and_measure(
    plan: Plan, run: Benchmark, measurements: Measurements, backend: str, clock: Clock
) -> None:
    """The wanted measurements of one backend, by one server, as long as there is time."""
    settings, name = plan.settings, run.engine.name
    launch = run.launch(backend, environment=run.engine.forgetting_environment())
    log, timeout_s = run.log(f"server-{backend}"), min(settings.start_timeout_s, clock.left)
    try:
        with ready_server(run.engine, launch, log, timeout_s, lambda: run.warm_up_prompts) as server:
            with status(name, "warming up") as tell:
                warm_up(run.engine, server.url, run.warm_up_prompts, settings.sampling, tell)
            while rate := measurements.wanted(backend, settings.backends, plan.search):
                if not clock.suffices_for(clock.estimate_s(plan, rate)):
                    return
                forget_prefixes(run.engine, server.url)
                if not measure(plan, run, measurements, server, rate, clock):
                    return
    except ServerTimeout:
        if timeout_s == settings.start_timeout_s:
            raise
        print(f"{name} with {backend}: the time is over, and the server is not ready", flush=True)


def measure(
    plan: Plan, run: Benchmark, measurements: Measurements, server: Server, rate: float, clock: Clock
) -> bool:
    """One measurement of a rate. Returns False if the time was over too early for one."""
    settings, backend = plan.settings, server.launch.name
    repeat = measurements.count(backend, rate)
    seed = seed_of(settings.seed, rate, repeat)
    workload = make_workload(
        plan.load.dataset,
        plan.num_prompts(rate),
        plan.load.output_len,
        run.model.folder,
        seed,
        plan.load.samples,
        settings.max_model_len,
    )
    who = f"{run.engine.name} with {backend}"
    print(f"{who}: {workload.num_prompts} prompts at {rate:g}/s, run {repeat + 1}", flush=True)
    name = f"client-{backend}-{rate:g}-{repeat}"
    client = new_client(
        settings, run.model, server.launch.port, workload, rate, seed, settings.results / f"{name}.json"
    )
    estimate_s = clock.estimate_s(plan, rate)
    timeout_s = min(max(CLIENT_TIMEOUT_S, estimate_s), clock.left)
    begin = time.monotonic()
    try:
        metrics = run_client(run.engine, client, settings.device, run.log(name), timeout_s)
    except ClientTimeout:
        server.raise_if_dead()
        if timeout_s < estimate_s:
            print(f"{who}: the time is over, and the client is not done", flush=True)
            return False
        metrics = not_done(workload.num_requests, timeout_s)
        value = f"the client was not done after {timeout_s:.0f} s"
    else:
        clock.client_start_s = max(time.monotonic() - begin - metrics.duration_s, 1.0) + 5
        value = f"{LIMITS[plan.limited]} {getattr(metrics, plan.limited):.1f} ms"
    server.raise_if_dead()
    measurements.add(backend, rate, metrics)
    print(f"{who}: {value} at {rate:g}/s; {state_of(measurements.found(backend, plan.search))}", flush=True)
    return True


def forget_prefixes(engine: Engine, url: str) -> None:
    """Raises RuntimeError if the server still holds requests after a while."""
    end = time.monotonic() + FORGET_TIMEOUT_S
    while not engine.forget_prefixes(url):
        if time.monotonic() > end:
            raise RuntimeError(f"{url}: the server does not forget its cached prefixes")
        time.sleep(0.2)


def state_of(found: Found) -> str:
    """Where a search stands, in words."""
    if found.low is None and found.high is None:
        return "the first rate is not decided"
    if found.low is None:
        return f"the limit is broken at {found.high:g}/s and above"
    if found.high is None:
        return f"the limit is kept up to {found.low:g}/s"
    return f"the highest rate is between {found.low:g} and {found.high:g}/s"


@dataclass(frozen=True)
class Report:
    """The tables and curves of what has been measured."""

    plan: Plan
    run: Benchmark
    measurements: Measurements

    @property
    def common_rate(self) -> float | None:
        return self.measurements.common_rate(self.plan.settings.backends, self.plan.search)

    def label(self, backend: str) -> str:
        return label(self.run.engine, backend, self.plan.settings.device)

    def load_name(self, rate: float) -> str:
        settings = self.plan.settings
        workload = self.run.workloads[0]
        at = describe(workload, rate, settings.sampling, settings.max_concurrency, settings.n_best)
        return at.replace(f"{workload.num_prompts} prompts", f"{self.plan.num_prompts(rate)} prompts", 1)

    def value_at(self, rate: float, repeats: list[Metrics]) -> str:
        """The limited time at a rate, or that its clients were not done."""
        if 2 * len(with_figures := done(repeats)) <= len(repeats):
            return f"{rate:g}/s, not done in time"
        return f"{rate:g}/s, {getattr(Row('', '', with_figures).metrics, self.plan.limited):.1f} ms"

    def highest_rates(self) -> str:
        """A table of what the searches found."""
        lines = []
        for backend in self.plan.settings.backends:
            found = self.measurements.found(backend, self.plan.search)
            rates = self.measurements.rates(backend)
            keeps, breaks = (
                self.value_at(rate, rates[rate]) if rate else "" for rate in (found.low, found.high)
            )
            state = "" if found.next_rate is None else f"next: {found.next_rate:g}/s"
            if found.next_rate is None and found.low is None:
                state = "no rate keeps the limit"
            if found.next_rate is None and found.high is None:
                state = "no rate breaks the limit"
            lines.append([self.label(backend), keeps, breaks, state])
        headers = ["backend", f"highest rate with {self.plan.limit}", "lowest rate above", "search"]
        return str(tabulate(lines, headers, tablefmt="pipe", disable_numparse=True))

    def rows(self) -> list[Row]:
        """The backends at the common rate, then each at its highest. Measurements without figures are left
        out.
        """
        search, common = self.plan.search, self.common_rate
        at_common, at_highest = [], []
        for backend in self.plan.settings.backends:
            found, rates = self.measurements.found(backend, search), self.measurements.rates(backend)
            if found.next_rate is not None or found.low is None or common is None:
                continue
            if at_rate := done(rates.get(common, [])):
                at_common.append(Row(self.label(backend), f"Common rate: {self.load_name(common)}", at_rate))
            at_highest.append(
                Row(
                    f"{self.label(backend)}, {found.low:g}/s",
                    f"Each at its highest rate: {self.run.workloads[0].description}",
                    done(rates[found.low]),
                )
            )
        return at_common + at_highest

    def curves(self) -> dict[str, dict[float, Metrics]]:
        """Of the backends and rates with figures."""
        curves = {
            self.label(backend): {
                rate: Row("", "", with_figures).metrics
                for rate, repeats in sorted(self.measurements.rates(backend).items())
                if (with_figures := done(repeats))
            }
            for backend in self.plan.settings.backends
        }
        return {backend: curve for backend, curve in curves.items() if curve}

    def write(self) -> str:
        """Writes all files, and returns the tables."""
        search, settings = self.plan.search, self.plan.settings
        title = f"{self.run.title}: {self.plan.limit}"
        note = "\n\n".join(filter(None, [self.run.note, self.highest_rates()]))
        described = self.run.described | {"search": asdict(search), "common_rate": self.common_rate}
        rows = self.rows()
        written = write_tables(settings.results, title, described, rows, note)
        try:
            from integration.rate_plot import plot_rates
        except ImportError:
            print("No plot: matplotlib is not installed here.")
        else:
            heading = f"{self.run.title}\n{self.run.workloads[0].description}"
            path = settings.results / "rates.png"
            limit = (self.plan.limited, search.limit)
            if curves := self.curves():
                written.append(plot_rates(path, heading, curves, limit, self.common_rate))
        for path in written:
            print(f"written: {path}", flush=True)
        return "\n\n".join(filter(None, [note, format_table(rows)]))


def check_settings(folder: Path, described: dict[str, Any]) -> None:
    """Writes what the measurements of a folder have in common. Raises ValueError if earlier ones differ."""
    path = folder / "settings.json"
    fixed = json.loads(json.dumps({name: described.get(name) for name in FIXED}, default=str))
    if not path.is_file():
        path.write_text(json.dumps(fixed, indent=2) + "\n", encoding="utf-8")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for name in FIXED:
        if fixed[name] != before.get(name):
            raise ValueError(
                f"results: {folder} has measurements with {name} {before.get(name)!r}, not {fixed[name]!r}: "
                f"choose another folder"
            )


def parse_arguments(arguments: list[str] | None = None) -> Plan:
    parser = new_parser(f"{__doc__}\n{datasets.__doc__}", "FOLDER")
    parser.add_argument(
        "--backends", nargs="+", required=True, help="as in python -m integration.serve_benchmark --help"
    )
    parser.add_argument("--dataset", default="sharegpt", help="see above; default: %(default)s")
    parser.add_argument(
        "--num-prompts",
        type=int,
        default=200,
        help="the fewest prompts of a measurement; it sends a multiple of this number; default: %(default)s",
    )
    parser.add_argument(
        "--duration",
        dest="duration_s",
        type=float,
        default=30.0,
        help="the shortest time in which the prompts of a measurement arrive, seconds; default: %(default)g",
    )
    parser.add_argument(
        "--output-len",
        default=RECORDED,
        help=f"tokens to generate: N, LOW-HIGH, or {RECORDED} (the default): as the data set says",
    )
    parser.add_argument("--samples", type=int, default=1, help="answers to each prompt; default: 1")
    parser.add_argument(
        "--limit", type=float, default=200.0, help="in ms; default: %(default)g, the paper's of P99 TTFT"
    )
    parser.add_argument(
        "--limit-of",
        dest="limited",
        choices=sorted(LIMITS),
        default="ttft_p99_ms",
        help="the limited time; default: %(default)s",
    )
    parser.add_argument(
        "--first-rate", type=float, default=4.0, help="prompts per second; default: %(default)g"
    )
    parser.add_argument(
        "--lowest-rate", type=float, default=0.25, help="the search ends there; default: %(default)g"
    )
    parser.add_argument(
        "--highest-rate", type=float, default=256.0, help="the search ends there; default: %(default)g"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        help="the search ends when a rate that breaks the limit is at most this part higher; default: "
        "%(default)g",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="measurements of a rate, an odd number; default: %(default)s"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="end this command within this time; the same command goes on; default: no limit",
    )
    add_serving_options(parser)
    given = parser.parse_args(arguments)
    if given.results is None:
        parser.error("--results is missing: the folder where the same command goes on")
    check_serving_options(parser, given)
    try:
        search = RateSearch(
            given.limit,
            given.first_rate,
            given.lowest_rate,
            given.highest_rate,
            given.tolerance,
            given.repeats,
        )
        output_len = None if given.output_len == RECORDED else given.output_len
        load = Load(
            dataset=given.dataset, num_prompts=given.num_prompts, output_len=output_len, samples=given.samples
        )
        settings = serving_settings(given, [load], given.results.resolve())
    except ValidationError as error:
        parser.error(refusal(error))
    except ValueError as error:
        parser.error(str(error))
    return Plan(settings, search, given.duration_s, given.seconds, given.limited)


def find(plan: Plan) -> bool:
    """Goes on with a search, and reports. Returns whether it has ended."""
    run = Benchmark.make(plan.settings)
    check_settings(plan.settings.results, run.described | {"duration_s": plan.duration_s})
    measurements = Measurements.read(plan.settings.results / "measurements", plan.limited)
    try:
        is_complete = go_through(plan, run, measurements)
    finally:
        if any(measurements.of_backends.values()):
            print("\n" + Report(plan, run, measurements).write(), flush=True)
    if not is_complete:
        print("\nNot all is measured: the same command goes on.", flush=True)
    return is_complete


def run() -> bool:
    if not find(parse_arguments()):
        sys.exit(GO_ON)
    return True


def main() -> None:
    exit_with(run)


if __name__ == "__main__":
    main()
