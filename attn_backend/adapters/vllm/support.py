"""Checks while vLLM starts: the refusals of this adapter, its bounds, and its notes to the user.

A refusal names the option or the model's feature, and a way out.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, NoReturn

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from attn_backend.adapters.layers import use_cascade
from attn_backend.adapters.metrics import log_start
from attn_backend.adapters.served import is_ours, report_layers
from attn_backend.kernels.attention import MAX_CUDA_INVARIANT_BATCH
from attn_backend.releases import own_release
from attn_backend.settings import Settings

from . import compat
from .rules import ONE_RANK, OTHER_BACKEND, OTHER_CACHE, unsupported_model

logger = init_logger("vllm.attn_backend")  # a child of vLLM's own logger: it logs to the same place

_WAYS_OUT = {  # ways out for vLLM's own reasons; the default is OTHER_BACKEND
    "dtype not supported": "pass --dtype bfloat16",
    "kv_cache_dtype not supported": OTHER_CACHE,
    "block_size not supported": "pass --block-size 16",
    "DCP not supported": ONE_RANK,
}
CASCADE_SWITCH = "ATTN_BACKEND_CASCADE"
CPU_SWITCH = "ATTN_BACKEND_VLLM_CPU"
OTHER_PLUGIN_WAY_OUT = (
    f"pass --attention-backend {compat.OWN_NAME} for attn_backend (vLLM 0.32 and later), or leave the other "
    "plugin out of VLLM_PLUGINS"
)


def refuse(what: str, way_out: str = OTHER_BACKEND) -> NoReturn:
    raise NotImplementedError(f"attn_backend does not support {what}: {way_out}")


def refuse_if(what: str | None, way_out: str = OTHER_BACKEND) -> None:
    """Refuses what is unsupported; does nothing if it is None."""
    if what is not None:
        refuse(what, way_out)


def with_ways_out(reasons: Iterable[str]) -> list[str]:
    """The reasons that vLLM shows when it refuses a backend, each with its way out.

    A reason that names an option already has one.
    """
    return [
        reason if "--" in reason else f"{reason}: {_WAYS_OUT.get(reason, OTHER_BACKEND)}"
        for reason in reasons
    ]


def unsupported_feature(vllm_config: VllmConfig) -> str | None:
    """The first need of the model or the deployment that this package cannot serve, or None.

    It checks only needs that some releases do not ask the backend about.
    """
    # vLLM forces the option for backends that need it, not on CPUs.
    keeps_images_whole = getattr(vllm_config.scheduler_config, "disable_chunked_mm_input", False)
    return unsupported_model(
        has_rswa=getattr(vllm_config.model_config, "rswa_window", None) is not None,
        splits_images=compat.has_image_spans(vllm_config) and not keeps_images_whole,
        is_diffusion=getattr(vllm_config, "diffusion_config", None) is not None,
        prefill_ranks=getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1),
    )


def unsupported_context_parallelism(vllm_config: VllmConfig, size: int) -> str | None:
    """Why a group of this size cannot share KV, or None. The layers check the rest (attention.py)."""
    if size == 1:
        return None
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if current_platform.is_cpu():
        return (
            f"decode context parallelism on a CPU, where vLLM cannot merge what its ranks find ({ONE_RANK})"
        )
    if size & (size - 1):
        powers = f"{ONE_RANK}, or 2, 4, 8"
        return f"decode context parallelism of {size} ranks: vLLM merges powers of two ({powers})"
    if compat.batch_invariant():
        return f"VLLM_BATCH_INVARIANT with decode context parallelism ({ONE_RANK})"
    if (
        not getattr(model, "use_mla", False)
        and parallel.tensor_parallel_size // model.get_total_num_kv_heads() % size
    ):
        return f"{size} ranks that share KV among them but not one KV head ({ONE_RANK})"
    return None


def unsupported_sparse_feature(vllm_config: VllmConfig) -> str | None:
    """The first need of a model with an indexer that this package cannot serve, or None."""
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        return "latents in host memory (HiSparse)"
    if getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) > 1:
        return f"decode context parallelism of sparse attention over latents ({ONE_RANK})"
    return None


def unsupported_latents(kv_cache_spec: Any, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> str | None:
    """Why a cache of latents cannot be read, or None. kv_dtype: its float8 or byte dtype, else None."""
    if kv_dtype is not None or kv_cache_spec.dtype == dtype:
        return None
    return f"a cache of latents of {kv_cache_spec.dtype} for a model of {dtype} (pass --kv-cache-dtype auto)"


def unsupported_invariance(max_batch: int, device: torch.device) -> str | None:
    """Why VLLM_BATCH_INVARIANT cannot be served, or None, also if it is not set."""
    if not compat.batch_invariant() or device.type != "cuda" or max_batch <= MAX_CUDA_INVARIANT_BATCH:
        return None
    advice = (
        f"pass smaller --max-num-seqs and --max-cudagraph-capture-size, {MAX_CUDA_INVARIANT_BATCH} at most"
    )
    return f"VLLM_BATCH_INVARIANT with batches of {max_batch} requests ({advice})"


def workspace_maxima(vllm_config: Any) -> tuple[int, int]:
    """The most rows and the most requests of any batch, padding for CUDA graphs included."""
    scheduler = vllm_config.scheduler_config
    largest_graph = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    speculative = getattr(vllm_config, "speculative_config", None)
    draft_tokens = getattr(speculative, "num_speculative_tokens", None) or 0
    max_rows = max(
        scheduler.max_num_batched_tokens, largest_graph, scheduler.max_num_seqs * (1 + draft_tokens)
    )
    return max_rows, max(scheduler.max_num_seqs, largest_graph)


def obey_cascade_option() -> None:
    """Turns cascades off if the command line does.

    Called when vLLM loads its plugins, before it starts processes: they inherit the variable.
    """
    if _is_cascade_option_given():
        os.environ.setdefault(CASCADE_SWITCH, "0")


def tell_of_cascade(logger: logging.Logger) -> None:
    """Called when vLLM starts; each process logs once. vLLM's processes inherit the command line."""
    if _is_cascade_option_given():
        _log_cascade(logger)


