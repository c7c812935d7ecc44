"""The command lines of the tools that start servers: options, the initial set-up of a comparison, exit
statuses.

No engine is started.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys

import pytest

from integration import compare_sampling, compare_speculation, compare_tokens, serve_benchmark
from integration.benchmark import Load
from integration.command_line import Comparison, exit_with, one_of, results_folder
from integration.tokenizer import write_word_tokenizer

TOOLS = {"tokens": compare_tokens, "sampling": compare_sampling, "speculation": compare_speculation}


@pytest.fixture
def model_folder(tmp_path):
    """A model without weights, and ShareGPT conversations whose first turns have 1 ...

    20 tokens.
    """
    write_word_tokenizer(tmp_path, 100)
    (tmp_path / "config.json").write_text("{}")
    turns = [" ".join(f"t{token:02}" for token in range(length)) for length in range(1, 21)]
    chats = [
        {"conversations": [{"from": "human", "value": turn}, {"from": "gpt", "value": "t00"}]}
        for turn in turns
    ]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    return tmp_path


@pytest.fixture
def parse(monkeypatch, model_folder):
    """A function that parses a tool's command line as its main() does."""

    def arguments(name, line=""):
        where = (
            f"--engine vllm --device cpu --model {model_folder} --dataset {model_folder / 'chats.json'} "
            f"--results {model_folder / 'results'}"
        )
        monkeypatch.setattr(sys, "argv", [name, *where.split(), *shlex.split(line)])
        return TOOLS[name].parse_arguments()

    return arguments


def test_names_are_of_those_that_are_known(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", default=["a", "b"], type=one_of(("a", "b")))
    assert parser.parse_args([]).names == ["a", "b"]
    assert parser.parse_args(["b"]).names == ["b"]
    with pytest.raises(SystemExit):
        parser.parse_args(["a", "c"])
    assert "NAME: c; must be of a, b" in capsys.readouterr().err


@pytest.mark.parametrize("name", TOOLS)
def test_a_comparison_starts_with_what_was_asked_for(name, parse, model_folder):
    given = parse(
        name,
        "--num-prompts 3 --longest-prompt 9 --max-tokens 5 --concurrency 2 --no-cuda-graphs "
        "--server-args='--seed 1' --backend stock",
    )
    setup = Comparison.make(given, name)
    assert setup.prompts == [list(range(length)) for length in (4, 5, 6)]  # shorter ones are left out
    launch = setup.launch
    assert (launch.backend, launch.dtype, launch.cuda_graphs, launch.extra_arguments) == (
        "stock",
        "float32",
        False,
        ["--seed", "1"],
    )
    assert (launch.max_model_len, launch.max_num_seqs, launch.model.folder) == (9 + 5 + 1, 2, model_folder)
    assert Comparison.make(parse(name, "--num-prompts 1 --device cuda"), name).launch.dtype == "bfloat16"
    with pytest.raises(ValueError, match=r"num-prompts: 7, but .* holds 6 prompts of 4 to 9 tokens"):
        Comparison.make(parse(name, "--num-prompts 7 --longest-prompt 9"), name)


def test_the_reference_may_have_other_arguments_and_fewer_gpus(parse, model_folder):
    def servers(line):
        given = parse("tokens", f"--num-prompts 1 --reference stock {line}")
        made = compare_tokens.launches(given, Comparison.make(given, "tokens").launch)
        return [
            (launch.backend, launch.tensor_parallel_size, launch.extra_arguments)
            for _, launch in made.values()
        ]

    assert servers("--server-args='--seed 1'") == [
        ("stock", 1, ["--seed", "1"]),
        ("attn_backend", 1, ["--seed", "1"]),
    ]
    assert servers("--tensor-parallel-size 2 --server-args='--seed 1' --reference-args=''") == [
        ("stock", 2, []),
        ("attn_backend", 2, ["--seed", "1"]),
    ]
    ranks = "--tensor-parallel-size 2 --reference-tensor-parallel-size 1"
    with pytest.raises(
        ValueError, match=r"reference-tensor-parallel-size: 1, must be 2 for .*, whose weights are random"
    ):
        servers(ranks)
    (model_folder / "model.safetensors").touch()
    assert servers(f"{ranks} --server-args='--seed 1'") == [
        ("stock", 1, ["--seed", "1"]),
        ("attn_backend", 2, ["--seed", "1"]),
    ]


@pytest.mark.parametrize("name", TOOLS)
def test_a_comparison_writes_its_settings_beside_the_outcome(name, parse, model_folder):
    setup = Comparison.make(parse(name, "--num-prompts 2 --dtype float16"), name)
    setup.results.mkdir()
    setup.write({"outcome": 7})
    report = json.loads((model_folder / "results" / f"{name}.json").read_text())
    assert (report["outcome"], report["settings"]["dtype"], report["settings"]["num_prompts"]) == (
        7,
        "float16",
        "2",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--check-seeds --sampling top_k=5", "--check-seeds is only known with --side-by-side"),
        ("--time-limit 9", "--time-limit is only known with --side-by-side"),
        ("--turn folder", "--turn is only known with --side-by-side"),
        ("--leave-out stock:1", "--leave-out is only known with --side-by-side"),
        ("--side-by-side --check-seeds", "--check-seeds needs --sampling"),
        ("--num-prompts 0", "num_prompts is 0, must be greater than 0"),
        ("--request-rate -1", "request_rate is -1.0, must be greater than 0"),
        ("--max-num-seqs 0", "max_num_seqs is 0, must be greater than 0"),
        ("--sampling top_q=1", "sampling: 'top_q' is none of temperature, top_p, top_k, min_p"),
    ],
)
def test_options_that_are_wrong_or_would_do_nothing_are_refused(line, message, capsys):
    with pytest.raises(SystemExit):
        serve_benchmark.parse_arguments(["--engine", "vllm", "--backends", "stock", *shlex.split(line)])
    assert message in capsys.readouterr().err


