"""Verification of draft trees, and the steps of a draft model with branches, inside a small engine, compared
with float64 attention.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape, capture, plans_of
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_utils import TreeMaskMode, per_step_draft_out_cache_loc
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang_steps import CASES, WINDOWED, check, step
from sglang_trees import (
    NODES,
    STEPS,
    TOPK,
    TREES,
    Draft,
    clear_padding,
    draft,
    eagle,
    fill_static,
    random_tree,
    static_batch,
    verify,
    without_prefixes,
)
from torch import Tensor

from attn_backend.adapters.layers import LayerSpec
from attn_backend.adapters.sglang import compat
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend
from attn_backend.adapters.sglang.drafts import DraftStepsBackend, branch_slots
from attn_backend.adapters.sglang.masks import TreeMask, TreeMasks
from attn_backend.adapters.sglang.support import tree_spec

pytestmark = pytest.mark.usefixtures("needs_a_release_that_serves_on_cpus")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "setting", TREES.get)


def with_prefixes(trees: list[Tensor], prefix_lens: list[int]) -> Tensor:
    """The long form of a mask, flattened."""
    return torch.cat(
        [
            torch.cat([torch.ones(NODES, n, dtype=torch.bool), tree], 1).flatten()
            for tree, n in zip(trees, prefix_lens, strict=True)
        ]
    )


def ngram(mask: Tensor) -> NgramVerifyInput:
    return NgramVerifyInput(custom_mask=mask, draft_token_num=NODES)


@pytest.mark.parametrize(("page_size", "hybrid"), [(1, False), (16, False), (16, True)])
@pytest.mark.parametrize(("device", "dtype"), [CASES[0], CASES[3]])
def test_trees_are_verified(device: str, dtype: torch.dtype, page_size: int, hybrid: bool) -> None:
    engine = FakeEngine(WINDOWED, page_size, dtype, hybrid, device)
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    for requests in ([0, 1, 2], [2], [1, 0]):
        trees = [random_tree(engine.generator) for _ in requests]
        short = without_prefixes(trees).to(device)
        long = with_prefixes(trees, [engine.requests[i].length for i in requests]).to(device)
        # as SGLang's worker makes them there
        verify(engine, backend, requests, trees, ngram(long if device == "cuda" else short))
        step(engine, backend, ForwardMode.DECODE, requests, [1] * len(requests))
        verify(engine, backend, requests, trees, eagle(short))
    step(
        engine,
        backend,
        ForwardMode.TARGET_VERIFY,
        [1, 0],
        [4, 4],
        SimpleNamespace(topk=1, draft_token_num=4, custom_mask=None),
    )


@pytest.mark.parametrize("writes_in_place", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_captured_verification(writes_in_place: bool, device: str) -> None:
    """Capture at one batch size, then replay other batches with padded requests.

    On a CPU the captured code just runs again.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    engine = FakeEngine((LayerShape(), LayerShape(window=20)), 1, dtype, device=device)
    clear_padding(engine)
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    size, rows = 4, 4 * NODES
    backend.init_cuda_graph_state(size, rows)
    ones = torch.ones(size * NODES * (NODES + 1), dtype=torch.bool, device=device)
    static = static_batch(
        ForwardMode.TARGET_VERIFY, size, rows, device, eagle(ones) if writes_in_place else ngram(ones)
    )
    like = engine.batch(ForwardMode.TARGET_VERIFY, [0], [NODES])
    inputs = [
        [torch.zeros(rows, *x.shape[1:], dtype=dtype, device=device) for x in engine.tensors(like, layer_id)]
        for layer_id in range(2)
    ]

    def run() -> list[Tensor]:
        backend.init_forward_metadata_in_graph(static)
        return [
            backend.forward(*inputs[layer_id], layer, static) for layer_id, layer in enumerate(engine.model)
        ]

    backend.init_forward_metadata_out_graph(static, in_capture=True)
    replay = capture(run, device)
    for requests in ([2, 0, 1], [1], [0, 2]):
        new_lens = [NODES] * len(requests)
        trees = [random_tree(engine.generator) for _ in requests]
        batch = engine.batch(ForwardMode.TARGET_VERIFY, requests, new_lens)
        fill_static(static, batch, len(requests), len(requests) * NODES)
        if writes_in_place:
            mask = backend.verify_mask.buffer
            mask.fill_(True)[: len(requests) * NODES * NODES] = without_prefixes(trees).to(device)
            given: Any = eagle(mask)
        else:
            lens = [engine.requests[i].length for i in requests]
            given = ngram(
                (without_prefixes(trees) if device == "cpu" else with_prefixes(trees, lens)).to(device)
            )
        expected = []
        for layer_id in range(2):
            q, k, v = engine.tensors(batch, layer_id)
            engine.remember(requests, new_lens, layer_id, k, v)
            expected.append(engine.reference(requests, new_lens, layer_id, q, trees))
            for buffer, tensor in zip(inputs[layer_id], (q, k, v), strict=True):
                buffer.zero_()[: len(tensor)] = tensor
        backend.init_forward_metadata_out_graph(SimpleNamespace(**{**vars(static), "spec_info": given}))
        for out, reference in zip(replay(), expected, strict=True):
            check(out[: len(reference)], reference)
            assert not out.isnan().any()
        engine.advance(requests, new_lens)