def _is_cascade_option_given() -> bool:
    """Off is vLLM's default, so only the command line shows whether a user gave the option."""
    return not {"--disable-cascade-attn", "--disable_cascade_attn"}.isdisjoint(sys.argv)


@cache
def _log_cascade(logger: logging.Logger) -> None:
    if use_cascade():
        logger.info(
            "%s=1 overrules --disable-cascade-attn: attn_backend looks for shared prefixes", CASCADE_SWITCH
        )
    else:
        logger.info(
            "attn_backend does not look for shared prefixes: --disable-cascade-attn was given. %s=1 "
            "overrules that.",
            CASCADE_SWITCH,
        )


def tell_of_registration() -> None:
    """Called when vLLM loads the plugin, and again once the model is built. Each process logs once.

    Engines inside the user's process load plugins before they set up vLLM's logger, so the first call may
    find a logger that shows nothing.
    """
    if logger.isEnabledFor(logging.INFO):
        _log_registration(logger)
    if logger.hasHandlers() and (other := compat.other_custom()) is not None:
        _log_other_plugin(other, logger)


@cache
def _log_registration(logger: logging.Logger) -> None:
    names = ", ".join(compat.our_names())
    # vLLM does not name the backend that it uses on a CPU
    logger.info("attn_backend %s is registered as %s.", own_release(), names or "no backend")


@cache
def _log_other_plugin(other: str, logger: logging.Logger) -> None:
    logger.warning(
        "Two plugins want the name CUSTOM. It belongs to %s, not to attn_backend: %s.",
        *(other, OTHER_PLUGIN_WAY_OUT),
    )


_planned_layers: set[str] = set()


def tell_when_ready(vllm_config: Any, layer_names: Iterable[str]) -> None:
    """Called when the builder of these layers has made its Attentions. The last builder logs the start."""
    _planned_layers.update(layer_names)
    try:
        layers = compat.attention_layers(vllm_config)
        if all(name in _planned_layers or not is_ours(layers[name].get_attn_backend()) for name in layers):
            log_start(logger)
    except Exception as error:  # of a layer that is not ours; the line is only for information
        logger.debug("attn_backend cannot tell whether all its layers are ready: %s", error)


def check_layers(vllm_config: Any) -> None:
    """Called in each worker once the model is built, if the plugin is loaded.

    Raises:
        RuntimeError: the user has chosen this backend, and no attention layer runs on it.
    """
    tell_of_registration()
    on_cpu = compat.serves_on_cpu()
    if not on_cpu and not compat.is_chosen(vllm_config):
        return
    if not on_cpu and current_platform.is_cpu():
        logger.warning(
            "attn_backend is not used: vLLM has no choice of backends on a CPU. %s=1 replaces its backend.",
            CPU_SWITCH,
        )
        return
    if Settings.read().metrics and (hidden_by := compat.hidden_metrics(vllm_config)) is not None:
        logger.warning("attn_backend's counters are not in /metrics with %s.", hidden_by)
    of_drafts = compat.setting("speculative_config.attention_backend.name", vllm_config)
    num_ours, others = 0, dict[str, list[str]]()
    for layer_name, layer in compat.attention_layers(vllm_config).items():
        backend = layer.get_attn_backend()
        if is_ours(backend):
            num_ours += 1
        elif backend.get_name() != of_drafts:
            others.setdefault(backend.get_name(), []).append(layer_name)
    hint = (
        f'A draft model gets attn_backend from "attention_backend": "{compat.backend_name()}" in '
        "--speculative-config, unless only the draft model or only the target has MLA."
    )
    has_drafts = getattr(vllm_config, "speculative_config", None) is not None
    report_layers(num_ours, others, logger, hint if has_drafts else "")
