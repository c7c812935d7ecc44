"""Multi-head latent attention (DeepSeek V2 and V3, Kimi K2): what its models and its pool must be like.

SGLang chooses between two ways for each step by a backend's name, and takes those of its Triton backend for a name that it does not know: prompts without a
cached prefix are attended to in decompressed keys and values, which are in no cache; all else in the latents.
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
from attn_backend.kernels.manifest import HeadDims
from attn_backend.metadata.kv_cache import FLOAT8_DTYPES


def has_latents(runner: Any) -> bool:
    """Whether the pool of this runner's model holds latents."""
    return bool(runner.model_config.attention_arch == AttentionArch.MLA)


def unsupported(runner: Any) -> str | None:
    """What keeps a model with latents from being served; None if nothing."""
    if is_deepseek_dsa(runner.model_config.hf_config):
        return "sparse attention over latents (DeepSeek V3.2, GLM 5)"
    pool = runner.token_to_kv_pool
    if not isinstance(pool, MLATokenToKVPool):
        return f"latents in a {type(pool).__name__}"
    stored_as = torch.uint8 if pool.dtype in FLOAT8_DTYPES else pool.dtype
    if pool.store_dtype != stored_as or pool.kv_cache_dim != pool.kv_lora_rank + pool.qk_rope_head_dim:
        return f"latents of {pool.dtype} stored as {pool.store_dtype}, {pool.kv_cache_dim} columns of them"
    widths = HeadDims(pool.kv_cache_dim, pool.kv_lora_rank)
    if device(runner.device).type == "cuda" and not widths.runs_on_cuda:
        return f"latents of {widths.v} + {widths.qk - widths.v} columns (on CUDA it serves 512 + 64)"
    return None


def is_decompressed(layer: RadixAttention, parent: Module | None) -> bool:
    """Whether a layer is given keys and values of the step's own tokens, decompressed, and reads nothing else."""
    return getattr(parent, "attn_mha", None) is layer and isinstance(getattr(parent, "attn_mqa", None), RadixAttention)


def append_latents(k: Tensor, v: Tensor, kv: KVCache, slots: Tensor) -> None:
    """As append_kv. k: [rows, 1, latent and rotated part], of which v is a part; kv: of the layer's slots."""
    rows, width = k[:, 0], kv.head_dim_v
    append_mla_kv(rows[:, :width], rows[:, width:], kv, slots)
