"""What a benchmark sends: ShareGPT conversations, prompts of prescribed lengths, or prompts behind one shared prefix.

A data set is named on the command line as

    sharegpt                ShareGPT, downloaded when needed; or FILE.json in its form
    uniform:LOW-HIGH        prompt lengths drawn evenly from LOW ... HIGH tokens
    prefix:PREFIX+SUFFIX    every prompt is the same PREFIX tokens, then SUFFIX tokens of its own
    lengths:FILE.csv        prompt and output lengths from the first two numeric columns of a file with a header
"""

from __future__ import annotations

import csv
import json
import random
from dataclasses import dataclass
from pathlib import Path

from integration.sharegpt import sharegpt_file
from integration.text import TextMaker


@dataclass(frozen=True)
class Workload:
    """Base of the kinds below; `description` goes into the report."""

    num_prompts: int
    description: str


@dataclass(frozen=True)
class ShareGPT(Workload):
    """The client samples `num_prompts` conversations from `path`. `output_len` None: as many tokens as the recorded answer has."""

    path: Path
    output_len: int | None


@dataclass(frozen=True)
class FileWorkload(Workload):
    """Prompts of prescribed lengths, written to a file in the form that the client reads. Lengths are in tokens, one entry a request."""

    model_folder: Path
    prompt_lens: list[int]
    output_lens: list[int]
    shared_prefix_len: int
    seed: int

    def _texts(self) -> tuple[TextMaker, list[str]]:
        maker = TextMaker(self.model_folder, self.seed)
        prefix = maker.text(self.shared_prefix_len)
        prompts = [prefix + maker.text(max(length - self.shared_prefix_len - maker.special_tokens, 1)) for length in self.prompt_lens]
        made, wanted = maker.count(prompts[0]), self.prompt_lens[0]
        if abs(made - wanted) > wanted // 50:
            raise ValueError(f"model: a prompt of {wanted} tokens came out with {made}: its tokenizer joins words")
        return maker, prompts

    def write_vllm(self, path: Path) -> Path:
        """Write the form of `vllm bench serve --dataset-name custom` (its reader needs pandas)."""
        _, prompts = self._texts()
        lines = [json.dumps({"prompt": prompt, "output_tokens": output}) for prompt, output in zip(prompts, self.output_lens, strict=True)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def write_sharegpt(self, path: Path) -> Path:
        """Write ShareGPT's form, in which the answer's number of tokens is the output length."""
        maker, prompts = self._texts()
        conversations = []
        for prompt, output in zip(prompts, self.output_lens, strict=True):
            answer = maker.text(max(output - maker.special_tokens, 1))
            conversations.append({"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]})
        path.write_text(json.dumps(conversations), encoding="utf-8")
        return path


@dataclass(frozen=True)
class SharedPrefix(FileWorkload):
    """All prompts have one length, begin with the same `shared_prefix_len` tokens, and get answers of one length."""


def make_workload(dataset: str, num_prompts: int, output_len: str | None, model_folder: Path, seed: int) -> Workload:
    """Parse a data set's name (see above). `output_len` is `N`, `LOW-HIGH` or None. Raises ValueError for a name or length it cannot use."""
    kind, _, rest = dataset.partition(":")
    outputs = _parse_range("output-len", output_len) if output_len else None
    draw = random.Random(seed)
    if kind == "sharegpt" or dataset.endswith(".json"):
        if outputs and outputs[0] != outputs[1]:
            raise ValueError(f"output-len: {output_len!r}: ShareGPT takes one number, or none for the recorded answers' lengths")
        path = sharegpt_file() if kind == "sharegpt" else Path(dataset).resolve(strict=True)
        lengths = f"{outputs[0]} output tokens" if outputs else "outputs as recorded"
        return ShareGPT(num_prompts, f"ShareGPT, first turns, {lengths}", path, outputs[0] if outputs else None)
    if kind == "lengths":
        prompts, answers = _read_lengths(Path(rest), num_prompts)
        if outputs:
            answers = [draw.randint(*outputs) for _ in prompts]
        return FileWorkload(len(prompts), f"lengths of {Path(rest).name}", model_folder, prompts, answers, 0, seed)
    if outputs is None:
        raise ValueError(f"output-len: missing, and the data set {dataset!r} does not say how long answers are")
    if kind == "uniform":
        low, high = _parse_range("dataset", rest)
        prompts = [draw.randint(low, high) for _ in range(num_prompts)]
        answers = [draw.randint(*outputs) for _ in prompts]
        return FileWorkload(num_prompts, f"prompts of {low}-{high} tokens, outputs of {output_len}", model_folder, prompts, answers, 0, seed)
    if kind == "prefix":
        prefix, _, suffix = rest.partition("+")
        if not (prefix.isdigit() and suffix.isdigit() and int(suffix) > 0) or outputs[0] != outputs[1]:
            raise ValueError(f"dataset: {dataset!r} with output-len {output_len!r}: expected prefix:PREFIX+SUFFIX, numbers of tokens, and one output length")
        total = int(prefix) + int(suffix)
        description = f"one shared prefix of {prefix} tokens, then {suffix} of each prompt's own, {output_len} output tokens"
        return SharedPrefix(num_prompts, description, model_folder, [total] * num_prompts, [outputs[0]] * num_prompts, int(prefix), seed)
    raise ValueError(f"dataset: {dataset!r} is none of sharegpt, FILE.json, uniform:LOW-HIGH, prefix:PREFIX+SUFFIX, lengths:FILE.csv")


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
        raise ValueError(f"dataset: {path} has {len(columns)} columns of whole numbers, expected two: prompt and output lengths")
    return [max(int(row[columns[0]]), 1) for row in rows], [max(int(row[columns[1]]), 1) for row in rows]
