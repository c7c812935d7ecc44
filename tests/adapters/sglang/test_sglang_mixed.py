"""The SGLang backend over a pool of the other 16-bit type than the model (--dtype float16 --kv-cache-dtype bfloat16)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

import test_sglang_backend
from fake_engine import FakeEngine, LayerShape
from mixed_cases import MIXTURES
from test_sglang_backend import WINDOWED, serve

from attn_backend.adapters.sglang import compat


@pytest.fixture(autouse=True)
def any_release_serves_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here does not depend on the release."""
    monkeypatch.setattr(compat, "starts_triton_on_cpu", lambda name: False)
    tolerance = test_sglang_backend.TOLERANCE[torch.bfloat16]  # Q is rounded to it
    monkeypatch.setattr(test_sglang_backend, "TOLERANCE", dict.fromkeys(test_sglang_backend.TOLERANCE, tolerance))


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("copies", [True, False], ids=["append_kv writes", "the pool writes"])
def test_serving(dtypes: tuple[torch.dtype, torch.dtype], device: str, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "copies_to_slots", lambda pool: copies)
    layers = (LayerShape(), LayerShape(logit_cap=30.0)) if copies else WINDOWED
    serve(FakeEngine(layers, page_size=16, dtype=dtypes[0], kv_dtype=dtypes[1], device=device))
