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

Ours is called `attn_backend` in both engines; `attn_backend-no-cascade` is ours, told by ATTN_BACKEND_CASCADE=0 to read every request's pages for itself;
`attn_backend-stock-sampler` is ours, told by ATTN_BACKEND_SAMPLER=0 to leave sampling to the engine; `stock` is what the engine picks by itself; any other
name is given to the engine as it is. Prefix caching is on in both engines, as it is by default. Answers are greedy, or sampled with --sampling, and then
every request brings a seed of its own. All inputs may be local paths, so it runs offline. It ends with a table; the same as JSON and as a plot, and all logs,
are in --results.
`python -m integration.merge_reports` puts several runs into one report.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from integration.client import ClientError, run_client
from integration.device import device_name, find_device, package_versions
from integration.engines import ENGINES, Client, Engine, Launch, Metrics, Sampling
from integration.engines.base import OURS_NO_CASCADE, OURS_STOCK_SAMPLER, STOCK
from integration.model import REPOSITORY, resolve_model
from integration.packages import DownloadError
from integration.report import Row, format_table, write_report, write_tables
from integration.server import ServerError, free_port, running_server, stop_on_signals
from integration.workload import Workload, make_workload

CLIENT_TIMEOUT_S = 3600
RECORDED = "recorded"
KNOWN_ERRORS = (ServerError, ClientError, DownloadError, ValueError, FileNotFoundError, RuntimeError)


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


def label(engine: Engine, backend: str, device: str) -> str:
    """What reports call a backend."""
    if backend == OURS_NO_CASCADE:
        return "attn_backend, cascade off"
    if backend == OURS_STOCK_SAMPLER:
        return "attn_backend, the engine's sampler"
    return engine.stock_backend(device) if backend == STOCK else backend


def describe(workload: Workload, request_rate: float, sampling: Sampling | None = None) -> str:
    """What reports call a load."""
    speed = "at once" if request_rate == float("inf") else f"at {request_rate:g}/s"
    answers = f", {workload.samples} answers to each" if workload.samples > 1 else ""
    return f"{workload.description}; {workload.num_prompts} prompts {speed}{answers}{f'; {sampling}, a seed for each request' if sampling else ''}"


def benchmark(settings: Settings, when_ready: Callable[[str, str], None] | None = None) -> list[Row]:
    """Measure each backend of `settings`, write the report, return its rows. `when_ready(backend, url)` is called when a server first answers."""
    engine = ENGINES[settings.engine]
    settings.results.mkdir(parents=True, exist_ok=True)
    model = resolve_model(settings.model, settings.python)
    workloads = [
        make_workload(load.dataset, load.num_prompts, load.output_len, model.folder, settings.seed, load.samples, settings.max_model_len)
        for load in settings.loads
    ]
    machine = {"device_name": device_name(settings.device), "versions": package_versions(settings.python)}
    loads = [{**asdict(load), "request_rate": str(load.request_rate)} for load in settings.loads]  # JSON has no infinity
    described = {**asdict(settings), "results": str(settings.results), "loads": loads, **machine}
    title = f"{engine.name}, {model.name}, {machine['device_name']}"
    rows: list[Row] = []
    for backend in settings.backends:
        launch = Launch(
            settings.python,
            model,
            backend,
            settings.device,
            free_port(),
            settings.dtype,
            settings.cuda_graphs,
            settings.max_model_len,
            settings.max_num_seqs,
            settings.server_arguments,
        )
        with running_server(engine, launch, settings.results / f"server-{backend}.log", settings.start_timeout_s) as url:
            if when_ready:
                when_ready(backend, url)
            for index, (load, workload) in enumerate(zip(settings.loads, workloads, strict=True)):
                repeats = [measure(settings, engine, launch, load, workload, index, repeat) for repeat in range(settings.repeats)]
                rows.append(Row(label(engine, backend, settings.device), describe(workload, load.request_rate, settings.sampling), repeats))
                write_tables(settings.results, title, described, rows)  # a run that is cut short leaves what it has measured
    for path in write_report(settings.results, title, described, rows):
        print(f"written: {path}", flush=True)
    return rows


