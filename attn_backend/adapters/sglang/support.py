"""What this backend serves, decided while the engine starts: every refusal is a ValueError that names the
model's feature or the option, and what to do.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch.nn import Module

from attn_backend.adapters.plan_key import PlanKey
from attn_backend.kernels.attention import MAX_CUDA_INVARIANT_BATCH
from attn_backend.metadata.kv_cache import SCALED_DTYPES

from . import NAME, compat
from .mla import has_latents, is_decompressed, is_sparse
from .mla import unsupported as unsupported_latents

_BLOCKS = "DFLASH"  # drafts a block of tokens in one pass, in which they see each other
_SPECULATION = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", _BLOCKS)
# causal over images unless their configuration says otherwise
_GEMMA_4 = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
_MASKS_OVER_IMAGES = ("Gemma3ForConditionalGeneration", *_GEMMA_4)  # models whose masks this backend knows
_SINKS = ("sinks", "attention_sink_bias")  # what models call them
_REFUSED_OPTIONS = {
    "--enable-unified-memory": "memory.enable_unified_memory",  # req_to_token would hold virtual slots
    "--dllm-algorithm": "exec.dllm.dllm_algorithm",
}
_REFUSED_PARALLELISM = {  # the setting, and what to use instead
    "--dcp-size": ("parallel.attn_dcp_size", "--attention-backend triton (flashinfer for MLA)"),
    "--attn-cp-size": ("parallel.attn_cp_size", "another --attention-backend"),
}


def refuse(what: str, advice: str = "use another --attention-backend") -> ValueError:
    return ValueError(f"--attention-backend {NAME} does not support {what}: {advice}")


def check_runner(runner: Any) -> None:
    """Refuses what no layer of this runner's model could be served with.

    Raises:
        ValueError: see the module.
    """
    config = runner.model_config
    device = torch.device(runner.device).type
    if device not in ("cuda", "cpu"):
        raise refuse(f"the device {runner.device!r}")
    if device == "cpu" and compat.starts_triton_on_cpu(NAME):
        advice = (
            "this release starts Triton for every backend name that is not its own; use SGLang 0.5.22 "
            "or later on a CPU"
        )
        raise refuse(f"CPUs with SGLang {compat.release()}", advice)
    if config.attention_arch not in (AttentionArch.MHA, AttentionArch.MLA):
        raise refuse(
            f"the attention architecture {getattr(config.attention_arch, 'name', config.attention_arch)} (it "
            f"serves MHA, GQA, MQA and MLA)"
        )
    _check_kv_dtype(runner)
    if has_latents(runner):
        unsupported = unsupported_latents(runner)
        if unsupported is not None:
            raise refuse(unsupported)
    if wants_spans(runner):
        _check_spans(runner)
    _check_settings()
    if drafts_in_blocks(runner):
        check_drafts(runner)


def _check_kv_dtype(runner: Any) -> None:
    model = "" if runner.dtype == torch.bfloat16 else "--dtype bfloat16 "
    advice = f"pass --kv-cache-dtype fp8_e4m3, or {model}--kv-cache-dtype bfloat16"
    if runner.kv_cache_dtype_str == "mxfp8":  # whose dtype is float8_e4m3fn, with scales in another buffer
        raise refuse("--kv-cache-dtype mxfp8", advice)
    if runner.kv_cache_dtype not in (runner.dtype, *SCALED_DTYPES) and {
        runner.dtype,
        runner.kv_cache_dtype,
    } != {torch.bfloat16, torch.float16}:
        raise refuse(f"a KV cache of {runner.kv_cache_dtype} for a model of {runner.dtype}", advice)


def wants_spans(runner: Any) -> bool:
    """Whether tokens of an image see each other on both sides: a model with this method hands such masks to
    SGLang's Triton backend (Gemma 3).

    Gemma 4's does so whatever its configuration says. The smaller ones are causal over images, in
    transformers and vLLM.
    """
    if not hasattr(runner.model, "prepare_attn_masks") or not runner.model_config.is_multimodal:
        return False
    text = getattr(runner.model_config, "hf_text_config", None)
    return (
        type(runner.model).__name__ not in _GEMMA_4
        or getattr(text, "use_bidirectional_attention", None) == "vision"
    )


def cuts_spans(runner: Any) -> bool:
    """Whether windows also cut what tokens of an image see of it.

    Layers without a window are causal, then: images are text to them (Gemma 4).
    """
    return type(runner.model).__name__ in _GEMMA_4


def _check_spans(runner: Any) -> None:
    # --enable-multimodal is the default of most
    text_alone = """pass --json-model-override-args '{"language_model_only": true}' (from 0.5.18 on)"""
    advice = f"{text_alone} to serve text alone, or use --attention-backend triton"
    if type(runner.model).__name__ not in _MASKS_OVER_IMAGES:
        raise refuse(
            f"the masks over the images of a prompt that {type(runner.model).__name__} makes", advice
        )
    if compat.setting("schedule.chunked_prefill_size", -1) != -1:
        raise refuse(
            "images, whose tokens see each other, in prompts that are computed in chunks",
            "pass --chunked-prefill-size -1",
        )
    if isinstance(runner.token_to_kv_pool, SWAKVPool) and not cuts_spans(runner):
        raise refuse(
            "images, whose tokens see each other, with a KV pool of its own for sliding windows",
            "pass --disable-hybrid-swa-memory",
        )


def _check_settings() -> None:
    algorithm = _algorithm()
    if algorithm and algorithm not in _SPECULATION:
        raise refuse(
            f"--speculative-algorithm {algorithm}",
            f"use one of {', '.join(_SPECULATION)}, or another --attention-backend",
        )
    for option, path in _REFUSED_OPTIONS.items():
        if compat.setting(path, None):
            raise refuse(option, "leave it out, or use another --attention-backend")
    for option, (path, instead) in _REFUSED_PARALLELISM.items():
        size = compat.setting(path, 1)
        if size > 1:
            raise refuse(f"{option} {size}", f"pass {option} 1, or use {instead}")


def drafts_are_trees() -> bool:
    """Whether the drafts that this server verifies may have branches."""
    algorithm = _algorithm()
    return algorithm == "NGRAM" or (
        algorithm in _SPECULATION and compat.setting("spec.speculative_eagle_topk", 1) > 1
    )


def drafts_in_blocks(runner: Any) -> bool:
    """Whether this runner's model drafts blocks: each comes whole, in one step, so its layers need not be
    causal.
    """
    return bool(runner.is_draft_worker) and _algorithm() == _BLOCKS


def _algorithm() -> str:
    return str(compat.setting("spec.speculative_algorithm", "")).upper()


def verified_tokens(runner: Any) -> int:
    """Draft tokens of a request in a step that verifies them; 0: this runner's model verifies none."""
    return 0 if runner.is_draft_worker else compat.num_draft_tokens()


