"""Engine features that a CPU can run, with this backend: tokens and log-probabilities in float32 equal
transformers'. Also the table of all features.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the environment of `make test`")
pytest.importorskip("safetensors", reason="needs the environment of `make test`")
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parents[2]))

from attn_backend.releases import RELEASES
from integration.compare_tokens import compare
from integration.engines import Token
from integration.features import serve
from integration.features.devices import CPU, GPU
from integration.features.float8 import round_as
from integration.features.model import MODELS, make_float8, make_prompts
from integration.features.outcomes import ENGINE_NAMES, Seen, read_junit, read_outcomes, record
from integration.features.runs import RUNS
from integration.features.serve import Served, cannot, listed
from integration.features.table import FEATURES, Cell, Feature, evidence, named, overview, replaced, tables
from integration.tiny_models.checkpoints import make_model
from integration.tiny_models.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
# the others: python -m integration.features.serve
IN_CI = ("vllm-tensor-parallel", "vllm-pipeline", "sglang-tensor-parallel")
NAMED = [(engine, name) for engine in ENGINE_NAMES for name in named(engine)]


@pytest.fixture(scope="module")
def models(tmp_path_factory, forked_engines):
    return Served(tmp_path_factory.mktemp("features"), CPU, num_tokens=12)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_CI)
def test_answers_are_those_of_transformers(name, models, need_engine, tmp_path):
    need_engine(RUNS[name].engine)
    outcome = models.outcome(RUNS[name], tmp_path)
    print(CPU.says(outcome))
    assert CPU.holds(outcome)


def answers(*logprobs, other=None):
    """An answer with the tokens 1, 2, ... other: the log-probability of a token 9 at the last place."""
    made = [Token(token, logprob, {token: logprob}) for token, logprob in enumerate(logprobs, 1)]
    if other is not None:
        made[-1].alternatives[9] = other
    return [made]


def parted(logprob, other):
    """Like answers(-1.0, ...), with 9 at the last place."""
    return [[*answers(-1.0)[0], Token(9, logprob, {9: logprob, 2: other})]]


def test_differences_are_seen():
    expected = answers(-1.0, -2.0, other=-2.05)
    for outcome, on_cpu, on_gpu in (
        (compare(expected, answers(-1.0, -2.0001)), True, True),
        (compare(expected, answers(-1.0, -2.1)), False, True),
        (compare(expected, answers(-1.0, -2.5)), False, False),
        (compare(expected, parted(-2.0, -2.05)), False, True),
        (compare(expected, parted(-2.0, -2.5)), False, False),
        (compare(answers(-1.0, -2.0, other=-2.5), parted(-2.0, -2.05)), False, False),
        (compare(answers(-1.0, -2.0), parted(-2.0, -2.05)), False, False),
        (compare([], []), False, False),
    ):
        assert (CPU.holds(outcome), GPU.holds(outcome)) == (on_cpu, on_gpu), outcome
    assert GPU.says(compare(expected, parted(-2.0, -2.05))).endswith(
        "within 0.0e+00, the others part at near ties"
    )
    assert GPU.says(compare(expected, parted(-2.0, -2.5))).endswith(", 1 part where there is no near tie")


def test_8_bit_numbers_get_more_room():
    outcome = compare(answers(-1.0, -2.0, other=-2.3), parted(-2.0, -2.3))
    assert not GPU.of(("model",)).holds(outcome)
    for device in (CPU, GPU):
        assert device.of(("float8-cache",)).holds(outcome)
        assert (device.of(("float8-cache",)).dtype, device.of(("model",))) == ("bfloat16", device)


@pytest.mark.slow
def test_without_its_scales_a_checkpoint_says_something_else(tmp_path):
    model = MODELS["float8"]
    make_model(model, tmp_path / "float8")
    make_float8(tmp_path)
    file = tmp_path / "float8-cache" / "model.safetensors"
    tokens = torch.tensor([make_prompts()[0]])

    @torch.no_grad()
    def logits(is_rounded):
        made = model.make()[1].from_pretrained(tmp_path / "float8", dtype=torch.float32).eval()
        if is_rounded:
            round_as(made, tmp_path / "float8-cache")
        return made(input_ids=tokens, use_cache=False).logits[0, -1].log_softmax(-1)

    exact, rounded = logits(False), logits(True)
    assert 1e-4 < (rounded - exact).abs().max() < 0.75
    save_file(
        {
            name: torch.ones(()) if name.endswith("_scale") else weight
            for name, weight in load_file(file).items()
        },
        file,
    )
    assert (logits(True) - exact).abs().max() > 1


def test_runs_are_left_out_where_they_cannot_be(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "nixl" else name)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("integration.features.serve.version", lambda engine: "0.5.19")
    assert cannot(RUNS["vllm-lora"], "cuda") is None
    assert cannot(RUNS["vllm-pipeline"], "cuda") == "it needs 2 GPUs"
    assert cannot(RUNS["vllm-pipeline"], "cpu") is None
    assert cannot(RUNS["sglang-hicache"], "cpu") == (
        "sglang cannot on this device (docs/reports/features.md says why)"
    )
    assert cannot(RUNS["vllm-nixl"], "cuda") == "the package nixl is not installed"
    assert cannot(RUNS["sglang-dflash"], "cuda") == "sglang has it since 0.5.20"


@pytest.mark.parametrize("named", [[], ["vllm-lora", "sglang-lora"]])
def test_nothing_is_made_where_no_run_can_be(named, monkeypatch, capsys):
    monkeypatch.setattr("integration.features.serve.cannot", lambda run, device: "it is night")
    monkeypatch.setattr("integration.features.serve.stop_on_signals", lambda: None)
    monkeypatch.setattr("integration.features.serve.make_models", lambda folder: pytest.fail("made models"))
    monkeypatch.setattr(sys, "argv", ["serve", *named])
    with pytest.raises(SystemExit, match="1"):
        serve.main()
    assert capsys.readouterr().out.count(": not run, it is night\n") == len(named or RUNS)


def test_a_list_says_what_runs_are_told_and_need():
    assert (
        listed("lora", RUNS["sglang-lora"], "cuda")
        == "lora: --enable-lora --lora-paths 'adapter={folder}/adapter'"
    )
    assert listed("lora", RUNS["sglang-lora"], "cpu").endswith(" --lora-backend torch_native")
    assert listed("dcp", RUNS["vllm-decode-context-parallel-mla"], "cuda").endswith(
        "--decode-context-parallel-size 2    [model deepseek, GPUs alone, 2 ranks]"
    )
    assert listed("cache", RUNS["vllm-float8-cache"], "cpu") == "cache: no option    [model float8-cache]"
    assert "; the server of prefills: --disaggregation-mode prefill " in listed(
        "pd", RUNS["sglang-nixl"], "cuda"
    )
    assert listed("blocks", RUNS["sglang-dflash"], "cuda").endswith("    [since sglang 0.5.20]")


def test_the_tables_of_the_documentation_are_made_of_what_ran():
    made = tables(read_outcomes())
    assert [len(of_page) for of_page in made.values()] == [1, len(ENGINE_NAMES)]
    for page, of_page in made.items():
        for table in of_page:
            assert f"\n\n{table}\n\n" in page.read_text(), "python -m integration.features.table writes it"


def test_a_table_is_replaced_by_its_first_line():
    text = "before\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\nafter\n\n| c |\n|---|\n| 5 |\n"
    for table in ("| a | b |\n|---|---|\n| 6 | `\\1` |", "| c |\n|---|"):
        changed = replaced(text, table)
        assert f"\n\n{table}\n" in changed
        assert "before\n\n| a | b |\n|---|---|\n" in changed
        assert "\n\nafter\n\n| c |\n|---|\n" in changed
        assert replaced(changed, table) == changed
    assert "| 3 |" not in replaced(text, "| a | b |\n|---|---|")
    assert "| 3 |" in replaced(text, "| c |\n|---|")
    for header, wrong in (("| x |", text), ("| a | b |", f"{text}\n{text}")):
        with pytest.raises(ValueError, match="tables with the first line"):
            replaced(wrong, f"{header}\n|---|")


@pytest.mark.parametrize(("engine", "name"), NAMED)
def test_what_the_table_names_is_there(engine, name):
    file, _, function = name.partition("::")
    if function:
        assert function in {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
    else:
        assert RUNS[name].engine == engine


def test_nothing_is_claimed_that_nothing_shows():
    for cell in (feature.cell(engine) for feature in FEATURES for engine in ENGINE_NAMES):
        assert cell.shown or not cell.works, cell


def test_features_begin_with_a_known_release():
    """A run that needs a release claims nothing for earlier ones."""
    for cell, engine in ((feature.cell(engine), engine) for feature in FEATURES for engine in ENGINE_NAMES):
        needed = {RUNS[one].since for one in cell.shown if one in RUNS} - {None}
        assert needed <= {cell.since}, cell
        assert cell.since in ("", *RELEASES[engine]), cell


def test_every_run_shows_a_feature_of_one_engine():
    names = [name for _, name in NAMED]
    assert len(set(names)) == len(names)
    assert set(names) >= set(RUNS)
    assert "items" in FAMILIES  # what shows multi-item scoring


def test_what_is_recorded_is_named_in_the_table():
    engines = {name: engine for engine, name in NAMED}
    for device, outcomes in read_outcomes().items():
        assert {name: seen.engine for name, seen in outcomes.items()} == {
            name: engines.get(name) for name in outcomes
        }
        assert all(bool(seen.gpu) == (device == "cuda") for seen in outcomes.values())
    assert read_outcomes()["cpu"]


WELL = Seen("vllm", "0.32.0", True, "2026-01-02")
LATER = Seen("vllm", "0.33.0", True, "2026-02-03")
BADLY = Seen("vllm", "0.33.0", False, "2026-02-03", "died")
ON_GPU = replace(WELL, version="0.26.0", gpu="H200")


def last_line(monkeypatch, table, cell, engine="vllm", cuda=None, **cpu):
    """The line of a table about one feature. `two` is the name of a test, all others are runs."""
    monkeypatch.setattr("integration.features.table.FEATURES", (Feature("drafts", cell, cell),))
    monkeypatch.setattr("integration.features.table.OWN_KERNELS", ())
    on_cpu = {name.replace("two", "a/b.py::two"): seen for name, seen in cpu.items()}
    return table(engine, {"cpu": on_cpu, "cuda": cuda or {}}).splitlines()[-1]


def answer(monkeypatch, cell, engine="vllm", **how):
    """The cell of an engine in the users' table."""
    line = last_line(monkeypatch, lambda _, outcomes: overview(outcomes), cell, **how)
    return line.strip("| ").split(" | ")[1 + ENGINE_NAMES.index(engine)]


