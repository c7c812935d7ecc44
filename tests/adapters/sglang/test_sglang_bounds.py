"""SGLang batches at and beyond the bounds of a plan, and a pool that is allocated again."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, plans_of
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_steps import step

from attn_backend.adapters.sglang import backend as sglang_backend
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend

pytestmark = pytest.mark.usefixtures("needs_a_release_that_serves_on_cpus")


def small_backend(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> SGLangAttentionBackend:
    """It has room for 2 requests and 20 rows."""
    monkeypatch.setattr(sglang_backend, "most_requests", lambda *_: 2)
    monkeypatch.setattr(sglang_backend, "longest_extend", lambda _: 18)
    return SGLangAttentionBackend(engine.runner())


@pytest.mark.parametrize(
    ("requests", "new_lens"),
    [([0, 1, 2], [33, 1, 16]), ([0, 1, 2], [5, 1, 3]), ([0, 1], [20, 1])],
    ids=["both", "requests", "rows"],
)
def test_a_batch_beyond_the_bounds(
    requests: list[int], new_lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    backend = small_backend(engine, monkeypatch)
    kept = next(iter(plans_of(backend).values())).attention
    step(engine, backend, ForwardMode.EXTEND, requests, new_lens)
    assert next(iter(plans_of(backend).values())).current is not kept
    step(engine, backend, ForwardMode.DECODE, [1, 0], [1, 1])
    assert next(iter(plans_of(backend).values())).current is kept  # captured graphs may refer to it


def test_batches_up_to_the_bounds_take_what_graphs_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    backend = small_backend(engine, monkeypatch)
    step(engine, backend, ForwardMode.EXTEND, [0, 1], [19, 1])
    plan = next(iter(plans_of(backend).values()))
    assert plan.current is plan.attention


@pytest.mark.parametrize("moved", [("k_buffer", "v_buffer"), ("k_buffer",), ("v_buffer",)], ids=str)
def test_a_pool_that_is_allocated_again(moved: tuple[str, ...]) -> None:
    engine = FakeEngine()
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1], [33, 5])
    for name in moved:
        old = getattr(engine.pool, name)
        setattr(engine.pool, name, [buffer.clone() for buffer in old])
        for buffer in old:
            buffer.fill_(float("nan"))
    step(engine, backend, ForwardMode.DECODE, [0, 1], [1, 1])
