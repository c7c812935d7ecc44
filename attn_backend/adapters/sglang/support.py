"""Checks while SGLang starts: refusals, bounds, and the spec of each layer.

Every refusal is a ValueError that names the model's feature or the option, and a way out.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch.nn import Module

from attn_backend.adapters.checkpoint import Refusal
from attn_backend.adapters.layers import LayerSpec
from attn_backend.adapters.served import is_ours, report_layers
from attn_backend.jit.manifest import HeadDims
from attn_backend.kernels.attention import MAX_CUDA_INVARIANT_BATCH
from attn_backend.metadata.kv_cache import MXFP4, CacheDtype

from . import compat, rules
from .compat import NAME
from .mla import has_latents, is_decompressed, is_sparse
from .mla import unsupported as unsupported_latents

logger = logging.getLogger(__name__)

_SINKS = ("sinks", "attention_sink_bias")  # the names in models
_SETTINGS = {  # of options that rules.py names
    "--enable-unified-memory": "memory.enable_unified_memory",
    "--dllm-algorithm": "exec.dllm.dllm_algorithm",
    "--dcp-size": "parallel.attn_dcp_size",
    "--attn-cp-size": "parallel.attn_cp_size",
    "--enable-hierarchical-cache": "memory.enable_hierarchical_cache",
    "--enable-lmcache": "memory.enable_lmcache",
    "--enable-flexkv": "memory.enable_flexkv",
    "--radix-cache-backend": "memory.radix_cache_backend",
    "--enable-unified-cache-external-linker": "memory.enable_unified_cache_external_linker",
    "--disaggregation-mode": "disagg.disaggregation_mode",
}


def refuse(what: str, advice: str = rules.OTHER_BACKEND) -> NoReturn:
    raise ValueError(f"--attention-backend {NAME} does not support {what}: {advice}")


def refuse_if(refusal: Refusal | None) -> None:
    if refusal is not None:
        refuse(*refusal)


def check_runner(runner: Any) -> None:
    """Refuses a model or an option that this backend cannot serve with any layer.

    Raises:
        ValueError: see the module.
    """
    config = runner.model_config
    device = torch.device(runner.device).type
    refuse_if(rules.unsupported_device(device))
    if device == "cpu" and compat.starts_triton_on_cpu(NAME):
        refuse_if(rules.unsupported_on_cpu(compat.release()))
    architecture = config.attention_arch
    refuse_if(rules.unsupported_architecture(getattr(architecture, "name", architecture)))
    if compat.stores_fp4(runner):
        _check_fp4(runner, device)
    else:
        refuse_if(rules.unsupported_kv_dtype(runner.kv_cache_dtype_str, runner.kv_cache_dtype, runner.dtype))
    if has_latents(runner) and (unsupported := unsupported_latents(runner)) is not None:
        refuse(unsupported)
    if wants_spans(runner):
        chunk = compat.setting("schedule.chunked_prefill_size", -1)
        has_window_pool = isinstance(runner.token_to_kv_pool, SWAKVPool)
        refuse_if(rules.unsupported_spans(type(runner.model).__name__, chunk, has_window_pool))
    _check_settings()
    if compat.deterministic():
        has_mixed_chunks = bool(compat.setting("schedule.enable_mixed_chunk", False))
        refuse_if(
            rules.unsupported_deterministic(
                has_latents=has_latents(runner), has_mixed_chunks=has_mixed_chunks
            )
        )
    if drafts_in_blocks(runner):
        check_drafts(runner)


def _check_fp4(runner: Any, device: str) -> None:
    pool = runner.token_to_kv_pool
    layers = attention_layers(runner.model, bool(runner.model_config.is_encoder_decoder))
    settings = {option: compat.setting(_SETTINGS[option], None) for option in rules.NOT_WITH_FP4}
    refusals = rules.unsupported_fp4(
        device,
        has_latents=has_latents(runner),
        has_window_pool=isinstance(pool, SWAKVPool),
        heads=(HeadDims(layer.head_dim, layer.v_head_dim) for layer, _ in layers),
        drafts_in_blocks=drafts_in_blocks(runner),
        options=(option for option, value in settings.items() if value not in (None, False, "null")),
    )
    refuse_if(next(refusals, None))
    if not compat.holds_fp4(pool):
        refuse(f"--kv-cache-dtype {MXFP4} in a {type(pool).__name__}")


def wants_spans(runner: Any) -> bool:
    """Whether tokens of an image see each other, left and right. A model with `prepare_attn_masks` hands such
    masks to SGLang's Triton backend (Gemma 3).
    """
    text = getattr(runner.model_config, "hf_text_config", None)
    return hasattr(runner.model, "prepare_attn_masks") and rules.has_spans(
        type(runner.model).__name__,
        bool(runner.model_config.is_multimodal),
        getattr(text, "use_bidirectional_attention", None),
    )


def cuts_spans(runner: Any) -> bool:
    """Whether windows also limit the tokens of an image that another one sees (Gemma 4).

    Layers without a window are then causal: images are text to them.
    """
    return type(runner.model).__name__ in rules.GEMMA_4


def _check_settings() -> None:
    refuse_if(rules.unsupported_algorithm(_algorithm()))
    for option in rules.REFUSED_OPTIONS:
        if compat.setting(_SETTINGS[option], None):
            refuse(*rules.unsupported_option(option))
    for option in rules.REFUSED_PARALLELISM:
        refuse_if(rules.unsupported_ranks(option, compat.setting(_SETTINGS[option], 1)))


def drafts_are_trees() -> bool:
    """Whether the drafts that this server verifies may have branches."""
    algorithm = _algorithm()
    return algorithm == "NGRAM" or (
        algorithm in rules.SPECULATION and compat.setting("spec.speculative_eagle_topk", 1) > 1
    )


def drafts_in_blocks(runner: Any) -> bool:
    """Whether this runner's model drafts a whole block in one step, so that its layers need not be causal."""
    return bool(runner.is_draft_worker) and _algorithm() == rules.BLOCKS


