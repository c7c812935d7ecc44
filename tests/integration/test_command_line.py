"""What the tools that start servers have in common: options, what a comparison starts with, exit statuses. No engine is started."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from integration import compare_sampling, compare_tokens, serve_benchmark
from integration.command_line import Comparison, exit_with, results_folder
from integration.tokenizer import write_word_tokenizer

TOOLS = {"tokens": compare_tokens, "sampling": compare_sampling}


@pytest.fixture
def model_folder(tmp_path):
    """A model without weights, and beside it ShareGPT conversations whose first turns have 1 ... 20 tokens."""
    write_word_tokenizer(tmp_path, 100)
    (tmp_path / "config.json").write_text("{}")
    turns = [" ".join(f"t{token:02}" for token in range(length)) for length in range(1, 21)]
    chats = [{"conversations": [{"from": "human", "value": turn}, {"from": "gpt", "value": "t00"}]} for turn in turns]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    return tmp_path


@pytest.fixture
def parse(monkeypatch, model_folder):
    """A function that parses a tool's command line as its main() does."""

    def arguments(name, line=""):
        where = f"--engine vllm --device cpu --model {model_folder} --dataset {model_folder / 'chats.json'} --results {model_folder / 'results'}"
        monkeypatch.setattr(sys, "argv", [name, *where.split(), *shlex.split(line)])
        return TOOLS[name].parse_arguments()

    return arguments


@pytest.mark.parametrize("name", TOOLS)
def test_a_comparison_starts_with_what_was_asked_for(name, parse, model_folder):
    given = parse(name, "--num-prompts 3 --longest-prompt 9 --max-tokens 5 --concurrency 2 --no-cuda-graphs --server-args='--seed 1' --backend stock")
    setup = Comparison.make(given, name)
    assert setup.prompts == [list(range(length)) for length in (4, 5, 6)]     # shorter ones are left out
    launch = setup.launch
    assert (launch.backend, launch.dtype, launch.cuda_graphs, launch.extra_arguments) == ("stock", "float32", False, ["--seed", "1"])
    assert (launch.max_model_len, launch.max_num_seqs, launch.model.folder) == (9 + 5 + 1, 2, model_folder)
    assert Comparison.make(parse(name, "--num-prompts 1 --device cuda"), name).launch.dtype == "bfloat16"
    with pytest.raises(ValueError, match=r"num-prompts: 7, but .* holds 6 prompts of 4 to 9 tokens"):
        Comparison.make(parse(name, "--num-prompts 7 --longest-prompt 9"), name)


@pytest.mark.parametrize("name", TOOLS)
def test_a_comparison_writes_its_settings_beside_the_outcome(name, parse, model_folder):
    setup = Comparison.make(parse(name, "--num-prompts 2 --dtype float16"), name)
    setup.results.mkdir()
    setup.write({"outcome": 7})
    report = json.loads((model_folder / "results" / f"{name}.json").read_text())
    assert (report["outcome"], report["settings"]["dtype"], report["settings"]["num_prompts"]) == (7, "float16", "2")


def test_results_go_to_a_folder_of_their_own(parse):
    given = parse("tokens")
    assert results_folder(given, "x") == given.results
    given.results = None
    assert results_folder(given, "x").parent.name == "results"
    assert results_folder(given, "x").name.startswith("x-2")
    assert serve_benchmark.parse_arguments(["--engine", "vllm", "--backends", "stock"]).results.name.startswith("vllm-2")


def refused():
    raise ValueError("model: 'x' is no model")


@pytest.mark.parametrize(("command", "status"), [(lambda: True, 0), (lambda: False, 1), (refused, "\nerror: model: 'x' is no model")])
def test_the_exit_status_says_how_it_went(command, status):
    with pytest.raises(SystemExit) as ended:
        exit_with(command)
    assert ended.value.code == status