def check_drafts(runner: Any) -> None:
    """Refuses a draft model whose consecutive steps, or blocks, could not be served.

    Raises:
        ValueError: see the module.
    """
    if is_sparse(runner):
        raise refuse(
            "draft models with sparse attention over latents",
            "pass --speculative-draft-attention-backend dsa",
        )
    if isinstance(runner.token_to_kv_pool, SWAKVPool):
        raise refuse(
            "draft models with a KV pool of their own for sliding windows",
            "pass --speculative-draft-attention-backend triton",
        )


def tree_key(key: PlanKey) -> PlanKey:
    """The key of the same layers in a step that verifies trees. There are no images in it, so no spans.

    Raises:
        ValueError: what these layers see follows from a token's position, which in a tree is not that of its
            row.
    """
    if key.has_alibi or key.chunk or key.has_items or key.of_encoder:
        raise refuse(
            "drafts that are trees with ALiBi, chunked local attention, --enable-mis or cross attention",
            "pass --speculative-eagle-topk 1",
        )
    return key._replace(has_tree=True, has_spans=False, cuts_spans=False)


def most_requests(runner: Any, branches: int = 0) -> int:
    """Requests of the largest step: the engine pads batches to what its graphs and its ranks need. branches:
    of each request; 0: it has one row or a prompt.

    Raises:
        ValueError: see the module.
    """
    most = -(-runner.req_to_token_pool.size // 32) * 32 * max(1, branches)
    if (
        compat.deterministic()
        and torch.device(runner.device).type == "cuda"
        and most > MAX_CUDA_INVARIANT_BATCH
    ):
        raise refuse(
            f"--enable-deterministic-inference for {most} requests at once",
            f"pass --max-running-requests {MAX_CUDA_INVARIANT_BATCH}",
        )
    return most


def longest_extend(runner: Any) -> int:
    """Most new tokens of one step.

    Without chunks a prompt as long as the context comes in one piece; a batch of several stops at
    max_prefill_tokens.
    """
    return max(
        runner.model_config.context_len,
        int(compat.setting("schedule.max_prefill_tokens", 16384)),
        int(compat.setting("schedule.chunked_prefill_size", 0)),
    )


def plan_key(
    layer: RadixAttention,
    parent: Module | None = None,
    *,
    in_window_pool: bool,
    attention_chunk_size: int | None,
    has_spans: bool,
    cuts_spans: bool = False,
    in_blocks: bool = False,
) -> PlanKey:
    """What to plan for this layer.

    Args:
        parent: the module that the layer is a part of, which has its sinks and its ALiBi slopes.
        attention_chunk_size: of the model: its layers with `use_irope` see only the tokens of the query's own
            chunk (Llama 4).
        has_spans: see wants_spans. cuts_spans: see the function. in_blocks: see drafts_in_blocks.

    Raises:
        ValueError: see the module.
    """
    name = f"layer {layer.layer_id}"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise refuse(f"logit capping by {layer.logit_capping_method!r} ({name})")
    window_left = -1 if layer.sliding_window_size is None else layer.sliding_window_size
    causal = layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention
    if layer.is_cross_attention and window_left >= 0:
        raise refuse(f"a sliding window over the tokens of an encoder ({name})")
    if not (causal or in_blocks or layer.is_cross_attention):
        _check_whole_prompts(layer)
    chunk = attention_chunk_size if attention_chunk_size is not None and layer.use_irope else 0
    has_spans = has_spans and causal and (window_left >= 0 or not cuts_spans)
    items = bool(compat.setting("exec.features.enable_mis", False))
    if items and (chunk or has_spans or not causal):
        raise refuse(f"--enable-mis with attention that is not causal or in chunks ({name})")
    return PlanKey(
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.head_dim,
        window_left,
        causal,
        in_window_pool,
        of_this_step=is_decompressed(layer, parent),
        of_encoder=layer.is_cross_attention,
        window_right=-1 if causal else window_left,
        chunk=chunk,
        has_spans=has_spans,
        cuts_spans=has_spans and cuts_spans,
        has_items=items,
        has_alibi=slopes_of(parent) is not None,
        temperature_len=max(0, layer.xai_temperature_len),
        has_sinks=any(isinstance(getattr(parent, sinks, None), torch.Tensor) for sinks in _SINKS),
        logits_soft_cap=float(layer.logit_cap or 0.0),
        head_dim_v=None if layer.v_head_dim == layer.head_dim else layer.v_head_dim,
    )


def _check_whole_prompts(layer: RadixAttention) -> None:
    """A token that sees those after it needs them in the same step."""
    name = f"(layer {layer.layer_id})"
    if compat.setting("schedule.chunked_prefill_size", -1) != -1:
        raise refuse(f"bidirectional prompts in chunks {name}", "pass --chunked-prefill-size -1")
    if layer.attn_type == AttentionType.ENCODER_ONLY and not compat.setting(
        "memory.disable_radix_cache", True
    ):
        raise refuse(f"bidirectional prompts after cached prefixes {name}", "pass --disable-radix-cache")


def slopes_of(parent: Module | None) -> torch.Tensor | None:
    """[num_qo_heads], the ALiBi slopes that a module of a model has for its attention (Baichuan 13B)."""
    slopes = getattr(parent, "alibi_slopes", None)
    return slopes if isinstance(slopes, torch.Tensor) else None


def attention_layers(model: Module, is_encoder_decoder: bool) -> list[tuple[RadixAttention, Module]]:
    """The attention layers of a model, each with the module that it is a part of, in the order in which the
    model declares them.

    Args:
        is_encoder_decoder: its encoder's layers are left out: they attend without the engine's cache, and
            call no backend.

    Raises:
        ValueError: the model has attention sinks that no layer of ours will be given.
    """
    found = []
    for name, module in model.named_modules():
        layers = [child for child in module.children() if isinstance(child, RadixAttention)]
        if not layers and any(isinstance(getattr(module, sinks, None), torch.Tensor) for sinks in _SINKS):
            raise refuse(f"the attention sinks of {name}, which has no attention of its own")
        found += [
            (layer, module)
            for layer in layers
            if not is_encoder_decoder or layer.attn_type != AttentionType.ENCODER_ONLY
        ]
    return list(dict(found).items())
