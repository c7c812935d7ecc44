"""The perplexity of texts, from the probabilities that a server gives to their tokens."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest

from integration import perplexity as tool
from integration.engines import ENGINES
from integration.engines import sglang as sglang_engine
from integration.engines import vllm as vllm_engine
from integration.model import Model
from integration.perplexity import cut_texts, parse_arguments, perplexity, run
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


def test_conversations_are_joined(tmp_path):
    file = tmp_path / "chats.json"
    file.write_text('[{"conversations": [{"value": "a"}, {"value": "b"}]}, {"conversations": []}]')
    assert conversation_texts(file) == ["a\n\nb", ""]


def test_what_vllm_answers(monkeypatch):
    answer = {"choices": [{"prompt_logprobs": [None, {"5": {"logprob": -1.5, "rank": 3}, "9": {"logprob": -0.5, "rank": 1}}, {"6": {"logprob": -2.0}}]}]}
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
    """Each token has the probability that its server's cache dtype stands for."""

    name: str = "fake"
    launches: list[list[str]] = field(default_factory=list)
    forgets: bool = False

    def prompt_logprobs(self, url, prompt):
        probability = {"auto": 0.5, "good": 0.49, "bad": 0.4}[self.launches[-1][1]]
        return [math.log(probability)] * (len(prompt) - 1 - self.forgets)


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
    write_word_tokenizer(tmp_path, 5000)
    (tmp_path / "chats.json").write_text('[{"conversations": [{"value": "one two three four five"}, {"value": "six seven eight"}]}]')

    def evaluate(engine, *dtypes):
        monkeypatch.setitem(ENGINES, "vllm", engine)
        monkeypatch.setattr(tool, "resolve_model", lambda name, python: Model("none", tmp_path, True))
        monkeypatch.setattr(tool, "running_server", lambda engine, launch, log, timeout: engine.launches.append(launch.extra_arguments) or nullcontext("url"))
        arguments = ["--engine", "vllm", "--dataset", str(tmp_path / "chats.json"), "--num-tokens", "4", "--results", str(tmp_path)]
        return run(parse_arguments([*arguments, "--kv-cache-dtypes", *dtypes]))

    return evaluate


def test_perplexities_are_compared_with_the_first(evaluate, tmp_path, capsys):
    engine = FakeEngine()
    assert evaluate(engine, "auto", "good")
    assert engine.launches == [["--kv-cache-dtype", "auto"], ["--kv-cache-dtype", "good"]]
    assert "| good | 2.041 | +2.04% |" in capsys.readouterr().out
    assert '"auto": 2.0' in (tmp_path / "perplexity.json").read_text()
    assert not evaluate(engine, "auto", "bad")


def test_a_server_that_leaves_tokens_out_is_an_error(evaluate):
    with pytest.raises(RuntimeError, match=r"did not score every token: \[3\]"):
        evaluate(FakeEngine(forgets=True), "auto")


@pytest.mark.integration
@pytest.mark.slow
def test_vllm_serves_over_8_bit_caches(need_engine, smollm2, sharegpt, tmp_path):
    """SGLang has none on a CPU."""
    need_engine("vllm")
    arguments = ["--engine", "vllm", "--device", "cpu", "--model", str(smollm2.folder), "--dataset", str(sharegpt), "--results", str(tmp_path)]
    assert run(parse_arguments([*arguments, "--num-tokens", "600", "--kv-cache-dtypes", "auto", "fp8", "fp8_e5m2", "--python", sys.executable]))
    assert "kv_cache_dtype=fp8_e5m2" in (tmp_path / "server-fp8_e5m2.log").read_text()
