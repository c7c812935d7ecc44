"""The requests of a benchmark: ShareGPT conversations, prompts of prescribed lengths, or prompts that share
one prefix. More kinds are in integration/shared_contexts.py and integration/trace.py; integration/datasets.py
has their names.

Parallel sampling (`samples` answers to each prompt) sends the prompt `samples` times in a row. Both engines
treat the `n` of a request the same way. vLLM 0.26.0 turns the request into n requests with the same prompt
(v1/engine/parallel_sampling.py). SGLang 0.5.17 does so too, after a first request that only fills the cache
(managers/tokenizer_manager.py). The n requests share the prompt's pages through prefix caching, which is on
in both engines.

Copies differ from `n` in two ways, for every backend. They arrive one by one, at `samples` times the prompts'
rate. And if SGLang prefills several copies in one step, each computes the prompt before the radix tree merges
their pages. With --n-best the server gets one request with `n`, and integration/bench_client.py gives each
answer its own stream: the engines' clients would mix up the interleaved answers of one stream.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from integration.sharegpt import first_exchanges
from integration.text import TextMaker

# The ShareGPT conversations to use, in tokens: the limits of vLLM's client
SHORTEST, LONGEST_PROMPT, LONGEST_TOTAL = 4, 1024, 2048


@dataclass(frozen=True)
class Prompt:
    """One prompt, the number of tokens to generate, and a text of that many tokens (clients that read
    ShareGPT's form count them).
    """

    text: str
    output_len: int
    answer: str


@dataclass(frozen=True)
class Workload:
    """Base of the kinds below: `num_prompts` prompts, each answered `samples` times. `description` goes into
    the report.
    """

    num_prompts: int
    samples: int
    description: str
    model_folder: Path

    @property
    def num_requests(self) -> int:
        """The number of requests that the client sends: one for each answer."""
        return self.num_prompts * self.samples

    def prompts(self, seed: int) -> list[Prompt]:
        """The prompts, without their copies; each seed gives different ones."""
        raise NotImplementedError

    @property
    def arrivals(self) -> list[float]:
        """When the prompts arrive, in seconds after the first. Raises ValueError if the data set does not say
        it.
        """
        raise ValueError(
            f"request-rate: recorded, but the data set has no times of arrival ({self.description})"
        )

    def requests(self, seed: int) -> list[Prompt]:
        """The client's requests in their order: the copies of a prompt are neighbors."""
        return [prompt for prompt in self.prompts(seed) for _ in range(self.samples)]

    def write_vllm(self, path: Path, seed: int) -> Path:
        """Write the form of `vllm bench serve --dataset-name custom` (its reader needs pandas)."""
        lines = [
            json.dumps({"prompt": request.text, "output_tokens": request.output_len})
            for request in self.requests(seed)
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def write_sharegpt(self, path: Path, seed: int) -> Path:
        """Write ShareGPT's form, in which the answer's token count is the output length."""
        requests = self.requests(seed)
        turns = [
            [{"from": "human", "value": request.text}, {"from": "gpt", "value": request.answer}]
            for request in requests
        ]
        path.write_text(json.dumps([{"conversations": turn} for turn in turns]), encoding="utf-8")
        return path


@dataclass(frozen=True)
class ShareGPT(Workload):
    """`num_prompts` conversations of `path`, selected here so that both engines' clients send the same ones
    in the same order.

    `output_len` None: as many tokens as the recorded answer. `max_model_len`: the server's maximum for prompt
    and answer together.
    """

    path: Path
    output_len: int | None
    max_model_len: int = LONGEST_TOTAL

    def prompts(self, seed: int) -> list[Prompt]:
        maker = TextMaker(self.model_folder, seed)
        exchanges = first_exchanges(self.path)
        random.Random(seed).shuffle(exchanges)
        longest = min(LONGEST_TOTAL, self.max_model_len)
        picked: list[Prompt] = []
        for turn, answer in exchanges:
            if len(picked) == self.num_prompts:
                break
            text, answer_text = maker.readable(turn), maker.readable(answer)
            prompt_len, answer_len = maker.count(text), maker.count(answer_text)
            output_len = self.output_len or answer_len
            if (
                SHORTEST <= prompt_len <= LONGEST_PROMPT
                and prompt_len + output_len <= longest
                and answer_len >= SHORTEST
            ):
                picked.append(Prompt(text, output_len, answer_text))
        if len(picked) < self.num_prompts:
            limits = f"prompts of {SHORTEST} to {LONGEST_PROMPT} tokens, at most {longest} with the answer"
            raise ValueError(
                f"num-prompts: {self.num_prompts}, but {self.path} holds {len(picked)} conversations that "
                f"can be used ({limits})"
            )
        return picked


@dataclass(frozen=True)
class FileWorkload(Workload):
    """Prompts with given lengths in tokens, one entry per prompt."""

    prompt_lens: list[int]
    output_lens: list[int]
    shared_prefix_len: int = 0

    def prompts(self, seed: int) -> list[Prompt]:
        maker = TextMaker(self.model_folder, seed)
        prefix = maker.text(self.shared_prefix_len)
        prompts = []
        for length, output in zip(self.prompt_lens, self.output_lens, strict=True):
            text = prefix + maker.text(max(length - self.shared_prefix_len - maker.special_tokens, 1))
            prompts.append(Prompt(text, output, maker.text(max(output - maker.special_tokens, 1))))
        made, wanted = maker.count(prompts[0].text), self.prompt_lens[0]
        if abs(made - wanted) > wanted // 50:
            raise ValueError(
                f"model: a prompt of {wanted} tokens came out with {made}: its tokenizer joins words"
            )
        return prompts


@dataclass(frozen=True)
class SharedPrefix(FileWorkload):
    """All prompts have one length and begin with the same `shared_prefix_len` tokens; all answers have one
    length.
    """
