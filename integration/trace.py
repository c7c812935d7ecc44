"""Recorded requests in Mooncake's format, as prompts that share what the recorded ones shared.

A hash of a block stands for its tokens, after equal blocks. So a hash becomes the same text in every prompt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from attn_backend.cli.batches import TRACE_BLOCK, TraceRequest, read_trace
from integration.text import TextMaker
from integration.workload import Prompt, Workload

SHORTEST = 2  # tokens; SGLang's client drops shorter prompts and answers, and later ones would move up


@dataclass(frozen=True)
class Trace(Workload):
    """The requests of a trace. `output_len` None: as recorded."""

    recorded: list[TraceRequest]
    output_len: int | None

    @property
    def arrivals(self) -> list[float]:
        return [request.arrival - self.recorded[0].arrival for request in self.recorded]

    def prompts(self, seed: int) -> list[Prompt]:
        maker = TextMaker(self.model_folder, seed)
        blocks: dict[int, list[str]] = {}
        prompts = []
        for request in self.recorded:
            words: list[str] = []
            for hash_id in request.hash_ids:
                if hash_id not in blocks:
                    draw = random.Random(f"{seed} {hash_id}")
                    blocks[hash_id] = draw.choices(maker.words, k=TRACE_BLOCK)
                # the first block also holds the tokens that the tokenizer adds
                words += blocks[hash_id] if words else blocks[hash_id][maker.special_tokens :]
            own = words[: max(request.input_length - maker.special_tokens, 1)]
            output = self.output_len or request.output_length
            answer = maker.text(max(output - maker.special_tokens, 1))
            prompts.append(Prompt("".join(f" {word}" for word in own), output, answer))
        return prompts


def read_requests(
    path: Path, num_prompts: int, output_len: int | None, max_model_len: int
) -> list[TraceRequest]:
    """The first requests of a trace that a server of this `max_model_len` and both clients take.

    Raises ValueError if there are fewer.
    """
    usable = [
        request
        for request in sorted(read_trace(path), key=lambda request: request.arrival)
        if request.input_length >= SHORTEST
        and (output_len or request.output_length) >= SHORTEST
        and request.input_length + (output_len or request.output_length) <= max_model_len
    ]
    if len(usable) < num_prompts:
        raise ValueError(
            f"num-prompts: {num_prompts}, but {path} holds {len(usable)} requests that can be used (at least "
            f"{SHORTEST} tokens, at most {max_model_len} with the answer)"
        )
    return usable[:num_prompts]
