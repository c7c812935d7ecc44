"""What this backend serves, decided while the engine starts: every refusal is a ValueError that names the model's feature or the option, and what to do."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from attn_backend.adapters.plan_key import PlanKey

from . import NAME, compat

# Their draft is one chain of tokens when speculative_eagle_topk is 1: the verifying step is then plain causal attention.
_CHAIN_SPECULATION = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
_TREE_SPECULATION = ("NGRAM",)
_SINKS = ("sinks", "attention_sink_bias")  # what models call them
_REFUSED_OPTIONS = {
    "--enable-unified-memory": "memory.enable_unified_memory",  # req_to_token would hold virtual slots
    "--enable-mis": "exec.features.enable_mis",
    "--dllm-algorithm": "exec.dllm.dllm_algorithm",
}
_REFUSED_PARALLELISM = {"--dcp-size": "parallel.attn_dcp_size", "--attn-cp-size": "parallel.attn_cp_size"}


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
        advice = "this release starts Triton for every backend name that is not its own; use SGLang 0.5.22 or later on a CPU"
        raise refuse(f"CPUs with SGLang {compat.release()}", advice)
    if config.attention_arch != AttentionArch.MHA:
        raise refuse(f"the attention architecture {config.attention_arch.name} (it serves MHA, GQA and MQA)")
    if config.is_encoder_decoder:
        raise refuse("encoder-decoder models (cross attention)")
    if runner.kv_cache_dtype != runner.dtype:
        model = "" if runner.dtype == torch.bfloat16 else "--dtype bfloat16 "
        advice = f"pass {model}--kv-cache-dtype bfloat16 (auto takes what the checkpoint declares, which may be fp8)"
        raise refuse(f"a KV cache of {runner.kv_cache_dtype} for a model of {runner.dtype}", advice)
    if runner.is_draft_worker:
        raise refuse("draft models", "pass --speculative-draft-attention-backend triton (or flashinfer)")
    # A model with this method hands masks to SGLang's Triton backend when a prompt has images, and leaves them out for every other backend (Gemma 3).
    if hasattr(runner.model, "prepare_attn_masks") and config.is_multimodal:
        advice = "leave --enable-multimodal out to serve text alone, or use --attention-backend triton"
        raise refuse("masks over the images of a prompt, within which tokens see both sides", advice)
    _check_settings()


def _check_settings() -> None:
    algorithm = compat.setting("spec.speculative_algorithm", None)
    if algorithm is not None:
        _check_speculation(str(algorithm).upper(), compat.setting("spec.speculative_eagle_topk", 1))
    for option, path in _REFUSED_OPTIONS.items():
        if compat.setting(path, None):
            raise refuse(option)
    for option, path in _REFUSED_PARALLELISM.items():
        size = compat.setting(path, 1)
        if size > 1:
            raise refuse(f"{option} {size}")


def _check_speculation(algorithm: str, topk: int) -> None:
    if topk > 1:
        why = "its draft is a tree"
    elif algorithm in _TREE_SPECULATION:
        why = "its drafts may be trees"
    elif algorithm not in _CHAIN_SPECULATION:
        why = "it has never been run with this backend"
    else:
        return
    advice = f"use --speculative-eagle-topk 1 with one of {', '.join(_CHAIN_SPECULATION)}, or another --attention-backend"
    raise refuse(f"--speculative-algorithm {algorithm} with --speculative-eagle-topk {topk} ({why})", advice)


def plan_key(layer: RadixAttention, in_window_pool: bool, attention_chunk_size: int | None = None) -> PlanKey:
    """What to plan for this layer.

    Args:
        attention_chunk_size: of the model: its layers with `use_irope` see only the tokens of the query's own chunk (Llama 4).

    Raises:
        ValueError: see the module.
    """
    name = f"layer {layer.layer_id}"
    if attention_chunk_size is not None and layer.use_irope:
        raise refuse(f"attention within chunks of {attention_chunk_size} tokens ({name})")
    if layer.is_cross_attention:
        raise refuse(f"cross attention ({name})")
    if layer.qk_head_dim != layer.v_head_dim:
        raise refuse(f"different head sizes of K and V ({layer.qk_head_dim} and {layer.v_head_dim}, {name})")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise refuse(f"logit capping by {layer.logit_capping_method!r} ({name})")
    if layer.xai_temperature_len > 0:
        raise refuse(f"length-dependent softmax temperature ({name})")
    window_left = -1 if layer.sliding_window_size is None else layer.sliding_window_size
    causal = layer.attn_type == AttentionType.DECODER
    if not causal and window_left >= 0:
        raise refuse(f"a sliding window over both sides of the query ({name})")
    if layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL and compat.setting("schedule.chunked_prefill_size", -1) != -1:
        raise refuse(f"bidirectional prompts in chunks ({name})", "pass --chunked-prefill-size -1")
    return PlanKey(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, window_left, causal, in_window_pool)


def attention_layers(model: Any) -> list[RadixAttention]:
    """The attention layers of a model, in the order in which it declares them.

    Raises:
        ValueError: the model will hand attention sinks to them. They only arrive with the first forward, which may be a user's request.
    """
    for name, module in model.named_modules():
        if any(isinstance(getattr(module, sinks, None), torch.Tensor) for sinks in _SINKS):
            raise refuse(f"attention sinks ({name})")
    return [module for module in model.modules() if isinstance(module, RadixAttention)]