def test_answers_say_how_runs_ended(monkeypatch):
    cell = Cell(("one", "a/b.py::two"), note="somehow", since="0.32.0")
    said = partial(answer, monkeypatch, cell)
    assert said(one=WELL, two=WELL) == "yes; somehow; from 0.32.0 on"
    assert said(one=WELL, two=LATER) == "yes; somehow; from 0.32.0 on"
    assert said(one=WELL, two=BADLY) == "failed: died"
    assert said(one=WELL) == "not run"
    assert said(one=WELL, two=WELL, cuda={"one": ON_GPU}) == "yes; somehow; from 0.32.0 on"
    failed = {"one": replace(ON_GPU, ok=False, reason="died")}
    assert said(one=WELL, two=WELL, cuda=failed) == "failed on an H200: died"
    assert said(two=WELL, cuda={"one": ON_GPU}) == "yes; somehow; from 0.32.0 on"


def test_answers_have_the_option_and_the_first_release(monkeypatch):
    said = partial(answer, monkeypatch)
    assert said(Cell(("one",), option="--halves")) == "not run"
    assert said(Cell(("one",), option="--halves"), one=WELL) == "yes: `--halves`"
    assert said(Cell(("one",)), engine="sglang", one=WELL) == "yes"
    assert said(Cell(("one",), False, "pass `--dcp 1`"), one=WELL) == "no; pass `--dcp 1`"
    assert said(Cell(works=None)) == "not in vLLM"
    assert said(Cell(works=None), engine="sglang") == "not in SGLang"


