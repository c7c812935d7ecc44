"""Steps of the SGLang backend inside a small engine, each compared with attention in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")
from fake_engine import FakeEngine, LayerShape, plans_of
from mixed_cases import MIXTURES
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from attn_backend.adapters import layers
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}


WINDOWED = (LayerShape(window=20), LayerShape(), LayerShape(window=20), LayerShape(window=7, logit_cap=5.0))


def step(
    engine: FakeEngine,
    backend: SGLangAttentionBackend,
    mode: ForwardMode,
    requests: list[int],
    new_lens: list[int],
    spec_info: object = None,
) -> list[Tensor]:
    """One step through all layers, compared with the reference; returns the outputs."""
    batch = engine.batch(mode, requests, new_lens, spec_info)
    backend.init_forward_metadata(batch)
    outputs = []
    for layer_id, layer in enumerate(engine.model):
        q, k, v = engine.tensors(batch, layer_id)
        engine.remember(requests, new_lens, layer_id, k, v)
        out = backend.forward(q, k, v, layer, batch)
        expected = engine.reference(requests, new_lens, layer_id, q)
        check(out, expected, rounds_to(engine))
        outputs.append(out)
    engine.advance(requests, new_lens)
    return outputs


def check(out: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """dtype: the dtype to which Q was rounded; None: the output's dtype."""
    assert out.shape == expected.shape
    assert (out.cpu().double() - expected).norm() / expected.norm() <= TOLERANCE[dtype or out.dtype]


def rounds_to(engine: FakeEngine) -> torch.dtype | None:
    """The dtype that Q is rounded to if the pool has the other 16-bit type than the model, with its
    tolerance."""
    return torch.bfloat16 if (engine.dtype, engine.kv_dtype) in MIXTURES else None


def serve(engine: FakeEngine, **runner: object) -> None:
    """Prompts, later chunks of some, decode steps, and a mixed step."""
    backend = SGLangAttentionBackend(engine.runner(**runner))
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    step(engine, backend, ForwardMode.EXTEND, [0, 3, 1], [40, 15, 5])  # 0 and 1 have a prefix in the cache
    step(engine, backend, ForwardMode.EXTEND, [2], [9])  # by itself, and together with another request again
    step(engine, backend, ForwardMode.EXTEND, [1, 2], [4, 3])
    for _ in range(3):
        step(engine, backend, ForwardMode.DECODE, [3, 0, 2, 1], [1, 1, 1, 1])
    step(engine, backend, ForwardMode.MIXED, [4, 0, 2], [50, 1, 1])
    step(engine, backend, ForwardMode.DECODE, [4], [1])


CASES = [
    *(pytest.param("cpu", dtype, id=f"cpu-{dtype}".replace("torch.", "")) for dtype in TOLERANCE),
    *(
        pytest.param("cuda", dtype, id=f"cuda-{dtype}".replace("torch.", ""), marks=pytest.mark.gpu)
        for dtype in (torch.bfloat16, torch.float16)
    ),
]


def serve_shared_prefix(
    engine: FakeEngine, cascade: bool | str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[list[int]]]:
    """Five requests that begin with the same 128 tokens.

    Returns the outputs of all layers, and the number of requests under the chosen node for each step and kind
    of layer.
    """
    monkeypatch.setattr(layers, "use_cascade", lambda: cascade)
    backend = SGLangAttentionBackend(engine.runner())
    outputs = step(engine, backend, ForwardMode.EXTEND, [0], [128])
    engine.share_prefix(0, [1, 2, 3, 4])
    taken = []
    for mode, requests, new_lens in [
        (ForwardMode.EXTEND, [0, 1, 2, 3], [2, 2, 1, 3]),
        (ForwardMode.DECODE, [3, 0, 2, 4, 1], [1] * 5),
        (ForwardMode.MIXED, [4, 0, 2], [20, 1, 1]),
        (ForwardMode.DECODE, [0, 4, 2, 1], [1] * 4),
    ]:
        outputs += step(engine, backend, mode, requests, new_lens)
        forests = [plan.attention.schedule().forest for plan in plans_of(backend).values()]
        taken.append([sum(node.num_requests for node in forest if node.group >= 0) for forest in forests])
    return outputs, taken
