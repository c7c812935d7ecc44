"""Planning and running the steps of a draft model never waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from waits import NoHostReads, traced

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang_steps import step
from sglang_trees import Draft

from attn_backend.adapters.sglang import compat
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend
from attn_backend.adapters.sglang.drafts import DraftStepsBackend

REQUESTS = [2, 0, 1]
STEPS = 4
DRAFTS = 20
CASES = [(1, 1), (1, 3), (16, 3)]  # page size, branches


def drafting(device: str, page_size: int, topk: int) -> tuple[DraftStepsBackend, Callable[[], None]]:
    """A draft's backend, and a function that plans and runs all its steps through two layers. The inputs are
    already on the device.
    """
    engine = FakeEngine(
        (LayerShape(), LayerShape(window=9)),
        page_size,
        torch.float32 if device == "cpu" else torch.bfloat16,
        device=device,
    )
    runner = engine.runner(is_draft_worker=True)
    extend, steps = SGLangAttentionBackend(runner), DraftStepsBackend(runner, topk, STEPS)
    step(engine, extend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    batch = Draft(engine, REQUESTS, topk).batch()
    slots = per_step_draft_out_cache_loc(batch.out_cache_loc, len(REQUESTS), topk, STEPS)
    inputs = [[engine.tensors(batch, layer_id) for layer_id in range(2)] for _ in steps.attn_backends]

    def draft() -> None:
        steps.init_forward_metadata(batch)
        for attention, loc, of_step in zip(steps.attn_backends, slots, inputs, strict=False):
            batch.out_cache_loc = loc
            for layer, (q, k, v) in zip(engine.model, of_step, strict=True):
                attention.forward(q, k, v, layer, batch)

    draft()
    return steps, draft


@pytest.fixture
def on_a_cpu() -> None:
    if compat.starts_triton_on_cpu(compat.NAME):
        pytest.skip(f"SGLang {compat.release()} starts Triton on a CPU for every backend but its own")


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(("page_size", "topk"), CASES)
def test_nothing_is_read_on_the_host(page_size: int, topk: int) -> None:
    _, draft = drafting("cpu", page_size, topk)
    with NoHostReads():
        draft()


@pytest.mark.gpu
@pytest.mark.parametrize(("page_size", "topk"), CASES)
def test_nothing_waits(page_size: int, topk: int) -> None:
    steps, draft = drafting("cuda", page_size, topk)
    names, waits = traced(draft, DRAFTS)
    plans = sum(name in ("plan_kernel", "plan_forest_kernel") for name in names)
    assert plans >= DRAFTS * len(steps.attn_backends), "the trace holds every plan"
    assert not waits, waits[:5]


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(
    "read",
    [
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.cpu,
        bool,
        int,
        lambda x: torch.arange(3)[x > 0],
        torch.nonzero,
    ],
)
def test_what_is_read_is_seen(
    read: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that reads from the device while it is planned."""
    steps, draft = drafting("cpu", 1, 1)
    plan_step = steps.attn_backends[1].plan_step

    def reads(batch: object) -> None:
        read(torch.ones(1, dtype=torch.int32).expand(3) if not isinstance(read, type) else torch.ones(1))
        plan_step(batch)

    monkeypatch.setattr(steps.attn_backends[1], "plan_step", reads)
    with pytest.raises(AssertionError, match=r"\(\)"), NoHostReads():
        draft()
