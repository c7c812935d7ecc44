"""Answers of SGLang on a CPU, with this package's backend: its model runner without the processes around it.

python -m integration.tiny_models.sglang_runner FOLDER [family ...] --backend ours|stock
"""

# ruff: noqa: E402  (engines read the environment when they are imported)

from __future__ import annotations

import os
import sys
from array import array
from pathlib import Path
from typing import Any

SHIMS = Path(__file__).resolve().parents[1] / "sglang_cpu"
OURS = "ours" if "--backend" in sys.argv and sys.argv[sys.argv.index("--backend") + 1] == "ours" else "stock"
os.environ |= {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "ATTN_BACKEND_SAMPLER": "0",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}
sys.path.append(str(SHIMS))

import torch
from sglang.benchmark import one_batch
from sglang.srt.managers.mm_schedule import init_mm_embedding_cache
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs, Req
from sglang.srt.model_executor import model_runner
from sglang.srt.models import llama4
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from integration.tiny_models.families import FAMILIES, Family
from integration.tiny_models.hybrids import SGLANG_ON_CPU
from integration.tiny_models.questions import LABELS, NEW_TOKENS, Answer, Question, questions
from integration.tiny_models.reference import audio_features, image_inputs
from integration.tiny_models.runner import run_families
from integration.tiny_models.tokenizer import BOS, IMAGE_TOKENS, VOCAB

load_plugins()
_adjust_config = model_runner.adjust_config_with_unaligned_cpu_tp


def _adjust_linear_attention(config: Any, *more: Any) -> Any:
    """SGLang's function takes hidden_size / heads for the head size, and expects one intermediate size (Gemma
    3n has one a layer). Models with GDN need its numbers.
    """
    has_gdn = hasattr(config.hf_text_config, "linear_num_value_heads")
    return _adjust_config(config, *more) if has_gdn else config


model_runner.adjust_config_with_unaligned_cpu_tp = _adjust_linear_attention
one_batch.get_tokenizer = lambda *arguments, **options: None

_get_rope = llama4.get_rope