def test_what_the_draft_writes_in_place_is_read() -> None:
    engine = FakeEngine()
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1], [12, 5])
    offered = backend.verify_mask
    assert offered.mode == TreeMaskMode.QLEN_ONLY
    assert offered.is_read
    assert offered.fits(6)
    trees = [random_tree(engine.generator) for _ in range(2)]
    offered.buffer.fill_(True)
    offered.buffer[: 2 * NODES * NODES] = without_prefixes(trees)
    verify(engine, backend, [0, 1], trees, eagle(offered.buffer))


def test_a_batch_beyond_the_buffer() -> None:
    engine = FakeEngine()
    backend = SGLangAttentionBackend(engine.runner())
    backend._reader.trees = TreeMasks(1, NODES, True, torch.device("cpu"))
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [12, 5, 7])
    trees = [random_tree(engine.generator) for _ in range(3)]
    verify(engine, backend, [0, 1, 2], trees, eagle(without_prefixes(trees)))


def test_both_forms_of_a_mask() -> None:
    generator = torch.Generator().manual_seed(3)
    trees, prefix_lens = [random_tree(generator) for _ in range(3)], [9, 1, 4]
    mask = TreeMask(5, NODES, False, torch.device("cpu"))
    for given, has_prefixes in ((with_prefixes(trees, prefix_lens), True), (without_prefixes(trees), False)):
        mask.visible.fill_(True)
        mask.fill(given, torch.tensor(prefix_lens), has_prefixes)
        assert torch.equal(mask.visible[: 3 * NODES], torch.cat(trees))
    padded = torch.tensor([*prefix_lens, 1, 1])  # a graph's batch: its last requests have no mask
    mask.fill(with_prefixes(trees, prefix_lens), padded, has_prefixes=True)
    assert torch.equal(mask.visible[: 3 * NODES], torch.cat(trees))


def test_a_chain_needs_no_plan_of_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "setting", {**TREES, "spec.speculative_eagle_topk": 1}.get)
    backend = SGLangAttentionBackend(FakeEngine().runner())
    assert not backend.verify_mask.is_read
    assert all(plan.of_trees is None for plan in plans_of(backend).values())


def test_trees_of_another_size_are_refused() -> None:
    engine = FakeEngine()
    backend = SGLangAttentionBackend(engine.runner())
    batch = engine.batch(
        ForwardMode.TARGET_VERIFY,
        [0],
        [3],
        SimpleNamespace(topk=2, draft_token_num=3, custom_mask=torch.ones(9, dtype=torch.bool)),
    )
    with pytest.raises(ValueError, match="trees of 3 tokens"):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize(
    "changes", [{"has_alibi": True}, {"chunk": 8}, {"has_items": True}, {"of_encoder": True}]
)
def test_layers_that_look_at_positions_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="drafts that are trees"):
        tree_spec(LayerSpec(4, 2, 64, -1)._replace(**changes))


def test_images_leave_no_span_in_a_tree() -> None:
    assert tree_spec(LayerSpec(4, 2, 64, 9, has_spans=True)) == LayerSpec(4, 2, 64, 9, has_tree=True)


# Draft models.


