"""A small engine with an 8-bit pool."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")
from fake_engine import FakeEngine, LayerShape

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


TWO_LAYERS = (LayerShape(), LayerShape(logit_cap=30.0))


def engine_of(
    kv_dtype: torch.dtype = E4M3,
    layers: tuple[LayerShape, ...] = TWO_LAYERS,
    scales: str = "tensor",
    **options: object,
) -> FakeEngine:
    """scales: "tensor", as in checkpoints; "number", as from --quantization-param-path; "none". Each layer
    has different scales, and K and V differ too.
    """
    engine = FakeEngine(layers, kv_dtype=kv_dtype, **options)  # type: ignore[arg-type]
    for layer_id, layer in enumerate(engine.model):
        values = (0.05 * (layer_id + 1), 0.4 / (layer_id + 1))
        if scales == "tensor":
            layer.k_scale, layer.v_scale = (
                torch.nn.Parameter(torch.tensor(value, device=engine.device), requires_grad=False)
                for value in values
            )
        elif scales == "number":
            layer.k_scale, layer.v_scale = values
    return engine