def _rope_in_place(*arguments: Any, **options: Any) -> Any:
    """Llama 4 expects queries and keys to be rotated in place, as on a GPU."""
    # the weights are not permuted, as in the multimodal class
    rope = _get_rope(*arguments, **options | {"is_neox_style": False})
    rotate = rope.forward

    def forward(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
        rotated = rotate(positions, query.contiguous(), key.contiguous())
        return query.copy_(rotated[0]), key.copy_(rotated[1])

    rope.forward = forward
    return rope


llama4.get_rope = _rope_in_place
CHUNK = 40  # tokens of the first part of longer prompts


def answer_all(family: Family, folder: Path) -> list[Answer]:
    runner = start(folder, SGLANG_ON_CPU.get(family.name, {}) | family.engines["sglang"])
    init_mm_embedding_cache()
    asked = questions(family)
    if family.kind == "score":
        return [
            Answer(
                values=extend(
                    runner, [_pair(question, document, folder) for document in question.items]
                ).embeddings.tolist()
            )
            for question in asked
        ]
    requests = [_request(i, question, folder) for i, question in enumerate(asked)]
    if family.kind == "embed":
        return [Answer(values=embedding.tolist()) for embedding in extend(runner, requests).embeddings]
    if family.kind == "items":
        scores = extend(runner, requests).input_token_ids_logprobs_val
        return [
            Answer(LABELS * len(question.items), _flat(of_question)[len(LABELS) :])
            for question, of_question in zip(asked, scores, strict=True)
        ]
    longer = [
        request for request in requests if family.kind == "generate" and len(request.origin_input_ids) > CHUNK
    ]
    if longer:
        for request in longer:
            _show(request, asked[int(request.rid)].expanded[:CHUNK])
        one_batch.extend(longer, runner)
        for request in longer:
            request.prefix_len = CHUNK
            _show(request, asked[int(request.rid)].expanded)
    answers = [Answer() for _ in asked]
    token_ids, logits, batch = one_batch.extend(requests, runner)
    for _ in range(NEW_TOKENS):
        logprobs = logits.log_softmax(-1)
        for row, request in enumerate(requests):
            answer = answers[int(request.rid)]
            answer.tokens.append(int(token_ids[row]))
            answer.logprobs.append(float(logprobs[row, token_ids[row]]))
        token_ids, logits = one_batch.decode(token_ids, batch, runner)
    return answers


def start(folder: Path, options: dict[str, Any]) -> Any:
    """SGLang's model runner."""
    backend = "attn_backend" if OURS == "ours" else "torch_native"
    common = {
        "device": "cpu",
        "dtype": "float32",
        "context_length": 128,
        "max_running_requests": 8,
        "max_total_tokens": 4096,
        "mem_fraction_static": 0.5,
        "log_level": "error",
    }
    arguments = ServerArgs(
        model_path=str(folder), attention_backend=backend, disable_cuda_graph=True, **common | options
    )
    arguments.resolve_once()
    ranks = one_batch.SpawnRanks(
        world_rank=one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0
    )
    one_batch.publish(arguments, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    runner = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)[0].torch_runner
    attention = getattr(runner.attn_backend, "full_attn_backend", runner.attn_backend)
    if type(attention).__module__.startswith("attn_backend.") != (OURS == "ours"):
        raise AssertionError(f"{type(attention)}, must be the {OURS} backend")
    return runner


@torch.no_grad()
def extend(runner: Any, requests: list[Req]) -> Any:
    """The output of one step over whole prompts of a model that does not generate."""
    pools = {
        "req_to_token_pool": runner.req_to_token_pool,
        "token_to_kv_pool_allocator": runner.token_to_kv_pool_allocator,
    }
    tree = one_batch.TreeCacheNamespace(
        page_size=1, device=runner.device, token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator
    )
    options = {
        "tree_cache": tree,
        "model_config": runner.model_config,
        "enable_overlap": False,
        "spec_algorithm": one_batch.SpeculativeAlgorithm.NONE,
    }
    batch = one_batch.ScheduleBatch.init_new(reqs=requests, **pools, **options)
    batch.is_prefill_only = True
    batch.prepare_for_extend()
    if batch.input_ids is None:
        batch.input_ids, batch.prefill_input_ids_cpu = batch.prefill_input_ids_cpu, None
    return runner.forward(
        one_batch.ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
    ).logits_output


def _request(number: int, question: Question, folder: Path) -> Req:
    tokens = question.expanded
    parameters = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS + 1)
    request = Req(
        rid=str(number), origin_input_text="", origin_input_ids=array("q", tokens), sampling_params=parameters
    )
    if question.items:
        tokens, delimiters = list(tokens), []
        for item in [*question.items, []]:
            delimiters.append(len(tokens))
            tokens += [BOS, *item]
        request.multi_item_delimiter_indices = delimiters
        request.return_logprob, request.logprob.token_ids_logprob = True, LABELS
    if question.image is not None:
        first = tokens.index(IMAGE_TOKENS[0])
        span, inputs = (first, first + tokens.count(IMAGE_TOKENS[0]) - 1), image_inputs(folder, question)
        item = MultimodalDataItem(
            modality=Modality.IMAGE,
            feature=inputs.pop("pixel_values"),
            offsets=[span],
            model_specific_data=inputs,
        )
        item.set_pad_value()
        request.multimodal_inputs = MultimodalInputs(mm_items=[item], im_token_id=IMAGE_TOKENS[0])
        tokens = [item.pad_value if token == IMAGE_TOKENS[0] else token for token in tokens]
    if question.audio is not None:
        features = audio_features(folder, question)
        item = MultimodalDataItem(modality=Modality.AUDIO, feature=features)
        encoder_len = features.shape[-1] // 2
        request.multimodal_inputs = MultimodalInputs(mm_items=[item], num_image_tokens=encoder_len)
        tokens = [VOCAB - 1] * encoder_len + tokens  # the encoder's places come first
    request.origin_input_ids = array("q", tokens)
    _show(request, tokens)
    return request


def _pair(question: Question, document: list[int], folder: Path) -> Req:
    """A query with a document, and the text that each token belongs to."""
    request = _request(0, Question(question.tokens + document), folder)
    request.token_type_ids = [0] * len(question.tokens) + [1] * len(document)
    return request


def _flat(scores: Any) -> list[float]:
    """The scores of all delimiters, including the first one, which has no item before it."""
    return [float(value) for of_delimiter in scores for value in of_delimiter]


def _show(request: Req, tokens: list[int]) -> None:
    request.full_untruncated_fill_ids = array("q", tokens)
    request.logprob_start_len = -1
    request.extend_end = len(tokens)


if __name__ == "__main__":
    run_families(
        __doc__,
        f"sglang-{OURS}",
        [name for name, family in FAMILIES.items() if family.runs_on_cpu("sglang")],
        answer_all,
    )
