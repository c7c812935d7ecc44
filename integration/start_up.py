"""How long does a server take to start with this backend, next to the engine's own? And what does it log?

    python -m integration.start_up --engine vllm [--backend attn_backend stock] [--rounds 3]
    python -m integration.start_up --engine vllm --logs

The backends take turns, a server at a time. A time begins with the process and ends with the first answer of
/health, to within half a second. The first round fills the caches of kernels and does not count. The report
also has the seconds of the log's line "attn_backend ...: ready in ... s".

--logs prints the lines about attn_backend of four servers:

- with this backend;
- with a plugin whose layers choose another backend, which must be refused;
- the same with ATTN_BACKEND_REQUIRE_LAYERS=0;
- with a plugin that takes the name CUSTOM.

Exit status: 0 if all servers have started, or were refused where they must be; 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from integration.command_line import exit_with, new_parser, results_folder
from integration.engines import ENGINES, Launch
from integration.engines.base import OURS, REPOSITORY, STOCK
from integration.model import Model, resolve_model
from integration.other_plugin import write_metadata
from integration.server import ServerError, free_port, ready_server

REQUIRE = "ATTN_BACKEND_REQUIRE_LAYERS"
REFUSAL = "serves none of the"  # of adapters/served.py
LONGEST_LINE = 600
CASES = {  # by title: environment, and whether the server must start
    "this backend": ({}, True),
    "a model with its own kernels": ({"OTHER_PLUGIN": "layers"}, False),
    f"a model with its own kernels, {REQUIRE}=0": ({"OTHER_PLUGIN": "layers", REQUIRE: "0"}, True),
    "two plugins": ({"OTHER_PLUGIN": "custom"}, True),
}


def launch_of(given: argparse.Namespace, model: Model, backend: str, environment: dict[str, str]) -> Launch:
    return Launch(
        given.python,
        model,
        backend,
        given.device,
        free_port(),
        given.dtype or ("float32" if given.device == "cpu" else "bfloat16"),
        given.cuda_graphs,
        extra_arguments=given.server_arguments,
        environment=environment,
    )


def start_once(given: argparse.Namespace, launch: Launch, log: Path) -> float:
    """The seconds from the start of a server until it answers."""
    with ready_server(ENGINES[given.engine], launch, log, given.start_timeout_s) as server:
        return time.monotonic() - server.begin


def own_lines(log: Path) -> list[str]:
    """The lines of a server's log about this package, each once: every process writes its own."""
    lines: dict[str, str] = {}
    for line in log.read_text(errors="replace").splitlines()[1:]:
        name = re.search(r"(?<![\w/.'])attn_backend(?![\w/-]|\.\w|'(?!s\b))", line)
        is_code = " = _" in line or "raise RuntimeError(" in line
        if name is not None and not is_code and len(line) <= LONGEST_LINE:
            lines.setdefault(line[name.start() :], line)
    return list(lines.values())


def seconds_of_ours(log: Path) -> float | None:
    """The seconds that the log's line reports; None: no such line."""
    found = re.findall(r"attn_backend \S+: .* ready in (\S+) s", log.read_text(errors="replace"))
    return float(found[0]) if found else None


def measure(given: argparse.Namespace, model: Model, results: Path) -> bool:
    times: dict[str, list[float]] = {backend: [] for backend in given.backend}
    of_ours: list[float] = []
    for round_ in range(given.rounds + 1):
        for backend in given.backend:
            log = results / f"{backend}-{round_}.log"
            seconds = start_once(given, launch_of(given, model, backend, {}), log)
            if round_ > 0:
                times[backend].append(seconds)
                of_ours += [own for own in [seconds_of_ours(log)] if own is not None]
    print(
        f"\n| backend | ready after, s, median of {given.rounds} | lowest | highest |\n|---|---:|---:|---:|"
    )
    for backend, taken in times.items():
        print(f"| {backend} | {statistics.median(taken):.1f} | {min(taken):.1f} | {max(taken):.1f} |")
    if of_ours:
        print(f"\nattn_backend reports {statistics.median(of_ours):.2f} s for its attention objects")
    settings = {name: str(value) for name, value in vars(given).items()}
    report = {"settings": settings, "seconds": times, "attention_objects": of_ours}
    (results / "start_up.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    return True


def show_logs(given: argparse.Namespace, model: Model, results: Path) -> bool:
    all_hold = True
    with TemporaryDirectory() as plugin:
        write_metadata(Path(plugin))
        path = os.pathsep.join([plugin, str(REPOSITORY)])
        for number, (title, (environment, starts)) in enumerate(CASES.items()):
            log = results / f"case-{number}.log"
            try:
                start_once(given, launch_of(given, model, OURS, environment | {"PYTHONPATH": path}), log)
                holds = starts
            except ServerError as error:
                holds = not starts and REFUSAL in log.read_text(encoding="utf-8", errors="replace")
                print(error)
            all_hold &= holds
            print(f"\n## {title}{'' if holds else ': WRONG'}\n", *own_lines(log), sep="\n", flush=True)
    return all_hold


def run(given: argparse.Namespace) -> bool:
    results, model = (
        results_folder(given, f"start-up-{given.engine}"),
        resolve_model(given.model, given.python),
    )
    return (show_logs if given.logs else measure)(given, model, results)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__, "start-up-ENGINE")
    parser.add_argument(
        "--backend",
        nargs="+",
        default=[OURS, STOCK],
        help="attn_backend, stock, or names that the engine knows; default: attn_backend stock",
    )
    parser.add_argument("--rounds", type=int, default=3, help="that count; default: %(default)s")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--logs", action="store_true", help="print what servers log when they start")
    return parser.parse_args(arguments)


def main() -> None:
    exit_with(lambda: run(parse_arguments()))


if __name__ == "__main__":
    main()