@pytest.mark.parametrize(("page_size", "topk"), [(1, 1), (1, TOPK), (16, 1), (16, TOPK)])
@pytest.mark.parametrize(("device", "dtype"), [CASES[0], CASES[3]])
def test_steps_of_a_draft_model(device: str, dtype: torch.dtype, page_size: int, topk: int) -> None:
    engine = FakeEngine((LayerShape(), LayerShape(window=9)), page_size, dtype, device=device)
    runner = engine.runner(is_draft_worker=True)
    extend, steps = SGLangAttentionBackend(runner), DraftStepsBackend(runner, topk, STEPS)
    assert extend.verify_mask is None
    assert len(steps.attn_backends) == STEPS - 1
    step(engine, extend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    draft(engine, steps, [2, 0, 1])
    step(engine, extend, ForwardMode.DRAFT_EXTEND_V2, [2, 0, 1], [4, 4, 4])
    draft(engine, steps, [1])
    idle = SimpleNamespace(forward_mode=ForwardMode.IDLE, batch_size=0)
    steps.init_forward_metadata(idle)
    assert all(attention.forward_metadata is None for attention in steps.attn_backends)


@pytest.mark.parametrize("topk", [1, TOPK])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_captured_steps_of_a_draft_model(topk: int, device: str) -> None:
    """One graph plans and runs all steps of a draft."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    engine = FakeEngine((LayerShape(), LayerShape(window=9)), 1, dtype, device=device)
    clear_padding(engine)
    runner = engine.runner(is_draft_worker=True)
    extend, steps = SGLangAttentionBackend(runner), DraftStepsBackend(runner, topk, STEPS)
    step(engine, extend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    size, rows = 4, 4 * topk
    steps.init_cuda_graph_state(size, rows)
    static = static_batch(ForwardMode.DECODE, size, rows * STEPS, device, None)
    like = engine.batch(ForwardMode.DECODE, [0], [1])
    inputs = [
        [
            [torch.zeros(rows, *x.shape[1:], dtype=dtype, device=device) for x in engine.tensors(like, i)]
            for i in range(2)
        ]
        for _ in range(STEPS - 1)
    ]

    def run() -> list[Tensor]:
        steps.init_forward_metadata_in_graph(static)
        slots, outs = static.out_cache_loc, []
        for i, loc in enumerate(per_step_draft_out_cache_loc(slots, size, topk, STEPS)[: STEPS - 1]):
            static.out_cache_loc = loc
            outs += [
                steps.attn_backends[i].forward(*inputs[i][layer_id], layer, static)
                for layer_id, layer in enumerate(engine.model)
            ]
        static.out_cache_loc = slots
        return outs

    steps.init_forward_metadata_out_graph(static, in_capture=True)
    replay = capture(run, device)
    for requests in ([2, 0, 1], [1]):
        drafted = Draft(engine, requests, topk)
        batch = drafted.batch()
        fill_static(static, batch, len(requests), batch.out_cache_loc.shape[0])
        expected = []
        for of_step in inputs:
            for layer_id in range(2):
                q, k, v = engine.tensors(batch, layer_id)
                expected.append(drafted.reference(layer_id, q, k, v))
                for buffer, tensor in zip(of_step[layer_id], (q, k, v), strict=True):
                    buffer.zero_()[: len(tensor)] = tensor
        steps.init_forward_metadata_out_graph(SimpleNamespace(**vars(static)))
        for out, reference in zip(replay(), expected, strict=True):
            check(out[: len(reference)], reference)
            assert not out.isnan().any()


def test_slots_of_branches() -> None:
    req_to_token = torch.arange(64, dtype=torch.int32).view(2, 32)
    slots = branch_slots(req_to_token, torch.tensor([1, 0]), torch.tensor([6, 4]), 2, 3, page_size=4)
    assert slots[0, :9].tolist() == [32, 33, 34, 35, 36, 37, 38, 39, 40]
    # a page of 36, 37 again, and one more for the third token
    assert slots[1, :9].tolist() == [32, 33, 34, 35, 44, 45, 46, 47, 48]
    assert slots[2, :7].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert slots[3, :7].tolist() == [0, 1, 2, 3, 8, 9, 10]


def test_draft_models_with_a_window_pool_are_refused() -> None:
    engine = FakeEngine(WINDOWED, hybrid=True)
    assert isinstance(engine.pool, SWAKVPool)
    with pytest.raises(ValueError, match="--speculative-draft-attention-backend triton"):
        DraftStepsBackend(engine.runner(is_draft_worker=True), 1, 3)