def _algorithm() -> str:
    return str(compat.setting("spec.speculative_algorithm", "")).upper()


def verified_tokens(runner: Any) -> int:
    """Draft tokens of a request in a step that verifies them; 0: this runner's model verifies none."""
    return 0 if runner.is_draft_worker else compat.num_draft_tokens()


def check_drafts(runner: Any) -> None:
    """Refuses a draft model with steps or blocks that this backend cannot serve.

    Raises:
        ValueError: see the module.
    """
    if is_sparse(runner):
        refuse(
            "draft models with sparse attention over latents",
            "pass --speculative-draft-attention-backend dsa",
        )
    if isinstance(runner.token_to_kv_pool, SWAKVPool):
        refuse(
            "draft models with a separate KV pool for sliding windows",
            "pass --speculative-draft-attention-backend triton",
        )


def tree_spec(spec: LayerSpec) -> LayerSpec:
    """The spec of the same layers in a step that verifies trees. There are no images in it, so no spans.

    Raises:
        ValueError: the layers mask by a token's position. In a tree a row does not have its token's position.
    """
    if spec.has_alibi or spec.chunk or spec.has_items or spec.of_encoder:
        refuse(
            "drafts that are trees with ALiBi, chunked local attention, --enable-mis or cross attention",
            "pass --speculative-eagle-topk 1",
        )
    return spec._replace(has_tree=True, has_spans=False, cuts_spans=False)


