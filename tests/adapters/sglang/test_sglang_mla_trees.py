"""Speculation over latents in SGLang's own pool: trees are verified, and draft models with branches run their
steps. Compared with float64 attention.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import MAX_REQUESTS, MAX_TOKENS, FakeEngine, LayerShape, model_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_steps import CASES, step
from sglang_trees import STEPS, TOPK, TREES, draft, eagle, random_tree, verify, without_prefixes
from torch import Tensor

from attn_backend.adapters.sglang import compat
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend
from attn_backend.adapters.sglang.drafts import DraftStepsBackend

LATENTS = LayerShape(num_qo_heads=4, num_kv_heads=1, head_dim=576, v_head_dim=512)


@pytest.fixture(autouse=True)
def trees_are_drafted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.callspec.params["device"] == "cpu" and compat.starts_triton_on_cpu(compat.NAME):
        pytest.skip(f"SGLang {compat.release()} starts Triton on a CPU for every backend but its own")
    monkeypatch.setattr(compat, "setting", TREES.get)


class LatentEngine(FakeEngine):
    """Two layers of DeepSeek, in steps that attend to the latents."""

    def __init__(self, page_size: int, dtype: torch.dtype, device: str) -> None:
        super().__init__((LATENTS, LATENTS), page_size, dtype, device=device)
        self.pool = MLATokenToKVPool(MAX_REQUESTS * MAX_TOKENS, page_size, dtype, 512, 64, 2, device, False)
        for buffer in self.pool.kv_buffer:
            buffer.fill_(float("nan"))

    def runner(self, **changes: object) -> SimpleNamespace:
        config = model_config(
            attention_arch=AttentionArch.MLA,
            hf_config=SimpleNamespace(architectures=["DeepseekV2ForCausalLM"]),
        )
        return super().runner(model_config=config, **changes)

    def tensors(self, batch: SimpleNamespace, layer_id: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, _ = super().tensors(batch, layer_id)
        return q, k, k[..., :512]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("device", "dtype"), [CASES[0], CASES[3]])
def test_trees_are_verified(device: str, dtype: torch.dtype, page_size: int) -> None:
    engine = LatentEngine(page_size, dtype, device)
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    for requests in ([0, 1, 2], [2], [1, 0]):
        trees = [random_tree(engine.generator) for _ in requests]
        verify(engine, backend, requests, trees, eagle(without_prefixes(trees).to(device)))
        step(engine, backend, ForwardMode.DECODE, requests, [1] * len(requests))


@pytest.mark.parametrize(("page_size", "topk"), [(1, 1), (16, TOPK)])
@pytest.mark.parametrize(("device", "dtype"), [CASES[0], CASES[3]])
def test_steps_of_a_draft_model(device: str, dtype: torch.dtype, page_size: int, topk: int) -> None:
    engine = LatentEngine(page_size, dtype, device)
    runner = engine.runner(is_draft_worker=True)
    extend, steps = SGLangAttentionBackend(runner), DraftStepsBackend(runner, topk, STEPS)
    step(engine, extend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    draft(engine, steps, [2, 0, 1])
    step(engine, extend, ForwardMode.DRAFT_EXTEND_V2, [2, 0, 1], [4, 4, 4])
    draft(engine, steps, [1])