def measure(settings: Settings, engine: Engine, launch: Launch, load: Load, workload: Workload, index: int, repeat: int) -> Metrics:
    """Run `repeat` of load number `index`: one run of the engine's client against a running server."""
    name = f"{launch.backend}-{index}-{repeat}"
    described = describe(workload, load.request_rate, settings.sampling)
    print(f"{engine.name} with {launch.backend}: {described}, run {repeat + 1} of {settings.repeats}", flush=True)
    client = Client(
        settings.python,
        launch.model,
        launch.port,
        workload,
        load.request_rate,
        settings.max_concurrency,
        settings.seed + 1000 * index + repeat,  # other prompts in each load and run, or the prefix cache would answer them
        settings.results / f"client-{name}.json",
        settings.client_arguments,
        settings.sampling,
    )
    begin = time.monotonic()
    metrics = run_client(engine, client, settings.device, settings.results / f"client-{name}.log", CLIENT_TIMEOUT_S)
    print(f"{engine.name} with {launch.backend}: done in {time.monotonic() - begin:.0f} s", flush=True)
    return metrics


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--backends", nargs="+", required=True, help="attn_backend (ours), its variants (see above), stock, or the engine's names")
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder, or a name in integration/models; without weights in the folder they are random")
    parser.add_argument("--dataset", nargs="+", default=["sharegpt"], help="sharegpt, FILE.json, uniform:LOW-HIGH, prefix:PREFIX+SUFFIX, lengths:FILE.csv")
    parser.add_argument("--num-prompts", nargs="+", type=int, default=[32], help="one number, or one for each data set")
    parser.add_argument("--output-len", nargs="+", default=[RECORDED], help=f"tokens to generate: N, LOW-HIGH, or {RECORDED}: what the data set says")
    parser.add_argument("--request-rate", nargs="+", type=float, default=[float("inf")], help="prompts per second, Poisson; default: all at once")
    parser.add_argument("--samples", nargs="+", type=int, default=[1], help="answers to each prompt, one number or one for each data set")
    parser.add_argument("--sampling", type=Sampling.parse, help="e.g. temperature=0.8,top_p=0.95,top_k=40; also min_p; default: greedy")
    parser.add_argument("--max-concurrency", type=int, help="most requests in flight")
    parser.add_argument("--repeats", type=int, default=1, help="runs of the client for each server; the table shows medians")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=find_device(), help="default: cuda when there is one")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--max-model-len", type=int, help="default: 2048 on a CPU, 8192 on a GPU")
    parser.add_argument("--max-num-seqs", type=int, help="default: 8 on a CPU, 256 on a GPU")
    parser.add_argument("--start-timeout", type=float, default=900, help="seconds a server may take to come up")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the engine; default: this one")
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more arguments for the server, in one string")
    parser.add_argument("--client-args", type=shlex.split, default=[], help="more arguments for the client")
    parser.add_argument("--results", type=Path, help="folder for reports and logs; default: results/ENGINE-TIME")
    given = parser.parse_args(arguments)
    gpu = given.device == "cuda"
    return Settings(
        engine=given.engine,
        backends=given.backends,
        model=given.model,
        results=(given.results or REPOSITORY / "results" / f"{given.engine}-{time.strftime('%Y%m%d-%H%M%S')}").resolve(),
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
    )


def exit_with(command: Callable[[], bool]) -> NoReturn:
    """Runs a command and ends the process: 0 if it returns True, 1 otherwise and for an error that can be expected, 130 when it is interrupted."""
    stop_on_signals()
    try:
        holds = command()
    except KNOWN_ERRORS as error:
        sys.exit(f"\nerror: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0 if holds else 1)


def run() -> bool:
    print(f"\n{format_table(benchmark(parse_arguments()))}")
    return True


def main() -> None:
    exit_with(run)


if __name__ == "__main__":
    main()