def most_requests(runner: Any, branches: int = 0) -> int:
    """Requests of the largest step, with the padding of graphs and ranks.

    Args:
        branches: of each request; 0: it has one row or a prompt.

    Raises:
        ValueError: see the module.
    """
    most = -(-runner.req_to_token_pool.size // 32) * 32 * max(1, branches)
    if (
        compat.deterministic()
        and torch.device(runner.device).type == "cuda"
        and most > MAX_CUDA_INVARIANT_BATCH
    ):
        refuse(
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


def layer_spec(
    layer: RadixAttention,
    parent: Module | None = None,
    *,
    kv_dtype: CacheDtype | None,
    in_window_pool: bool,
    attention_chunk_size: int | None,
    has_spans: bool,
    cuts_spans: bool = False,
    in_blocks: bool = False,
) -> LayerSpec:
    """The needs of this layer.

    Args:
        parent: the module that the layer is a part of, which has its sinks and its ALiBi slopes.
        kv_dtype: of the pool, if it differs from the model's.
        attention_chunk_size: of the model. Layers with `use_irope` see only the query's own chunk (Llama 4).
        has_spans, cuts_spans, in_blocks: results of wants_spans(), cuts_spans() and drafts_in_blocks().

    Raises:
        ValueError: see the module.
    """
    name = f"layer {layer.layer_id}"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        refuse(f"logit capping by {layer.logit_capping_method!r} ({name})")
    window_left = -1 if layer.sliding_window_size is None else layer.sliding_window_size
    causal = layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention
    if layer.is_cross_attention and window_left >= 0:
        refuse(f"a sliding window over the tokens of an encoder ({name})")
    if not (causal or in_blocks or layer.is_cross_attention):
        _check_whole_prompts(layer)
    chunk = attention_chunk_size if attention_chunk_size is not None and layer.use_irope else 0
    has_spans = has_spans and causal and (window_left >= 0 or not cuts_spans)
    items = bool(compat.setting("exec.features.enable_mis", False))
    of_this_step = is_decompressed(layer, parent)
    if items and (chunk or has_spans or not causal):
        refuse(f"--enable-mis with attention that is not causal or in chunks ({name})")
    return LayerSpec(
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.head_dim,
        window_left,
        causal,
        in_window_pool,
        of_this_step=of_this_step,
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
        kv_dtype=None if of_this_step else kv_dtype,
        token_scales=kv_dtype == MXFP4,
    )


def _check_whole_prompts(layer: RadixAttention) -> None:
    refusals = rules.unsupported_prompts(
        f" (layer {layer.layer_id})",
        layer.attn_type.value,
        compat.setting("schedule.chunked_prefill_size", -1),
        bool(compat.setting("memory.disable_radix_cache", True)),
    )
    refuse_if(next(refusals, None))


def slopes_of(parent: Module | None) -> torch.Tensor | None:
    """[num_qo_heads], the ALiBi slopes that a module of a model has for its attention (Baichuan 13B)."""
    slopes = getattr(parent, "alibi_slopes", None)
    return slopes if isinstance(slopes, torch.Tensor) else None


def attention_layers(model: Module, is_encoder_decoder: bool) -> list[tuple[RadixAttention, Module]]:
    """The attention layers of a model, each with the module that it is a part of, in the order in which the
    model declares them.

    Args:
        is_encoder_decoder: leave out the encoder's layers, which attend without the engine's cache and call
            no backend.

    Raises:
        ValueError: the model has attention sinks that no layer passes to us.
    """
    found = []
    for name, module in model.named_modules():
        layers = [child for child in module.children() if isinstance(child, RadixAttention)]
        if not layers and any(isinstance(getattr(module, sinks, None), torch.Tensor) for sinks in _SINKS):
            refuse(f"the attention sinks of {name}, a module without attention")
        found += [
            (layer, module)
            for layer in layers
            if not is_encoder_decoder or layer.attn_type != AttentionType.ENCODER_ONLY
        ]
    return list(dict(found).items())


def check_layers(runner: Any, built: Any) -> None:
    """Called once the model is built and SGLang has wrapped its attention backend for it.

    A phase counts if the user chose this backend for it: SGLang has one option each for prompts and decodes.

    Args:
        built: SGLang's wrapper returned it: our backend, another backend, or a backend that has several.

    Raises:
        RuntimeError: no layer of the model runs on this backend.
    """
    phases = compat.phases_of_user(runner)
    if not phases:
        return
    layers: dict[int, str] = {}
    for name, module in runner.model.named_modules():
        if isinstance(module, RadixAttention):  # DeepSeek has two for one layer
            layers.setdefault(module.layer_id, name)
    num_ours, others = 0, dict[str, list[str]]()
    for layer_id, name in layers.items():
        backends = [compat.backend_of_layer(built, layer_id, phase) for phase in phases]
        foreign = {
            f"{type(backend).__name__}{f' in {phase}s' if len(set(backends)) > 1 else ''}"
            for phase, backend in zip(phases, backends, strict=True)
            if not is_ours(type(backend))
        }
        num_ours += not foreign
        for backend in foreign:
            others.setdefault(backend, []).append(name)
    is_draft = bool(runner.is_draft_worker)
    hint = f"--speculative-draft-attention-backend {NAME} chooses attn_backend for it." if is_draft else ""
    report_layers(num_ours, others, logger, hint, is_draft)
