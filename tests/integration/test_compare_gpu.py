"""The distance between answers whose tokens may differ (integration/tiny_models/compare_gpu.py)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the environment of `make test`")
sys.path.append(str(Path(__file__).resolve().parents[2]))

from safetensors.torch import load_file, save_file

from integration.processes import own_modules
from integration.tiny_models import compare_gpu, reference, sglang_engine_runner
from integration.tiny_models.compare_gpu import compare, families_of, served
from integration.tiny_models.families import FAMILIES
from integration.tiny_models.questions import (
    LABELS,
    Answer,
    Question,
    apart,
    distance,
    questions,
    read_answers,
)
from integration.tiny_models.tokenizer import BOS, VOCAB, text_of, write_tokenizer

REFERENCE = Answer([1, 2, 3], [-1.0, -2.0, -3.0], [-4.0])


@pytest.mark.parametrize(
    ("engine", "message"),
    [("vllm", "there is no GPU; on a CPU: "), ("vlm", "ENGINE: vlm; must be of vllm, sglang")],
)
def test_what_cannot_be_compared_is_refused_first(engine, message, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["compare_gpu", engine])
    with pytest.raises(SystemExit, match="2"):
        compare_gpu.main()
    assert message in capsys.readouterr().err


def test_distance_ends_where_tokens_differ():
    other = Answer([1, 5, 9], [-1.5, -2.1, -7.0], [-4.5])
    assert distance([REFERENCE], [other]) == pytest.approx(0.5)
    assert apart(REFERENCE, other) == pytest.approx(0.1)
    assert apart(REFERENCE, REFERENCE) == 0.0


def test_distance_of_embeddings_and_of_nothing():
    embedding = Answer(values=[0.5, 1.0])
    assert distance([embedding], [Answer(values=[0.25, 1.25])]) == 0.25
    assert apart(embedding, Answer(values=[0.25, 1.25])) == 0.0
    assert distance([Answer([1], [-1.0])], [Answer([2], [-1.0])]) is None


def compare_answers(folder, *, ours, stock=None):
    (folder / "bert").mkdir()
    for name, answer in (("reference", REFERENCE), ("vllm-ours", ours), ("vllm-stock", stock)):
        if answer is not None:
            (folder / "bert" / f"{name}.answers.json").write_text(json.dumps([asdict(answer)]))
    return compare("vllm", "bert", folder, folder)


@pytest.mark.parametrize(
    ("ours", "near"),
    [
        (Answer([1, 2, 3], [-1.14, -2.14, -3.14], [-4.14]), True),
        (Answer([1, 2, 3], [-1.2, -2.2, -3.2], [-4.2]), False),  # twice as far away as the engine's own
        (Answer([1, 7, 3], [-1.0, -2.15, -3.0], [-4.0]), True),  # a tie
        (Answer([1, 7, 3], [-1.0, -2.5, -3.0], [-4.0]), False),  # no tie
    ],
)
def test_the_engines_own_backend_is_the_measure(ours, near, tmp_path):
    assert (
        compare_answers(tmp_path, ours=ours, stock=Answer([1, 2, 3], [-1.1, -2.1, -3.1], [-4.1]))[0] == near
    )


@pytest.mark.parametrize(
    ("ours", "stock", "near"),
    [
        # the engine's own backend has another token, which is less probable
        (Answer([1, 2, 3], [-1.0, -2.1, -3.0]), Answer([1, 7, 3], [-1.1, -2.8, -3.0]), True),
        # not ours either
        (Answer([1, 8, 3], [-1.0, -2.5, -3.0]), Answer([1, 7, 3], [-1.1, -2.8, -3.0]), False),
        # both have another token: a difference of the engine's model
        (Answer([1, 7, 3], [-1.0, -2.5, -3.0]), Answer([1, 7, 3], [-1.1, -2.6, -3.1]), True),
    ],
)
def test_a_token_is_transformers_or_the_own_backends(ours, stock, near, tmp_path):
    assert compare_answers(tmp_path, ours=ours, stock=stock)[0] == near


def test_nothing_to_compare_is_a_line(tmp_path):
    """Answers that differ from transformers' at the first token: the engine's own backend, and ours."""
    elsewhere = Answer([9, 9, 9], [-1.3, -2.0, -3.0])
    for name in ("near", "far", "wrong"):
        (tmp_path / name).mkdir()
    near, line = compare_answers(
        tmp_path / "near", ours=Answer([1, 2, 3], [-1.05, -2.05, -3.05]), stock=elsewhere
    )
    assert (near, line) == (
        True,
        "5.0e-02, own backend nothing to compare, between them nothing to compare, tokens that differ are "
        "0.0e+00 apart",
    )
    assert not compare_answers(tmp_path / "far", ours=Answer([1, 2, 3], [-1.2, -2.2, -3.2]), stock=elsewhere)[
        0
    ]
    near, line = compare_answers(tmp_path / "wrong", ours=elsewhere)
    assert not near
    assert line.startswith("nothing to compare, own backend does not serve it, log ")


def test_a_family_that_failed_is_not_near(tmp_path):
    logs = [f"{tmp_path}/bert/vllm-{who}.log" for who in ("ours", "stock")]
    assert compare("vllm", "bert", tmp_path, tmp_path) == (
        False,
        f"failed, log {logs[0]}; own backend, too, log {logs[1]}",
    )
    assert compare_answers(tmp_path, ours=None, stock=REFERENCE) == (False, f"failed, log {logs[0]}")


# Requests to SGLang's engine (integration/tiny_models/sglang_engine_runner.py)


class FakeEngine:
    """Records its requests, and returns `outputs`."""

    def __init__(self, outputs):
        self.outputs, self.asked = outputs, None
        self.loop, self.tokenizer_manager = asyncio.new_event_loop(), self

    def generate(self, **asked):
        self.asked = asked
        return self.outputs

    def rerank(self, pairs):
        self.asked = pairs
        return self.outputs

    async def generate_request(self, request, _http_request):
        self.asked = request
        yield self.outputs


def of_tokens(*logprobs):
    return [(logprob, token, None) for token, logprob in enumerate(logprobs)]


def test_every_family_is_asked():
    for engine in ("vllm", "sglang"):
        assert families_of(engine, None) == [
            name for name, family in FAMILIES.items() if engine in family.engines
        ]
    assert families_of("sglang", ["whisper", "bloom", "bert"]) == ["bert", "whisper"]  # SGLang has no BLOOM
    assert {FAMILIES[name].kind for name in families_of("sglang", None)} == set(sglang_engine_runner.ASK)


def test_sglang_has_graphs_for_all_questions():
    sizes = sglang_engine_runner.GPU_OPTIONS["cuda_graph_bs_prefill"]
    for family in FAMILIES.values():
        asked = sum(
            len(question.expanded) + sum(1 + len(item) for item in question.items) + 1
            for question in questions(family)
        )
        assert asked < max(sizes)
    assert max(sizes) == sglang_engine_runner.GPU_OPTIONS["cuda_graph_max_bs_prefill"]


def test_checkpoints_as_sglang_expects_them(tmp_path):
    """In bfloat16. For Llama 4, RoPE pairs are neighbors in transformers, and half a head apart here."""
    folder = tmp_path / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"dtype": "float32", "text_config": {"dtype": "float32"}}))
    rows = torch.arange(2 * 64.0)[:, None].repeat(1, 3)
    save_file(
        {"layers.0.q_proj.weight": rows, "layers.0.v_proj.weight": rows.clone()}, folder / "model.safetensors"
    )
    for family in ("gemma2", "llama4"):
        (tmp_path / family).mkdir()
        made = sglang_engine_runner.as_served(FAMILIES[family], folder, tmp_path / family)
        assert json.loads((made / "config.json").read_text()) == {
            "dtype": "bfloat16",
            "text_config": {"dtype": "bfloat16"},
        }
        assert (made / "1_Pooling").is_dir()
        weights = load_file(made / "model.safetensors")
        assert torch.equal(weights["layers.0.v_proj.weight"], rows)
        head = [*range(0, 64, 2), *range(1, 64, 2)] if family == "llama4" else [*range(64)]
        assert weights["layers.0.q_proj.weight"][:, 0].tolist() == [*head, *(64 + row for row in head)]


def test_options_are_of_families_that_there_are():
    assert {*sglang_engine_runner.STOCK_OF_FAMILY, *sglang_engine_runner.GPU_OPTIONS_OF_FAMILY} <= set(
        families_of("sglang", None)
    )


def test_the_engine_is_asked_for_tokens_alone():
    asked = questions(FAMILIES["gemma2"])
    engine = FakeEngine([{"meta_info": {"output_token_logprobs": of_tokens(-1.0, -2.0)}}])
    assert sglang_engine_runner.generate(engine, Path(), asked) == [Answer([0, 1], [-1.0, -2.0])]
    assert engine.asked["input_ids"] == [question.tokens for question in asked]
    assert "image_data" not in engine.asked
    assert "audio_data" not in engine.asked
    for logprobs in ((), (float("nan"),)):
        engine.outputs = [{"meta_info": {"output_token_logprobs": of_tokens(*logprobs)}}]
        with pytest.raises(AssertionError, match="must be finite, and some"):
            sglang_engine_runner.generate(engine, Path(), asked)


def test_images_belong_to_their_prompts(monkeypatch, need_engine):
    need_engine("sglang")
    from sglang.srt.managers.io_struct import GenerateReqInput

    monkeypatch.setattr(
        reference, "image_inputs", lambda _folder, question: {"pixel_values": torch.tensor(question.image)}
    )
    monkeypatch.setattr(sglang_engine_runner, "OURS", "ours")
    asked = questions(FAMILIES["gemma3"])
    engine = FakeEngine([])
    sglang_engine_runner.generate_with_images(engine, Path(), asked)
    request = GenerateReqInput(**engine.asked)
    request.normalize_batch_and_arguments()
    for i, question in enumerate(asked):
        one = request[i]
        assert one.input_ids == question.expanded
        assert one.contains_mm_input() == (question.image is not None)
        if question.image is not None:
            (image,) = one.image_data
            assert image["format"] == "processor_output"
            assert torch.equal(image["pixel_values"], torch.tensor(question.image))


def test_the_own_backend_gets_prompts_with_and_without_images_one_at_a_time(monkeypatch):
    monkeypatch.setattr(
        reference, "image_inputs", lambda _folder, question: {"pixel_values": torch.tensor(question.image)}
    )
    monkeypatch.setattr(sglang_engine_runner, "OURS", "stock")
    asked = questions(FAMILIES["gemma3"])
    engine = FakeEngine([{"meta_info": {"output_token_logprobs": of_tokens(-1.0)}}])
    assert sglang_engine_runner.generate_with_images(engine, Path(), asked) == [Answer([0], [-1.0])] * len(
        asked
    )
    assert engine.asked["input_ids"] == [asked[-1].expanded]


def test_whisper_takes_the_prompts_of_the_questions(monkeypatch, need_engine):
    need_engine("sglang")
    from sglang.srt.managers.io_struct import GenerateReqInput

    monkeypatch.setattr(
        reference, "audio_features", lambda _folder, question: torch.tensor(question.audio)[None]
    )
    asked = questions(FAMILIES["whisper"])
    engine, processor = FakeEngine([]), FakeEngine([])
    sglang_engine_runner.generate(engine, Path(), asked)
    sglang_engine_runner.take_prompts(processor)
    request = GenerateReqInput(**engine.asked)
    request.normalize_batch_and_arguments()
    for i, question in enumerate(asked):
        one = request[i]
        assert one.contains_mm_input()
        given = {"image_data": None, "request_obj": one, "max_req_input_len": 128}
        processed = asyncio.run(
            processor.process_mm_data_async(audio_data=one.audio_data, input_text=one.input_ids, **given)
        )
        assert processed.input_ids == question.tokens
        (item,) = processed.mm_items
        assert torch.equal(item.feature, torch.tensor(question.audio))


def test_embeddings_are_asked_for_by_tokens(need_engine):
    need_engine("sglang")
    engine = FakeEngine([{"embedding": [0.5, -0.5]}])
    assert sglang_engine_runner.embed(engine, Path(), [Question([12, 13])]) == [Answer(values=[0.5, -0.5])]
    request = engine.asked
    request.normalize_batch_and_arguments()
    assert request[0].input_ids == [12, 13]
    assert request[0].text is None


def test_documents_are_scored_in_pairs_of_words(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, tells_texts=True)
    assert AutoTokenizer.from_pretrained(tmp_path)(text_of(list(range(VOCAB))))["input_ids"] == list(
        range(VOCAB)
    )
    encoded = AutoTokenizer.from_pretrained(tmp_path)("t012 t013", "t014")
    assert (encoded["input_ids"], encoded["token_type_ids"]) == ([12, 13, 14], [0, 0, 1])
    engine = FakeEngine([{"embedding": 0.5}, {"embedding": -0.5}])
    assert sglang_engine_runner.score_documents(
        engine, tmp_path, [Question([12, 13], items=[[14], [15]])]
    ) == [Answer(values=[0.5, -0.5])]
    assert engine.asked == [["t012 t013", "t014"], ["t012 t013", "t015"]]


def test_items_are_scored_after_their_delimiters(need_engine):
    need_engine("sglang")
    first, *others = (
        [(-float(3 * place + i), label, None) for i, label in enumerate(LABELS)] for place in range(3)
    )
    engine = FakeEngine([{"meta_info": {"input_token_ids_logprobs": [first, *others]}}])
    assert sglang_engine_runner.score_items(engine, Path(), [Question([30, 31], items=[[40], [41, 42]])]) == [
        Answer(LABELS * 2, [-3.0, -4.0, -5.0, -6.0, -7.0, -8.0])
    ]
    request = engine.asked
    request.normalize_batch_and_arguments()
    one = request[0]
    assert one.input_ids == [30, 31, BOS, 40, BOS, 41, 42, BOS]
    assert one.multi_item_delimiter_indices == [2, 4, 7]
    assert (one.token_ids_logprob, one.logprob_start_len, one.sampling_params["max_new_tokens"]) == (
        LABELS,
        0,
        0,
    )


# The visible output of a run (integration/tiny_models/runner.py)

PROGRAM = """
import os, signal, subprocess, sys
from integration.tiny_models.questions import Answer
from integration.tiny_models.runner import run_families, say_ready

