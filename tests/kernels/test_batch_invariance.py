"""batch_invariant=True: a request's output and lse have the same bits by itself, in any batch, at any place
in it, and with any sharing of its prefix. A prompt's rows have them with any part of it in the cache.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import attention_kernels
import numpy
import pytest
import torch
from compositions import Shape, random_shape, same_bits
from forests import Batch, Problem, make_problem, random_problem
from tiers import mostly_slow
from torch import Tensor

from attn_backend import Attention, BSRView
from attn_backend.jit import compilers
from attn_backend.variants import builtin

CPU = torch.device("cpu")
SHAPE = Shape(2, 4, 128, torch.bfloat16, 16, None)
each_kernel = pytest.mark.usefixtures("kernel")
ROOM = {"max_rows": 1000, "max_batch": 200, "batch_invariant": True}


def run_some(
    problem: Problem, attention: Attention, requests: list[int], rng: numpy.random.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Output and lse of some of the requests, in this order, run as one batch."""
    some = problem.select(requests)
    out, lse = some.run(attention, some.batch.view(rng, problem.q.device))
    lens = [*some.batch.qo_lens, len(out) - some.batch.rows]
    assert not out[: some.batch.rows].isnan().any()
    return list(zip(out.split(lens), lse.split(lens), strict=True))[:-1]


def check_some(
    problem: Problem,
    attention: Attention,
    requests: list[int],
    expected: list[tuple[Tensor, Tensor]],
    rng: numpy.random.Generator,
) -> None:
    """Checks for the bits that `expected` has for each request of the problem."""
    for i, (out, lse) in zip(requests, run_some(problem, attention, requests, rng), strict=True):
        qo_len, kv_len = problem.batch.qo_lens[i], problem.batch.kv_lens[i]
        same = same_bits(out, expected[i][0]) and same_bits(lse, expected[i][1])
        assert same, (
            f"request {i} of {qo_len} rows and {kv_len} tokens, in a batch of "
            f"{len(requests)}\n{problem.shape}"
        )


def everything(problem: Problem) -> list[int]:
    return list(range(len(problem.batch.pages)))


@pytest.mark.parametrize("block", mostly_slow(range(40), fast=8, without_gpu=8))
def test_alone_and_in_other_batches(device: torch.device, block: int) -> None:
    for seed in range(5 * block, 5 * block + 5):
        rng = numpy.random.default_rng([seed, 30])
        problem = random_problem(rng, device, style=["decode", "mixed", "chunks"][seed % 3])
        attention = problem.attention(**ROOM)
        problem.run(attention, problem.batch.view(rng, device))
        problem.check()
        expected = run_some(problem, attention, everything(problem), rng)
        for i in rng.permutation(len(expected))[:5].tolist():
            check_some(problem, attention, [i], expected, rng)
        for _ in range(3):
            some = rng.permutation(len(expected))[: rng.integers(1, len(expected) + 1)].tolist()
            check_some(problem, attention, some, expected, rng)
        # some requests many times: all of their KV is shared
        twice = rng.integers(len(expected), size=2 * len(expected)).tolist()
        check_some(
            problem,
            problem.attention(batch_invariant=True, max_rows=8000, max_batch=256),
            twice[:64],
            expected,
            rng,
        )