def test_an_option_holds_for_all_data_sets_or_for_one_each():
    loads = serve_benchmark.parse_loads(
        ["sharegpt", "prefix:8+8"], [4, 5], ["recorded", "16"], [float("inf")], [4, 1]
    )
    assert loads == [Load("sharegpt", 4, None, float("inf"), 4), Load("prefix:8+8", 5, "16", float("inf"), 1)]
    with pytest.raises(ValueError, match="num-prompts: 3 values"):
        serve_benchmark.parse_loads(["sharegpt", "sharegpt"], [1, 2, 3], ["recorded"], [1.0], [1])
    with pytest.raises(ValueError, match="samples: 3 values"):
        serve_benchmark.parse_loads(["sharegpt", "sharegpt"], [1], ["recorded"], [1.0], [1, 4, 16])


def test_the_command_line_of_the_loads_that_share_prefixes():
    line = (
        "--engine vllm --backends attn_backend --dataset prefix:4096+256 sharegpt sharegpt --output-len "
        "128 recorded recorded"
    )
    settings = serve_benchmark.parse_arguments(
        f"{line} --num-prompts 128 96 24 --request-rate 40 8 2 --samples 1 4 16".split()
    )
    shared, few, many = settings.loads
    assert shared == Load("prefix:4096+256", 128, "128", 40.0, 1)
    assert (few.samples, many.samples) == (4, 16)
    assert few.num_prompts * few.samples == many.num_prompts * many.samples == 384


def test_results_go_to_a_folder_of_their_own(parse):
    given = parse("tokens")
    assert results_folder(given, "x") == given.results
    given.results = None
    assert results_folder(given, "x").parent.name == "results"
    assert results_folder(given, "x").name.startswith("x-2")
    assert serve_benchmark.parse_arguments(
        ["--engine", "vllm", "--backends", "stock"]
    ).results.name.startswith("vllm-2")


def refused():
    raise ValueError("model: 'x' is not a model")


@pytest.mark.parametrize(
    ("command", "status"),
    [(lambda: True, 0), (lambda: False, 1), (refused, "\nerror: model: 'x' is not a model")],
)
def test_the_exit_status_says_how_it_went(command, status):
    with pytest.raises(SystemExit) as ended:
        exit_with(command)
    assert ended.value.code == status
