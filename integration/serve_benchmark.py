"""Serve a model through an engine with one attention backend after another, and measure each with the engine's own client.

    python -m integration.serve_benchmark --engine vllm --backends attn_backend stock --model smollm2 --dataset sharegpt --num-prompts 32 --output-len 64
    python -m integration.serve_benchmark --engine vllm --backends attn_backend FLASH_ATTN TRITON_ATTN --model llama-3.1-8b --request-rate 16 --num-prompts 256
    python -m integration.serve_benchmark --engine sglang --backends attn_backend triton --model llama-3.1-8b \\
        --dataset sharegpt prefix:4096+256 --num-prompts 300 128 --output-len recorded 128 --request-rate 16 40
    python -m integration.serve_benchmark --engine vllm --backends attn_backend attn_backend-no-cascade FLASH_ATTN TRITON_ATTN --model llama-3.1-8b \\
        --dataset prefix:4096+256 sharegpt sharegpt --num-prompts 128 96 24 --output-len 128 recorded recorded --request-rate 40 8 2 --samples 1 4 16
    python -m integration.serve_benchmark --engine vllm --backends attn_backend attn_backend-stock-sampler --model llama-3.1-8b --request-rate 16 \\
        --num-prompts 256 --sampling temperature=0.8,top_p=0.95,top_k=40

Several data sets are sent to the same server one after another. With --samples N each prompt is answered N times, as parallel sampling (`n`) does; it is
sent N times for that, see integration/workload.py. --num-prompts and --request-rate count prompts, not answers.

With --side-by-side all servers are started at once, on one device, and each load is sent to one after another before the next load has its turn: starting
engines is most of a run, and a run that is cut short has compared what it has measured. Each server must then be told (--server-args) to take its share of
the memory; those that wait for their turn do nothing. Before anything is measured every server answers a few requests of every load (integration/warm_up.py),
and each load, and each of its --repeats, begins with the next backend: none is always the first or the last.

Ours is called `attn_backend` in both engines; `attn_backend-no-cascade` is ours, told by ATTN_BACKEND_CASCADE=0 to read every request's pages for itself;
`attn_backend-stock-sampler` is ours, told by ATTN_BACKEND_SAMPLER=0 to leave sampling to the engine; `stock` is what the engine picks by itself; any other
name is given to the engine as it is. Prefix caching is on in both engines, as it is by default. Answers are greedy, or sampled with --sampling, and then
every request brings a seed of its own. --check-seeds, side by side, then asks each server for a few answers one at a time, again, all at once and with
other seeds, and says how many are equal (integration/compare_sampling.py; it wants --server-args that turn prefix caching off). All inputs may be local
paths, so it runs offline. It ends with a table; the same as JSON and as a plot, and all logs, are in --results.
`python -m integration.merge_reports` puts several runs into one report.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from integration.client import ClientError, RunningClient, run_client
from integration.command_line import exit_with, new_parser, parse_left_out, results_folder
from integration.compare_sampling import check_seeds
from integration.device import device_name, package_versions
from integration.engines import ENGINES, Client, Engine, Launch, Metrics, Sampling
from integration.engines.base import OURS_NO_CASCADE, OURS_STOCK_SAMPLER, STOCK
from integration.model import Model, resolve_model
from integration.report import Row, format_table, write_report, write_tables
from integration.server import Server, ServerError, free_port, print_tail, running_server
from integration.warm_up import wait_for_turn, warm_up, warm_up_prompts
from integration.workload import Workload, make_workload

CLIENT_TIMEOUT_S = 3600
CLIENTS_AHEAD = 8  # side by side: clients that have been started before their turn. Their preparations take longer than many a load
RECORDED = "recorded"


@dataclass(frozen=True)
class Load:
    """What a client sends, how fast (prompts per second), and how many answers each prompt gets."""

    dataset: str = "sharegpt"
    num_prompts: int = 32
    output_len: str | None = None
    request_rate: float = float("inf")
    samples: int = 1


@dataclass(frozen=True)
class Settings:
    """Everything that a benchmark depends on; see --help for what each means."""

    engine: str
    backends: list[str]
    model: str
    results: Path
    loads: list[Load]
    max_concurrency: int | None = None
    repeats: int = 1
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    cuda_graphs: bool = True
    max_model_len: int = 2048
    max_num_seqs: int = 8
    start_timeout_s: float = 900
    python: str = sys.executable
    server_arguments: list[str] = field(default_factory=list)
    client_arguments: list[str] = field(default_factory=list)
    sampling: Sampling | None = None
    side_by_side: bool = False
    time_limit_s: float | None = None
    check_seeds: bool = False
    turn: Path | None = None
    left_out: tuple[tuple[str, int], ...] = ()  # (backend, index of a load) that are not measured


def label(engine: Engine, backend: str, device: str) -> str:
    """What reports call a backend."""
    if backend == OURS_NO_CASCADE:
        return "attn_backend, cascade off"
    if backend == OURS_STOCK_SAMPLER:
        return "attn_backend, the engine's sampler"
    return engine.stock_backend(device) if backend == STOCK else backend


def describe(workload: Workload, request_rate: float, sampling: Sampling | None = None, max_concurrency: int | None = None) -> str:
    """What reports call a load."""
    together = "at once" if max_concurrency is None else f"{max_concurrency} at a time"
    speed = together if request_rate == float("inf") else f"at {request_rate:g}/s"
    answers = f", {workload.samples} answers to each" if workload.samples > 1 else ""
    return f"{workload.description}; {workload.num_prompts} prompts {speed}{answers}{f'; {sampling}, a seed for each request' if sampling else ''}"


@dataclass(frozen=True)
class Benchmark:
    """What the two ways to measure have in common: what is sent, and the report."""

    settings: Settings
    engine: Engine
    model: Model
    workloads: list[Workload]
    described: dict[str, Any]
    title: str
    measured: dict[tuple[int, int], list[Metrics]] = field(default_factory=dict)  # of (index of a load, index of a backend), one for each repeat

    @classmethod
    def make(cls, settings: Settings) -> Benchmark:
        engine = ENGINES[settings.engine]
        settings.results.mkdir(parents=True, exist_ok=True)
        model = resolve_model(settings.model, settings.python)
        workloads = [
            make_workload(load.dataset, load.num_prompts, load.output_len, model.folder, settings.seed, load.samples, settings.max_model_len)
            for load in settings.loads
        ]
        machine = {"device_name": device_name(settings.device), "versions": package_versions(settings.python)}
        loads = [{**asdict(load), "request_rate": str(load.request_rate)} for load in settings.loads]  # JSON has no infinity
        limit = {"time_limit_s": str(settings.time_limit_s), "turn": str(settings.turn)}
        described = {**asdict(settings), "results": str(settings.results), "loads": loads, **limit, **machine}
        return cls(settings, engine, model, workloads, described, f"{engine.name}, {model.name}, {machine['device_name']}")

    def launch(self, backend: str, cache: Path | None = None) -> Launch:
        settings = self.settings
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
            cache=cache,
        )

    def log(self, name: str) -> Path:
        return self.settings.results / f"{name}.log"

    def load_name(self, index: int) -> str:
        return describe(self.workloads[index], self.settings.loads[index].request_rate, self.settings.sampling, self.settings.max_concurrency)

    def client(self, launch: Launch, index: int, repeat: int, waits: bool = False) -> Client:
        """Of load number `index`. `waits`: until it is released."""
        settings = self.settings
        name = f"client-{launch.backend}-{index}-{repeat}"
        return Client(
            settings.python,
            self.model,
            launch.port,
            self.workloads[index],
            settings.loads[index].request_rate,
            settings.max_concurrency,
            settings.seed + 1000 * index + repeat,  # other prompts in each load and run, or the prefix cache would answer them
            settings.results / f"{name}.json",
            settings.client_arguments,
            settings.sampling,
            settings.results / f"{name}.go" if waits else None,
        )

    def announce(self, backend: str, index: int, repeat: int) -> None:
        print(f"{self.engine.name} with {backend}: {self.load_name(index)}, run {repeat + 1} of {self.settings.repeats}", flush=True)

    @property
    def rows(self) -> list[Row]:
        """The report's, load after load, in the order of the command line."""
        labels = [label(self.engine, backend, self.settings.device) for backend in self.settings.backends]
        return [Row(labels[backend], self.load_name(load), repeats) for (load, backend), repeats in sorted(self.measured.items())]

    def add(self, backend: str, index: int, metrics: Metrics) -> None:
        """Add a run of the client to the report. Its tables are written at once: a run that is cut short leaves what it has measured."""
        self.measured.setdefault((index, self.settings.backends.index(backend)), []).append(metrics)
        write_tables(self.settings.results, self.title, self.described, self.rows)

    def finish(self) -> list[Row]:
        for path in write_report(self.settings.results, self.title, self.described, self.rows):
            print(f"written: {path}", flush=True)
        return self.rows