def answer_all(family, folder):
    print("the engine of", family.name)
    subprocess.run([sys.executable, "-c", "print('its process')"], check=True)
    if family.name == "bert":
        raise ValueError("no such layer\\nin two lines")
    if family.name == "phi3":
        os.kill(os.getpid(), signal.SIGKILL)
    say_ready()
    return [Answer([1], [-1.0])]

run_families("", "fake", [], answer_all)
"""


def run_program(folder, *families):
    environment = os.environ | own_modules() | {"TINY_MODELS_ANSWERS": str(folder)}
    command = [sys.executable, "-c", PROGRAM, "models", *families]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)


def test_a_family_has_a_log_and_lines_that_say_how_it_goes(tmp_path):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "fake.answers.json").write_text("of an earlier run")
    done = run_program(tmp_path, "gemma2", "bert", "phi3")
    assert done.returncode == 1
    lines = re.sub(r"after \d+ s", "after N s", done.stdout).splitlines()
    assert lines == [
        f"fake, gemma2: starts, log {tmp_path}/gemma2/fake.log",
        "fake, gemma2: ready after N s",
        "fake, gemma2: answered after N s",
        f"fake, bert: starts, log {tmp_path}/bert/fake.log",
        "fake, bert: failed after N s: ValueError: no such layer",
        f"fake, phi3: starts, log {tmp_path}/phi3/fake.log",
    ]
    assert (tmp_path / "gemma2" / "fake.log").read_text() == "the engine of gemma2\nits process\n"
    assert (tmp_path / "phi3" / "fake.log").read_text() == "the engine of phi3\nits process\n", (
        "what a killed process had said"
    )
    assert read_answers(tmp_path / "gemma2" / "fake.answers.json") == [Answer([1], [-1.0])]
    assert not (tmp_path / "bert" / "fake.answers.json").exists()
    assert (tmp_path / "bert" / "fake.answers.error").read_text() == "ValueError: no such layer\nin two lines"
    assert (tmp_path / "phi3" / "fake.answers.error").read_text() == "ended with status -9"
    assert done.stderr.endswith("---\nphi3: ended with status -9\nfailed: bert phi3\n")
    assert "ValueError: no such layer" in done.stderr.partition(f"the end of {tmp_path}/bert/fake.log")[2]


def test_a_family_is_compared_when_both_backends_have_ended(tmp_path, monkeypatch, capsys):
    """While others of theirs still run; leftovers of an earlier run do not count."""
    may_go_on, models, results = threading.Event(), tmp_path / "models", tmp_path / "results"
    for name, who in (("gemma2", "reference"), ("phi3", "reference"), ("phi3", "sglang-ours")):
        path = (results if who != "reference" else models) / name / f"{who}.answers.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(REFERENCE)]))

    def run(program, folder, families, _, backend, *options, answers, shows):
        assert (program, folder, families, options, shows) == (
            "sglang_engine_runner",
            models,
            ["gemma2", "phi3"],
            ("--device", "cuda", "--jobs", "4"),
            True,
        )
        (answers / "gemma2").mkdir(exist_ok=True)
        path = answers / "gemma2" / f"sglang-{backend}.answers.json"
        if backend == "ours":
            path.with_suffix(".partial").write_text(json.dumps([asdict(REFERENCE)]))
            path.with_suffix(".partial").rename(path)
        else:
            path.with_suffix(".error").write_text("no such layer")
        assert may_go_on.wait(60)
        if backend == "ours":
            raise RuntimeError("the program ended")

    monkeypatch.setattr(compare_gpu, "run", run)
    monkeypatch.setattr(compare_gpu, "POLL_S", 0.01)
    families = served("sglang", ["gemma2", "phi3"], models, results, 4)
    assert next(families) == "gemma2"
    near, line = compare("sglang", "gemma2", models, results)
    assert near
    assert line.startswith(f"0.0e+00, own backend does not serve it, log {results}/gemma2/sglang-stock.log")
    may_go_on.set()
    assert list(families) == ["phi3"]
    assert not compare("sglang", "phi3", models, results)[0]
    assert capsys.readouterr().out == "sglang, ours: the program ended\n"
