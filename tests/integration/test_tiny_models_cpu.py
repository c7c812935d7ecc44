"""A tiny random model of each family with special attention needs, in both engines on the CPU: tokens and
log-probabilities in float32. Families without float32 kernels run in bfloat16.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the environment of `make test`")
pytest.importorskip("safetensors", reason="needs the environment of `make test`")
sys.path.append(str(Path(__file__).resolve().parents[2]))

from integration.processes import stop_group
from integration.tiny_models.compare import difference, largest_allowed, program_of, run, serve
from integration.tiny_models.families import FAMILIES, matrix
from integration.tiny_models.questions import Answer, largest_difference

LONGEST_S = 900  # per program

SERVED = [
    pytest.param(engine, name, id=f"{engine}-{name}")
    for engine in ("vllm", "sglang")
    for name, family in FAMILIES.items()
    if family.runs_on_cpu(engine)
]


@pytest.fixture(scope="module")
def answers(forks, tmp_path_factory):
    """A function that returns the folder with all answers of an engine.

    Served once per backend, by a fork of a process that has imported the engine.
    """
    folders, programs = {}, []

    def of(engine):
        if engine not in folders:
            folders[engine] = tmp_path_factory.mktemp(engine)
            serve(
                engine,
                folders[engine],
                forked(forks(engine)) if os.environ.get("PYTEST_XDIST_WORKER") else run,
            )
        return folders[engine]

    def forked(forks_of_engine):
        def run_fork(program, folder, families, *options, answers):
            command, environment = program_of(program, folder, families, *options, answers=answers)
            log = tmp_path_factory.mktemp(program) / "program.log"
            programs.append(forks_of_engine.start(command[1:], log, environment))
            assert programs[-1].wait(LONGEST_S) == 0, log.read_text()[-6000:]

        return run_fork

    yield of
    for program in programs:
        if program.poll() is None:  # a test was interrupted, or another program failed
            stop_group(program)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "family"), SERVED)
def test_answers_are_those_of_the_reference(engine, family, answers, need_engine):
    need_engine(engine)
    assert difference(engine, family, answers(engine)) <= largest_allowed(engine, family)


def test_differences_are_seen():
    answer = Answer([1, 2], [-1.0, -2.0], [-3.0])
    assert largest_difference([answer], [Answer([1, 2], [-1.0, -2.5])]) == 0.5
    assert largest_difference([answer], [Answer([1, 2], [-1.0, -2.0], [-4.0])]) == 1.0
    assert largest_difference([answer], [Answer([1, 3], [-1.0, -2.0])]) == float("inf")
    assert largest_difference([Answer(values=[0.5])], [Answer(values=[0.25])]) == 0.25
    assert largest_difference([Answer()], [Answer()]) == float("inf")
    with pytest.raises(ValueError, match="0 and 1 answers"):
        largest_difference([], [answer])


def test_the_matrix_of_the_documentation_is_that_of_the_tests():
    text = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()
    assert f"\n\n{matrix()}\n\n" in text
