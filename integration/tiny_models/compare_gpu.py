"""Serves a tiny random model of each family with both engines on a GPU in bfloat16, with CUDA graphs, and
compares with transformers in float32 on a CPU.

    python -m integration.tiny_models.compare_gpu [vllm|sglang ...] [--family NAME [--family NAME ...]] \\
        [--models FOLDER] [--jobs N] [--results FOLDER]

In bfloat16 no engine reproduces transformers' numbers exactly, so the engine's own backend is the measure:
our distance from transformers may be 1.5 times its distance. A token may differ from transformers', or from
the own backend's, if both tokens are equally probable. One of the two is enough, since the own backend may be
wrong. Distances are root mean squares of differences of log-probabilities: of prompts if the engine reports
them, and of generated tokens up to the first difference.

A line reports when a family's engine starts (with its log), is ready, has answered, or failed. A family is
compared when both backends have finished it. Answers and logs are in FOLDER/FAMILY; a killed run keeps its
files.

Exit status: 1 if a family is farther away, fails with our backend, or has none of transformers' tokens;
otherwise 0. A family that fails with the engine's own backend, or has none of transformers' tokens there, is
compared only with transformers: within 0.1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from integration.command_line import one_of
from integration.environment import REPOSITORY
from integration.tiny_models.compare import models_folder, run
from integration.tiny_models.families import FAMILIES
from integration.tiny_models.questions import LARGEST_TIE, apart, distance, read_answers
from integration.tiny_models.runner import answers_file, failure_file, log_file

BACKENDS = ("ours", "stock")
POLL_S = 0.5
RUNNERS = {"vllm": "vllm_runner", "sglang": "sglang_engine_runner"}
MOST_TIMES_STOCK = 1.5
LARGEST_ALONE = 0.1


def families_of(engine: str, asked: list[str] | None) -> list[str]:
    """The requested families that an engine has; None: all."""
    return [
        name for name, family in FAMILIES.items() if engine in family.engines and name in (asked or FAMILIES)
    ]


def served(engine: str, families: list[str], models: Path, results: Path, jobs: int) -> Iterator[str]:
    """Writes the answers of both backends, and yields each family when both have finished it. A family that a
    backend does not serve has no answers.
    """
    files = {
        name: [
            (answers_file(results, name, who), failure_file(results, name, who))
            for who in map(f"{engine}-{{}}".format, BACKENDS)
        ]
        for name in families
    }
    for earlier in (file for of_family in files.values() for of_backend in of_family for file in of_backend):
        earlier.unlink(missing_ok=True)
    waiting = list(families)
    with ThreadPoolExecutor(len(BACKENDS)) as pool:
        options = ("--device", "cuda", "--jobs", str(jobs))
        runs = [
            pool.submit(
                run,
                RUNNERS[engine],
                models,
                families,
                "--backend",
                name,
                *options,
                answers=results,
                shows=True,
            )
            for name in BACKENDS
        ]
        while waiting:
            are_over = all(one.done() for one in runs)  # checked before their files
            for name in [
                name
                for name in waiting
                if are_over or all(any(file.exists() for file in of_backend) for of_backend in files[name])
            ]:
                waiting.remove(name)
                yield name
            time.sleep(0 if are_over else POLL_S)
        for backend, one in zip(BACKENDS, runs, strict=True):
            if error := one.exception():
                print(f"{engine}, {backend}: {error}", flush=True)


def compare(engine: str, family: str, models: Path, answers: Path) -> tuple[bool, str]:
    """Whether ours is close enough, and a line with the distance."""
    found = {backend: answers_file(answers, family, f"{engine}-{backend}") for backend in BACKENDS}
    logs = {backend: log_file(answers, family, f"{engine}-{backend}") for backend in BACKENDS}
    if not found["ours"].exists():
        return False, f"failed, log {logs['ours']}" + (
            "" if found["stock"].exists() else f"; own backend, too, log {logs['stock']}"
        )
    reference, ours = read_answers(answers_file(models, family, "reference")), read_answers(found["ours"])
    stock = read_answers(found["stock"]) if found["stock"].exists() else None
    to_reference, of_stock = distance(ours, reference), None if stock is None else distance(stock, reference)
    others = [reference] if stock is None else [reference, stock]
    tie = max(min(apart(a, b) for b in of_question) for a, *of_question in zip(ours, *others, strict=True))
    parts = [_text(to_reference)]
    if stock is None:
        parts.append(f"own backend does not serve it, log {logs['stock']}")
    else:
        parts += [f"own backend {_text(of_stock)}", f"between them {_text(distance(ours, stock))}"]
    parts.append(f"tokens that differ are {tie:.1e} apart")
    farthest = LARGEST_ALONE if of_stock is None else MOST_TIMES_STOCK * of_stock
    return to_reference is not None and to_reference <= farthest and tie <= LARGEST_TIE, ", ".join(parts)


def _text(rms: float | None) -> str:
    return "nothing to compare" if rms is None else f"{rms:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engines = f"of {', '.join(RUNNERS)}; default: both"
    parser.add_argument(
        "engines", nargs="*", default=list(RUNNERS), metavar="ENGINE", type=one_of(RUNNERS), help=engines
    )
    parser.add_argument(
        "--family", action="append", choices=list(FAMILIES), help="may be given more than once; default: all"
    )
    models_help = (
        "a folder that `checkpoints FOLDER` and then `reference FOLDER` of this package have "
        "written; default: made, and kept in the cache"
    )
    parser.add_argument("--models", type=Path, help=models_help)
    parser.add_argument(
        "--jobs", type=int, default=4, help="families that a backend serves at a time; default: %(default)s"
    )
    parser.add_argument(
        "--results", type=Path, help="folder for answers and logs; default: results/tiny-models-TIME"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU; on a CPU: python -m integration.tiny_models.compare")
    results = (
        arguments.results or REPOSITORY / "results" / f"tiny-models-{time.strftime('%Y%m%d-%H%M%S')}"
    ).resolve()
    print(f"answers and logs go to {results}", flush=True)
    begin = time.monotonic()
    models = arguments.models.resolve() if arguments.models else models_folder()
    print(
        f"models and the reference's answers: {models}, there after {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    all_near = True
    for engine in arguments.engines:
        for name in served(engine, families_of(engine, arguments.family), models, results, arguments.jobs):
            near, line = compare(engine, name, models, results)
            all_near &= near
            print(f"{engine:8}{name:16}{'ok   ' if near else 'WRONG'}  {line}", flush=True)
    sys.exit(int(not all_near))


if __name__ == "__main__":
    main()
