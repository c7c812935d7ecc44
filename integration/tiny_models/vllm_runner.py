"""Answers of vLLM with its own backend or with this package's: on a CPU in float32, on a GPU in bfloat16 and
with CUDA graphs.

python -m integration.tiny_models.vllm_runner FOLDER [family ...] --backend ours|stock [--device cpu|cuda]
[--jobs N]
"""

# ruff: noqa: E402  (engines read the environment when they are imported)

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

OURS = "ours" if "--backend" in sys.argv and sys.argv[sys.argv.index("--backend") + 1] == "ours" else "stock"
ON_GPU = "--device" in sys.argv and sys.argv[sys.argv.index("--device") + 1] == "cuda"
# One process, so that the backend's class can be inspected; one thread, because each backend has a program at
# the same time.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "INFO" if ON_GPU else "ERROR",
}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"ATTN_BACKEND_VLLM_CPU": str(int(OURS == "ours" and not ON_GPU))}
if not ON_GPU:
    # compiling the helper that counts a token's rank would take as long as a whole family
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

import vllm.v1.engine.core  # (here once, and not in each family's process)
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.model_executor.models import registry

if ON_GPU:
    import vllm.v1.worker.gpu_worker
else:
    import vllm.v1.worker.cpu_worker  # noqa: F401

from integration.tiny_models.families import FAMILIES, Family
from integration.tiny_models.hybrids import ALIGN
from integration.tiny_models.questions import (
    LARGEST_TIE,
    NEW_TOKENS,
    SAMPLING_RATE,
    Answer,
    Question,
    apart,
    questions,
)
from integration.tiny_models.runner import run_families, say_ready
from integration.tiny_models.tokenizer import text_of

if OURS == "ours":
    from attn_backend.adapters.vllm.mla import MlaMetadataBuilder

    # so that these short prompts also take the path of long ones
    MlaMetadataBuilder.reorder_batch_threshold = 16

# inspects a model's class in this process, which has imported everything that another would
registry._run_in_subprocess = lambda function: function()


ON_CPU_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 64,
}
# No kernels from the engine's compiler, which take longer to build than everything else; decode graphs.
ON_GPU_OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.05,
}
ON_GPU_OPTIONS |= {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4],
    }
}
# FlashInfer's kernel for GDN, the default on Hopper, compiles for minutes.
ON_GPU_OPTIONS["additional_config"] = {"gdn_prefill_backend": "triton"}
ON_GPU_OPTIONS |= {"attention_backend": "CUSTOM"} if OURS == "ours" else {}
# for most drafts vLLM would choose a backend by itself
OUR_DRAFTS = {"attention_backend": "CUSTOM"} if ON_GPU else {}
# an engine shuts down when nothing refers to it; this one ends with its process, which is faster
STARTED: list[LLM] = []


def answer_all(family: Family, folder: Path) -> list[Answer]:
    """Runs twice, the second time from the prefix cache; both must be the same in float32."""
    options: dict[str, Any] = {"max_num_batched_tokens": 48 if family.kind == "generate" else 128}
    if family.kind in ("embed", "score"):  # it has no decodes for graphs
        options = {"runner": "pooling", "enforce_eager": True}
    options |= (ON_GPU_OPTIONS if ON_GPU else ON_CPU_OPTIONS) | family.engines["vllm"]
    if ON_GPU and family.name == "qwen3_next_mtp":
        options |= ALIGN
    if ON_GPU and "mamba_cache_mode" in options:
        options["max_num_batched_tokens"] = 96  # a block or more
    if OURS == "ours" and "speculative_config" in options:
        options["speculative_config"] = options["speculative_config"] | OUR_DRAFTS
    llm = LLM(str(folder), max_model_len=128, max_num_seqs=4, **options)
    STARTED.append(llm)
    say_ready()
    _check_backend(llm)
    if family.kind == "score":
        return [_score(llm, question) for question in questions(family)]
    prompts = [_prompt(question) for question in questions(family)]
    if family.kind == "embed":
        return [Answer(values=output.outputs.embedding) for output in llm.embed(prompts, use_tqdm=False)]
    tells = family.kind == "generate"
    answers = _generate(llm, prompts, prompt_logprobs=tells)
    again = _generate(llm, prompts, prompt_logprobs=False)
    # in bfloat16 there are ties
    farthest = LARGEST_TIE if options["dtype"] == "bfloat16" else 0.0
    if not ON_GPU and any(apart(*pair) > farthest for pair in zip(answers, again, strict=True)):
        raise AssertionError("other tokens with prefixes from the cache")
    return answers


def _score(llm: LLM, question: Question) -> Answer:
    """The engine takes only text for it: it joins a query and a document, and gives the model the text of
    each token.
    """
    outputs = llm.score(
        text_of(question.tokens), [text_of(document) for document in question.items], use_tqdm=False
    )
    return Answer(values=[output.outputs.score for output in outputs])


def _generate(llm: LLM, prompts: list[Any], prompt_logprobs: bool) -> list[Answer]:
    parameters = SamplingParams(
        temperature=0,
        max_tokens=NEW_TOKENS,
        logprobs=1,
        prompt_logprobs=1 if prompt_logprobs else None,
        ignore_eos=True,
    )
    answers = []
    for output in llm.generate(prompts, parameters, use_tqdm=False):
        made = output.outputs[0]
        of_prompt = zip(
            output.prompt_logprobs[1:] if prompt_logprobs else [], output.prompt_token_ids[1:], strict=False
        )
        logprobs = [step[token].logprob for step, token in zip(made.logprobs, made.token_ids, strict=True)]
        answers.append(
            Answer(list(made.token_ids), logprobs, [step[token].logprob for step, token in of_prompt])
        )
    return answers


def _prompt(question: Question) -> Any:
    if question.image is not None:
        from PIL import Image

        return TokensPrompt(
            prompt_token_ids=question.tokens, multi_modal_data={"image": Image.fromarray(question.image)}
        )
    if question.audio is not None:
        return TokensPrompt(
            prompt_token_ids=question.tokens, multi_modal_data={"audio": (question.audio, SAMPLING_RATE)}
        )
    return TokensPrompt(prompt_token_ids=question.tokens)


def _check_backend(llm: LLM) -> None:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    layers = getattr(worker, "worker", worker).model_runner.compilation_config.static_forward_context.values()
    modules = {
        type(layer.impl).__mro__[-4 if OURS == "ours" else 0].__module__
        for layer in layers
        if hasattr(layer, "impl")
    }
    ours = [
        any(base.__module__.startswith("attn_backend.") for base in type(layer.impl).__mro__)
        for layer in layers
        if hasattr(layer, "impl")
    ]
    if not ours or set(ours) != {OURS == "ours"}:
        raise AssertionError(f"layers of {modules}, must be of the {OURS} backend")


if __name__ == "__main__":
    run_families(
        __doc__,
        f"vllm-{OURS}",
        [
            name
            for name, family in FAMILIES.items()
            if (ON_GPU and "vllm" in family.engines) or family.runs_on_cpu("vllm")
        ],
        answer_all,
    )
