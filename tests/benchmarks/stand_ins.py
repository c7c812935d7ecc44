"""Replacements for a GPU and peers in tests of the benchmarks: a timer without a clock, vLLM's kernels in
torch, our own FlashInfer API.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import attn_backend.flashinfer
from benchmarks import peers
from benchmarks.timing import Machine

MACHINE = Machine(bandwidth=1e12, rate=1e15, launch=1.0)


class OneMoreEach:
    """A timer that launches, and reports 1, 2, ... microseconds for launches that take turns."""

    def __call__(self, launch) -> float:
        return self.together([launch])[0]

    def together(self, launches) -> list[float]:
        for launch in launches:
            launch()
        return [1.0 + i for i in range(len(launches))]


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox) -> None:
    assert is_neox
    cos, sin = (angles[:, None] for angles in cos_sin_cache[positions].float().chunk(2, dim=-1))
    for heads in (query.unflatten(1, (-1, head_size)), key.unflatten(1, (-1, head_size))):
        first, second = heads.float().chunk(2, dim=-1)
        heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))


def fused_qk_norm_rope(
    qkv,
    num_heads_q,
    num_heads_k,
    num_heads_v,
    head_dim,
    eps,
    q_weight,
    k_weight,
    cos_sin_cache,
    is_neox,
    position_ids,
) -> None:
    q, k, _ = qkv.split([num_heads_q * head_dim, num_heads_k * head_dim, num_heads_v * head_dim], dim=1)
    for flat, weight in ((q, q_weight), (k, k_weight)):
        heads = flat.unflatten(1, (-1, head_dim))
        heads.copy_(torch.nn.functional.rms_norm(heads.float(), [head_dim], weight.float(), eps))
    rotary_embedding(position_ids, q, k, head_dim, cos_sin_cache, is_neox)


def reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
) -> None:
    assert (kv_cache_dtype, key_cache.dtype) in (("auto", key.dtype), ("fp8", torch.uint8))
    for tokens, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        written = (
            tokens
            if kv_cache_dtype == "auto"
            else (tokens.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        )
        cache[slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]] = written


def install_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs FlashInfer, and vLLM's kernels except FlashAttention-3."""
    kernels = {
        function.__name__: function
        for function in (rotary_embedding, fused_qk_norm_rope, reshape_and_cache_flash)
    }
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", SimpleNamespace(**kernels))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flashinfer", attn_backend.flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer.rope", attn_backend.flashinfer.rope)
    monkeypatch.setattr(peers, "FLASHINFER_WORKSPACE", 1 << 20)