def benchmark(settings: Settings, when_ready: Callable[[str, str], None] | None = None) -> list[Row]:
    """Measure each backend of `settings`, write the report, return its rows. `when_ready(backend, url)` is called when a server first answers."""
    run = Benchmark.make(settings)
    for backend in settings.backends:
        launch = run.launch(backend)
        with running_server(run.engine, launch, run.log(f"server-{backend}"), settings.start_timeout_s) as url:
            if when_ready:
                when_ready(backend, url)
            for index, repeat in product(range(len(settings.loads)), range(settings.repeats)):
                run.add(backend, index, measure(run, launch, index, repeat))
    return run.finish()


def measure(run: Benchmark, launch: Launch, index: int, repeat: int) -> Metrics:
    """Run `repeat` of load number `index`: one run of the engine's client against a running server."""
    run.announce(launch.backend, index, repeat)
    begin = time.monotonic()
    log = run.log(f"client-{launch.backend}-{index}-{repeat}")
    metrics = run_client(run.engine, run.client(launch, index, repeat), run.settings.device, log, CLIENT_TIMEOUT_S)
    print(f"{run.engine.name} with {launch.backend}: done in {time.monotonic() - begin:.0f} s", flush=True)
    return metrics


def benchmark_side_by_side(settings: Settings) -> list[Row]:
    """Like benchmark(), with all servers running on one device and load after load. A backend that fails is left out from there on."""
    run, begin = Benchmark.make(settings), time.monotonic()
    failed: set[str] = set()
    with ExitStack() as stack:
        servers = {}
        for backend in settings.backends:
            server = Server(run.engine, run.launch(backend, settings.results / f"cache-{backend}"), run.log(f"server-{backend}"))
            stack.callback(server.stop)
            servers[backend] = server
        stack.callback(ask_all_to_stop, servers.values())
        turns = side_by_side_turns(settings)
        waiting: deque[RunningClient] = deque()
        stack.callback(stop_all, waiting)

        def prepare() -> None:
            number = len(waiting) + done
            if number < len(turns):
                index, backend, repeat = turns[number]
                client = run.client(servers[backend].launch, index, repeat, waits=True)
                waiting.append(RunningClient(run.engine, client, settings.device, run.log(f"client-{backend}-{index}-{repeat}")))

        done = 0
        for _ in range(CLIENTS_AHEAD):
            prepare()
        prompts = [warm_up_prompts(workload, settings.seed - 1 - index) for index, workload in enumerate(run.workloads)]

        def leave_out(backend: str, error: BaseException) -> None:
            print_tail(servers[backend].log)
            failed.add(backend)
            print(f"left out: {error}", flush=True)

        for backend, server in servers.items():
            try:
                server.wait_until_ready(settings.start_timeout_s)
            except ServerError as error:
                leave_out(backend, error)
        with ThreadPoolExecutor(len(servers)) as pool:  # all of them share the device: this is not measured
            ready = {backend: server.url for backend, server in servers.items() if backend not in failed}
            warmed = {backend: pool.submit(warm_up, run.engine, url, prompts, settings.sampling) for backend, url in ready.items()}
        for backend, outcome in warmed.items():
            if reason := outcome.exception():
                leave_out(backend, reason)
        print(f"{run.engine.name}: all have been warmed up {time.monotonic() - begin:.0f} s after the start", flush=True)
        wait_for_turn(settings.turn)
        for number, (index, backend, repeat) in enumerate(turns):
            if settings.time_limit_s is not None and time.monotonic() - begin > settings.time_limit_s:
                for missed, of_backend, _ in turns[number:]:
                    print(f"not measured: {of_backend}, {run.load_name(missed)}", flush=True)
                break
            client = waiting.popleft()
            done += 1
            if backend in failed:
                client.stop()
                prepare()
                print(f"not measured: {backend}, {run.load_name(index)}", flush=True)
                continue
            run.announce(backend, index, repeat)
            client.release()
            prepare()
            try:
                run.add(backend, index, client.finish(CLIENT_TIMEOUT_S))
                servers[backend].raise_if_dead()
            except (ClientError, ServerError) as error:
                leave_out(backend, error)
            print(f"{run.engine.name} with {backend}: done {time.monotonic() - begin:.0f} s after the start", flush=True)
        for backend, url in ready.items():
            if settings.check_seeds and settings.sampling and backend not in failed:
                check_seeds(run.engine, backend, url, [tokens for tokens, _ in prompts[0]], settings.sampling, settings.results)
    if not run.measured:
        raise ServerError("no backend was measured (see above)")
    rows = run.finish()
    if failed:
        raise ServerError(f"not measured, or not to the end: {', '.join(sorted(failed))}")
    return rows


