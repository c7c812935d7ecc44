"""Serves a tiny random model of each family with both engines on a CPU, and compares it with transformers and
with the engines' own backends.

    python -m integration.tiny_models.compare [vllm|sglang ...]

Exit status: 1 if an answer differs by more than 1e-4, or in bfloat16 by more than 0.1, otherwise 0.
`compare_gpu` does the same on a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from integration.cache import cached_folder
from integration.command_line import one_of
from integration.environment import REPOSITORY
from integration.processes import own_modules
from integration.tiny_models.checkpoints import make_model
from integration.tiny_models.families import FAMILIES
from integration.tiny_models.questions import (
    LARGEST_TIE,
    Answer,
    apart,
    distance,
    largest_difference,
    read_answers,
)
from integration.tiny_models.runner import answers_file

LARGEST = 1e-4
LARGEST_OF_BFLOAT16 = LARGEST_TIE
HYBRIDS = (
    "qwen3_next",
    "qwen3_next_mtp",
    "qwen3_5",
    "falcon_h1",
    "granite4",
    "nemotron_h",
    "lfm2",
    "muse_glimmer",
)
STOCK_TOO = {
    "vllm": ("gpt_oss", "bert", "reranker", "llama4", "whisper", *HYBRIDS),
    "sglang": ("bert", "reranker", "whisper", *HYBRIDS),
}  # families that the engines' own CPU backends serve, in addition to Family.stock
SOURCES = ("checkpoints.py", "families.py", "hybrids.py", "questions.py", "reference.py", "tokenizer.py")


def models_folder() -> Path:
    """The models with the reference's answers; made once."""
    digest = hashlib.sha256(version("transformers").encode())
    for name in SOURCES:
        digest.update((REPOSITORY / "integration" / "tiny_models" / name).read_bytes())

    def fill(folder: Path) -> None:
        for name, family in FAMILIES.items():
            make_model(family, folder / name)
        run("reference", folder, list(FAMILIES), "--jobs", str(os.cpu_count() or 1))

    return cached_folder(f"tiny_models/{digest.hexdigest()[:12]}", fill)


def program_of(
    program: str, folder: Path, families: list[str], *options: str, answers: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of one of the programs of this package."""
    command = [sys.executable, "-m", f"integration.tiny_models.{program}", str(folder), *families, *options]
    environment = os.environ | own_modules() | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return command, environment | ({} if answers is None else {"TINY_MODELS_ANSWERS": str(answers)})


def run(
    program: str,
    folder: Path,
    families: list[str],
    *options: str,
    answers: Path | None = None,
    shows: bool = False,
) -> None:
    """One of the programs of this package, in a separate process. shows: prints lines of its standard output
    as it writes them.

    Raises:
        RuntimeError: a family has failed; the end of the program's output that was not shown.
    """
    command, environment = program_of(program, folder, families, *options, answers=answers)
    done = subprocess.run(
        command,
        check=False,
        stdout=None if shows else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=REPOSITORY,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)}: exit status "
            f"{done.returncode}\n{(done.stdout or '')[-3000:]}\n{done.stderr[-6000:]}"
        )


def serve(engine: str, answers: Path, run: Callable[..., None] = run) -> None:
    """Writes the answers of an engine's models, with this package's backend and with its own. run: runs a
    program.
    """
    served = [name for name, family in FAMILIES.items() if family.runs_on_cpu(engine)]
    stock = [name for name in served if engine in FAMILIES[name].stock or name in STOCK_TOO[engine]]
    folder = models_folder()
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, f"{engine}_runner", folder, served, "--backend", "ours", answers=answers)]
        runs.append(
            pool.submit(run, f"{engine}_runner", folder, stock, "--backend", "stock", answers=answers)
        )
        for one in runs:
            one.result()


def difference(engine: str, family: str, answers: Path) -> float:
    """The largest difference from all references for this family's answers.

    In bfloat16: the root mean square up to the first different token, or that token's difference if it is
    larger.
    """
    ours = read_answers(answers_file(answers, family, f"{engine}-ours"))
    others = (
        []
        if engine in FAMILIES[family].stock
        else [read_answers(answers_file(models_folder(), family, "reference"))]
    )
    stock = answers_file(answers, family, f"{engine}-stock")
    others += [read_answers(stock)] if stock.exists() else []
    return max(
        (_rounded_difference if _is_bfloat16(engine, family) else largest_difference)(ours, other)
        for other in others
    )


def largest_allowed(engine: str, family: str) -> float:
    return LARGEST_OF_BFLOAT16 if _is_bfloat16(engine, family) else LARGEST


def _is_bfloat16(engine: str, family: str) -> bool:
    return FAMILIES[family].engines[engine].get("dtype") == "bfloat16"


def _rounded_difference(ours: list[Answer], other: list[Answer]) -> float:
    logprobs = distance(ours, other)  # None: all answers differ in their first token
    return max(
        math.inf if logprobs is None else logprobs, *(apart(*pair) for pair in zip(ours, other, strict=True))
    )


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "engines", nargs="*", default=list(STOCK_TOO), metavar="ENGINE", type=one_of(STOCK_TOO)
    )
    engines = parser.parse_args().engines
    all_near = True
    with tempfile.TemporaryDirectory() as folder:
        for engine in engines:
            serve(engine, Path(folder))
            for name, family in FAMILIES.items():
                if family.runs_on_cpu(engine):
                    largest = difference(engine, name, Path(folder))
                    all_near &= largest <= largest_allowed(engine, name)
                    print(f"{engine:8}{name:12}{largest:10.1e}   {family.asks}")
    sys.exit(int(not all_near))


if __name__ == "__main__":
    main()
