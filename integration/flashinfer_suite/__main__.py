"""Runs FlashInfer's own tests against attn_backend.flashinfer, with only the import changed: `python -m
integration.flashinfer_suite CHECKOUT`.

CHECKOUT is FlashInfer's source (github.com/flashinfer-ai/flashinfer, commit fb28d724); none of it is kept. On
a CPU (--device cpu) the device is also replaced, and cases that capture CUDA graphs are skipped. Use a sample
of the cases, and leave the large ones out:

    python -m integration.flashinfer_suite ../flashinfer --device cpu --sample 40 --max-tokens 2048 \\
        --timeout 60 --markdown table.md

On a GPU several files may run at once, each in several processes (pytest-xdist). Each process then gets a
share of the GPU's memory. A case that needs more waits until no other such case runs, and runs once more
without that limit:

    python -m integration.flashinfer_suite ../flashinfer --sample 300 --jobs 4 --gpu-memory 3 \\
        --pytest='-n 3' --time-limit 600 --json cases.json

The table has a line for each file, and one for the references of FlashInfer's traces. Its columns count the
cases that

- passed or failed,
- need a feature that attn_backend.flashinfer refuses by name (not supported),
- expect a refusal, but attn_backend.flashinfer has no such limit,
- skipped themselves (on a CPU also if memory is too small),
- did not run: the time limit ended, or the GPU's memory is too small.

If a case catches an error and skips itself, the error decides. --markdown writes the table of
docs/reports/flashinfer.md. Reports are written after every line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from integration.processes import own_modules

from .layout import LINES, lay_out, missing_files

OUTCOMES = ("passed", "failed", "not supported", "no such limit", "skipped")
COLUMNS = ("file", "cases", "taken", *OUTCOMES, "not run")


def run_line(
    folder: Path, name: str, options: dict[str, object], timeout: float, pytest_arguments: list[str]
) -> dict[str, object]:
    """The outcome of the cases of one line: counts by outcome, the reasons, and how the run ended."""
    printed = folder / f"{Path(name).stem}.txt"
    results = printed.with_suffix(".jsonl")
    environment = (
        os.environ
        | own_modules(str(folder))
        | {"FLASHINFER_SUITE": json.dumps(options | {"results": str(results)})}
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        "pytest.ini",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
    command += ["--show-capture=no", "-W", "ignore", *LINES[name], *pytest_arguments]
    ended = "in time"
    # a file: workers that briefly outlive pytest would keep a pipe open
    with printed.open("w") as output:
        try:
            status = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                timeout=timeout,
                check=False,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode
            if status not in (0, 1, 5):
                ended = f"with exit status {status}"
        except subprocess.TimeoutExpired:
            ended = "by the time limit"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    counts = Counter(line["outcome"] for line in lines if "outcome" in line)
    taken = next((line for line in lines if "taken" in line), {"cases": 0, "taken": 0})
    outcomes = {outcome: counts[outcome] for outcome in OUTCOMES}
    not_run = taken["taken"] - sum(outcomes.values())
    return {
        "file": name,
        **taken,
        **outcomes,
        "not run": not_run,
        "ended": ended,
        "lines": lines,
        "output": printed.read_text(errors="replace"),
    }


def rows_of(results: list[dict[str, object]]) -> list[tuple[str, ...]]:
    """The table: its header, a row for each line, and the sums."""
    rows = [tuple(str(result[column]) for column in COLUMNS) for result in results]
    return [COLUMNS, *rows, ("all", *(str(sum(int(row[i]) for row in rows)) for i in range(1, len(COLUMNS))))]


def markdown(results: list[dict[str, object]]) -> str:
    """The table as in docs/reports/flashinfer.md."""
    head, *rows = rows_of(results)
    rule = ("---", *("---:" for _ in head[1:]))
    return "".join(
        f"| {' | '.join(row)} |\n"
        for row in (
            head,
            rule,
            *((f"`{row[0]}`" if row is not rows[-1] else row[0], *row[1:]) for row in rows),
        )
    )


def table(results: list[dict[str, object]]) -> str:
    """The table for a terminal."""
    rows = rows_of(results)
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def write_reports(results: list[dict[str, object]], given: argparse.Namespace) -> None:
    """The requested options, with the completed lines."""
    if given.markdown:
        given.markdown.write_text(markdown(results))
    if given.output:
        given.output.write_text("\n".join(str(result["output"]) for result in results))
    if given.json:
        given.json.write_text(
            json.dumps(
                [{key: value for key, value in result.items() if key != "output"} for result in results],
                indent=1,
            )
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="FlashInfer's source")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="lines whose names contain one of these texts, in the order of the texts",
    )
    parser.add_argument("--sample", type=int, default=0, help="so many cases of each file, by chance; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=0,
        help="leave out cases with more tokens (requests times longest length); 0: none",
    )
    parser.add_argument("--jobs", type=int, default=1, help="lines that run at the same time")
    parser.add_argument(
        "--gpu-memory",
        type=float,
        default=0,
        metavar="GIB",
        help="of each process of pytest, see above; 0: all",
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for each line")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        help="seconds for all of them: what then still runs is ended",
    )
    parser.add_argument("--json", type=Path, help="every case with its outcome")
    parser.add_argument("--markdown", type=Path, help="the table of docs/reports/flashinfer.md")
    parser.add_argument("--output", type=Path, help="what pytest printed")
    parser.add_argument("--pytest", default="", help="more arguments for pytest, as in a shell")
    given = parser.parse_args()
    if absent := missing_files(given.checkout):
        parser.error(f"checkout: {given.checkout} has no {absent[0]}")
    return given


def main() -> int:
    given = parse_arguments()
    deadline = time.monotonic() + given.time_limit
    options = {
        "device": given.device,
        "sample": given.sample,
        "seed": given.seed,
        "max_tokens": given.max_tokens,
        "gpu_memory": given.gpu_memory,
    }
    pytest_arguments = shlex.split(given.pytest)
    results: list[dict[str, object]] = []

    def run(line: str) -> dict[str, object]:
        return run_line(
            folder, line, options, max(0.0, min(given.timeout, deadline - time.monotonic())), pytest_arguments
        )

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        ThreadPoolExecutor(given.jobs) as pool,
    ):
        folder = Path(name)
        lay_out(given.checkout, folder, given.device)
        lines = dict.fromkeys(line for text in given.only for line in LINES if text in line)
        for done in as_completed([pool.submit(run, line) for line in lines]):
            results.append(done.result())
            print(
                f"{results[-1]['file']}: "
                f"{', '.join(f'{results[-1][outcome]} {outcome}' for outcome in OUTCOMES)}; ended "
                f"{results[-1]['ended']}",
                flush=True,
            )
            results.sort(key=lambda result: list(LINES).index(str(result["file"])))
            write_reports(results, given)
    print(table(results))
    return 1 if any(result["failed"] or result["ended"] != "in time" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
