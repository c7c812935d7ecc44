"""A serving benchmark: the requests and servers, one server after another, and the report.

`integration.serve_benchmark` is its command line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from attn_backend.jit.progress import status
from attn_backend.machine import FIGURES_OF_A_CPU, serving_choice
from integration.arrivals import of_requests, poisson
from integration.client import run_client
from integration.datasets import make_workload
from integration.device import device_name, package_versions
from integration.engines import ENGINES, Client, Engine, Launch, Metrics, Sampling
from integration.engines.base import ON_OURS, OURS_NO_CASCADE, OURS_STOCK_SAMPLER, STOCK, engines_name
from integration.model import Model, resolve_model
from integration.report import write_report, write_tables
from integration.results import Row
from integration.server import free_port, ready_server
from integration.warm_up import Prompts, warm_up, warm_up_prompts
from integration.workload import Workload

CLIENT_TIMEOUT_S = 3600


@checked_dataclass(frozen=True)
class Load:
    """A data set, its rate in prompts per second (None: its recorded arrivals), and the number of answers to
    each prompt.
    """

    dataset: str = "sharegpt"
    num_prompts: PositiveInt = 32
    output_len: str | None = None
    request_rate: PositiveFloat | None = float("inf")
    samples: PositiveInt = 1


@checked_dataclass(frozen=True)
class Settings:
    """All parameters of a benchmark; `python -m integration.serve_benchmark --help` explains each.

    Raises:
        pydantic.ValidationError: names what is wrong.
    """

    engine: str
    backends: list[str]
    model: str
    results: Path
    loads: list[Load]
    max_concurrency: PositiveInt | None = None
    repeats: PositiveInt = 1
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    cuda_graphs: bool = True
    max_model_len: PositiveInt = 2048
    max_num_seqs: PositiveInt = 8
    tensor_parallel_size: PositiveInt = 1
    start_timeout_s: PositiveFloat = 900
    python: str = sys.executable
    server_arguments: list[str] = field(default_factory=list)
    client_arguments: list[str] = field(default_factory=list)
    sampling: Sampling | None = None
    n_best: bool = False
    side_by_side: bool = False
    time_limit_s: float | None = None
    check_seeds: bool = False
    turn: Path | None = None
    left_out: tuple[tuple[str, int], ...] = ()  # (backend, index of a load) that are not measured


def label(engine: Engine, backend: str, device: str) -> str:
    """The name of a backend in reports."""
    backend, _, kv_cache_dtype = backend.partition("@")
    if kv_cache_dtype:
        return f"{label(engine, backend, device)}, {kv_cache_dtype} cache"
    if backend == OURS_NO_CASCADE:
        return "attn_backend, cascade off"
    if backend == OURS_STOCK_SAMPLER:
        return "attn_backend, the engine's sampler"
    if backend.endswith(ON_OURS):
        return f"{engines_name(backend)} on attn_backend"
    return engine.stock_backend(device) if backend == STOCK else backend


def describe(
    workload: Workload,
    request_rate: float | None,
    sampling: Sampling | None = None,
    max_concurrency: int | None = None,
    n_best: bool = False,
) -> str:
    """The name of a load in reports."""
    if request_rate is None:
        speed = "as they arrived"
    elif request_rate == float("inf"):
        speed = "at once" if max_concurrency is None else f"{max_concurrency} at a time"
    else:
        speed = f"at {request_rate:g}/s"
    asked = "by one request with n" if n_best else "to each"
    answers = f", {workload.samples} answers {asked}" if workload.samples > 1 else ""
    return (
        f"{workload.description}; {workload.num_prompts} prompts "
        f"{speed}{answers}{f'; {sampling}, a seed for each request' if sampling else ''}"
    )


def new_client(
    settings: Settings,
    model: Model,
    port: int,
    workload: Workload,
    request_rate: float | None,
    seed: int,
    result: Path,
    wait_for: Path | None = None,
) -> Client:
    """A client of a server at `port`. Copies of a prompt that become one request arrive together."""
    arrivals = None
    n_best = settings.n_best and workload.samples > 1
    if request_rate is None:
        arrivals = of_requests(workload.arrivals, workload.samples)
    elif n_best and request_rate != float("inf"):
        arrivals = of_requests(poisson(workload.num_prompts, request_rate, seed), workload.samples)
    return Client(
        settings.python,
        model,
        port,
        workload,
        float("inf") if request_rate is None else request_rate,
        settings.max_concurrency,
        seed,
        result,
        settings.client_arguments,
        settings.sampling,
        wait_for,
        arrivals,
        n_best,
    )


def note_on(settings: Settings) -> str:
    """A note above the tables; empty on a GPU."""
    return f"{serving_choice(settings.dtype)} {FIGURES_OF_A_CPU}" if settings.device == "cpu" else ""


@dataclass(frozen=True)
class Benchmark:
    """Code shared by both ways to measure: the loads, and the report."""

    settings: Settings
    engine: Engine
    model: Model
    described: dict[str, Any]
    title: str
    note: str  # above the tables
    # of (index of a load, index of a backend), one for each repeat
    measured: dict[tuple[int, int], list[Metrics]] = field(default_factory=dict)

    @classmethod
    def make(cls, settings: Settings) -> Benchmark:
        engine = ENGINES[settings.engine]
        settings.results.mkdir(parents=True, exist_ok=True)
        model = resolve_model(settings.model, settings.python)
        machine = {"device_name": device_name(settings.device), "versions": package_versions(settings.python)}
        # JSON has no infinity
        loads = [{**asdict(load), "request_rate": str(load.request_rate)} for load in settings.loads]
        limit = {"time_limit_s": str(settings.time_limit_s), "turn": str(settings.turn)}
        described = {**asdict(settings), "results": str(settings.results), "loads": loads, **limit, **machine}
        gpus = "" if settings.tensor_parallel_size == 1 else f"{settings.tensor_parallel_size} x "
        title = f"{engine.name}, {model.name}, {gpus}{machine['device_name']}"
        run = cls(settings, engine, model, described, title, note_on(settings))
        for backend in settings.backends:
            # an engine refuses a bad name before another backend is measured
            engine.server_command(run.launch(backend))
        return run

    @cached_property
    def workloads(self) -> list[Workload]:
        settings = self.settings
        print(f"{self.engine.name}: the requests are chosen", flush=True)
        with status(self.engine.name, "the requests are chosen"):
            return [
                make_workload(
                    load.dataset,
                    load.num_prompts,
                    load.output_len,
                    self.model.folder,
                    settings.seed,
                    load.samples,
                    settings.max_model_len,
                )
                for load in settings.loads
            ]

    @cached_property
    def warm_up_prompts(self) -> list[Prompts]:
        """The first prompts of each load. Measured runs use other prompts."""
        return [
            warm_up_prompts(workload, self.settings.seed - 1 - index)
            for index, workload in enumerate(self.workloads)
        ]

    def launch(
        self, backend: str, cache: Path | None = None, environment: dict[str, str] | None = None
    ) -> Launch:
        settings = self.settings
        backend, _, kv_cache_dtype = backend.partition("@")
        return Launch(
            settings.python,
            self.model,
            backend,
            settings.device,
            free_port(),
            settings.dtype,
            settings.cuda_graphs,
            settings.max_model_len,
            settings.max_num_seqs,
            settings.server_arguments,
            tensor_parallel_size=settings.tensor_parallel_size,
            kv_cache_dtype=kv_cache_dtype or None,
            environment=environment or {},
            cache=cache,
        )

    def log(self, name: str) -> Path:
        return self.settings.results / f"{name}.log"

    def load_name(self, index: int) -> str:
        return describe(
            self.workloads[index],
            self.settings.loads[index].request_rate,
            self.settings.sampling,
            self.settings.max_concurrency,
            self.settings.n_best,
        )

    def client(self, launch: Launch, index: int, repeat: int, waits: bool = False) -> Client:
        """The client of load number `index`. `waits`: it waits until it is released."""
        settings = self.settings
        name = f"client-{launch.name}-{index}-{repeat}"
        # different prompts in each load and run, or the prefix cache would answer them
        seed = settings.seed + 1000 * index + repeat
        return new_client(
            settings,
            self.model,
            launch.port,
            self.workloads[index],
            settings.loads[index].request_rate,
            seed,
            settings.results / f"{name}.json",
            settings.results / f"{name}.go" if waits else None,
        )

    def announce(self, backend: str, index: int, repeat: int) -> None:
        print(
            f"{self.engine.name} with {backend}: {self.load_name(index)}, run {repeat + 1} of "
            f"{self.settings.repeats}",
            flush=True,
        )

    @property
    def rows(self) -> list[Row]:
        """The rows of the report, load after load, in the order of the command line."""
        labels = [label(self.engine, backend, self.settings.device) for backend in self.settings.backends]
        return [
            Row(labels[backend], self.load_name(load), repeats)
            for (load, backend), repeats in sorted(self.measured.items())
        ]

    def add(self, backend: str, index: int, metrics: Metrics) -> None:
        """Add a run of the client to the report.

        Writes its tables at once, so that an interrupted run keeps its results.
        """
        self.measured.setdefault((index, self.settings.backends.index(backend)), []).append(metrics)
        write_tables(self.settings.results, self.title, self.described, self.rows, self.note)

    def finish(self) -> list[Row]:
        for path in write_report(self.settings.results, self.title, self.described, self.rows, self.note):
            print(f"written: {path}", flush=True)
        return self.rows


def benchmark(settings: Settings, when_ready: Callable[[str, str], None] | None = None) -> list[Row]:
    """Measure each backend of `settings`, write the report, return its rows.

    `when_ready(backend, url)` is called when a server first answers.
    """
    run = Benchmark.make(settings)
    for backend in settings.backends:
        launch = run.launch(backend)
        # the requests are selected while the first server starts, which takes seconds
        with ready_server(
            run.engine,
            launch,
            run.log(f"server-{backend}"),
            settings.start_timeout_s,
            lambda: run.warm_up_prompts,
        ) as server:
            if when_ready:
                when_ready(backend, server.url)
            prompts = run.warm_up_prompts
            print(
                f"{run.engine.name} with {backend}: {sum(map(len, prompts))} requests that do not count",
                flush=True,
            )
            with status(run.engine.name, "warming up") as tell:
                # otherwise the first backend would also pay for the others
                warm_up(run.engine, server.url, prompts, settings.sampling, tell)
            for index, repeat in product(range(len(settings.loads)), range(settings.repeats)):
                run.add(backend, index, measure(run, launch, index, repeat))
    return run.finish()


def measure(run: Benchmark, launch: Launch, index: int, repeat: int) -> Metrics:
    """Run `repeat` of load number `index`: one run of the engine's client against a running server."""
    run.announce(launch.name, index, repeat)
    begin = time.monotonic()
    log = run.log(f"client-{launch.name}-{index}-{repeat}")
    metrics = run_client(
        run.engine, run.client(launch, index, repeat), run.settings.device, log, CLIENT_TIMEOUT_S
    )
    print(f"{run.engine.name} with {launch.name}: done in {time.monotonic() - begin:.0f} s", flush=True)
    return metrics
