"""The perplexity of texts, from the probabilities that a server assigns to their tokens."""

from __future__ import annotations

import json
import math
import shutil
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from integration import perplexity as tool
from integration.engines import ENGINES, Token
from integration.engines import sglang as sglang_engine
from integration.engines import vllm as vllm_engine
from integration.model import Model
from integration.perplexity import agreement, cut_texts, increase, parse_arguments, perplexity, run
from integration.sharegpt import conversation_texts
from integration.tokenizer import write_word_tokenizer


def test_texts_are_cut_to_the_number_of_tokens():
    texts = [list(range(9)), [7], [], list(range(50)), list(range(50))]
    cut = cut_texts(texts, 30, 20)
    assert [len(text) for text in cut] == [9, 20, 4]  # 8 + 19 + 3 are scored
    assert cut[2] == [0, 1, 2, 3]
    assert cut_texts([[1, 2, 3], [4, 5]], 2, 10) == [[1, 2, 3]]
    with pytest.raises(ValueError, match="num-tokens: 30, but the texts hold 8"):
        cut_texts(texts[:3], 30, 20)


def test_perplexity():
    assert perplexity([[math.log(0.5)] * 3, [math.log(0.5)]]) == pytest.approx(2.0)
    assert perplexity([[0.0, math.log(1 / 16)]]) == pytest.approx(4.0)


def test_increase():
    more, error = increase([[-1.0, -2.0], [-3.0]], [[-1.0, -2.1], [-3.2]])
    assert more == pytest.approx(math.expm1(0.1))
    assert error == pytest.approx(0.1 / math.sqrt(3))


def test_agreement():
    reference = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert agreement(reference, reference) == (1.0, 1.0)
    assert agreement(reference, [[1, 2, 9, 4], [5, 6, 7, 8]]) == (0.75, 0.5)
    assert agreement(reference, [[9, 2, 3, 4], [5, 6, 7, 9]]) == (0.375, 0.0)


def test_conversations_are_joined(tmp_path):
    file = tmp_path / "chats.json"
    file.write_text('[{"conversations": [{"value": "a"}, {"value": "b"}]}, {"conversations": []}]')
    assert conversation_texts(file) == ["a\n\nb", ""]


def test_what_vllm_answers(monkeypatch):
    answer = {
        "choices": [
            {
                "prompt_logprobs": [
                    None,
                    {"5": {"logprob": -1.5, "rank": 3}, "9": {"logprob": -0.5, "rank": 1}},
                    {"6": {"logprob": -2.0}},
                ]
            }
        ]
    }
    asked = []
    monkeypatch.setattr(vllm_engine, "post_json", lambda url, body: asked.append((url, body)) or answer)
    assert ENGINES["vllm"].prompt_logprobs("http://here", [4, 5, 6]) == [-1.5, -2.0]
    assert asked[0][0] == "http://here/v1/completions"
    assert asked[0][1]["prompt"] == [4, 5, 6]


def test_what_sglang_answers(monkeypatch):
    answer = {"meta_info": {"input_token_logprobs": [[None, 4, None], [-1.5, 5, None], [-2.0, 6, None]]}}
    monkeypatch.setattr(sglang_engine, "post_json", lambda url, body: answer)
    assert ENGINES["sglang"].prompt_logprobs("http://here", [4, 5, 6]) == [-1.5, -2.0]


@dataclass
class FakeEngine:
    """The server's cache dtype determines the probability of each token, and the last token of an answer."""

    name: str = "fake"
    kv_cache_dtypes: list[str] = field(default_factory=list)  # one for each started server
    forgets: bool = False

    def prompt_logprobs(self, url, prompt):
        probability = {"auto": 0.5, "good": 0.49, "bad": 0.4}[self.kv_cache_dtypes[-1]]
        return [math.log(probability)] * (len(prompt) - 1 - self.forgets)

    def generate(self, url, prompt, max_tokens, alternatives):
        last = 0 if self.kv_cache_dtypes[-1] == "auto" else 1
        return [Token(token_id, 0.0, {}) for token_id in [0] * (max_tokens - 1) + [last]]


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
    write_word_tokenizer(tmp_path, 5000)
    (tmp_path / "chats.json").write_text(
        '[{"conversations": [{"value": "one two three four five"}, {"value": "six seven eight"}]}]'
    )

    def evaluate(engine, *dtypes, arguments=()):
        monkeypatch.setitem(ENGINES, "vllm", engine)
        monkeypatch.setattr(tool, "resolve_model", lambda name, python: Model("none", tmp_path, True))
        monkeypatch.setattr(
            tool,
            "running_server",
            lambda engine, launch, *_: (
                engine.kv_cache_dtypes.append(launch.kv_cache_dtype) or nullcontext("url")
            ),
        )
        standard = [
            "--engine",
            "vllm",
            "--dataset",
            str(tmp_path / "chats.json"),
            "--num-tokens",
            "4",
            "--num-prompts",
            "1",
            "--max-tokens",
            "4",
            "--results",
            str(tmp_path),
        ]
        return run(parse_arguments([*standard, *arguments, "--kv-cache-dtypes", *dtypes]))

    return evaluate


