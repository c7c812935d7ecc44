"""Questions to the tiny models, and their answers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from integration.tiny_models.families import AUDIO_SECONDS, Family, Images
from integration.tiny_models.tokenizer import BOS, FIRST_WORD, VOCAB

NEW_TOKENS = 10
LABELS = [20, 21, 22]  # tokens that are scored after an item
SAMPLING_RATE = 16000
LARGEST_TIE = 0.1  # difference of log-probabilities of two equally probable tokens


@dataclass(frozen=True)
class Question:
    """Attributes: tokens: of the prompt; `images.place` marks an image. image: uint8 [height, width, 3], or
    None. audio: float32 [samples] at SAMPLING_RATE, or None. items: each continues the prompt, as if the
    others did not exist; for a reranker, documents for a query. images: of its family, or None.
    """

    tokens: list[int]
    image: Any = None
    audio: Any = None
    items: list[list[int]] = field(default_factory=list)
    images: Images | None = None

    @property
    def expanded(self) -> list[int]:
        """The tokens, including the image's."""
        if self.images is None:
            return self.tokens
        return [
            part
            for token in self.tokens
            for part in (self.images.tokens if token == self.images.place else [token])
        ]


@dataclass
class Answer:
    """Attributes: tokens: generated, greedily. logprobs: float natural logarithms of their probabilities.
    prompt_logprobs: the same for the prompt's tokens except the first, if reported. values: for a model that
    does not generate: an embedding, or the scores of documents.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def questions(family: Family) -> list[Question]:
    """Prompts longer and shorter than windows and chunks."""
    generator = torch.Generator().manual_seed(1)

    def words(count: int) -> list[int]:
        return torch.randint(FIRST_WORD, VOCAB, (count,), generator=generator).tolist()

    pixels = np.random.default_rng(0)
    if images := family.images:
        made = [pixels.integers(0, 256, (*images.size, 3), dtype=np.uint8) for _ in range(2)]
        prompts = [
            [BOS, *words(9), images.place, *words(20)],
            [BOS, *words(33)],
            [BOS, *words(30), images.place, *words(5)],
        ]
        return [
            Question(prompt, image, images=images)
            for prompt, image in zip(prompts, (made[0], None, made[1]), strict=True)
        ]
    if family.kind == "audio":
        return [
            Question(
                [BOS, *words(count)],
                audio=pixels.standard_normal(SAMPLING_RATE * AUDIO_SECONDS).astype(np.float32),
            )
            for count in (3, 9)
        ]
    if family.kind == "items":
        return [
            Question(words(count), items=[words(length) for length in lengths])
            for count, lengths in ((30, (1, 4, 2)), (5, (9, 3)))
        ]
    if family.kind == "score":
        return [
            Question(words(count), items=[words(length) for length in lengths])
            for count, lengths in ((12, (40, 3, 80)), (30, (25,)))
        ]
    return [Question(words(count)) for count in (70, 33, 5, 90)]


def write_answers(path: Path, answers: list[Answer]) -> None:
    path.write_text(json.dumps([asdict(answer) for answer in answers]))


def read_answers(path: Path) -> list[Answer]:
    return [Answer(**answer) for answer in json.loads(path.read_text())]


def largest_difference(one: list[Answer], other: list[Answer]) -> float:
    """The largest difference of log-probabilities, or of elements of embeddings of length 1, or of scores.

    Infinite where tokens differ.

    Raises:
        ValueError: answers to other questions, or none.
    """
    if len(one) != len(other) or not one:
        raise ValueError(f"{len(one)} and {len(other)} answers, must be as many, and some")
    largest = 0.0
    for a, b in zip(one, other, strict=True):
        if a.tokens != b.tokens or len(a.values) != len(b.values) or not (a.tokens or a.values):
            return float("inf")
        prompts = (
            [a.prompt_logprobs, b.prompt_logprobs] if a.prompt_logprobs and b.prompt_logprobs else [[], []]
        )
        pairs = [
            *zip(a.logprobs, b.logprobs, strict=True),
            *zip(a.values, b.values, strict=True),
            *zip(*prompts, strict=True),
        ]
        largest = max(largest, *(abs(x - y) for x, y in pairs))
    return largest


def distance(ours: list[Answer], other: list[Answer]) -> float | None:
    """For answers to the same questions, up to the first different token: the root mean square of differences
    of log-probabilities, or of elements of embeddings, or of scores. None: all differ at once.

    Raises:
        ValueError: answers to other questions.
    """
    squares: list[float] = []
    for a, b in zip(ours, other, strict=True):
        prompts = (
            zip(a.prompt_logprobs, b.prompt_logprobs, strict=True)
            if a.prompt_logprobs and b.prompt_logprobs
            else ()
        )
        squares += [(x - y) ** 2 for x, y in [*prompts, *zip(a.values, b.values, strict=True)]]
        same = _same_tokens(a, b)
        squares += [(x - y) ** 2 for x, y in zip(a.logprobs[:same], b.logprobs[:same], strict=True)]
    return math.sqrt(sum(squares) / len(squares)) if squares else None


def apart(one: Answer, other: Answer) -> float:
    """The difference of log-probabilities of the first different tokens; 0 if there are none."""
    same = _same_tokens(one, other)
    return 0.0 if same == len(one.tokens) else abs(one.logprobs[same] - other.logprobs[same])


def _same_tokens(one: Answer, other: Answer) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), len(one.tokens)
    )
