"""Prefixes that `plan` finds in page tables by itself: random forests compared with the float64 oracle, the
same bits every time, one CUDA graph for all.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import cases
import numpy
import pytest
import torch
from compositions import Shape, make_attention, memory_of_pages, noise, prefix_sum, same_bits
from forests import Problem, make_problem, naming, random_batch, random_problem
from tiers import mostly_slow
from torch import Tensor

from attn_backend import Attention, BSRView, PageTable

MODES = [True, "always"]
CPU = torch.device("cpu")
SHAPE = Shape(2, 4, 64, torch.bfloat16, 16, None)
each_kernel = pytest.mark.usefixtures("kernel")


@pytest.mark.parametrize("block", mostly_slow(range(80), fast=8, without_gpu=10))
def test_against_the_oracle(device: torch.device, block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        rng = numpy.random.default_rng(seed)
        problem = random_problem(rng, device)
        problem.run(problem.attention(cascade=MODES[seed % 2]), problem.batch.view(rng, device))
        with naming(seed):
            problem.check()


@pytest.mark.parametrize("kernel_of_costs", ["hopper", "generic"])
@pytest.mark.parametrize("block", mostly_slow(range(4), fast=2, without_gpu=2))
def test_schedules_of_gpu_kernels_on_a_cpu(block: int, kernel_of_costs: str) -> None:
    """Schedules from the costs of a GPU's kernels (whole pairs, evenly split prefixes) merge as well as a
    CPU's schedules.
    """
    for seed in range(25 * block, 25 * block + 25):
        rng = numpy.random.default_rng([seed, 7])
        problem = random_problem(rng, CPU)
        problem.run(
            problem.attention(cascade=MODES[seed % 2], kernel=kernel_of_costs), problem.batch.view(rng, CPU)
        )
        with naming(seed):
            problem.check()


@pytest.mark.parametrize("block", range(10))
def test_agrees_with_no_cascade(device: torch.device, block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        rng = numpy.random.default_rng([seed, 1])
        problem = random_problem(rng, device)
        view = problem.batch.view(rng, device)
        plain = problem.attention(cascade=False)
        o, lse = problem.run(plain, view)
        assert plain.schedule().forest == ()
        for mode in MODES:
            other, other_lse = problem.run(problem.attention(cascade=mode), view)
            with naming(seed):
                assert_close(problem, other, other_lse, o, lse)


def assert_close(problem: Problem, o: Tensor, lse: Tensor, expected: Tensor, expected_lse: Tensor) -> None:
    rows = problem.batch.rows
    expected = expected[:rows].double()
    assert (o[:rows].double() - expected).norm() <= 2 * cases.TOLERANCE[problem.shape.dtype] * expected.norm()
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2 * cases.LSE_TOLERANCE, equal_nan=True)


# The same bits.


@each_kernel
@pytest.mark.parametrize("seed", range(12))
def test_same_bits_in_every_run(device: torch.device, seed: int) -> None:
    """Neither leftovers of other plans in the workspace nor the order of threads matters."""
    rng = numpy.random.default_rng([seed, 4])
    problem, other = (random_problem(rng, device, SHAPE, depth=depth) for depth in (1 + seed % 6, 3))
    room = {
        "max_rows": 1 + max(len(p.q) for p in (problem, other)),
        "max_batch": 1 + max(len(p.batch.pages) for p in (problem, other)),
    }
    view, other_view = (p.batch.view(rng, device) for p in (problem, other))
    attention = problem.attention(cascade="always", **room)
    out, lse = problem.run(attention, view)
    problem.check()
    for repeat in range(4 if device.type == "cpu" else 80):
        if repeat % 2:
            attention = problem.attention(cascade="always", **room)
        elif repeat % 3:
            attention.plan(other_view)
        again, again_lse = problem.run(attention, view)
        assert same_bits(again, out)
        assert same_bits(again_lse, lse)


@each_kernel
@pytest.mark.slow
@pytest.mark.parametrize("cascade", MODES)
def test_same_bits_in_very_many_runs(device: torch.device, cascade: object) -> None:
    rng = numpy.random.default_rng(5)
    shape = Shape(2, 4, 128, torch.bfloat16, 16, None)
    problem = make_problem(
        rng,
        shape,
        random_batch(rng, 16, depth=4, max_requests=64, kv_cost=2 * 128, budget=2e7, style="mixed"),
        device,
    )
    attention, view = problem.attention(cascade=cascade), problem.batch.view(rng, device)
    out, lse = problem.run(attention, view)
    problem.check()
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(5 if device.type == "cpu" else 1000):
        again, again_lse = problem.run(attention, view)
        different += (again.view(torch.int16) != out.view(torch.int16)).sum() + (
            again_lse.view(torch.int32) != lse.view(torch.int32)
        ).sum()
    assert different == 0


@pytest.mark.parametrize("seed", range(10))
def test_threads_do_not_change_a_bit(seed: int) -> None:
    rng = numpy.random.default_rng([seed, 6])
    problem = random_problem(rng, CPU, depth=1 + seed % 6)
    attention, view = problem.attention(cascade="always"), problem.batch.view(rng, CPU)
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3, 8):
            torch.set_num_threads(number)
            results.append(problem.run(attention, view))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(out, results[0][0]) and same_bits(lse, results[0][1]) for out, lse in results[1:])


@pytest.mark.parametrize("seed", range(20))
def test_form_of_the_table_does_not_matter(device: torch.device, seed: int) -> None:
    rng = numpy.random.default_rng([seed, 7])
    problem = random_problem(rng, device)
    attention = problem.attention(cascade="always")
    results = [
        problem.run(attention, problem.batch.view(rng, device, form))
        for form in ("csr", "block_table", "token_slots")
    ]
    assert all(same_bits(out, results[0][0]) and same_bits(lse, results[0][1]) for out, lse in results[1:])


# Wrong tables, and other arguments.

WRONG = (-1, -(2**31), 2**31 - 1, 10**6, 10**9, 0, 7)


def test_refuses_other_modes(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^cascade is 'never', must be "):
        Attention(8, 2, 64, device=device, max_rows=8, max_batch=8, cascade="never")


@pytest.mark.parametrize("seed", range(60))
def test_wrong_values_never_reach_outside(device: torch.device, seed: int) -> None:
    """A CPU refuses such tables. A GPU clamps them: it writes only inside `out` and `lse`, and the object
    stays usable.
    """
    rng = numpy.random.default_rng([seed, 8])
    problem = random_problem(rng, device, replace(SHAPE, seed=seed), max_rows=200)
    attention = problem.attention(cascade="always")
    good, bad = problem.batch.view(rng, device), problem.batch.view(rng, device)
    out, lse = problem.run(attention, good)
    table = bad.table
    tensors = [
        t
        for t in (bad.qo_indptr, table.indices, table.indptr, table.last_page_len, table.kv_lens, table.rows)
        if t is not None and t.numel()
    ]
    for tensor in tensors:
        if rng.random() < 0.5:
            wrong = torch.from_numpy(rng.choice(WRONG, size=tuple(tensor.shape))).to(tensor)
            hit = torch.from_numpy(rng.random(tuple(tensor.shape)) < rng.choice([0.01, 0.2, 1.0])).to(device)
            tensor.copy_(torch.where(hit, wrong, tensor))
    wall = 64
    room = torch.full(
        (len(problem.q) + 2 * wall, *problem.q.shape[1:]), torch.nan, dtype=problem.q.dtype, device=device
    )
    lse_room = torch.full(room.shape[:2], torch.nan, device=device)
    with contextlib.suppress(ValueError) if device.type == "cpu" else contextlib.nullcontext():
        attention.plan(bad)
        attention.run(problem.q, problem.memory.kv, out=room[wall:-wall], lse=lse_room[wall:-wall])
    if device.type == "cuda":
        torch.cuda.synchronize()
    for tensor in (room, lse_room):
        assert tensor[:wall].isnan().all()
        assert tensor[-wall:].isnan().all()
    again, again_lse = problem.run(attention, good)
    assert same_bits(again, out)
    assert same_bits(again_lse, lse)


# CUDA graphs.


@pytest.mark.gpu
@each_kernel
@pytest.mark.parametrize("cascade", MODES)
def test_run_captured_once_serves_every_forest(cascade: object) -> None:
    """500 other batches: decode, prefill and both, deep forests and none."""
    device, rng = torch.device("cuda"), numpy.random.default_rng(9)
    shape, most_rows, most_requests, num_pages = Shape(2, 4, 128, torch.bfloat16, 16, None), 256, 96, 4096
    memory = memory_of_pages(rng, shape, device, [list(range(num_pages))], [num_pages * 16], num_pages)
    q = noise(rng, device, most_rows, 8, 128).bfloat16()

    def random_view(depth: int | None, style: str | None) -> tuple[BSRView, int]:
        while True:
            batch = random_batch(
                rng, 16, depth=depth, style=style, max_requests=64, max_rows=most_rows - 8, budget=60000
            )
            if batch.rows <= most_rows and len(batch.pages) <= most_requests and batch.num_pages <= num_pages:
                return batch.view(rng, device), batch.rows

    room = {"max_rows": most_rows, "max_batch": most_requests, "cascade": cascade}
    captured, eager = make_attention(shape, device, **room), make_attention(shape, device, **room)
    out, lse = torch.empty_like(q), torch.empty(most_rows, 8, device=device)
    captured.plan(random_view(2, "decode")[0])
    captured.run(q, memory.kv, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run(q, memory.kv, out=out, lse=lse)
    for repeat in range(500):
        view, rows = random_view(
            [4, 0, None, 1, 6][repeat % 5], [None, "decode", "mixed", "chunks"][repeat % 4]
        )
        expected, expected_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
        eager.plan(view)
        eager.run(q, memory.kv, out=expected, lse=expected_lse)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        captured.plan(view)
        graph.replay()
        assert same_bits(out[:rows], expected[:rows])
        assert same_bits(lse[:rows], expected_lse[:rows])
        for left in (out[rows:], lse[rows:], expected[rows:], expected_lse[rows:]):
            assert left.isnan().all()


@pytest.mark.gpu
@each_kernel
def test_plan_in_the_graph_finds_every_forest() -> None:
    """As an engine captures a step: tables and lengths are in buffers that are filled before each replay.
    Requests beyond the batch are empty.
    """
    device, rng = torch.device("cuda"), numpy.random.default_rng(11)
    shape, most_rows, most_requests, num_pages = Shape(2, 4, 128, torch.bfloat16, 16, None), 256, 96, 4096
    memory = memory_of_pages(rng, shape, device, [list(range(num_pages))], [num_pages * 16], num_pages)
    q = noise(rng, device, most_rows, 8, 128).bfloat16()
    room = {"max_rows": most_rows, "max_batch": most_requests, "cascade": "always"}
    captured, eager = make_attention(shape, device, **room), make_attention(shape, device, **room)
    out, expected = torch.zeros_like(q), torch.zeros_like(q)
    qo_indptr = torch.zeros(most_requests + 1, dtype=torch.int32, device=device)
    table, kv_lens = (
        torch.zeros(most_requests, num_pages, dtype=torch.int32, device=device),
        torch.zeros_like(qo_indptr[1:]),
    )
    view = BSRView(qo_indptr, PageTable.block_table(table, kv_lens, 16))

    def step() -> None:
        captured.plan(view)
        captured.run(q, memory.kv, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for repeat in range(100):
        batch = random_batch(rng, 16, depth=repeat % 6, max_requests=64, max_rows=most_rows - 8, budget=60000)
        batch = replace(batch, causal=True, window_left=-1)
        requests = len(batch.pages)
        qo_indptr.fill_(batch.rows)
        qo_indptr[: requests + 1] = torch.tensor(prefix_sum(batch.qo_lens))
        kv_lens.zero_()
        kv_lens[:requests] = torch.tensor(batch.kv_lens)
        for row, pages in zip(table, batch.pages, strict=False):
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        graph.replay()
        eager.plan(batch.view(rng, device, "block_table"))
        eager.run(q, memory.kv, out=expected)
        found, wanted = (
            [replace(node, group=min(node.group, 0)) for node in attention.schedule().forest]
            for attention in (captured, eager)
        )
        assert found == wanted
        assert same_bits(out[: batch.rows], expected[: batch.rows])


@pytest.mark.gpu
@each_kernel
def test_plan_and_run_never_synchronise() -> None:
    rng, device = numpy.random.default_rng(10), torch.device("cuda")
    problem = random_problem(rng, device, SHAPE, depth=3)
    attention, view = problem.attention(cascade="always"), problem.batch.view(rng, device)
    problem.run(attention, view)
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run(attention, view)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    problem.check()
