"""The requests of a benchmark: ShareGPT conversations, prompts of prescribed lengths, or prompts that share
one prefix.

A data set is named on the command line as

    sharegpt                ShareGPT, downloaded when needed; or FILE.json in its form
    uniform:LOW-HIGH        prompt lengths drawn evenly from LOW ... HIGH tokens
    prefix:PREFIX+SUFFIX    every prompt is the same PREFIX tokens, then SUFFIX tokens of its own
    lengths:FILE.csv        prompt and output lengths: the first two numeric columns of a file with a header

Parallel sampling (`samples` answers to each prompt) sends the prompt `samples` times in a row. Both engines
treat the `n` of a request the same way. vLLM 0.26.0 turns the request into n requests with the same prompt
(v1/engine/parallel_sampling.py). SGLang 0.5.17 does so too, after a first request that only fills the cache
(managers/tokenizer_manager.py). The n requests share the prompt's pages through prefix caching, which is on
in both engines.

The engines' clients cannot measure `n` itself, because they mix up the interleaved answers of one stream.
vLLM's client would report the gaps between tokens of different answers, about 1/n of the ITL. SGLang's client
compares token counts of different answers, and counts the tokens of only one answer as throughput. With
copies, every answer has its own stream, TTFT and ITL.

Copies differ from `n` in two ways, for every backend. They arrive one by one, at `samples` times the prompts'
rate. And if SGLang prefills several copies in one step, each computes the prompt before the radix tree merges
their pages.
"""

from __future__ import annotations

import csv
import json
import random
from dataclasses import dataclass
from pathlib import Path

from integration.sharegpt import dataset_file, first_exchanges
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


def make_workload(
    dataset: str,
    num_prompts: int,
    output_len: str | None,
    model_folder: Path,
    seed: int,
    samples: int = 1,
    max_model_len: int = LONGEST_TOTAL,
) -> Workload:
    """Parse a data set's name (see above).

    `output_len` is `N`, `LOW-HIGH` or None; `seed` draws lengths. Raises ValueError for unusable values.
    """
    kind, _, rest = dataset.partition(":")
    outputs = _parse_range("output-len", output_len) if output_len else None
    draw = random.Random(seed)
    if num_prompts < 1 or samples < 1:
        raise ValueError(f"num-prompts: {num_prompts}, samples: {samples}: both must be positive")
    if dataset == "sharegpt" or dataset.endswith(".json"):
        if outputs and outputs[0] != outputs[1]:
            raise ValueError(
                f"output-len: {output_len!r}: ShareGPT takes one number, or none for the recorded answers' "
                f"lengths"
            )
        description = (
            f"ShareGPT, first turns, {f'{outputs[0]} output tokens' if outputs else 'outputs as recorded'}"
        )
        return ShareGPT(
            num_prompts,
            samples,
            description,
            model_folder,
            dataset_file(dataset),
            outputs[0] if outputs else None,
            max_model_len,
        )
    if kind == "lengths":
        prompts, answers = _read_lengths(Path(rest), num_prompts)
        if outputs:
            answers = [draw.randint(*outputs) for _ in prompts]
        return FileWorkload(
            len(prompts), samples, f"lengths of {Path(rest).name}", model_folder, prompts, answers
        )
    if outputs is None:
        raise ValueError(
            f"output-len: missing, and the data set {dataset!r} does not say how long answers are"
        )
    if kind == "uniform":
        low, high = _parse_range("dataset", rest)
        prompts = [draw.randint(low, high) for _ in range(num_prompts)]
        answers = [draw.randint(*outputs) for _ in prompts]
        return FileWorkload(
            num_prompts,
            samples,
            f"prompts of {low}-{high} tokens, outputs of {output_len}",
            model_folder,
            prompts,
            answers,
        )
    if kind == "prefix":
        prefix, _, suffix = rest.partition("+")
        if not (prefix.isdigit() and suffix.isdigit() and int(suffix) > 0) or outputs[0] != outputs[1]:
            raise ValueError(
                f"dataset: {dataset!r} with output-len {output_len!r}: expected prefix:PREFIX+SUFFIX, "
                f"numbers of tokens, and one output length"
            )
        total = int(prefix) + int(suffix)
        description = (
            f"one shared prefix of {prefix} tokens, then {suffix} of each prompt's own, "
            f"{output_len} output tokens"
        )
        return SharedPrefix(
            num_prompts,
            samples,
            description,
            model_folder,
            [total] * num_prompts,
            [outputs[0]] * num_prompts,
            int(prefix),
        )
    raise ValueError(
        f"dataset: {dataset!r} is none of sharegpt, FILE.json, uniform:LOW-HIGH, prefix:PREFIX+SUFFIX, "
        f"lengths:FILE.csv"
    )


def _parse_range(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not low.isdigit() or not (high or low).isdigit() or not 0 < int(low) <= int(high or low):
        raise ValueError(f"{name}: {text!r} is neither a positive number nor LOW-HIGH")
    return int(low), int(high or low)


def _read_lengths(path: Path, num_prompts: int) -> tuple[list[int], list[int]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1 : num_prompts + 1]
    if not rows:
        raise ValueError(f"dataset: {path} has no rows under its header")
    columns = [index for index, cell in enumerate(rows[0]) if cell.strip().isdigit()]
    if len(columns) < 2:
        raise ValueError(
            f"dataset: {path} has {len(columns)} columns of whole numbers, expected two: prompt and output "
            f"lengths"
        )
    return [max(int(row[columns[0]]), 1) for row in rows], [max(int(row[columns[1]]), 1) for row in rows]
