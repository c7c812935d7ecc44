"""Compositions of several levels compared with the float64 oracle: random trees and cascades, CUDA graphs."""

from __future__ import annotations

import numpy
import pytest
import torch
from attention_kernels import kernel_of
from compositions import (
    MAX_ROWS,
    Seen,
    Shape,
    cascade_problem,
    make_attention,
    make_memory,
    make_problem,
    noise,
    path_to,
    prefix_sum,
    random_forest,
    random_nodes,
    random_shape,
    same_bits,
    skewed,
    tree_problem,
)
from tiers import mostly_slow

from attn_backend import Attention, BSRView, Composition, KVCache, PageTable
from attn_backend.metadata.views import MAX_LEVELS

SHAPE = Shape(2, 4, 64, torch.bfloat16, 16, None)
each_kernel = pytest.mark.usefixtures("kernel")


@pytest.mark.parametrize("seed", mostly_slow(range(150), fast=60, without_gpu=60))
def test_trees(device: torch.device, seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    problem = tree_problem(rng, random_shape(rng, device), device)
    problem.run(problem.attention())
    problem.check()


@pytest.mark.parametrize("num_levels", [2, 3])
@pytest.mark.parametrize("seed", mostly_slow(range(50), fast=25, without_gpu=25))
def test_cascades(device: torch.device, seed: int, num_levels: int) -> None:
    rng = numpy.random.default_rng([seed, num_levels])
    problem = cascade_problem(rng, random_shape(rng, device), device, num_levels)
    problem.run(problem.attention())
    problem.check()


@pytest.mark.parametrize("window_left", [0, 5, 70])
@pytest.mark.parametrize("seed", range(5))
def test_window_in_the_last_level(device: torch.device, seed: int, window_left: int) -> None:
    rng = numpy.random.default_rng([seed, window_left])
    problem = cascade_problem(rng, random_shape(rng, device), device, 2, window_left)
    problem.run(problem.attention())
    problem.check()


@pytest.mark.parametrize("seed", range(10))
def test_most_levels(device: torch.device, seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    problem = tree_problem(rng, random_shape(rng, device), device, depth=MAX_LEVELS - 1)
    assert len(problem.composition.levels) == MAX_LEVELS
    problem.run(problem.attention())
    problem.check()


@each_kernel
@pytest.mark.parametrize("num_levels", [2, 3])
def test_long_shared_prefix(device: torch.device, num_levels: int) -> None:
    """One group of many rows over a KV that all CTAs share, together with short ones."""
    rng = numpy.random.default_rng(num_levels)
    shape = Shape(2, 4, 128, torch.bfloat16, 16, None)
    memory = make_memory(rng, shape, device, [5000, *[17] * (64 * (num_levels - 1))])
    parents = [-1, *[0] * 64, *([*range(1, 65)] if num_levels == 3 else [])]
    node_of_row = rng.permutation(len(parents)).tolist()
    composition = Composition.tree(parents, memory.table(rng, list(range(len(parents)))), node_of_row)
    seen = [
        Seen([row], torch.cat([memory.slots[n] for n in path_to(parents, node)]), memory.slots[0][:0])
        for row, node in enumerate(node_of_row)
    ]
    problem = make_problem(rng, shape, memory, composition, seen, len(node_of_row))
    problem.run(problem.attention())
    problem.check()


@each_kernel
def test_lse_may_be_left_out(device: torch.device) -> None:
    rng = numpy.random.default_rng(0)
    problem = tree_problem(rng, Shape(2, 4, 64, torch.bfloat16, 16, 37), device, depth=3)
    attention = problem.attention()
    problem.run(attention)
    problem.check()
    out = torch.full_like(problem.out, torch.nan)
    attention.run(problem.q, problem.memory.kv, out=out)
    assert same_bits(out, problem.out)


@each_kernel
@pytest.mark.parametrize("num_ctas", [None, 1, 37])
def test_one_object_serves_any_number_of_levels(device: torch.device, num_ctas: int | None) -> None:
    """The next plan keeps no state of the previous one."""
    shape = Shape(2, 3, 64, torch.bfloat16, 16, num_ctas)
    attention = make_attention(shape, device, max_rows=MAX_ROWS, max_batch=1024, max_levels=MAX_LEVELS)
    for seed, depth in enumerate([4, 0, 6, 1, 0, 7, 2, 5]):
        rng = numpy.random.default_rng(seed)
        for problem in (
            tree_problem(rng, shape, device, depth),
            cascade_problem(rng, shape, device, 1 + seed % 3),
        ):
            problem.run(attention)
            problem.check()


@each_kernel
def test_rows_that_see_nothing_are_zero(device: torch.device) -> None:
    """A row in a level has a result, even if it only sees empty KV; a row in no level has none."""
    rng = numpy.random.default_rng(0)
    memory = make_memory(rng, SHAPE, device, [0, 0, 40])
    composition = Composition.tree([-1, 0, 0], memory.table(rng, [0, 1, 2]), [1, 2, -1, 0])
    nothing = memory.slots[0]
    seen = [Seen([0], nothing, nothing), Seen([1], memory.slots[2], nothing), Seen([3], nothing, nothing)]
    problem = make_problem(rng, SHAPE, memory, composition, seen, 4)
    problem.run(problem.attention())
    problem.check()
    assert (problem.out[[0, 3]] == 0).all()
    assert (problem.lse[[0, 3]] == -torch.inf).all()


@each_kernel
def test_rows_that_no_level_has(device: torch.device) -> None:
    rng = numpy.random.default_rng(0)
    memory = make_memory(rng, SHAPE, device, [30, 20])
    table = memory.table(rng, [0, 1])
    unseen = Composition.tree([-1, 0], table, [-1, -1, -1])
    for composition in (unseen, Composition(unseen.levels * 3)):
        problem = make_problem(rng, SHAPE, memory, composition, [], 3)
        problem.run(problem.attention())
        assert problem.out.isnan().all()
        assert problem.lse.isnan().all()


def test_refuses_more_levels_than_max_levels(device: torch.device) -> None:
    rng = numpy.random.default_rng(0)
    problem = tree_problem(rng, SHAPE, device, depth=2)
    attention = problem.attention(max_levels=2)
    with pytest.raises(ValueError, match=r"^len\(composition\.levels\) is 3, must be "):
        attention.plan(problem.composition)
    attention.plan(Composition(problem.composition.levels[:2]))


def test_one_level_is_the_default(device: torch.device) -> None:
    problem = tree_problem(numpy.random.default_rng(0), SHAPE, device, depth=1)
    attention = make_attention(SHAPE, device, max_rows=MAX_ROWS, max_batch=100)
    with pytest.raises(ValueError, match=r"^len\(composition\.levels\) is 2, must be "):
        attention.plan(problem.composition)


@pytest.mark.parametrize("max_levels", [0, -1, MAX_LEVELS + 1])
def test_refuses_max_levels(device: torch.device, max_levels: int) -> None:
    with pytest.raises(ValueError, match=rf"^max_levels is {max_levels}, must be "):
        make_attention(SHAPE, device, max_rows=8, max_batch=8, max_levels=max_levels)


@pytest.mark.parametrize("seed", range(20))
def test_a_level_without_rows_changes_nothing(device: torch.device, seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    problem = tree_problem(rng, random_shape(rng, device), device, depth=seed % 4)
    levels = problem.composition.levels
    attention = problem.attention(max_levels=len(levels) + 2, max_batch=1024)
    problem.run(attention)
    problem.check()
    first, first_lse = problem.out.clone(), problem.lse.clone()
    table = levels[0].table
    without_rows = BSRView(torch.zeros(table.batch_size + 1, dtype=torch.int32, device=device), table)
    without_requests = BSRView(
        torch.zeros(1, dtype=torch.int32, device=device), problem.memory.table(rng, [])
    )
    for empty in (without_rows, without_requests):
        for at in range(len(levels) + 1):
            problem.run(attention, Composition((*levels[:at], empty, *levels[at:])))
            problem.check()
            if len(levels) > 1:  # a single level may take a shorter path, and round once less
                assert same_bits(problem.out, first)
                assert same_bits(problem.lse, first_lse)


@pytest.mark.parametrize("seed", range(20))
def test_order_of_levels_does_not_matter(device: torch.device, seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    problem = tree_problem(rng, random_shape(rng, device), device, depth=1 + seed % 6)
    attention = problem.attention()
    for _ in range(3):
        problem.run(
            attention,
            Composition(
                tuple(problem.composition.levels[i] for i in rng.permutation(len(problem.composition.levels)))
            ),
        )
        problem.check()


@pytest.mark.parametrize("seed", range(20))
def test_same_bits_in_every_run(device: torch.device, seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    problem = tree_problem(rng, random_shape(rng, device), device, depth=1 + seed % 6)
    attention = problem.attention()
    problem.run(attention)
    problem.check()
    first, first_lse = problem.out.clone(), problem.lse.clone()
    for repeat in range(20):
        problem.run(problem.attention() if repeat % 5 == 0 else attention)
        assert same_bits(problem.out, first)
        assert same_bits(problem.lse, first_lse)


@pytest.mark.parametrize("seed", range(10))
def test_threads_do_not_change_a_bit(seed: int) -> None:
    rng, device = numpy.random.default_rng(seed), torch.device("cpu")
    problem = tree_problem(rng, random_shape(rng, device), device, depth=1 + seed % 6)
    attention = problem.attention()
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3, 8):
            torch.set_num_threads(number)
            problem.run(attention)
            results.append((problem.out.clone(), problem.lse.clone()))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(out, results[0][0]) and same_bits(lse, results[0][1]) for out, lse in results[1:])


# CUDA graphs: one capture serves every composition.


@each_kernel
@pytest.mark.gpu
@pytest.mark.parametrize("num_ctas", [None, 37])
def test_run_captured_once_serves_every_composition(num_ctas: int | None) -> None:
    device, rng = torch.device("cuda"), numpy.random.default_rng(0)
    shape = Shape(4, 4, 128, torch.bfloat16, 16, num_ctas)
    lens = [skewed(rng, 600, zero=0.06) for _ in range(1100)]
    memory = make_memory(rng, shape, device, lens)
    q = noise(rng, device, MAX_ROWS, 16, 128).bfloat16()

    def random_composition(depth: int) -> Composition | BSRView:
        parents = random_forest(rng, depth)
        segments = rng.permutation(len(lens))[: len(parents)].tolist()
        if depth == 0 and rng.random() < 0.5:  # a plain view, causal
            qo_lens = rng.integers(0, 9, len(parents)).tolist()
            return BSRView(
                torch.tensor(prefix_sum(qo_lens), dtype=torch.int32, device=device),
                memory.table(rng, segments),
            )
        return Composition.tree(parents, memory.table(rng, segments), random_nodes(rng, parents))

    room = {"max_rows": MAX_ROWS, "max_batch": 1024, "max_levels": MAX_LEVELS}
    captured, eager = make_attention(shape, device, **room), make_attention(shape, device, **room)
    out, lse = torch.empty_like(q), torch.empty(MAX_ROWS, 16, device=device)
    captured.plan(random_composition(1))
    captured.run(q, memory.kv, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run(q, memory.kv, out=out, lse=lse)
    for repeat in range(40):
        composition = random_composition([4, 0, 7, 1, 0, 6, 2, 0, 3, 5][repeat % 10])
        expected, expected_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
        eager.plan(composition)
        eager.run(q, memory.kv, out=expected, lse=expected_lse)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        captured.plan(composition)
        graph.replay()
        written = ~expected.isnan().flatten(1).any(1)
        assert written.any() or repeat % 10 in (1, 4, 7)
        assert same_bits(out[written], expected[written])
        assert same_bits(lse[written], expected_lse[written])
        for left in (out[~written], lse[~written], expected[~written], expected_lse[~written]):
            assert left.isnan().all()


@each_kernel
@pytest.mark.gpu
def test_plan_and_run_never_synchronise() -> None:
    rng, device = numpy.random.default_rng(0), torch.device("cuda")
    problem = tree_problem(rng, SHAPE, device, depth=3)
    attention = problem.attention()
    problem.run(attention)
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run(attention)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    problem.check()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["csr", "csr_lens", "block_table", "token_slots"])
def test_levels_of_several_page_sizes(device: torch.device, form: str, layout: str) -> None:
    """A prefix in pages of 64 and each request's own tokens in pages of 16, in one cache. Same result as with
    pages of 16 for all tokens, and as with one level.
    """

    def ints(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    generator = torch.Generator().manual_seed(7)
    cache = torch.randn(40, 2, 16, 2, 64, generator=generator).to(device, torch.bfloat16)
    kv = KVCache.from_tensor(cache if layout == "NHD" else cache.transpose(2, 3).contiguous(), layout)
    q = torch.randn(4, 8, 64, generator=generator).to(device, torch.bfloat16)
    large, tokens = [7, 0, 3], 2 * 64 + 41  # the prefix
    small = [4 * page + part for page in large for part in range(4)]
    own, lens = [[20, 21], [38, 5], [10, 11]], [17, 32, 1]
    prefix = {
        "csr": lambda: PageTable.csr(ints([0, 3]), ints([*large, -5]), ints([41], torch.int64), 64),
        "csr_lens": lambda: PageTable.csr(ints([0, 4]), ints([*large, 9]), None, 64, kv_lens=ints([tokens])),
        "block_table": lambda: PageTable.block_table(ints([[*large, -1]]), ints([tokens]), 64),
        "token_slots": lambda: PageTable.token_slots(
            ints([[0] * 192, [64 * large[i // 64] + i % 64 for i in range(192)]]),
            ints([1]),
            ints([tokens]),
            64,
        ),
    }[form]()
    suffix = PageTable.block_table(ints(own), ints(lens), 16)
    rows, of_own = ints([0, 4]), ints([0, 1, 3, 4])
    attention = Attention(
        8, 2, 64, device=device, max_rows=4, max_batch=3, max_levels=2, kernel=kernel_of(device)
    )
    results = []
    for table in (prefix, PageTable.block_table(ints([small]), ints([tokens]), 16)):
        attention.plan(Composition.cascade([rows, of_own], [table, suffix]))
        attention.raise_for_errors()
        results.append(attention.run(q, kv, return_lse=True))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))

    # One level, in pages of one token: the prefix ends inside of a page.
    def slots_of(pages: list[int], length: int) -> list[int]:
        return [16 * pages[i // 16] + i % 16 for i in range(length)]

    slots = [
        slots_of(small, tokens) + slots_of(pages, length) for pages, length in zip(own, lens, strict=True)
    ]
    padded = [row + [0] * (tokens + 32 - len(row)) for row in slots]
    whole = Attention(8, 2, 64, device=device, max_rows=4, max_batch=3, kernel=kernel_of(device))
    whole.plan(BSRView(of_own, PageTable.block_table(ints(padded), ints([len(row) for row in slots]), 1)))
    expected = whole.run(
        q, KVCache.from_slots(kv.k.reshape(-1, 2, 64), kv.v.reshape(-1, 2, 64)), return_lse=True
    )
    torch.testing.assert_close(results[0][0], expected[0], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(results[0][1], expected[1], rtol=1e-4, atol=1e-4)


def test_wrong_values_of_larger_pages() -> None:
    indptr, one = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([65], dtype=torch.int32)
    large = BSRView(
        indptr, PageTable.csr(indptr, torch.tensor([0], dtype=torch.int32), one, 64), causal=False
    )
    small = BSRView(
        indptr,
        PageTable.csr(indptr, torch.tensor([5], dtype=torch.int32), torch.tensor([9], dtype=torch.int32), 16),
    )
    attention = Attention(8, 2, 64, device="cpu", max_rows=4, max_batch=3, max_levels=2)
    with pytest.raises(
        ValueError, match=r"^levels\[0\]: kv_last_page_len\[0\] is 65, must be 1 .. page_size = 64"
    ):
        attention.plan(Composition([large, small]))


def test_larger_pages_whose_ids_change_are_refused() -> None:
    """Their ids are copied when they are planned: later changes would be ignored."""
    indptr, zero = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    large = BSRView(indptr, PageTable.csr(indptr, zero, zero + 64, 64), causal=False, pages_change=True)
    small = BSRView(indptr, PageTable.csr(indptr, zero + 5, zero + 9, 16))
    attention = Attention(8, 2, 64, device="cpu", max_rows=4, max_batch=3, max_levels=2)
    with pytest.raises(
        ValueError,
        match=r"^levels\[0\]\.pages_change is True, must be False with pages of 64 tokens in a cache of 16",
    ):
        attention.plan(Composition([large, small]))
