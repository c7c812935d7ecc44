"""Sparse attention over latents: SGLang's own backend around our attention, compared with float64 attention
over the selected tokens.

SGLang's indexer and metadata have GPU kernels only. The tests fill in their results, and the GPU properties
that the constructor would read.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import latent_cases
import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import dsa_backend as dsa
from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from attn_backend import KVCache, append_mla_kv
from attn_backend.adapters.sglang import sparse
from attn_backend.adapters.sglang.mla import unsupported
from attn_backend.adapters.sglang.plugin import create_backend
from attn_backend.adapters.sglang.sparse import SparseBackend

HEADS, TOPK, SLOTS = 16, 24, 320
SCALE = 192**-0.5


class Pool:
    """The latents of two layers, one row a slot."""

    def __init__(self, is_scaled: bool) -> None:
        self.rows = [
            torch.zeros(SLOTS, 1, 656, dtype=torch.uint8)
            if is_scaled
            else torch.zeros(SLOTS, 1, 576, dtype=torch.bfloat16)
            for _ in range(2)
        ]
        self.dsa_kv_cache_store_fp8 = is_scaled

    def set_mla_kv_buffer(self, layer: Any, slots: Tensor, k: Tensor, k_rope: Tensor) -> None:
        append_mla_kv(k.flatten(1), k_rope.flatten(1), KVCache.from_latent(self.rows[layer.layer_id]), slots)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        rows = self.rows[layer_id]
        return rows.view(torch.float8_e4m3fn) if rows.dtype == torch.uint8 else rows


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SparseBackend:
    is_scaled = getattr(request, "param", False)

    def init(self: Any, runner: Any) -> None:
        """The attributes that forward_decode and forward_extend of 0.5.17 to 0.5.23 read."""
        vars(self).update(
            device="cpu",
            num_q_heads=HEADS,
            use_mha=False,
            use_fused_topk=True,
            hisparse_coordinator=None,
            dsa_index_kpool=1,
            device_sm_major=9,
            token_to_kv_pool=runner.token_to_kv_pool,
            dsa_kv_cache_store_fp8=is_scaled,
            dsa_prefill_impl="flashmla_kv",
            dsa_decode_impl="fa3",
            enable_auto_select_prefill_impl=True,
            forward_metadata=SimpleNamespace(dsa_cache_seqlens_int32=None, topk_indices_offset=None),
        )

    monkeypatch.setattr(dsa.DeepseekSparseAttnBackend, "__init__", init)
    monkeypatch.setattr(
        dsa.DeepseekSparseAttnBackend,
        "_get_fused_topk_page_table",
        lambda self, indices: indices,
        raising=False,
    )
    for name in ("concat_mla_absorb_q_general", "_concat_mla_absorb_q_general"):
        monkeypatch.setattr(dsa, name, lambda nope, rope: torch.cat([nope, rope], -1), raising=False)
    monkeypatch.setattr(
        dsa.DeepseekSparseAttnBackend,
        "get_topk_transform_method",
        lambda self, mode=None: TopkTransformMethod.PAGED,
    )
    monkeypatch.setattr(sparse, "check_runner", lambda runner: None)
    monkeypatch.setattr(sparse, "get_dsa_index_topk", lambda config: TOPK)
    return SparseBackend(make_runner(Pool(is_scaled)))


def make_runner(pool: Any, **changes: Any) -> SimpleNamespace:
    config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=TOPK)
    model = SimpleNamespace(hf_config=config, context_len=64, attention_arch=AttentionArch.MLA)
    runner = {
        "dtype": torch.bfloat16,
        "token_to_kv_pool": pool,
        "model_config": model,
        "req_to_token_pool": SimpleNamespace(size=8),
        "device": "cuda",
    }
    return SimpleNamespace(**runner | {"hisparse_coordinator": None} | changes)


def make_layer(number: int) -> RadixAttention:
    return RadixAttention(HEADS, 576, SCALE, 1, number, v_head_dim=512)


def step(backend: SparseBackend, mode: ForwardMode, seen: list[int], generator: torch.Generator) -> None:
    """Both layers of a step: row i selects from seen[i] slots. All were written before, except the row's own
    slot, which is written now.
    """
    rows = len(seen)
    slots = torch.randperm(SLOTS, generator=generator).int()
    own = slots[:rows]
    for number in range(2):
        layer, pool = make_layer(number), backend.token_to_kv_pool
        latents = torch.randn(SLOTS, 576, generator=generator).bfloat16()
        old = slots[rows:].long()
        pool.set_mla_kv_buffer(layer, old, latents[old, :512], latents[old, 512:])
        chosen = torch.full((rows, TOPK), -1, dtype=torch.int32)
        for row, count in enumerate(seen):
            selected = torch.cat(
                [
                    own[row : row + 1],
                    slots[rows + torch.randperm(SLOTS - rows, generator=generator)[: count - 1]],
                ]
            )
            chosen[row, : min(count, TOPK)] = selected[:TOPK]
        new = latents[own.long()][:, None]
        q = torch.randn(rows, HEADS, 576, generator=generator).bfloat16()
        batch = SimpleNamespace(
            forward_mode=mode, out_cache_loc=own.long(), extend_prefix_lens_cpu=[1], batch_size=rows
        )
        forward = backend.forward_decode if mode.is_decode() else backend.forward_extend
        parts: dict[str, Tensor] = {"q_rope": q[..., 512:], "k_rope": new[..., 512:], "topk_indices": chosen}
        out = forward(q[..., :512].contiguous(), new[..., :512], new[..., :512], layer, batch, True, **parts)
        numbers = latent_cases.numbers_of(pool.rows[number], 1.0)[:, 0]
        for row, of_row in enumerate(chosen):
            keys = numbers[of_row[of_row >= 0].long()]
            expected = ((q[row].double() @ keys.T) * SCALE).softmax(-1) @ keys[:, :512]
            assert (out.view(rows, HEADS, 512)[row].double() - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("backend", [False, True], indirect=True, ids=["bf16", "656 bytes"])
def test_steps(backend: SparseBackend) -> None:
    """Decodes with different lengths, a prompt, then decodes again: each step is planned in its first
    layer."""
    plans = []
    for rows in backend._rows.values():
        plan = rows.plan
        rows.plan = lambda counts, plan=plan: (plans.append(counts.tolist()), plan(counts))  # type: ignore[method-assign,misc]
    generator = torch.Generator().manual_seed(0)
    steps = [
        (ForwardMode.DECODE, [3, 90, 20]),
        (ForwardMode.EXTEND, list(range(1, 31))),
        (ForwardMode.DECODE, [1, 200]),
    ]
    for mode, seen in steps:
        step(backend, mode, seen, generator)
    assert plans == [[min(count, TOPK) for count in seen] for _, seen in steps]


def test_prompts_over_8_bits_are_widened_by_the_engine(backend: SparseBackend) -> None:
    """A step's own latents, or latents that it has dequantized, arrive in a separate tensor."""
    latents, slots = (
        torch.randn(40, 1, 576).bfloat16(),
        torch.tensor([[3, 5, -1], [39, 0, 7]], dtype=torch.int32),
    )
    slots = torch.cat([slots, torch.full((2, TOPK - 3), -1, dtype=torch.int32)], 1)
    q = torch.randn(2, HEADS, 576).bfloat16()
    out = backend._forward_flashmla_sparse(
        q_all=q, kv_cache=latents, page_table_1=slots, sm_scale=SCALE, v_head_dim=512
    )
    keys = latents[[3, 5], 0].double()
    expected = ((q[0].double() @ keys.T) * SCALE).softmax(-1) @ keys[:, :512]
    assert (out[0].double() - expected).norm() <= 1e-2 * expected.norm()
    with pytest.raises(ValueError, match="attention sinks over selected tokens"):
        backend._forward_flashmla_sparse(q, latents, 512, slots, SCALE, attn_sink=torch.zeros(HEADS))


