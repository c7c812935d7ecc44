"""A small engine with DeepSeek layers: attention over latents, and over decompressed keys and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import latent_cases
import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")
from fake_engine import MAX_REQUESTS, MAX_TOKENS, FakeEngine, LayerShape, model_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_steps import check, rounds_to
from torch import Tensor, nn

from attn_backend.adapters.sglang.backend import SGLangAttentionBackend

HEADS, LATENT, ROPE, QK, V = 4, 512, 64, 192, 128


SCALE = 192**-0.5


class SelfAttention(nn.Module):
    """The two attentions of a DeepSeek layer: over latents, and over decompressed keys and values."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.attn_mqa = RadixAttention(HEADS, LATENT + ROPE, SCALE, 1, layer_id, v_head_dim=LATENT)
        self.attn_mha = RadixAttention(HEADS, QK, SCALE, HEADS, layer_id, v_head_dim=V)


class Engine(FakeEngine):
    def __init__(
        self,
        page_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__((LayerShape(),), page_size, dtype, device=device)
        size = MAX_REQUESTS * MAX_TOKENS
        self.kv_dtype = kv_dtype or dtype
        self.pool: Any = MLATokenToKVPool(size, page_size, self.kv_dtype, LATENT, ROPE, 2, device, False)
        for layer_id in range(2):
            self.pool.kv_buffer[layer_id].fill_(0x7F if kv_dtype else float("nan"))  # NaN, also in 8 bits
        self.model = nn.ModuleList(SelfAttention(i) for i in range(2))
        self.latents: dict[tuple[int, int], Tensor] = {}  # for a request in a layer: float64 [tokens, 576]

    def runner(self, **changes: object) -> SimpleNamespace:
        config = model_config(
            attention_arch=AttentionArch.MLA,
            hf_config=SimpleNamespace(architectures=["DeepseekV2ForCausalLM"]),
        )
        return super().runner(**{"model_config": config, "kv_cache_dtype": self.kv_dtype, **changes})

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def remember_latents(self, requests: list[int], new_lens: list[int], layer_id: int, new: Tensor) -> None:
        for i, rows in zip(requests, new.cpu().double().split(new_lens), strict=True):
            before = self.latents.get((i, layer_id), rows[:0])
            self.latents[i, layer_id] = torch.cat([before, rows])


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float64 [rows, heads * columns of V]: the rows are the last tokens of k [tokens, heads, ...]."""
    scores = torch.einsum("qhd,khd->hqk", q.cpu().double(), k.cpu().double()) * SCALE
    hidden = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.cpu().double()
    ).flatten(1)


def step(
    engine: Engine,
    backend: SGLangAttentionBackend,
    mode: ForwardMode,
    requests: list[int],
    new_lens: list[int],
    apart: bool = True,
) -> None:
    """apart: the model passes the parts of Q and K separately."""
    batch = engine.batch(mode, requests, new_lens)
    backend.init_forward_metadata(batch)
    decompressed = mode == ForwardMode.EXTEND and sum(batch.extend_prefix_lens_cpu) == 0  # as SGLang decides
    rows = sum(new_lens)
    for layer_id, layer in enumerate(engine.model):
        latent = engine.randn(rows, 1, LATENT + ROPE)
        if engine.kv_dtype != engine.dtype:
            latent = latent.to(engine.kv_dtype).to(engine.dtype)  # as the pool stores it
        engine.remember_latents(requests, new_lens, layer_id, latent[:, 0])
        if decompressed:
            q, k, v = (
                engine.randn(rows, HEADS, QK),
                engine.randn(rows, HEADS, QK),
                engine.randn(rows, HEADS, QK + V)[..., QK:],
            )
            # The model writes latents itself.
            engine.pool.kv_buffer[layer_id][batch.out_cache_loc] = latent.to(engine.kv_dtype).view(
                engine.pool.store_dtype
            )
            out = backend.forward(q, k, v, layer.attn_mha, batch, save_kv_cache=False)
            check(
                out,
                torch.cat(
                    [
                        attention(*parts)
                        for parts in zip(q.split(new_lens), k.split(new_lens), v.split(new_lens), strict=True)
                    ]
                ),
                rounds_to(engine),
            )
            continue
        q = engine.randn(rows, HEADS, LATENT + ROPE)
        if apart:
            q_nope, q_rope = latent_cases.parts_of_q(q, "engine")
            k_nope, k_rope = latent.clone()[..., :LATENT], latent[..., LATENT:]
            out = backend.forward(q_nope, k_nope, k_nope, layer.attn_mqa, batch, q_rope=q_rope, k_rope=k_rope)
        else:
            out = backend.forward(q, latent, latent[..., :LATENT], layer.attn_mqa, batch)
        expected = []
        for i, q_of_request in zip(requests, q.split(new_lens), strict=True):
            k = engine.latents[i, layer_id][:, None].expand(-1, HEADS, -1)
            expected.append(attention(q_of_request, k, k[..., :LATENT]))
        check(out, torch.cat(expected), rounds_to(engine))
    engine.advance(requests, new_lens)
