"""Features of the engines that a CPU can run, with this backend: tokens and log-probabilities in float32 are transformers'. And the table of all of them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the environment of `make test`")
pytest.importorskip("safetensors", reason="needs the environment of `make test`")
sys.path.append(str(Path(__file__).resolve().parents[2]))

from integration.features.serve import RUNS, Outcome, Served, compare
from integration.features.table import FEATURES, matrix
from integration.tiny_models.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
IN_CI = ("vllm-tensor-parallel", "vllm-pipeline", "sglang-tensor-parallel")  # the others: python -m integration.features.serve
SHOWN = [(feature.name, says, shown) for feature in FEATURES for says, shown in ((feature.vllm, feature.vllm_shown), (feature.sglang, feature.sglang_shown))]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Served(tmp_path_factory.mktemp("features"))


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_CI)
def test_answers_are_those_of_transformers(name, models, need_engine, tmp_path):
    need_engine(RUNS[name].engine)
    outcome = models.outcome(RUNS[name], tmp_path)
    print(outcome)
    assert outcome.holds


def test_differences_are_seen():
    expected = [[(1, -1.0), (2, -2.0)], [(3, -0.5)]]
    assert compare(expected, [[(1, -1.0), (2, -2.25)], [(3, -0.5)]]) == Outcome(2, 2, 0.25)
    assert compare(expected, [[(1, -1.0), (4, -2.0)], [(3, -0.5)]]) == Outcome(1, 2, 0.0)
    assert Outcome(2, 2, 1e-5).holds
    for wrong in (Outcome(1, 2, 0.0), Outcome(2, 2, 0.25), Outcome(0, 0, 0.0)):
        assert not wrong.holds


def test_the_matrix_of_the_documentation_is_the_table():
    assert f"\n\n{matrix()}\n\n" in (ROOT / "docs" / "engines.md").read_text()


@pytest.mark.parametrize(("name", "shown"), [(name, one) for name, _, shown in SHOWN for one in shown])
def test_what_the_table_names_is_there(name, shown):
    file, _, function = shown.partition("::")
    if function:
        defined = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
        assert function in defined, name
    else:
        assert shown in RUNS or (ROOT / file).is_file(), name


def test_nothing_is_claimed_that_nothing_shows():
    for name, says, shown in SHOWN:
        assert shown or says.startswith(("not ", "has no", "tried once")), name
    assert {one for _, _, shown in SHOWN for one in shown} >= set(RUNS)
    assert "items" in FAMILIES  # what shows multi-item scoring
