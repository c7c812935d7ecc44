"""Multi-head latent attention (DeepSeek V2 and V3, Kimi K2): supported models and pools.

SGLang chooses one of two ways for each step by the backend's name. It treats an unknown name like its Triton
backend: prompts without a cached prefix attend to decompressed keys and values, which are in no cache. All
other steps attend to the latents.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from torch import Tensor, device
from torch.nn import Module

from attn_backend import KVCache, append_mla_kv
from attn_backend.metadata.kv_cache import SCALED_LATENT_BYTES

from . import compat, rules
from .compat import NAME


def has_latents(runner: Any) -> bool:
    """Whether the pool of this runner's model holds latents."""
    return bool(runner.model_config.attention_arch == AttentionArch.MLA)


def is_sparse(runner: Any) -> bool:
    """Whether the model also has an indexer, which selects the tokens that a row attends to (DeepSeek V3.2,
    GLM 5).
    """
    return has_latents(runner) and bool(is_deepseek_dsa(runner.model_config.hf_config))


def unsupported_indexer(runner: Any) -> str | None:
    """Why this backend cannot serve a model with an indexer, or None."""
    config, pool = runner.model_config.hf_config, runner.token_to_kv_pool
    names = {
        compat.setting("exec.kernel.prefill_attention_backend", None),
        compat.setting("exec.kernel.decode_attention_backend", None),
    } - {None, NAME}
    is_known = isinstance(pool, MLATokenToKVPool)
    width, rotated = (pool.kv_lora_rank, pool.qk_rope_head_dim) if is_known else (0, 0)
    pools, has_sink = getattr(config, "index_kpool", 1), getattr(config, "learnable_sink", False)
    for found in rules.unsupported_sparse(device(runner.device).type, width, rotated, pools, has_sink):
        return found
    if (
        pool.kv_cache_dim != (SCALED_LATENT_BYTES if pool.dsa_kv_cache_store_fp8 else 576)
        or (pool.dtype.itemsize == 1) != pool.dsa_kv_cache_store_fp8
    ):
        return (
            f"{rules.SPARSE} in 8-bit rows without block scales (pass --kv-cache-dtype bfloat16, or "
            f"flashmla_sparse as --dsa-prefill-backend and -decode-)"
        )
    if runner.dtype != torch.bfloat16:
        return f"{rules.SPARSE} for a model of {runner.dtype} (pass --dtype bfloat16)"
    if runner.hisparse_coordinator is not None:
        return "--enable-hisparse"
    if compat.deterministic():
        return f"{rules.SPARSE} with --enable-deterministic-inference"
    return f"{rules.SPARSE} with another backend ({', '.join(sorted(map(str, names)))})" if names else None


def unsupported(runner: Any) -> str | None:
    """Why this backend cannot serve a model with latents, or None."""
    if is_sparse(runner):
        return unsupported_indexer(runner)
    pool = runner.token_to_kv_pool
    if (what := rules.unsupported_pool([base.__name__ for base in type(pool).__mro__])) is not None:
        return what
    stored_as = torch.uint8 if pool.dtype.itemsize == 1 else pool.dtype
    if pool.store_dtype != stored_as or pool.kv_cache_dim != pool.kv_lora_rank + pool.qk_rope_head_dim:
        return f"latents of {pool.dtype} stored as {pool.store_dtype}, {pool.kv_cache_dim} columns of them"
    return rules.unsupported_latents(pool.kv_lora_rank, pool.qk_rope_head_dim, device(runner.device).type)


def ask_for_parts(runner: Any) -> None:
    """Makes this runner's model pass the parts of Q and K separately.

    Not a model with Llama 4's scaling of queries (Mistral Large 3), which needs whole queries. A draft model
    does the same as its target model.
    """
    is_scaled = any(
        getattr(module, "llama_4_scaling_config", None) is not None for module in runner.model.modules()
    )
    if is_scaled or not runner.is_draft_worker:
        compat.take_parts(NAME, not is_scaled)


def is_decompressed(layer: RadixAttention, parent: Module | None) -> bool:
    """Whether a layer only reads decompressed keys and values of the step's own tokens."""
    return getattr(parent, "attn_mha", None) is layer and isinstance(
        getattr(parent, "attn_mqa", None), RadixAttention
    )


def append_latents(k: Tensor, k_rope: Tensor | None, kv: KVCache, slots: Tensor) -> None:
    """Writes a step's latents into the cache.

    Args:
        k: [rows, 1, latent and rotated part]; with k_rope only the latent.
        k_rope: [rows, 1, rotated part].
        kv: of the layer's slots.
    """
    rows, width = k[:, 0], kv.head_dim_v
    append_mla_kv(rows[:, :width], rows[:, width:] if k_rope is None else k_rope[:, 0], kv, slots)