@each_kernel
@pytest.mark.parametrize("qo_len", mostly_slow([1, 16, 17, 2, 3, 8, 40, 64, 130], fast=3))
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_around_chunks(device: torch.device, causal: bool, qo_len: int) -> None:
    """All lengths in one batch; then each by itself, and with a few others."""
    kv_lens = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 639, 640, 641, 1023, 1024, 1025, 1280, 1281, 4097]
    kv_lens += [8191, 8192, 8193, 20000, 40000] * (qo_len <= 2)
    rng = numpy.random.default_rng(qo_len)
    starts = numpy.cumsum([0, *[-(-kv_len // 16) for kv_len in kv_lens]]).tolist()
    pages = [list(range(begin, end)) for begin, end in itertools.pairwise(starts)]
    batch = Batch(16, [qo_len] * len(kv_lens), kv_lens, pages, starts[-1] + 1, causal)
    problem = make_problem(rng, SHAPE, batch, device)
    attention = problem.attention(batch_invariant=True, max_rows=3000)
    problem.run(attention, batch.view(rng, device))
    problem.check()
    expected = run_some(problem, attention, everything(problem), rng)
    for i in everything(problem):
        check_some(problem, attention, [i], expected, rng)
        check_some(problem, attention, [*rng.integers(len(kv_lens), size=3).tolist(), i, 0], expected, rng)


@each_kernel
@pytest.mark.parametrize("window_left", [0, 10, 100, 1000])
@pytest.mark.parametrize("qo_len", [1, 30])
def test_windows(device: torch.device, qo_len: int, window_left: int) -> None:
    kv_lens = [30, 100, 101, 1000, 1002, 5000]
    pages = [list(range(313 * i, 313 * i + -(-kv_len // 16))) for i, kv_len in enumerate(kv_lens)]
    batch = Batch(16, [qo_len] * len(kv_lens), kv_lens, pages, 313 * len(kv_lens), window_left=window_left)
    rng = numpy.random.default_rng(0)
    problem = make_problem(rng, SHAPE, batch, device)
    attention = problem.attention(**ROOM)
    problem.run(attention, batch.view(rng, device))
    problem.check()
    expected = run_some(problem, attention, everything(problem), rng)
    for i in everything(problem):
        check_some(problem, attention, [i], expected, rng)


@each_kernel
@pytest.mark.parametrize("qo_len", [1, 4, 33])
@pytest.mark.parametrize("prefix", [16, 500, 5000])
def test_neighbours_that_share_its_prefix(device: torch.device, prefix: int, qo_len: int) -> None:
    """A request by itself, with 39 others that share all but its last pages, and with 39 that share
    nothing."""
    rng = numpy.random.default_rng(prefix)
    full, own = prefix // 16, -(-(prefix % 16 + qo_len + 7) // 16)
    kv_len, num = prefix + qo_len + 7, 40
    shared = [[*range(full), *range(full + own * i, full + own * (i + 1))] for i in range(num)]
    begin = full + own * num
    alone = [list(range(begin + (full + own) * i, begin + (full + own) * (i + 1))) for i in range(5)]
    batch = Batch(16, [qo_len] * (num + 5), [kv_len] * (num + 5), shared + alone, begin + 5 * (full + own))
    problem = make_problem(rng, SHAPE, batch, device)
    attention = problem.attention(**(ROOM | {"max_rows": 2000}))
    expected = [run_some(problem, attention, [i], rng)[0] for i in everything(problem)]
    for requests in (
        everything(problem)[:num],
        everything(problem)[::-1],
        [num - 1, 0],
        [3, *range(num, num + 5)],
        [*range(num, num + 5), 3] * 4,
    ):
        check_some(problem, attention, requests, expected, rng)


@pytest.mark.parametrize("seed", mostly_slow(range(20), fast=10, without_gpu=10))
def test_other_objects(device: torch.device, seed: int) -> None:
    """An object's room, its number of CTAs and the form of the table do not matter."""
    rng = numpy.random.default_rng([seed, 31])
    problem = random_problem(rng, device)
    expected = run_some(problem, problem.attention(**ROOM), everything(problem), rng)
    for num_ctas, max_rows, max_batch, cascade in [
        (1, 700, 150, True),
        (3, 5000, 256, False),
        (132, 701, 200, "always"),
    ]:
        heads = problem.shape.num_kv_heads * problem.shape.group_size
        attention = Attention(
            heads,
            problem.shape.num_kv_heads,
            problem.shape.head_dim,
            dtype=problem.shape.dtype,
            device=device,
            num_ctas=num_ctas,
            max_rows=max_rows,
            max_batch=max_batch,
            cascade=cascade,
            batch_invariant=True,
            kernel=attention_kernels.kernel_of(device, problem.shape.seed),
        )
        check_some(problem, attention, rng.permutation(len(expected)).tolist(), expected, rng)


@pytest.mark.parametrize("seed", mostly_slow(range(20), fast=10, without_gpu=10))
def test_row_lists(device: torch.device, seed: int) -> None:
    """Rows of Q in any places."""
    rng = numpy.random.default_rng([seed, 32])
    problem = random_problem(rng, device, random_shape(rng, device), max_rows=300)
    rows, attention = problem.batch.rows, problem.attention(**ROOM)
    view = problem.batch.view(rng, device)
    expected, expected_lse = problem.run(attention, view)
    place = torch.from_numpy(rng.permutation(rows + 5)[:rows]).to(device)
    q = torch.full((rows + 5, *problem.q.shape[1:]), torch.nan, dtype=problem.q.dtype, device=device)
    q[place] = problem.q[:rows]
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=device)
    attention.plan(BSRView(view.qo_indptr, view.table, view.causal, view.window_left, place.int()))
    attention.run(
        q,
        problem.memory.kv,
        out=out,
        lse=lse,
        sm_scale=problem.shape.sm_scale,
        logits_soft_cap=problem.shape.logits_soft_cap,
    )
    assert same_bits(out[place], expected[:rows])
    assert same_bits(lse[place], expected_lse[:rows])


@pytest.mark.parametrize("seed", range(5))
def test_threads_do_not_change_a_bit(seed: int) -> None:
    rng = numpy.random.default_rng([seed, 33])
    problem = random_problem(rng, CPU)
    attention = problem.attention(**ROOM)
    expected = run_some(problem, attention, everything(problem), rng)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3, 8):
            torch.set_num_threads(number)
            check_some(problem, attention, everything(problem)[::-1], expected, rng)
    finally:
        torch.set_num_threads(threads)


def last_rows(problem: Problem, lens: list[int]) -> Problem:
    """The last rows of each request: its first tokens are cached."""
    ends = itertools.accumulate(problem.batch.qo_lens)
    rows = [row for end, length in zip(ends, lens, strict=True) for row in range(end - length, end)]
    batch = replace(problem.batch, qo_lens=lens)
    return replace(problem, batch=batch, q=problem.q[rows], out=problem.out[rows], lse=problem.lse[rows])


def run_prompts(
    problem: Problem, attention: Attention, are_prompts: list[bool], rng: numpy.random.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Output and lse of each request."""
    device, lens = problem.q.device, problem.batch.qo_lens
    flags = torch.tensor(are_prompts, dtype=torch.int32, device=device)
    out, lse = problem.run(attention, replace(problem.batch.view(rng, device), prompts=flags))
    return list(zip(out.split(lens), lse.split(lens), strict=True))


RESTS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 700]
PROMPT_SHAPES = [
    SHAPE,
    Shape(2, 3, 64, torch.float16, 16, 7, logits_soft_cap=20.0),
    Shape(1, 1, 256, torch.bfloat16, 1, 3),
    Shape(1, 16, 192, torch.bfloat16, 48, None, head_dim_v=128),
    Shape(1, 5, 576, torch.bfloat16, 16, None, head_dim_v=512, v_in_k=True),
]


@each_kernel
@pytest.mark.parametrize("window_left", [-1, 0, 40, 600])
@pytest.mark.parametrize("shape", PROMPT_SHAPES, ids=lambda shape: f"{shape.group_size}-{shape.head_dim}")
def test_cached_prefixes_do_not_change_a_prompt(device: torch.device, shape: Shape, window_left: int) -> None:
    """Every row has the bits that it has in the whole prompt. A decode in the batch keeps its own."""
    if device.type == "cpu" and shape is SHAPE:
        shape = replace(shape, dtype=torch.float32)  # 16 bits hide sums in another order
    lens = [1, 17, 64, 129, 200, 1333] if shape.head_dim <= 256 else [1, 65, 300]
    decode = 3000
    starts = numpy.cumsum([0, *[-(-length // shape.page_size) for length in [*lens, decode]]]).tolist()
    pages = [list(range(begin, end)) for begin, end in itertools.pairwise(starts)]
    batch = Batch(
        shape.page_size, [*lens, 1], [*lens, decode], pages, starts[-1] + 1, window_left=window_left
    )
    rng = numpy.random.default_rng([shape.head_dim, window_left + 1])
    problem = make_problem(rng, shape, batch, device)
    problem = replace(problem, q=problem.q[: batch.rows])
    problem = replace(problem, out=problem.out[: batch.rows], lse=problem.lse[: batch.rows])
    attention = problem.attention(**(ROOM | {"max_rows": 2000}))
    are_prompts = [True] * len(lens) + [False]
    whole = run_prompts(problem, attention, are_prompts, rng)
    problem.check()
    alone = run_some(problem, attention, [len(lens)], rng)[0]
    assert same_bits(whole[-1][0], alone[0])
    assert same_bits(whole[-1][1], alone[1])
    for rest in RESTS:
        some = last_rows(problem, [*(min(rest, length) for length in lens), 1])
        for i, (out, lse) in enumerate(run_prompts(some, attention, are_prompts, rng)):
            same = same_bits(out, whole[i][0][-len(out) :]) and same_bits(lse, whole[i][1][-len(lse) :])
            assert same, f"the last {rest} rows of request {i}\n{shape}"


VARIANTS = {
    "alibi": (builtin.alibi(), {"slopes": builtin.alibi_slopes(8)}),
    "chunks": (builtin.chunked_local(300), {}),
    "documents": (
        builtin.document(),
        {"document_ids": torch.arange(1500, dtype=torch.int32)[None] // 90 % 4},
    ),
}


@pytest.mark.slow
@each_kernel
@pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", VARIANTS)
def test_cached_prefixes_under_variants(device: torch.device, name: str) -> None:
    """KV tiles from the last to the first, row tiles that begin late, and row tiles with holes."""
    variant, arguments = VARIANTS[name]
    arguments = {
        key: value.to(device) if isinstance(value, Tensor) else value for key, value in arguments.items()
    }
    tokens = 1500
    pages = [list(range(-(-tokens // 16)))]
    rng = numpy.random.default_rng(5)
    problem = make_problem(rng, SHAPE, Batch(16, [tokens], [tokens], pages, 100), device)
    attention = Attention(
        8,
        2,
        128,
        dtype=SHAPE.dtype,
        device=device,
        max_rows=tokens,
        max_batch=1,
        batch_invariant=True,
        variant=variant,
        kernel=attention_kernels.kernel_of(device, 0),
    )

    def run_last(rows: int) -> Tensor:
        view = last_rows(problem, [rows]).batch.view(rng, device)
        prompts = torch.ones(1, dtype=torch.int32, device=device)
        attention.plan(replace(view, prompts=prompts), variant_args=arguments)
        q = problem.q[tokens - rows : tokens]
        return attention.run(q, problem.memory.kv, variant_args=arguments)

    whole = run_last(tokens)
    for rest in RESTS:
        assert same_bits(run_last(rest), whole[-rest:]), rest


def test_prompts_are_numbers_of_requests(device: torch.device) -> None:
    batch = Batch(16, [1, 1], [20, 40], [[0, 1], [2, 3, 4]], 5)
    view = batch.view(numpy.random.default_rng(0), device)
    for wrong in (True, torch.ones(3, dtype=torch.int32, device=device), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(
            ValueError, match=r"^prompts.* is .*, must be a contiguous int32 tensor \[batch\] = \[2\]"
        ):
            replace(view, prompts=wrong)


@pytest.mark.gpu
@each_kernel
def test_run_captured_once_serves_every_batch() -> None:
    """Bits of a replay equal an eager run of the single request."""
    device, rng = torch.device("cuda"), numpy.random.default_rng(34)
    problem = random_problem(rng, device, SHAPE, depth=3, max_requests=64, style="mixed")
    captured, eager = problem.attention(**ROOM), problem.attention(**ROOM)
    expected = [run_some(problem, eager, [i], rng)[0] for i in everything(problem)]
    q = torch.zeros_like(problem.q)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    captured.plan(problem.batch.view(rng, device))
    captured.run(q, problem.memory.kv, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run(q, problem.memory.kv, out=out, lse=lse)
    for _ in range(50):
        requests = rng.permutation(len(expected))[: rng.integers(1, len(expected) + 1)].tolist()
        some = problem.select(requests)
        q[: some.batch.rows] = some.q[: some.batch.rows]
        captured.plan(some.batch.view(rng, device))
        graph.replay()
        assert same_bits(out[: some.batch.rows], torch.cat([expected[i][0] for i in requests]))
        assert same_bits(lse[: some.batch.rows], torch.cat([expected[i][1] for i in requests]))


def test_refuses_several_levels(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^max_levels is 2, must be 1 with batch_invariant=True"):
        Attention(8, 2, 64, device=device, max_rows=8, max_batch=8, max_levels=2, batch_invariant=True)
