"""Answers of SGLang's whole engine, with this package's backend or with its own: on a GPU in bfloat16, with
CUDA graphs, or on a CPU in float32.

python -m integration.tiny_models.sglang_engine_runner FOLDER [family ...] --backend ours|stock [--device
cuda|cpu] [--jobs N]
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from integration.server import free_port
from integration.tiny_models.families import COMMON, FAMILIES, Family
from integration.tiny_models.hybrids import SGLANG_ON_CPU
from integration.tiny_models.questions import LABELS, NEW_TOKENS, Answer, Question, questions
from integration.tiny_models.runner import run_families, say_ready
from integration.tiny_models.tokenizer import BOS, text_of

OURS = "ours" if "--backend" in sys.argv and sys.argv[sys.argv.index("--backend") + 1] == "ours" else "stock"
ON_CPU = "--device" in sys.argv and sys.argv[sys.argv.index("--device") + 1] == "cpu"
SHIMS = Path(__file__).resolve().parents[1] / "sglang_cpu"
GPU_OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "mem_fraction_static": 0.9, "cuda_graph_max_bs_decode": 4}
# By default states would take a share of all memory, which the engines of other families need.
GPU_OPTIONS["max_mamba_cache_size"] = 64
# By default there would be a prefill graph for each of some 50 numbers of tokens, up to max_total_tokens; all
# questions together have fewer than 256.
GPU_OPTIONS |= {"cuda_graph_bs_prefill": [16, 64, 256], "cuda_graph_max_bs_prefill": 256}
CPU_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "mem_fraction_static": 0.5,
    "disable_cuda_graph": True,
}
# SGLang 0.5.17's Triton backend has no cross attention in graphs, no items and no chunks. It decodes over
# windows that are one token short, and does not support bidirectional windows. Its output for Gemma 3n has
# dimensions that the model does not accept.
STOCK_OF_FAMILY = {
    "whisper": "flashinfer",
    "items": "flashinfer",
    **dict.fromkeys(("gemma2", "gpt_oss", "embedding_gemma", "llama4", "gemma3n"), "fa3"),
}
# In prompt graphs attention's output has Q's dimensions with any backend, which Gemma 3n does not accept.
# SGLang 0.5.23 refuses such graphs if layers share a cache, as in Gemma 4. With images it makes none itself.
# The tiny Gemma 4 for text has no processor. Prompt graphs of Falcon-H1 read memory that is not theirs in
# 0.5.23, with any backend. By default the experts of Nemotron-H need FlashInfer.
GPU_OPTIONS_OF_FAMILY: dict[str, dict[str, Any]] = {
    "gemma3n": {"disable_prefill_cuda_graph": True},
    "gemma4": {"enable_multimodal": False, "disable_prefill_cuda_graph": True},
    "falcon_h1": {"disable_prefill_cuda_graph": True},
    "nemotron_h": {"moe_runner_backend": "triton"},
    "mimo": {"trust_remote_code": True},
}
# The transformers of SGLang 0.5.17 does not know MiMo V2; published checkpoints include their configuration
# too.
MIMO_MODULE = """from transformers import PretrainedConfig


class MiMoV2FlashConfig(PretrainedConfig):
    model_type = "mimo_v2_flash"
"""


def answer_all(family: Family, folder: Path) -> list[Answer]:
    """Runs twice, the second time from the prefix cache if a family has one; returns the second answers."""
    with TemporaryDirectory() as made:
        engine = start(family, folder if ON_CPU else as_served(family, folder, Path(made)))
        say_ready()
        try:
            asked = questions(family)
            for _ in range(2):
                answers = ASK[family.kind](engine, folder, asked)
            return answers
        finally:
            engine.shutdown()


def as_served(family: Family, folder: Path, made: Path) -> Path:
    """Makes a checkpoint in the form that SGLang's models on a GPU expect.

    The dtype is bfloat16: gpt-oss creates its weights in the dtype of the configuration. For Llama 4, queries
    and keys are permuted to the order of SGLang's RoPE: the class with images does this itself, the text-only
    class does not.
    """
    for file in folder.iterdir():
        if file.name == "config.json":
            config = json.loads(file.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
            if family.name == "mimo":
                (made / "configuration_mimo.py").write_text(MIMO_MODULE)
                config["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoV2FlashConfig"}
            (made / file.name).write_text(json.dumps(config))
        elif family.name == "llama4" and file.suffix == ".safetensors":
            weights = {
                name: _halves(weight) if "q_proj" in name or "k_proj" in name else weight
                for name, weight in load_file(file).items()
            }
            save_file(weights, made / file.name, {"format": "pt"})
        else:
            (made / file.name).symlink_to(file.resolve())
    return made


def _halves(weight: Tensor) -> Tensor:
    """For each head, first the even rows, then the odd ones: a rotation of neighbors becomes a rotation of
    halves.
    """
    return weight.view(-1, COMMON["head_dim"] // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def start(family: Family, folder: Path) -> Any:
    """SGLang's engine."""
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    if ON_CPU:  # also in its processes
        os.environ |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": os.pathsep.join((str(SHIMS), os.environ.get("PYTHONPATH", ""))),
        }
        sys.path.append(str(SHIMS))
    import sglang

    stock = "torch_native" if ON_CPU else STOCK_OF_FAMILY.get(family.name, "triton")
    options: dict[str, Any] = {
        "context_length": 128,
        "max_running_requests": 8,
        "max_total_tokens": 4096,
        "log_level": "info",
        "port": free_port(),
    }
    options |= {
        "attention_backend": "attn_backend" if OURS == "ours" else stock,
        "sampling_backend": "pytorch",
    }
    of_device = (
        CPU_OPTIONS | SGLANG_ON_CPU.get(family.name, {})
        if ON_CPU
        else GPU_OPTIONS | GPU_OPTIONS_OF_FAMILY.get(family.name, {})
    )
    engine = sglang.Engine(model_path=str(folder), **options | of_device | family.engines["sglang"])
    if family.kind == "audio":
        take_prompts(engine.tokenizer_manager.mm_processor)
    return engine


