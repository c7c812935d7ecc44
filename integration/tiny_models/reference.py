"""Answers of transformers' own code: float32, eager attention, no cache, a full pass for every token.

python -m integration.tiny_models.reference FOLDER [family ...]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from integration.tiny_models.families import FAMILIES, Family
from integration.tiny_models.questions import LABELS, NEW_TOKENS, SAMPLING_RATE, Answer, Question, questions
from integration.tiny_models.runner import run_families
from integration.tiny_models.tokenizer import IMAGE_TOKENS


@torch.no_grad()
def answer_all(family: Family, folder: Path) -> list[Answer]:
    model = family.make()[1].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [_answer(family, folder, model, question) for question in questions(family)]


def _answer(family: Family, folder: Path, model: Any, question: Question) -> Answer:
    prompt = question.expanded
    if family.kind == "embed":
        states = model(torch.tensor([prompt])).last_hidden_state[0]
        return Answer(
            values=torch.nn.functional.normalize(
                states.mean(0) if family.pools_mean else states[0], dim=-1
            ).tolist()
        )
    if family.kind == "score":
        pairs = [
            (torch.tensor([prompt + document]), torch.tensor([[0] * len(prompt) + [1] * len(document)]))
            for document in question.items
        ]
        return Answer(values=[float(model(tokens, token_type_ids=types).logits) for tokens, types in pairs])
    if question.items:
        scores = [
            model(torch.tensor([prompt + item])).logits[0, -1].log_softmax(-1)[LABELS]
            for item in question.items
        ]
        return Answer(LABELS * len(scores), torch.cat(scores).tolist())
    inputs: dict[str, Any] = {"use_cache": False}
    if question.image is not None:
        inputs |= image_inputs(folder, question)
    if question.audio is not None:
        inputs["input_features"] = audio_features(folder, question)
    tokens, logprobs = list(prompt), torch.empty(0)
    for _ in range(NEW_TOKENS):
        name = "decoder_input_ids" if family.kind == "audio" else "input_ids"
        if question.image is not None:
            inputs["token_type_ids" if family.name == "gemma3" else "mm_token_type_ids"] = torch.tensor(
                [[int(token == IMAGE_TOKENS[0]) for token in tokens]]
            )
        logprobs = model(**inputs, **{name: torch.tensor([tokens])}).logits[0].log_softmax(-1)
        tokens.append(int(logprobs[-1].argmax()))
    chosen = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    return Answer(tokens[len(prompt) :], chosen[len(prompt) - 1 :], chosen[: len(prompt) - 1])


def image_inputs(folder: Path, question: Question) -> dict[str, torch.Tensor]:
    """The image from the model's processor: `pixel_values`, and the places of patches if these are
    patches.
    """
    made = transformers.AutoProcessor.from_pretrained(folder).image_processor(
        [question.image], return_tensors="pt"
    )
    return {name: made[name] for name in ("pixel_values", "image_position_ids") if name in made}


def audio_features(folder: Path, question: Question) -> torch.Tensor:
    """float32 [1, bins, frames]."""
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    features: torch.Tensor = extractor(question.audio, sampling_rate=SAMPLING_RATE, return_tensors="pt")[
        "input_features"
    ]
    return features


if __name__ == "__main__":
    run_families(__doc__, "reference", list(FAMILIES), answer_all)
