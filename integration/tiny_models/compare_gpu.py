"""Serves a tiny random model of each family with both engines on a GPU in bfloat16, with CUDA graphs, and compares with transformers in float32 on a CPU.

    python -m integration.tiny_models.compare_gpu [vllm|sglang ...] [--family NAME ...] [--models FOLDER] [--jobs N]

In bfloat16 no engine gives exactly transformers' numbers, so the engine's own backend is the measure: ours may be 1.5 times as far away as that one, and a
token may be another one where both are as probable. Distances are root mean squares of differences of log-probabilities, of prompts where the engine tells
them, and of generated tokens. --models: made elsewhere, with the reference's answers (`compare.models_folder`).

Exit status: 1 if a family is farther away, or fails with our backend; else 0. One that fails with the engine's own backend is compared with transformers alone.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from integration.tiny_models.compare import models_folder, run
from integration.tiny_models.families import FAMILIES
from integration.tiny_models.questions import Answer, read_answers
from integration.tiny_models.runner import answers_file

RUNNERS = {"vllm": "vllm_runner", "sglang": "sglang_engine_runner"}
MOST_TIMES_STOCK = 1.5
LARGEST_ALONE = 0.1
LARGEST_TIE = 0.1  # difference of log-probabilities of two tokens that are as probable


@dataclass(frozen=True)
class Distance:
    """Attributes:
    rms: of differences of log-probabilities, or of elements of embeddings, or of scores.
    tie: the largest difference between two tokens' log-probabilities where answers part; 0 where they do not.
    """

    rms: float
    tie: float


def distance(ours: list[Answer], other: list[Answer]) -> Distance:
    """The distance of answers to the same questions, as far as they have the same tokens.

    Raises:
        ValueError: answers to other questions, or nothing to compare.
    """
    squares: list[float] = []
    tie = 0.0
    for a, b in zip(ours, other, strict=True):
        prompts = zip(a.prompt_logprobs, b.prompt_logprobs, strict=True) if a.prompt_logprobs and b.prompt_logprobs else ()
        squares += [(x - y) ** 2 for x, y in [*prompts, *zip(a.values, b.values, strict=True)]]
        for token, other_token, x, y in zip(a.tokens, b.tokens, a.logprobs, b.logprobs, strict=True):
            if token != other_token:
                tie = max(tie, abs(x - y))
                break
            squares.append((x - y) ** 2)
    if not squares:
        raise ValueError("ours: nothing that can be compared")
    return Distance(math.sqrt(sum(squares) / len(squares)), tie)


def families_of(engine: str, asked: list[str] | None) -> list[str]:
    """The families that an engine has, among those that were asked for; None: all."""
    return [name for name, family in FAMILIES.items() if engine in family.engines and name in (asked or FAMILIES)]


def serve(engine: str, families: list[str], models: Path, answers: Path, jobs: int) -> None:
    """Writes the answers of both backends; what a backend does not serve has none."""
    with ThreadPoolExecutor(2) as pool:
        options = ("--device", "cuda", "--jobs", str(jobs))
        runs = {backend: pool.submit(run, RUNNERS[engine], models, families, "--backend", backend, *options, answers=answers) for backend in ("ours", "stock")}
        for backend, one in runs.items():
            if error := one.exception():
                print(f"{engine}, {backend}: {error}", flush=True)


def compare(engine: str, family: str, models: Path, answers: Path) -> tuple[bool, str]:
    """Whether ours is near enough, and a line that says how near."""
    found = {backend: answers_file(answers, family, f"{engine}-{backend}") for backend in ("ours", "stock")}
    if not found["ours"].exists():
        return False, "failed"
    reference = read_answers(answers_file(models, family, "reference"))
    ours = read_answers(found["ours"])
    to_reference = distance(ours, reference)
    if not found["stock"].exists():
        return to_reference.rms <= LARGEST_ALONE, f"{to_reference.rms:.1e}, own backend does not serve it"
    stock = read_answers(found["stock"])
    to_stock, of_stock = distance(ours, stock), distance(stock, reference)
    near = to_reference.rms <= MOST_TIMES_STOCK * of_stock.rms and to_stock.tie <= LARGEST_TIE
    return near, f"{to_reference.rms:.1e}, own backend {of_stock.rms:.1e}, between them {to_stock.rms:.1e}, tokens that differ are {to_stock.tie:.1e} apart"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", default=["vllm", "sglang"])
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="may be given more than once; default: all")
    parser.add_argument("--models", type=Path, help="default: they are made")
    parser.add_argument("--jobs", type=int, default=4, help="families that a backend serves at a time")
    arguments = parser.parse_args()
    models = arguments.models or models_folder()
    all_near = True
    with tempfile.TemporaryDirectory() as folder:
        for engine in arguments.engines:
            families = families_of(engine, arguments.family)
            if families:
                serve(engine, families, models, Path(folder), arguments.jobs)
            for name in families:
                near, line = compare(engine, name, models, Path(folder))
                all_near &= near
                print(f"{engine:8}{name:12}{'ok   ' if near else 'WRONG'}  {line}", flush=True)
    sys.exit(int(not all_near))


if __name__ == "__main__":
    main()