def side_by_side_turns(settings: Settings) -> list[tuple[int, str, int]]:
    """(index of a load, backend, repeat) in the order in which they are measured."""
    turns = []
    for number, (index, repeat) in enumerate(product(range(len(settings.loads)), range(settings.repeats))):
        first = number % len(settings.backends)
        backends = settings.backends[first:] + settings.backends[:first]
        turns += [(index, backend, repeat) for backend in backends if (backend, index) not in settings.left_out]
    return turns


def ask_all_to_stop(servers: Iterable[Server]) -> None:
    for server in servers:
        server.ask_to_stop()


def stop_all(clients: Iterable[RunningClient]) -> None:
    for client in clients:
        client.stop()


def parse_loads(datasets: list[str], num_prompts: list[int], output_lens: list[str], request_rates: list[float], samples: list[int]) -> list[Load]:
    """One load for each data set; an option that is given once holds for all of them. Raises ValueError when the numbers do not match."""
    options: dict[str, list[Any]] = {"num-prompts": num_prompts, "output-len": output_lens, "request-rate": request_rates, "samples": samples}
    for name, values in options.items():
        if len(values) not in (1, len(datasets)):
            raise ValueError(f"{name}: {len(values)} values, must be 1 or one for each of the {len(datasets)} data sets")
    columns = [values * len(datasets) if len(values) == 1 else values for values in options.values()]
    lines = zip(datasets, *columns, strict=True)
    return [Load(dataset, number, None if length == RECORDED else length, rate, answers) for dataset, number, length, rate, answers in lines]


