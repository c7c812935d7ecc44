"""The SGLang backend over a pool with the other 16-bit type than the model (--dtype float16 --kv-cache-dtype
bfloat16).
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

import sglang_latents
from fake_engine import FakeEngine, LayerShape, plans_of
from mixed_cases import MIXTURES
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_steps import WINDOWED, serve

from attn_backend.adapters.sglang import compat
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend


@pytest.fixture(autouse=True)
def any_release_serves_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests do not depend on the release."""
    monkeypatch.setattr(compat, "starts_triton_on_cpu", lambda name: False)


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("copies", [True, False], ids=["append_kv writes", "the pool writes"])
def test_serving(
    dtypes: tuple[torch.dtype, torch.dtype], device: str, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "copies_to_slots", lambda pool: copies)
    layers = (LayerShape(), LayerShape(logit_cap=30.0)) if copies else WINDOWED
    serve(FakeEngine(layers, page_size=16, dtype=dtypes[0], kv_dtype=dtypes[1], device=device))


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_latents(dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    engine = sglang_latents.Engine(16, dtypes[0], device, dtypes[1])
    backend = SGLangAttentionBackend(engine.runner())
    assert {(key.of_this_step, key.kv_dtype) for key in plans_of(backend)} == {
        (False, dtypes[1]),
        (True, None),
    }
    sglang_latents.step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    sglang_latents.step(engine, backend, ForwardMode.EXTEND, [0, 3, 1], [40, 15, 5])
    sglang_latents.step(engine, backend, ForwardMode.DECODE, [3, 0, 2, 1], [1, 1, 1, 1])
