"""DFLASH: a draft model makes a block of tokens in one pass. They see each other, and the target verifies
them as a chain. Runs inside a small engine, compared with float64 attention. For the tokens before a block,
SGLang gives the draft model K and V made from the target's hidden states.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape, capture
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative import draft_worker_common
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang_steps import CASES, WINDOWED, check, step
from sglang_trees import clear_padding, fill_static, static_batch
from torch import Tensor

from attn_backend.adapters.sglang import compat, register
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend

BLOCK = 8
DFLASH = {
    "spec.speculative_algorithm": "DFLASH",
    "spec.speculative_eagle_topk": 1,
    "spec.speculative_num_draft_tokens": BLOCK,
    "schedule.chunked_prefill_size": 64,  # for the target's prompts; a block is never cut
    "memory.disable_radix_cache": False,
}
# A draft model's layers: every token sees the whole block, unless a window is shorter. DFLASH also has causal
# layers.
DRAFT_LAYERS = (
    LayerShape(attn_type=AttentionType.ENCODER_ONLY),
    LayerShape(attn_type=AttentionType.ENCODER_ONLY, window=20),
    LayerShape(attn_type=AttentionType.ENCODER_ONLY, window=5),
    LayerShape(window=20),
)


pytestmark = pytest.mark.usefixtures("needs_a_release_that_serves_on_cpus")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "setting", DFLASH.get)


def block_of_drafts(custom_mask: Tensor | None = None) -> DFlashVerifyInput:
    nothing = torch.empty(0, dtype=torch.int64)
    return DFlashVerifyInput(
        nothing, nothing, BLOCK, custom_mask=custom_mask, capture_hidden_mode=CaptureHiddenMode.NULL
    )


def put(engine: FakeEngine, requests: list[int], new_lens: list[int]) -> None:
    """Writes K and V of tokens that the target has computed into the pool, as SGLang's worker does: without
    attention, and over the slots of drafts.
    """
    batch = engine.batch(ForwardMode.EXTEND, requests, new_lens)
    for layer_id, layer in enumerate(engine.model):
        _, k, v = engine.tensors(batch, layer_id)
        engine.remember(requests, new_lens, layer_id, k, v)
        engine.pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    engine.advance(requests, new_lens)


def expected_of_block(
    engine: FakeEngine, requests: list[int], tensors: list[tuple[Tensor, Tensor, Tensor]]
) -> list[Tensor]:
    """For each layer. Restores the engine's copies afterwards: drafts do not stay."""
    new_lens, expected = [BLOCK] * len(requests), []
    for layer_id, (q, k, v) in enumerate(tensors):
        before = [(engine.requests[i].k[layer_id], engine.requests[i].v[layer_id]) for i in requests]
        engine.remember(requests, new_lens, layer_id, k, v)
        expected.append(engine.reference(requests, new_lens, layer_id, q))
        for i, (old_k, old_v) in zip(requests, before, strict=True):
            engine.requests[i].k[layer_id], engine.requests[i].v[layer_id] = old_k, old_v
    return expected


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("device", "dtype"), [CASES[0], CASES[3]])
def test_blocks_are_drafted(device: str, dtype: torch.dtype, page_size: int) -> None:
    engine = FakeEngine(DRAFT_LAYERS, page_size, dtype, device=device)
    backend = SGLangAttentionBackend(engine.runner(is_draft_worker=True))
    put(engine, [0, 1, 2], [33, 1, 16])
    for requests, accepted in (
        ([0, 1, 2], [3, 1, BLOCK]),
        ([2], [1]),
        ([1, 0], [5, 2]),
        ([2, 1, 0], [1, 1, 1]),
    ):
        batch = engine.batch(ForwardMode.TARGET_VERIFY, requests, [BLOCK] * len(requests), block_of_drafts())
        backend.init_forward_metadata(batch)
        tensors = [engine.tensors(batch, layer_id) for layer_id in range(len(engine.model))]
        outputs = [
            backend.forward(*given, layer, batch) for given, layer in zip(tensors, engine.model, strict=True)
        ]
        for out, expected in zip(outputs, expected_of_block(engine, requests, tensors), strict=True):
            check(out, expected)
        put(engine, requests, accepted)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_captured_blocks(device: str) -> None:
    """Capture at one batch size, then replay other batches with padded requests.

    On a CPU the captured code just runs again.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    engine = FakeEngine(DRAFT_LAYERS, 1, dtype, device=device)
    clear_padding(engine)
    backend = SGLangAttentionBackend(engine.runner(is_draft_worker=True))
    put(engine, [0, 1, 2], [33, 1, 16])
    size, rows = 4, 4 * BLOCK
    backend.init_cuda_graph_state(size, rows)
    static = static_batch(ForwardMode.TARGET_VERIFY, size, rows, device, block_of_drafts())
    like = engine.batch(ForwardMode.TARGET_VERIFY, [0], [BLOCK])
    inputs = [
        [torch.zeros(rows, *x.shape[1:], dtype=dtype, device=device) for x in engine.tensors(like, i)]
        for i in range(len(engine.model))
    ]

    def run() -> list[Tensor]:
        backend.init_forward_metadata_in_graph(static)
        return [
            backend.forward(*given, layer, static) for given, layer in zip(inputs, engine.model, strict=True)
        ]

    backend.init_forward_metadata_out_graph(static, in_capture=True)
    replay = capture(run, device)
    for requests in ([2, 0, 1], [1], [0, 2]):
        batch = engine.batch(ForwardMode.TARGET_VERIFY, requests, [BLOCK] * len(requests))
        used = len(requests) * BLOCK
        fill_static(static, batch, len(requests), used)
        tensors = [engine.tensors(batch, layer_id) for layer_id in range(len(engine.model))]
        for buffers, given in zip(inputs, tensors, strict=True):
            for buffer, x in zip(buffers, given, strict=True):
                buffer.zero_()[:used] = x
        for out, expected in zip(replay(), expected_of_block(engine, requests, tensors), strict=True):
            check(out[:used], expected)
        put(engine, requests, [2] * len(requests))


@pytest.mark.parametrize(("page_size", "hybrid"), [(1, False), (16, True)])
@pytest.mark.parametrize(("device", "dtype"), [CASES[0], CASES[3]])
def test_blocks_are_verified_as_chains(device: str, dtype: torch.dtype, page_size: int, hybrid: bool) -> None:
    """By the target, causally.

    SGLang makes a meaningless mask for backends that it does not know. It must not be read.
    """
    engine = FakeEngine(WINDOWED, page_size, dtype, hybrid, device)
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    step(engine, backend, ForwardMode.TARGET_VERIFY, [2, 0], [BLOCK] * 2, block_of_drafts())
    step(
        engine,
        backend,
        ForwardMode.TARGET_VERIFY,
        [1, 0, 2],
        [BLOCK] * 3,
        block_of_drafts(torch.zeros(4096, dtype=torch.bool, device=device)),
    )


def test_sglang_gives_drafts_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = getattr(speculative_hook, "DRAFT_ATTENTION_BACKEND_CHOICES", None)
    if choices is None:
        pytest.skip(
            f"SGLang {compat.release()} has no list of draft backends to add to: they are FlashInfer's"
        )
    register()
    register()
    assert choices.count(compat.NAME) == 1
    monkeypatch.setattr(
        draft_worker_common, "get_spec", lambda: SimpleNamespace(speculative_draft_attention_backend=None)
    )
    monkeypatch.setattr(draft_worker_common, "attention_backends", lambda: (compat.NAME, compat.NAME))
    assert draft_worker_common.resolve_draft_worker_attention_backend(algo_label="DFLASH") == compat.NAME
    declared: dict[str, Any] = {}
    monkeypatch.setattr(
        speculative_hook,
        "resolving_view",
        lambda _: SimpleNamespace(speculative_draft_attention_backend=compat.NAME),
    )
    monkeypatch.setattr(speculative_hook, "declare_resolution", lambda *_, **named: declared.update(named))
    speculative_hook._resolve_dflash_draft_attention_backend(None)
    assert declared == {"speculative_draft_attention_backend": compat.NAME}


def test_refused_models() -> None:
    # the target's prompts may be cut
    with pytest.raises(ValueError, match="bidirectional prompts in chunks"):
        SGLangAttentionBackend(FakeEngine(DRAFT_LAYERS).runner())
    with pytest.raises(ValueError, match="draft models with a separate KV pool for sliding windows"):
        SGLangAttentionBackend(FakeEngine(WINDOWED, 16, hybrid=True).runner(is_draft_worker=True))