def test_formats_are_compared_with_the_first(evaluate, tmp_path, capsys):
    engine = FakeEngine()
    assert evaluate(engine, "auto", "auto", "good")
    assert engine.kv_cache_dtypes == ["auto", "auto", "good"]
    said = capsys.readouterr().out
    assert said.count("| attn_backend | auto | 2.000 | +0.00% ± 0.00% | 100.0% | 100.0% |") == 2
    assert "| attn_backend | good | 2.041 | +2.04% ± 0.00% | 75.0% | 0.0% |" in said
    formats = json.loads((tmp_path / "perplexity.json").read_text())["formats"]
    assert [(one["kv_cache_dtype"], one["perplexity"]) for one in formats[:2]] == [("auto", 2.0)] * 2
    assert not evaluate(engine, "auto", "bad")


def test_answers_are_optional(evaluate, capsys):
    assert evaluate(FakeEngine(), "auto", arguments=["--num-prompts", "0"])
    assert "| attn_backend | auto | 2.000 | +0.00% ± 0.00% |\n" in capsys.readouterr().out


def test_earlier_runs_are_joined(evaluate, tmp_path, capsys):
    evaluate(FakeEngine(), "auto", arguments=["--backend", "stock"])
    earlier = (tmp_path / "perplexity.json").rename(tmp_path / "earlier.json")
    assert not evaluate(FakeEngine(), "bad", arguments=["--against", str(earlier)])
    said = capsys.readouterr().out
    assert (
        "| stock | auto | 2.000 | +0.00% ± 0.00% | 100.0% | 100.0% |\n"
        "| attn_backend | bad | 2.500 | +25.00% ± 0.00% | 75.0% | 0.0% |" in said
    )
    with pytest.raises(ValueError, match=r"earlier.json has max_tokens 4, must be 5"):
        evaluate(FakeEngine(), "good", arguments=["--against", str(earlier), "--max-tokens", "5"])


def test_a_server_that_leaves_tokens_out_is_an_error(evaluate):
    with pytest.raises(RuntimeError, match=r"did not score every token: \[3\]"):
        evaluate(FakeEngine(forgets=True), "auto")


def write_checkpoint_with_scales(folder, target, scale):
    """The model in `folder` as llm-compressor writes it with an fp8 KV cache: the config declares it, and
    each layer has scales.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    tensors = {
        name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    config = json.loads((target / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor([scale]) for name in "kv"}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    declared = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": ["lm_head"],
    }
    config["quantization_config"] = declared | {"kv_cache_scheme": scheme}
    (target / "config.json").write_text(json.dumps(config))


@pytest.mark.integration
@pytest.mark.slow
def test_a_checkpoint_that_declares_an_8_bit_cache_brings_its_scales(
    need_engine, forked_engines, smollm2, sharegpt, tmp_path
):
    """Scales that are far too small ruin K and V. A high perplexity shows that the scales are used, and that
    `auto` follows the declaration. SGLang has no 8-bit caches on a CPU.
    """
    need_engine("vllm")
    write_checkpoint_with_scales(smollm2.folder, tmp_path / "model", 1e-4)
    arguments = [
        "--engine",
        "vllm",
        "--device",
        "cpu",
        "--model",
        str(tmp_path / "model"),
        "--dataset",
        str(sharegpt),
        "--results",
        str(tmp_path),
    ]
    assert not run(
        parse_arguments(
            [
                *arguments,
                "--num-tokens",
                "300",
                "--num-prompts",
                "0",
                "--kv-cache-dtypes",
                "bfloat16",
                "auto",
                "--python",
                sys.executable,
            ]
        )
    )
    formats = json.loads((tmp_path / "perplexity.json").read_text())["formats"]
    found = {one["kv_cache_dtype"]: one["perplexity"] for one in formats}
    assert found["bfloat16"] < 20
    assert found["auto"] > 10 * found["bfloat16"]