def test_evidence_has_releases_dates_and_gpus(monkeypatch):
    line = partial(last_line, monkeypatch, evidence, Cell(("one", "a/b.py::two"), no_cpu="no memory"))
    assert line(one=WELL, two=WELL) == "| drafts | `one`, `two` (0.32.0, 2026-01-02) | no memory |"
    assert (
        line(one=WELL, two=LATER)
        == "| drafts | `one` (0.32.0, 2026-01-02), `two` (0.33.0, 2026-02-03) | no memory |"
    )
    assert line(one=WELL) == "| drafts | `one` (0.32.0, 2026-01-02), `two` | no memory |"
    there = "(0.32.0, 2026-01-02; 0.26.0 on an H200, 2026-01-02)"
    assert (
        line(one=WELL, two=WELL, cuda={"one": ON_GPU})
        == f"| drafts | `one` {there}, `two` (0.32.0, 2026-01-02) | no memory |"
    )
    assert last_line(monkeypatch, evidence, Cell(works=False)) == "|---|---|---|"


def test_an_outcome_takes_the_place_of_the_one_before(tmp_path, monkeypatch):
    file = tmp_path / "features.json"
    file.write_text('{"cpu": {}, "cuda": {}}')
    monkeypatch.setattr(
        "integration.features.outcomes.version",
        lambda engine: {"vllm": "0.32.0+cpu", "sglang": "0.5.23"}[engine],
    )
    record("b", "sglang", True, file=file)
    record("a", "vllm", True, file=file)
    record("b", "sglang", False, "died", file=file)
    record("b", "sglang", True, file=file, device="cuda", gpu="H200")
    on_gpu, seen = read_outcomes(file)["cuda"], read_outcomes(file)["cpu"]
    assert {name: (of.ok, of.gpu) for name, of in on_gpu.items()} == {"b": (True, "H200")}
    assert list(seen) == ["a", "b"]
    assert (seen["a"].version, seen["a"].ok) == ("0.32.0", True)
    assert (seen["b"].version, seen["b"].ok, seen["b"].reason) == ("0.5.23", False, "died")


def test_how_a_test_ended(tmp_path):
    """One failed case decides; skipped cases prove nothing."""
    cases = {
        "good[1]": "",
        "good[2]": "<skipped/>",
        "bad[1]": "",
        "bad[2]": '<failure message="no&#10;more"/>',
        "skipped": "<skipped/>",
    }
    report = tmp_path / "report.xml"
    lines = [
        f'<testcase classname="tests.a.b" name="{name}">{inside}</testcase>' for name, inside in cases.items()
    ]
    report.write_text(f"<testsuite>{''.join(lines)}</testsuite>")
    assert read_junit(report, "tests/a/b.py::good") == (True, "")
    assert read_junit(report, "tests/a/b.py::bad") == (False, "no")
    for nothing in ("tests/a/b.py::skipped", "tests/a/b.py::absent", "tests/a/c.py::good"):
        assert read_junit(report, nothing) == (False, "no case was run")
