"""Plans and draws on a GPU with invalid metadata, workspace, or concurrent launches: each ends in bounded
time, and the next one is right.
"""

from __future__ import annotations

import time

import pytest
import torch
from served_requests import Served
from workspace import workspace_of

from attn_backend import sample, sampling_workspace

pytestmark = pytest.mark.gpu

_LONGEST = 60.0  # seconds: far longer than any of these takes, but still bounded


def synchronize() -> None:
    begin = time.monotonic()
    while not torch.cuda.current_stream().query():
        assert time.monotonic() - begin < _LONGEST, "the device does not come to an end"
        time.sleep(0.001)
    torch.cuda.synchronize()


@pytest.mark.parametrize("cascade", [True, "always"])
def test_whatever_the_workspace_holds(cascade: object) -> None:
    """As after a sleep that discards memory: random bytes, ones, or another object's schedule."""
    served = Served(cascade)
    expected = served.run().clone()
    planned = served.attention.schedule()
    assert any(node.group >= 0 for node in planned.forest) or cascade is True
    workspace = workspace_of(served.attention)
    schedule = workspace.schedule
    other = schedule.roll(16)
    for poison in (
        torch.randint(0, 256, schedule.shape, dtype=torch.uint8, device="cuda"),
        torch.full_like(schedule, 255),
        other,
    ):
        schedule.copy_(poison)
        workspace.partial_o.fill_(torch.nan)
        workspace.partial_lse.fill_(torch.nan)
        assert torch.equal(served.run(), expected)
        assert served.attention.schedule().errors == 0
        assert served.attention.schedule().forest == planned.forest


@pytest.mark.parametrize("cascade", [True, "always"])
def test_metadata_that_changes_during_plans(cascade: object) -> None:
    """Another stream writes lengths, pages and query lengths while 10,000 plans read them."""
    served = Served(cascade)
    expected = served.run().clone()
    kept = [tensor.clone() for tensor in (served.table, served.kv_lens, served.qo_indptr)]
    generator = torch.Generator("cuda").manual_seed(1)
    wrong = [
        [
            torch.randint(
                0,
                served.batch.num_pages,
                kept[0].shape,
                dtype=torch.int32,
                device="cuda",
                generator=generator,
            ),
            torch.randint(-5, 200, kept[1].shape, dtype=torch.int32, device="cuda", generator=generator),
            torch.randint(0, 70, kept[2].shape, dtype=torch.int32, device="cuda", generator=generator)
            .sort()
            .values.int(),
        ]
        for _ in range(4)
    ]
    mutator = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            served.attention.plan(served.view)
        served.attention.run(served.q, served.kv)
    begin = time.monotonic()
    for _ in range(500):
        with torch.cuda.stream(mutator):
            for number in range(24):
                for tensor, value in zip(
                    (served.table, served.kv_lens, served.qo_indptr), (kept, *wrong)[number % 5], strict=True
                ):
                    tensor.copy_(value)
        graph.replay()
        synchronize()
    assert time.monotonic() - begin < _LONGEST
    mutator.synchronize()
    for tensor, value in zip((served.table, served.kv_lens, served.qo_indptr), kept, strict=True):
        tensor.copy_(value)
    assert torch.equal(served.run(), expected)
    assert served.attention.schedule().errors == 0


def test_two_replays_of_one_object_at_once() -> None:
    """This is not allowed: their results are not checked, but both end, and later results are right."""
    served = Served()
    expected = served.run().clone()
    out = torch.empty_like(served.q)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            served.attention.plan(served.view)
            served.attention.run(served.q, served.kv, out=out)
        graphs.append(graph)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    begin = time.monotonic()
    for _ in range(2000):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    for stream in streams:
        stream.synchronize()
    assert time.monotonic() - begin < _LONGEST
    assert torch.equal(served.run(), expected)


def test_draws_with_whatever_the_workspace_holds() -> None:
    logits = torch.randn(8, 50_000, device="cuda")
    seed = torch.arange(8, device="cuda")
    expected = sample(logits, seed=seed).token_ids
    workspace = sampling_workspace("cuda")
    for poison in (
        torch.randint(-(2**62), 2**62, workspace.shape, device="cuda"),
        torch.full_like(workspace, -1),
        torch.ones_like(workspace),
    ):
        workspace.copy_(poison)
        for batch in (8, 3, 8):
            samples = sample(logits[:batch], seed=seed[:batch], workspace=workspace)
            assert torch.equal(samples.token_ids, expected[:batch])
            assert samples.valid.all()


def test_two_draws_with_one_workspace_at_once() -> None:
    """This is not allowed: both end, and later results are right."""
    logits = torch.randn(16, 100_000, device="cuda")
    seed = torch.arange(16, device="cuda")
    expected = sample(logits, seed=seed).token_ids
    workspace = sampling_workspace("cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    begin = time.monotonic()
    for i in range(1000):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                sample(
                    logits[: 16 if (i + number) % 3 else 5],
                    seed=seed[: 16 if (i + number) % 3 else 5],
                    workspace=workspace,
                )
    torch.cuda.synchronize()
    assert time.monotonic() - begin < _LONGEST
    assert torch.equal(sample(logits, seed=seed, workspace=workspace).token_ids, expected)