def test_models_find_the_name_that_they_look_for(backend: SparseBackend) -> None:
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "attn_backend"
    assert (backend.prefill_attention_backend_str, backend.decode_attention_backend_str) == ("dsa", "dsa")
    assert (backend.dsa_prefill_impl, backend.dsa_decode_impl, backend.enable_auto_select_prefill_impl) == (
        "flashmla_sparse",
        "flashmla_sparse",
        False,
    )
    assert isinstance(backend, dsa.DeepseekSparseAttnBackend)


def test_the_class_is_chosen_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "SparseBackend", lambda runner: "sparse")
    assert create_backend(make_runner(None)) == "sparse"  # type: ignore[comparison-overlap]


def test_what_is_refused() -> None:
    pool = MLATokenToKVPool(64, 64, torch.bfloat16, 512, 64, 1, "cpu", False)
    pool.dsa_kv_cache_store_fp8 = False
    assert unsupported(make_runner(pool)) is None
    pooled = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=TOPK, index_kpool=4),
        attention_arch=AttentionArch.MLA,
    )
    for changes, reason in [
        ({"device": "cpu"}, "on a CPU"),
        ({"dtype": torch.float16}, "for a model of torch.float16"),
        ({"hisparse_coordinator": object()}, "--enable-hisparse"),
        ({"model_config": pooled}, "pooled index keys"),
    ]:
        assert reason in str(unsupported(make_runner(pool, **changes)))
    pool.dsa_kv_cache_store_fp8 = True
    assert "8-bit rows without block scales" in str(unsupported(make_runner(pool)))