def parse_arguments(arguments: list[str] | None = None) -> Settings:
    parser = new_parser(__doc__, "ENGINE")
    parser.add_argument("--backends", nargs="+", required=True, help="attn_backend (ours), its variants (see above), stock, or the engine's names")
    parser.add_argument("--dataset", nargs="+", default=["sharegpt"], help="sharegpt, FILE.json, uniform:LOW-HIGH, prefix:PREFIX+SUFFIX, lengths:FILE.csv")
    parser.add_argument("--num-prompts", nargs="+", type=int, default=[32], help="one number, or one for each data set")
    parser.add_argument("--output-len", nargs="+", default=[RECORDED], help=f"tokens to generate: N, LOW-HIGH, or {RECORDED}: what the data set says")
    parser.add_argument("--request-rate", nargs="+", type=float, default=[float("inf")], help="prompts per second, Poisson; default: all at once")
    parser.add_argument("--samples", nargs="+", type=int, default=[1], help="answers to each prompt, one number or one for each data set")
    parser.add_argument("--sampling", type=Sampling.parse, help="e.g. temperature=0.8,top_p=0.95,top_k=40; also min_p; default: greedy")
    parser.add_argument("--max-concurrency", type=int, help="most requests in flight")
    parser.add_argument("--repeats", type=int, default=1, help="runs of the client for each server; the table shows medians")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, help="default: 2048 on a CPU, 8192 on a GPU")
    parser.add_argument("--max-num-seqs", type=int, help="default: 8 on a CPU, 256 on a GPU")
    parser.add_argument("--client-args", type=shlex.split, default=[], help="more arguments for the client")
    parser.add_argument("--side-by-side", action="store_true", help="start all servers at once, then load after load, see above")
    parser.add_argument("--time-limit", type=float, help="side by side: begin no load when so many seconds have passed")
    parser.add_argument("--check-seeds", action="store_true", help="side by side, with --sampling: see above")
    parser.add_argument("--turn", type=Path, metavar="FOLDER", help="side by side: when all are warm leave FOLDER/ready, and begin when FOLDER/go is there")
    parser.add_argument("--leave-out", nargs="+", default=[], metavar="BACKEND:N", help="side by side: do not send load number N, from 1, to this backend")
    given = parser.parse_args(arguments)
    gpu = given.device == "cuda"
    return Settings(
        engine=given.engine,
        backends=given.backends,
        model=given.model,
        results=results_folder(given, given.engine),
        loads=parse_loads(given.dataset, given.num_prompts, given.output_len, given.request_rate, given.samples),
        max_concurrency=given.max_concurrency,
        repeats=given.repeats,
        seed=given.seed,
        device=given.device,
        dtype=given.dtype,
        cuda_graphs=not given.no_cuda_graphs,
        max_model_len=given.max_model_len or (8192 if gpu else 2048),
        max_num_seqs=given.max_num_seqs or (256 if gpu else 8),
        start_timeout_s=given.start_timeout,
        python=given.python,
        server_arguments=given.server_args,
        client_arguments=given.client_args,
        sampling=given.sampling,
        side_by_side=given.side_by_side,
        time_limit_s=given.time_limit,
        check_seeds=given.check_seeds,
        turn=given.turn,
        left_out=parse_left_out(given.leave_out, given.backends, len(given.dataset)),
    )


def run() -> bool:
    settings = parse_arguments()
    rows = benchmark_side_by_side(settings) if settings.side_by_side else benchmark(settings)
    print(f"\n{format_table(rows)}")
    return True


def main() -> None:
    exit_with(run)


if __name__ == "__main__":
    main()
