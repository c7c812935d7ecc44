"""One object, several threads: refused, or correct results; and the additional checks of
ATTN_BACKEND_DEBUG=1."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from gate_problem import Problem

from attn_backend import Attention
from attn_backend.kernels.native import InUseError


def test_two_threads_are_refused_or_served_rightly() -> None:
    """Either the other thread is not inside a run, or this one is refused: no result is wrong."""
    problem = Problem(torch.device("cpu"))
    expected = problem.run()
    served, refused, wrong = [], [], []

    def work() -> None:
        for _ in range(300):
            try:
                result = problem.attention.run(problem.q, problem.kv)
            except RuntimeError as error:
                (refused if "in use by another thread" in str(error) else wrong).append(1)
            else:
                (served if torch.equal(result, expected) else wrong).append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(served) > 100
    assert len(served) + len(refused) == 1200
    assert torch.equal(problem.run(), expected)


def test_a_refused_thread_leaves_the_others_plan() -> None:
    """Its refusal comes after the other thread has left, and keeps that thread's plan."""
    problem = Problem(torch.device("cpu"))
    expected = problem.run()
    plan_level = problem.attention._plan_level

    def refused(**_: object) -> int:
        raise InUseError("this Attention is in use by another thread: ...")

    problem.attention._plan_level = refused
    with pytest.raises(RuntimeError, match="in use by another thread"):
        problem.attention.plan(problem.view)
    problem.attention._plan_level = plan_level
    assert torch.equal(problem.attention.run(problem.q, problem.kv), expected)


def test_debug_refuses_a_second_thread_until_the_first_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_DEBUG", "1")
    problem = Problem(torch.device("cpu"))
    entered, may_end = threading.Event(), threading.Event()

    def raise_for_errors() -> None:
        entered.set()
        may_end.wait(10)

    monkeypatch.setattr(problem.attention, "raise_for_errors", raise_for_errors)
    thread = threading.Thread(target=problem.attention.plan, args=(problem.view,))
    thread.start()
    assert entered.wait(10)
    with pytest.raises(RuntimeError, match="in use by another thread"):
        problem.attention.run(problem.q, problem.kv)
    may_end.set()
    thread.join()
    problem.attention.run(problem.q, problem.kv)


@pytest.mark.parametrize("value", ["1", "0"])
def test_debug_does_not_keep_an_object(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ATTN_BACKEND_DEBUG", value)
    problem = Problem(torch.device("cpu"))
    problem.run()
    attention = weakref.ref(problem.attention)
    gc.disable()
    try:
        del problem
        assert attention() is None
    finally:
        gc.enable()


def test_debug_serves_attention_states(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for value in ("0", "1"):
        monkeypatch.setenv("ATTN_BACKEND_DEBUG", value)
        problem = Problem(torch.device("cpu"))
        problem.attention.plan(problem.view)
        states.append(problem.attention.run(problem.q, problem.kv, return_lse=True))
    assert all(torch.equal(*parts) for parts in zip(*states, strict=True))


def test_debug_serves_an_object_that_nobody_else_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_DEBUG", "1")
    problem = Problem(torch.device("cpu"))
    Attention(8, 2, 64, device="cpu", max_rows=16, max_batch=4).plan(problem.view)
