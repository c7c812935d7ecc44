"""Answers of SGLang's whole engine, with this package's backend or with its own: on a GPU in bfloat16, with CUDA graphs, or on a CPU in float32.

python -m integration.tiny_models.sglang_engine_runner FOLDER [family ...] --backend ours|stock [--device cuda|cpu] [--jobs N]
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration.server import free_port
from integration.tiny_models.families import FAMILIES, Family
from integration.tiny_models.questions import LABELS, NEW_TOKENS, Answer, Question, questions
from integration.tiny_models.runner import run_families, say_ready
from integration.tiny_models.tokenizer import BOS, text_of

OURS = "ours" if "--backend" in sys.argv and sys.argv[sys.argv.index("--backend") + 1] == "ours" else "stock"
ON_CPU = "--device" in sys.argv and sys.argv[sys.argv.index("--device") + 1] == "cpu"
SHIMS = Path(__file__).resolve().parents[1] / "sglang_cpu"
GPU_OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "mem_fraction_static": 0.9, "cuda_graph_max_bs_decode": 4}
# By default there would be a graph of prefills for each of some 50 numbers of tokens, up to max_total_tokens; all questions together have fewer than 256.
GPU_OPTIONS |= {"cuda_graph_bs_prefill": [16, 64, 256], "cuda_graph_max_bs_prefill": 256}
CPU_OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "mem_fraction_static": 0.5, "disable_cuda_graph": True}
STOCK_OF_KIND = {"audio": "flashinfer", "items": "flashinfer"}  # Triton has no cross attention in graphs, and no items


def answer_all(family: Family, folder: Path) -> list[Answer]:
    """Twice, the second time from the prefix cache where a family has one; the answers are those of the second time."""
    engine = start(family, folder)
    say_ready()
    try:
        asked = questions(family)
        for _ in range(2):
            answers = ASK[family.kind](engine, folder, asked)
        return answers
    finally:
        engine.shutdown()


def start(family: Family, folder: Path) -> Any:
    """SGLang's engine."""
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    if ON_CPU:  # in its processes, too
        os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join((str(SHIMS), os.environ.get("PYTHONPATH", "")))}
        sys.path.append(str(SHIMS))
    import sglang

    stock = "torch_native" if ON_CPU else STOCK_OF_KIND.get(family.kind, "triton")
    options: dict[str, Any] = {"context_length": 128, "max_running_requests": 8, "max_total_tokens": 4096, "log_level": "info", "port": free_port()}
    options |= {"attention_backend": "attn_backend" if OURS == "ours" else stock, "sampling_backend": "pytorch"}
    engine = sglang.Engine(model_path=str(folder), **options | (CPU_OPTIONS if ON_CPU else GPU_OPTIONS) | family.engines["sglang"])
    if family.kind == "audio":
        take_prompts(engine.tokenizer_manager.mm_processor)
    return engine


def take_prompts(processor: Any) -> None:
    """Has SGLang's processor of Whisper take a request's prompt, and its features, as they are. Its own makes a prompt of the language, for which these models
    have no tokens."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    async def process(*, audio_data: list[Any], input_text: list[int], **_: Any) -> Any:
        (features,) = audio_data
        return MultimodalProcessorOutput(input_ids=list(input_text), mm_items=[MultimodalDataItem(feature=features, modality=Modality.AUDIO)])

    processor.process_mm_data_async = process


def generate(engine: Any, folder: Path, asked: list[Question]) -> list[Answer]:
    """Answers to tokens and what belongs to them: images as the model's own processor gives them, as in the reference; features of audio."""
    from integration.tiny_models.reference import audio_features, image_pixels

    inputs: dict[str, Any] = {}
    if any(question.image is not None for question in asked):
        images = [None if question.image is None else image_pixels(folder, question) for question in asked]
        inputs["image_data"] = [[None if pixels is None else {"format": "processor_output", "pixel_values": pixels}] for pixels in images]
    if any(question.audio is not None for question in asked):
        inputs["audio_data"] = [[audio_features(folder, question)[0]] for question in asked]
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    outputs = engine.generate(input_ids=[question.expanded for question in asked], sampling_params=parameters, return_logprob=True, **inputs)
    return [answer_of(output["meta_info"]["output_token_logprobs"]) for output in outputs]


def embed(engine: Any, folder: Path, asked: list[Question]) -> list[Answer]:
    """Embeddings of text: the engine takes no tokens for them."""
    outputs = engine.encode([text_of(question.expanded) for question in asked])
    return [Answer(values=output["embedding"]) for output in outputs]


def score_documents(engine: Any, folder: Path, asked: list[Question]) -> list[Answer]:
    """Scores of pairs of texts."""
    scores = [engine.rerank([[text_of(question.tokens), text_of(document)] for document in question.items]) for question in asked]
    return [Answer(values=[output["embedding"] for output in of_question]) for of_question in scores]


def score_items(engine: Any, folder: Path, asked: list[Question]) -> list[Answer]:
    """What Engine.score() asks of generate_request(), with a delimiter that is in these models' vocabulary."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    prompts, delimiters = [], []
    for question in asked:
        prompt, places = list(question.expanded), []
        for item in [*question.items, []]:
            places.append(len(prompt))
            prompt += [BOS, *item]
        prompts.append(prompt)
        delimiters.append(places)
    labels = [LABELS] * len(asked)
    options = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": labels}
    request = GenerateReqInput(input_ids=prompts, multi_item_delimiter_indices=delimiters, **options)
    outputs = engine.loop.run_until_complete(anext(engine.tokenizer_manager.generate_request(request, None)))
    # At every delimiter, the first included, which no item is in front of.
    return [answer_of([token for place in output["meta_info"]["input_token_ids_logprobs"][1:] for token in place]) for output in outputs]


ASK: dict[str, Callable[[Any, Path, list[Question]], list[Answer]]] = {
    "generate": generate,
    "image": generate,
    "audio": generate,
    "embed": embed,
    "score": score_documents,
    "items": score_items,
}


def answer_of(tokens: list[tuple[float, int, Any]]) -> Answer:
    """Of (natural logarithm of the probability, token, text) of each token.

    Raises:
        AssertionError: a number that is not finite, or none.
    """
    answer = Answer([token for _, token, _ in tokens], [logprob for logprob, _, _ in tokens])
    if not tokens or not all(math.isfinite(logprob) for logprob in answer.logprobs):
        raise AssertionError(f"log-probabilities {answer.logprobs}, must be finite, and some")
    return answer


if __name__ == "__main__":
    run_families(__doc__, f"sglang-{OURS}", [name for name, family in FAMILIES.items() if "sglang" in family.engines], answer_all)