def take_prompts(processor: Any) -> None:
    """Makes SGLang's Whisper processor take a request's prompt and features unchanged.

    Its own builds a prompt from the language, for which these models have no tokens.
    """
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    async def process(*, audio_data: list[Any], input_text: list[int], **_: Any) -> Any:
        (features,) = audio_data
        return MultimodalProcessorOutput(
            input_ids=list(input_text),
            mm_items=[MultimodalDataItem(feature=features, modality=Modality.AUDIO)],
        )

    processor.process_mm_data_async = process


def generate(engine: Any, folder: Path, asked: list[Question]) -> list[Answer]:
    """Answers to tokens and their inputs: images from the model's own processor, as in the reference; audio
    features.
    """
    from integration.tiny_models.reference import audio_features, image_inputs

    inputs: dict[str, Any] = {}
    if any(question.image is not None for question in asked):
        images = [
            None
            if question.image is None
            else {"format": "processor_output", **image_inputs(folder, question)}
            for question in asked
        ]
        inputs["image_data"] = [[image] for image in images]
    if any(question.audio is not None for question in asked):
        inputs["audio_data"] = [[audio_features(folder, question)[0]] for question in asked]
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    outputs = engine.generate(
        input_ids=[question.expanded for question in asked],
        sampling_params=parameters,
        return_logprob=True,
        **inputs,
    )
    return [answer_of(output["meta_info"]["output_token_logprobs"]) for output in outputs]


def generate_with_images(engine: Any, folder: Path, asked: list[Question]) -> list[Answer]:
    """SGLang's own backend gets one prompt at a time: its masks fail if some prompts of a step have images
    and others do not.
    """
    steps = [asked] if OURS == "ours" else [[question] for question in asked]
    return [answer for step in steps for answer in generate(engine, folder, step)]


def embed(engine: Any, folder: Path, asked: list[Question]) -> list[Answer]:
    """Engine.encode()'s call of generate_request(). With texts, EmbeddingGemma would get one more token."""
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    outputs = _outputs(engine, EmbeddingReqInput(input_ids=[question.expanded for question in asked]))
    return [Answer(values=output["embedding"]) for output in outputs]


def score_documents(engine: Any, folder: Path, asked: list[Question]) -> list[Answer]:
    """Scores of pairs of texts."""
    scores = [
        engine.rerank([[text_of(question.tokens), text_of(document)] for document in question.items])
        for question in asked
    ]
    return [Answer(values=[output["embedding"] for output in of_question]) for of_question in scores]


def score_items(engine: Any, folder: Path, asked: list[Question]) -> list[Answer]:
    """Engine.score()'s call of generate_request(), with a delimiter that these models know."""
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
    options = {
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "token_ids_logprob": labels,
    }
    request = GenerateReqInput(input_ids=prompts, multi_item_delimiter_indices=delimiters, **options)
    outputs = _outputs(engine, request)
    # At every delimiter, including the first, which has no item before it.
    return [
        answer_of([token for place in output["meta_info"]["input_token_ids_logprobs"][1:] for token in place])
        for output in outputs
    ]


def _outputs(engine: Any, request: Any) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = engine.loop.run_until_complete(
        anext(engine.tokenizer_manager.generate_request(request, None))
    )
    return outputs


ASK: dict[str, Callable[[Any, Path, list[Question]], list[Answer]]] = {
    "generate": generate,
    "image": generate_with_images,
    "audio": generate,
    "embed": embed,
    "score": score_documents,
    "items": score_items,
}


def answer_of(tokens: list[tuple[float, int, Any]]) -> Answer:
    """From (natural logarithm of the probability, token, text) of each token.

    Raises:
        AssertionError: a number is missing or not finite.
    """
    answer = Answer([token for _, token, _ in tokens], [logprob for logprob, _, _ in tokens])
    if not tokens or not all(math.isfinite(logprob) for logprob in answer.logprobs):
        raise AssertionError(f"log-probabilities {answer.logprobs}, must be finite, and some")
    return answer


if __name__ == "__main__":
    run_families(
        __doc__,
        f"sglang-{OURS}",
        [name for name, family in FAMILIES.items() if "sglang" in family.engines],
        answer_all,
    )
