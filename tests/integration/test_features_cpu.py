"""Features of the engines that a CPU can run, with this backend: tokens and log-probabilities in float32 are transformers'. And the table of all of them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the environment of `make test`")
pytest.importorskip("safetensors", reason="needs the environment of `make test`")
sys.path.append(str(Path(__file__).resolve().parents[2]))

from integration.features.outcomes import ENGINE_NAMES, Seen, read_junit, read_outcomes, record
from integration.features.serve import RUNS, Outcome, Served, compare
from integration.features.table import FEATURES, Cell, Feature, matrix, named
from integration.tiny_models.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
IN_CI = ("vllm-tensor-parallel", "vllm-pipeline", "sglang-tensor-parallel")  # the others: python -m integration.features.serve
NAMED = [(engine, name) for engine in ENGINE_NAMES for name in named(engine)]


@pytest.fixture(scope="module")
def models(tmp_path_factory, forked_engines):
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


def test_the_matrix_of_the_documentation_is_made_of_what_ran():
    assert f"\n\n{matrix(read_outcomes())}\n\n" in (ROOT / "docs" / "engines.md").read_text(), "python -m integration.features.table prints what belongs there"


@pytest.mark.parametrize(("engine", "name"), NAMED)
def test_what_the_table_names_is_there(engine, name):
    file, _, function = name.partition("::")
    if function:
        assert function in {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
    else:
        assert RUNS[name].engine == engine


def test_nothing_is_claimed_that_nothing_shows():
    for cell in (feature.cell(engine) for feature in FEATURES for engine in ENGINE_NAMES):
        assert cell.shown or cell.says.startswith(("not ", "has no")), cell
    names = [name for _, name in NAMED]
    assert len(set(names)) == len(names)
    assert set(names) >= set(RUNS)
    assert "items" in FAMILIES  # what shows multi-item scoring


def test_what_is_recorded_is_named_in_the_table():
    engines = {name: engine for engine, name in NAMED}
    outcomes = read_outcomes()
    assert outcomes
    assert {name: seen.engine for name, seen in outcomes.items()} == {name: engines.get(name) for name in outcomes}


def test_cells_say_how_runs_ended(monkeypatch):
    features = (Feature("drafts", Cell(("one", "a/b.py::two"), "works, somehow"), Cell(says="has none")),)
    monkeypatch.setattr("integration.features.table.FEATURES", features)

    def line(**outcomes):
        return matrix({name.replace("two", "a/b.py::two"): seen for name, seen in outcomes.items()}).splitlines()[-1]

    well, later, badly = (
        Seen("vllm", "0.32.0", True, "2026-01-02"),
        Seen("vllm", "0.33.0", True, "2026-02-03"),
        Seen("vllm", "0.33.0", False, "2026-02-03", "died"),
    )
    assert line(one=well, two=well) == "| drafts | works, somehow | `one`, `two` (0.32.0, 2026-01-02) | has none |  |"
    assert line(one=well, two=later) == "| drafts | works, somehow | `one` (0.32.0, 2026-01-02), `two` (0.33.0, 2026-02-03) | has none |  |"
    assert line(one=well, two=badly).startswith("| drafts | failed: died | ")
    assert line(one=well) == "| drafts | not run | `one` (0.32.0, 2026-01-02), `two` | has none |  |"


def test_an_outcome_takes_the_place_of_the_one_before(tmp_path, monkeypatch):
    file = tmp_path / "features.json"
    file.write_text("{}")
    monkeypatch.setattr("integration.features.outcomes.version", lambda engine: {"vllm": "0.32.0+cpu", "sglang": "0.5.23"}[engine])
    record("b", "sglang", True, file=file)
    record("a", "vllm", True, file=file)
    record("b", "sglang", False, "died", file=file)
    seen = read_outcomes(file)
    assert list(seen) == ["a", "b"]
    assert (seen["a"].version, seen["a"].ok) == ("0.32.0", True)
    assert (seen["b"].version, seen["b"].ok, seen["b"].reason) == ("0.5.23", False, "died")


def test_how_a_test_ended(tmp_path):
    """A case that fails decides, and skipped ones show nothing."""
    cases = {"good[1]": "", "good[2]": "<skipped/>", "bad[1]": "", "bad[2]": '<failure message="no&#10;more"/>', "skipped": "<skipped/>"}
    report = tmp_path / "report.xml"
    lines = [f'<testcase classname="tests.a.b" name="{name}">{inside}</testcase>' for name, inside in cases.items()]
    report.write_text(f"<testsuite>{''.join(lines)}</testsuite>")
    assert read_junit(report, "tests/a/b.py::good") == (True, "")
    assert read_junit(report, "tests/a/b.py::bad") == (False, "no")
    for nothing in ("tests/a/b.py::skipped", "tests/a/b.py::absent", "tests/a/c.py::good"):
        assert read_junit(report, nothing) == (False, "no case was run")
