"""Verifying trees of draft tokens, and the steps of a draft model with branches, inside a small engine,
against attention in float64.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape, capture
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode, per_step_draft_out_cache_loc
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from test_sglang_backend import CASES, WINDOWED, check, step
from torch import Tensor

from attn_backend.adapters.layers import LayerSpec
from attn_backend.adapters.sglang import compat
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend
from attn_backend.adapters.sglang.batch import TreeMask, TreeMasks
from attn_backend.adapters.sglang.drafts import DraftStepsBackend, branch_slots
from attn_backend.adapters.sglang.support import tree_spec

NODES = 7
TREES = {
    "spec.speculative_algorithm": "EAGLE",
    "spec.speculative_eagle_topk": 3,
    "spec.speculative_num_draft_tokens": NODES,
}


pytestmark = pytest.mark.usefixtures("needs_a_release_that_serves_on_cpus")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "setting", TREES.get)


def random_tree(generator: torch.Generator) -> Tensor:
    """bool [NODES, NODES]: a node sees itself and those above it; each comes after its parent."""
    visible = torch.eye(NODES, dtype=torch.bool)
    for node in range(1, NODES):
        visible[node] |= visible[int(torch.randint(node, (), generator=generator))]
    return visible


def with_prefixes(trees: list[Tensor], prefix_lens: list[int]) -> Tensor:
    """The long form of a mask, flat."""
    return torch.cat(
        [
            torch.cat([torch.ones(NODES, n, dtype=torch.bool), tree], 1).flatten()
            for tree, n in zip(trees, prefix_lens, strict=True)
        ]
    )


def without_prefixes(trees: list[Tensor]) -> Tensor:
    return torch.cat([tree.flatten() for tree in trees])


def eagle(mask: Tensor) -> EagleVerifyInput:
    fields: dict[str, Any] = dict.fromkeys(
        [
            "draft_token",
            "positions",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "retrieve_cum_len",
        ]
    )
    return EagleVerifyInput(
        **fields,
        custom_mask=mask,
        spec_steps=3,
        topk=3,
        draft_token_num=NODES,
        capture_hidden_mode=None,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def ngram(mask: Tensor) -> NgramVerifyInput:
    return NgramVerifyInput(custom_mask=mask, draft_token_num=NODES)


def verify(
    engine: FakeEngine,
    backend: SGLangAttentionBackend,
    requests: list[int],
    trees: list[Tensor],
    spec_info: object,
) -> None:
    """One verifying step through all layers."""
    new_lens = [NODES] * len(requests)
    batch = engine.batch(ForwardMode.TARGET_VERIFY, requests, new_lens, spec_info)
    backend.init_forward_metadata(batch)
    for layer_id, layer in enumerate(engine.model):
        q, k, v = engine.tensors(batch, layer_id)
        engine.remember(requests, new_lens, layer_id, k, v)
        check(
            backend.forward(q, k, v, layer, batch), engine.reference(requests, new_lens, layer_id, q, trees)
        )
    engine.advance(requests, new_lens)


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


def clear_padding(engine: FakeEngine) -> None:
    """Padded requests write slot 0, and read what row 0 of the table names."""
    for layer_id in range(len(engine.model)):
        for buffer in engine.pool.get_kv_buffer(layer_id):
            buffer[: engine.page_size] = 0.0
    engine.req_to_token_pool.req_to_token[0] = 0


def static_batch(mode: ForwardMode, size: int, rows: int, device: str, spec_info: object) -> SimpleNamespace:
    """What a graph is captured with: tensors that stay where they are."""
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=size,
        req_pool_indices=torch.zeros(size, dtype=torch.int64, device=device),
        seq_lens=torch.ones(size, dtype=torch.int64, device=device),
        out_cache_loc=torch.zeros(rows, dtype=torch.int64, device=device),
        spec_info=spec_info,
        _attn_output=None,
    )


def fill_static(static: SimpleNamespace, batch: SimpleNamespace, num_requests: int, rows: int) -> None:
    for name, count, padding in (
        ("req_pool_indices", num_requests, 0),
        ("seq_lens", num_requests, 1),
        ("out_cache_loc", rows, 0),
    ):
        getattr(static, name).fill_(padding)[:count] = getattr(batch, name)


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
    assert all(plan.of_trees is None for plan in backend._plans.values())


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

TOPK, STEPS = 3, 4


class Draft:
    """The draft of some requests: branches after each, which SGLang's allocator lays out."""

    def __init__(self, engine: FakeEngine, requests: list[int], topk: int) -> None:
        self.engine, self.requests, self.topk = engine, requests, topk
        page, table = engine.page_size, engine.req_to_token_pool.req_to_token
        slots = []
        for request in (engine.requests[i] for i in requests):
            in_page = request.length % page
            branch_len = -(-(in_page + STEPS) // page) * page
            for branch in range(topk):
                begin = request.length - in_page + branch * branch_len
                slots.append(table[request.row, begin + in_page : begin + in_page + STEPS])
                for layer_id in range(len(engine.model)):  # the end of the prefix, again
                    for buffer in engine.pool.get_kv_buffer(layer_id):
                        source = table[request.row, request.length - in_page : request.length].long()
                        buffer[table[request.row, begin : begin + in_page].long()] = buffer[source]
        self.out_cache_loc = torch.cat(slots).long()
        self.k = [
            [[engine.requests[i].k[layer] for layer in range(len(engine.model))] for _ in range(topk)]
            for i in requests
        ]
        self.v = [
            [[engine.requests[i].v[layer] for layer in range(len(engine.model))] for _ in range(topk)]
            for i in requests
        ]

    def batch(self) -> SimpleNamespace:
        lens = torch.tensor([self.engine.requests[i].length for i in self.requests])
        rows = torch.tensor([self.engine.requests[i].row for i in self.requests])
        device = self.engine.device
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(self.requests),
            req_pool_indices=rows.to(device),
            seq_lens=lens.to(device),
            out_cache_loc=self.out_cache_loc,
            positions=lens.repeat_interleave(self.topk).to(device),
            spec_info=None,
            _attn_output=None,
        )

    def reference(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """float64: each branch is a request of its own, one token long."""
        outputs = []
        for row in range(q.shape[0]):
            place, branch = divmod(row, self.topk)
            keys, values = self.k[place][branch], self.v[place][branch]
            keys[layer_id] = torch.cat([keys[layer_id], k[row : row + 1].cpu().double()])
            values[layer_id] = torch.cat([values[layer_id], v[row : row + 1].cpu().double()])
            alone = self.engine.requests[self.requests[place]]
            kept = alone.k[layer_id], alone.v[layer_id]
            alone.k[layer_id], alone.v[layer_id] = keys[layer_id], values[layer_id]
            outputs.append(self.engine.reference([self.requests[place]], [1], layer_id, q[row : row + 1]))
            alone.k[layer_id], alone.v[layer_id] = kept
        return torch.cat(outputs)


def draft(engine: FakeEngine, backend: DraftStepsBackend, requests: list[int]) -> None:
    drafted = Draft(engine, requests, backend.topk)
    batch = drafted.batch()
    backend.init_forward_metadata(batch)  # all steps, before the first
    of_steps = per_step_draft_out_cache_loc(batch.out_cache_loc, len(requests), backend.topk, STEPS)
    for i, attention in enumerate(backend.attn_backends):
        batch.out_cache_loc = of_steps[i]
        for layer_id, layer in enumerate(engine.model):
            q, k, v = engine.tensors(batch, layer_id)
            expected = drafted.reference(layer_id, q, k, v)
            check(attention.forward(q, k, v, layer, batch), expected)
        batch.positions += 1


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
    """All steps of a draft in one graph, planned in it."""
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
