"""Compositions of several levels against attention over all tokens that a row sees, from its definition: random trees and cascades, row lists, CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

import case_tensors
import cases
import numpy
import oracle
import pytest
import torch
from torch import Tensor

from attn_backend import Attention, BSRView, Composition, KVCache, PageTable
from attn_backend.metadata.composition import MAX_LEVELS

MAX_ROWS = 200


@dataclass(frozen=True)
class Shape:
    """What is the same for all levels."""

    num_kv_heads: int
    group_size: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    num_ctas: int | None
    sm_scale: float | None = None
    logits_soft_cap: float = 0.0


@dataclass
class Memory:
    """A paged cache that holds segments of tokens; slots in no segment are NaN."""

    k_slots: Tensor             # [slots, num_kv_heads, head_dim]
    v_slots: Tensor
    kv: KVCache
    page_size: int
    pages: list[list[int]]      # of each segment
    slots: list[Tensor]         # int64, of each segment: where its tokens are

    def table(self, rng: numpy.random.Generator, segments: list[int]) -> PageTable:
        """A table whose request i is the segment segments[i], in any form; entries that are not used are no pages."""
        device, size = self.k_slots.device, self.page_size
        pages, lens = [self.pages[s] for s in segments], [len(self.slots[s]) for s in segments]
        form, dtype = rng.choice(["csr", "block_table", "token_slots"]), [torch.int32, torch.int64][rng.integers(2)]

        def index(values: list[int], as_dtype: torch.dtype = dtype) -> Tensor:
            return torch.tensor(values, dtype=as_dtype, device=device)

        if form == "csr":
            indices = index([page for own in pages for page in own] + [-1, 10**6], torch.int32)
            return PageTable.csr(index(prefix_sum([len(own) for own in pages])), indices, index([(n - 1) % size + 1 for n in lens]), size)
        per_entry = size if form == "token_slots" else 1
        width = max((len(own) for own in pages), default=0) + int(rng.integers(3))
        entries = numpy.full((len(pages) + 2, width * per_entry), -(2**31), dtype=numpy.int32)
        for row, own in enumerate(pages):
            entries[row, : len(own) * per_entry : per_entry] = [page * per_entry for page in own]
        matrix = torch.from_numpy(entries).to(device)
        if form == "block_table":
            return PageTable.block_table(matrix[: len(pages)], index(lens), size)
        order = rng.permutation(len(pages) + 2)
        rows = numpy.argsort(order)[: len(pages)].tolist()
        return PageTable.token_slots(matrix[torch.from_numpy(order).to(device)], index(rows), index(lens), size)


@dataclass
class Seen:
    """What some rows of Q see: all tokens of `shared`, and of `own` all or, if causal, those up to the row's position in it and inside its window."""

    rows: list[int]
    shared: Tensor      # int64: slots
    own: Tensor
    causal: bool = False
    window_left: int = -1


@dataclass
class Problem:
    shape: Shape
    q: Tensor
    memory: Memory
    composition: Composition
    seen: list[Seen]
    out: Tensor     # like q, NaN
    lse: Tensor     # float32 [rows, num_qo_heads], NaN

    def attention(self, **changes: object) -> Attention:
        levels = self.composition.levels
        room = {"max_rows": len(self.q) + 1, "max_batch": sum(level.batch_size for level in levels) + 1, "max_levels": max(len(levels), 2)} | changes
        return make_attention(self.shape, self.q.device, **room)

    def run(self, attention: Attention, composition: Composition | None = None) -> None:
        attention.plan(self.composition if composition is None else composition)
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)
        shape = self.shape
        attention.run(self.q, self.memory.kv, out=self.out, lse=self.lse, sm_scale=shape.sm_scale, logits_soft_cap=shape.logits_soft_cap)

    def expected(self) -> tuple[Tensor, Tensor]:
        """float64 o and lse; NaN for rows in no level."""
        o = torch.full(self.q.shape, torch.nan, dtype=torch.float64, device=self.q.device)
        lse = torch.full(self.lse.shape, torch.nan, dtype=torch.float64, device=self.q.device)

        def attend(rows: list[int], slots: Tensor, causal: bool) -> None:
            shape, memory = self.shape, self.memory
            k, v = memory.k_slots[slots], memory.v_slots[slots]
            o[rows], lse[rows] = oracle.attention(
                self.q[rows], k, v, sm_scale=shape.sm_scale, causal=causal, logits_soft_cap=shape.logits_soft_cap
            )

        for seen in self.seen:
            rows, shared, own = seen.rows, seen.shared, seen.own
            if seen.window_left >= 0:
                for j, row in enumerate(rows):
                    position = len(own) - len(rows) + j
                    begin, end = max(position - seen.window_left, 0), max(position + 1, 0) if seen.causal else len(own)
                    attend([row], torch.cat([shared, own[begin:end]]), False)
            elif seen.causal:
                # Rows in front of their own tokens see the shared ones only; the others stand at the end of all tokens.
                first = max(len(rows) - len(own), 0)
                attend(rows[:first], shared, False)
                attend(rows[first:], torch.cat([shared, own]), True)
            else:
                attend(rows, torch.cat([shared, own]), False)
        return o, lse

    def check(self) -> None:
        """Compares `out` and `lse` with the oracle."""
        tolerance = cases.TOLERANCE[self.shape.dtype]
        o_ref, lse_ref = self.expected()
        absent = torch.ones(len(self.q), dtype=torch.bool, device=self.q.device)
        absent[[row for seen in self.seen for row in seen.rows]] = False
        assert self.out[absent].isnan().all(), f"rows in no level were written\n{self.shape}"
        assert self.lse[absent].isnan().all(), f"lse of rows in no level was written\n{self.shape}"
        o_ref, lse_ref, lse = o_ref[~absent], lse_ref[~absent], self.lse[~absent]
        error = self.out[~absent].double() - o_ref
        assert not error.isnan().any(), f"{int(error.isnan().any(-1).sum())} rows of {error.shape[:2].numel()} hold NaN\n{self.shape}"
        assert error.norm() <= tolerance * o_ref.norm(), f"||o - ref|| / ||ref|| = {float(error.norm() / o_ref.norm()):.2e} > {tolerance}\n{self.shape}"
        assert (error.norm(dim=-1) <= 10 * tolerance * o_ref.norm(dim=-1)).all(), f"one row is more than {10 * tolerance} off\n{self.shape}"
        infinite = lse_ref == -torch.inf
        assert torch.equal(lse == -torch.inf, infinite), f"lse is -inf in other rows than it should be\n{self.shape}"
        lse_error = (lse.double() - lse_ref).masked_fill(infinite, 0).abs()
        assert (lse_error <= cases.LSE_TOLERANCE).all(), f"lse is {float(lse_error.nan_to_num(torch.inf).max()):.2e} off\n{self.shape}"


def make_attention(shape: Shape, device: torch.device, **room: object) -> Attention:
    heads = shape.num_kv_heads * shape.group_size
    return Attention(heads, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=device, num_ctas=shape.num_ctas, **room)


def prefix_sum(lengths: list[int]) -> list[int]:
    return [0, *numpy.cumsum(lengths, dtype=int).tolist()]


def skewed(rng: numpy.random.Generator, longest: int, zero: float = 0.0) -> int:
    """0 with probability `zero`, else 1 .. longest with a uniform logarithm."""
    return 0 if rng.random() < zero else int(numpy.exp(rng.uniform(0, numpy.log(longest + 0.999))))


def random_shape(rng: numpy.random.Generator, device: torch.device) -> Shape:
    dtypes = [torch.bfloat16, torch.float16] + ([torch.float32] if device.type == "cpu" else [])
    return Shape(
        num_kv_heads=int(rng.integers(1, 4)),
        group_size=int(rng.choice([1, 2, 3, 4, 8])),
        head_dim=int(rng.choice([64, 64, 128, 128, 256])),
        dtype=dtypes[rng.integers(len(dtypes))],
        page_size=int(rng.choice([1, 2, 3, 5, 8, 16, 16, 16, 24, 32, 48, 64])),
        num_ctas=[None, 1, 3, 37, 264][rng.integers(5)],
        sm_scale=float(rng.uniform(0.02, 0.3)) if rng.random() < 0.2 else None,
        logits_soft_cap=float(rng.uniform(1, 50)) if rng.random() < 0.2 else 0.0,
    )


def make_memory(rng: numpy.random.Generator, shape: Shape, device: torch.device, lens: list[int]) -> Memory:
    """Segments of the given lengths, their pages in any order over the cache."""
    size = shape.page_size
    counts = [-(-n // size) for n in lens]
    num_pages = sum(counts) + 3
    free = rng.permutation(num_pages).tolist()
    pages = [[free.pop() for _ in range(count)] for count in counts]
    slots = [(torch.tensor(own, dtype=torch.int64)[:, None] * size + torch.arange(size)).flatten()[:n].to(device) for own, n in zip(pages, lens, strict=True)]
    used = torch.cat(slots) if slots else torch.zeros(0, dtype=torch.int64, device=device)
    cache = torch.full((num_pages, 2, size, shape.num_kv_heads, shape.head_dim), torch.nan, dtype=shape.dtype, device=device)
    cache[used // size, :, used % size] = noise(rng, device, len(used), 2, shape.num_kv_heads, shape.head_dim).to(shape.dtype)
    k_slots, v_slots = cache[:, 0].flatten(0, 1), cache[:, 1].flatten(0, 1)
    kv = KVCache.from_tensor(cache) if rng.random() < 0.5 else KVCache.from_pair(cache[:, 0].contiguous(), cache[:, 1].contiguous())
    return Memory(k_slots, v_slots, kv, size, pages, slots)


def noise(rng: numpy.random.Generator, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(int(rng.integers(2**31))), device=device)


def make_problem(
    rng: numpy.random.Generator, shape: Shape, memory: Memory, composition: Composition, seen: list[Seen], rows: int
) -> Problem:
    device, heads = memory.k_slots.device, shape.num_kv_heads * shape.group_size
    q = noise(rng, device, rows, heads, shape.head_dim).to(shape.dtype)
    absent = torch.ones(rows, dtype=torch.bool, device=device)
    absent[[row for s in seen for row in s.rows]] = False
    q[absent] = torch.nan
    return Problem(shape, q, memory, composition, seen, torch.full_like(q, torch.nan), torch.full((rows, heads), torch.nan, device=device))


def random_forest(rng: numpy.random.Generator, depth: int) -> list[int]:
    """The parent of each node of a random forest of this depth, in any order with parents in front."""
    parents, key = [-1] * int(rng.integers(1, 4)), []
    level = list(range(len(parents)))
    for _ in range(depth):
        grown = rng.permutation(level)[:2].tolist()
        children = [node for node in grown for _ in range(int(rng.integers(1, 9)))]
        level = list(range(len(parents), len(parents) + len(children)))
        parents += children
    for parent in parents:
        key.append(float(rng.random()) + (key[parent] if parent >= 0 else 0.0))
    order = numpy.argsort(key).tolist()
    place = {node: i for i, node in enumerate(order)}
    return [place[parents[node]] if parents[node] >= 0 else -1 for node in order]


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from a root to `node`."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def random_nodes(rng: numpy.random.Generator, parents: list[int]) -> list[int]:
    """The node of each row: requests of 1 .. 40 rows at random nodes, the rows of all requests mixed; -1 for some."""
    deepest = max(range(len(parents)), key=lambda node: len(path_to(parents, node)))
    nodes = [deepest]
    for _ in range(int(rng.integers(1, 25))):
        node = -1 if rng.random() < 0.08 else int(rng.integers(len(parents)))
        nodes += [node] * int(rng.integers(1, 41) if rng.random() < 0.3 else rng.integers(1, 4))
    nodes = nodes[:MAX_ROWS]
    return rng.permutation(nodes).tolist() if rng.random() < 0.8 else nodes


def tree_problem(rng: numpy.random.Generator, shape: Shape, device: torch.device, depth: int | None = None) -> Problem:
    parents = random_forest(rng, int(rng.integers(0, 7)) if depth is None else depth)
    memory = make_memory(rng, shape, device, [skewed(rng, 600, zero=0.06) for _ in parents])
    node_of_row = random_nodes(rng, parents)
    composition = Composition.tree(parents, memory.table(rng, list(range(len(parents)))), node_of_row)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    seen = []
    for node in sorted(set(node_of_row) - {-1}):
        rows = [row for row, own in enumerate(node_of_row) if own == node]
        seen.append(Seen(rows, torch.cat([memory.slots[n] for n in path_to(parents, node)]), nothing))
    return make_problem(rng, shape, memory, composition, seen, len(node_of_row))


def cascade_problem(rng: numpy.random.Generator, shape: Shape, device: torch.device, num_levels: int, window_left: int = -1) -> Problem:
    """Requests in groups with a common prefix, the groups in larger groups."""
    causal = bool(rng.random() < 0.8)
    paths: list[tuple[int, ...]] = [()]     # of each request: its segment in each level
    lens: list[int] = []
    for level in range(num_levels):
        grown = []
        for path in paths:
            for _ in range(int(rng.integers(1, 5))):
                grown.append((*path, len(lens)))
                lens.append(skewed(rng, 600 if level < num_levels - 1 else 200, zero=0.06))
        paths = grown
    qo_lens = [int(rng.integers(1, 41) if rng.random() < 0.3 else rng.integers(0, 5)) for _ in paths]
    while sum(qo_lens) > MAX_ROWS:
        qo_lens = [n // 2 for n in qo_lens]
    memory = make_memory(rng, shape, device, lens)

    qo_indptrs, tables = [], []
    for level in range(num_levels):
        rows_of = {path[level]: 0 for path in paths}
        for path, qo_len in zip(paths, qo_lens, strict=True):
            rows_of[path[level]] += qo_len
        dtype = [torch.int32, torch.int64][rng.integers(2)]
        qo_indptrs.append(torch.tensor(prefix_sum(list(rows_of.values())), dtype=dtype, device=device))
        tables.append(memory.table(rng, list(rows_of)))
    if window_left < 0:
        composition = Composition.cascade(qo_indptrs, tables, causal=causal)
    else:     # a window inside the last level's own KV
        shared = [BSRView(qo_indptr, table, causal=False) for qo_indptr, table in zip(qo_indptrs[:-1], tables[:-1], strict=True)]
        composition = Composition((*shared, BSRView(qo_indptrs[-1], tables[-1], causal=causal, window_left=window_left)))

    seen, begin = [], 0
    for path, qo_len in zip(paths, qo_lens, strict=True):
        shared_slots = [memory.slots[segment] for segment in path[:-1]] or [memory.slots[0][:0]]
        seen.append(Seen(list(range(begin, begin + qo_len)), torch.cat(shared_slots), memory.slots[path[-1]], causal, window_left))
        begin += qo_len
    return make_problem(rng, shape, memory, composition, seen, begin)


def same_bits(a: Tensor, b: Tensor) -> bool:
    as_int = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(as_int), b.contiguous().view(as_int))


@pytest.mark.parametrize("seed", range(150))
def test_trees(device: torch.device, seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    problem = tree_problem(rng, random_shape(rng, device), device)
    problem.run(problem.attention())
    problem.check()


@pytest.mark.parametrize("num_levels", [2, 3])
@pytest.mark.parametrize("seed", range(50))
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


@pytest.mark.parametrize("num_levels", [2, 3])
def test_long_shared_prefix(device: torch.device, num_levels: int) -> None:
    """One group of many rows over a KV that all CTAs share, beside short ones."""
    rng = numpy.random.default_rng(num_levels)
    shape = Shape(2, 4, 128, torch.bfloat16, 16, None)
    memory = make_memory(rng, shape, device, [5000, *[17] * (64 * (num_levels - 1))])
    parents = [-1, *[0] * 64, *([*range(1, 65)] if num_levels == 3 else [])]
    node_of_row = rng.permutation(len(parents)).tolist()
    composition = Composition.tree(parents, memory.table(rng, list(range(len(parents)))), node_of_row)
    seen = [Seen([row], torch.cat([memory.slots[n] for n in path_to(parents, node)]), memory.slots[0][:0]) for row, node in enumerate(node_of_row)]
    problem = make_problem(rng, shape, memory, composition, seen, len(node_of_row))
    problem.run(problem.attention())
    problem.check()


def test_lse_may_be_left_out(device: torch.device) -> None:
    rng = numpy.random.default_rng(0)
    problem = tree_problem(rng, Shape(2, 4, 64, torch.bfloat16, 16, 37), device, depth=3)
    attention = problem.attention()
    problem.run(attention)
    problem.check()
    out = torch.full_like(problem.out, torch.nan)
    attention.run(problem.q, problem.memory.kv, out=out)
    assert same_bits(out, problem.out)


@pytest.mark.parametrize("num_ctas", [None, 1, 37])
def test_one_object_serves_any_number_of_levels(device: torch.device, num_ctas: int | None) -> None:
    """Nothing of a plan is left in the next one."""
    shape = Shape(2, 3, 64, torch.bfloat16, 16, num_ctas)
    attention = make_attention(shape, device, max_rows=MAX_ROWS, max_batch=1024, max_levels=MAX_LEVELS)
    for seed, depth in enumerate([4, 0, 6, 1, 0, 7, 2, 5]):
        rng = numpy.random.default_rng(seed)
        for problem in (tree_problem(rng, shape, device, depth), cascade_problem(rng, shape, device, 1 + seed % 3)):
            problem.run(attention)
            problem.check()


def test_rows_that_see_nothing_are_zero(device: torch.device) -> None:
    """A row in a level has a result, even if all that it sees is empty; a row in no level has none."""
    rng = numpy.random.default_rng(0)
    shape = Shape(2, 4, 64, torch.bfloat16, 16, None)
    memory = make_memory(rng, shape, device, [0, 0, 40])
    composition = Composition.tree([-1, 0, 0], memory.table(rng, [0, 1, 2]), [1, 2, -1, 0])
    nothing = memory.slots[0]
    seen = [Seen([0], nothing, nothing), Seen([1], memory.slots[2], nothing), Seen([3], nothing, nothing)]
    problem = make_problem(rng, shape, memory, composition, seen, 4)
    problem.run(problem.attention())
    problem.check()
    assert (problem.out[[0, 3]] == 0).all()
    assert (problem.lse[[0, 3]] == -torch.inf).all()


def test_rows_that_no_level_has(device: torch.device) -> None:
    rng = numpy.random.default_rng(0)
    shape = Shape(2, 4, 64, torch.bfloat16, 16, None)
    memory = make_memory(rng, shape, device, [30, 20])
    table = memory.table(rng, [0, 1])
    unseen = Composition.tree([-1, 0], table, [-1, -1, -1])
    for composition in (unseen, Composition(unseen.levels * 3)):
        problem = make_problem(rng, shape, memory, composition, [], 3)
        problem.run(problem.attention())
        assert problem.out.isnan().all()
        assert problem.lse.isnan().all()


def test_refuses_more_levels_than_max_levels(device: torch.device) -> None:
    rng = numpy.random.default_rng(0)
    problem = tree_problem(rng, Shape(2, 4, 64, torch.bfloat16, 16, None), device, depth=2)
    attention = problem.attention(max_levels=2)
    with pytest.raises(ValueError, match=r"^len\(composition\.levels\) is 3, must be "):
        attention.plan(problem.composition)
    attention.plan(Composition(problem.composition.levels[:2]))


def test_a_row_list_needs_two_levels(device: torch.device) -> None:
    problem = tree_problem(numpy.random.default_rng(0), Shape(2, 4, 64, torch.bfloat16, 16, None), device, depth=1)
    attention = problem.attention(max_levels=1)
    with pytest.raises(ValueError, match=r"^rows is a row list, must be None for an Attention of max_levels = 1"):
        attention.plan(problem.composition.levels[0])


def test_one_level_is_the_default(device: torch.device) -> None:
    problem = tree_problem(numpy.random.default_rng(0), Shape(2, 4, 64, torch.bfloat16, 16, None), device, depth=1)
    attention = Attention(8, 2, 64, device=device, max_rows=MAX_ROWS, max_batch=100)
    with pytest.raises(ValueError, match=r"^len\(composition\.levels\) is 2, must be "):
        attention.plan(problem.composition)


@pytest.mark.parametrize("max_levels", [0, -1, MAX_LEVELS + 1])
def test_refuses_max_levels(device: torch.device, max_levels: int) -> None:
    with pytest.raises(ValueError, match=rf"^max_levels is {max_levels}, must be "):
        make_attention(Shape(2, 4, 64, torch.bfloat16, 16, None), device, max_rows=8, max_batch=8, max_levels=max_levels)


@pytest.mark.parametrize("seed", range(60))
def test_row_list_equals_the_plain_view(device: torch.device, seed: int) -> None:
    """Rows of Q in any places, some between them in no request: the same bits as side by side."""
    case = case_tensors.build(cases.random_spec(seed, device.type), device)
    attention = case.attention(max_levels=2)
    attention.plan(case.view)
    case.run(attention, out=case.out, lse=case.lse)
    case_tensors.check(case, case.out, case.lse)

    rows = numpy.random.default_rng(seed).permutation(attention.max_rows)[: case.rows]
    rows = torch.from_numpy(rows).to(device, torch.int32)
    view = BSRView(case.view.qo_indptr, case.view.table, case.view.causal, case.view.window_left, rows)
    place = rows.long()
    q = torch.full((attention.max_rows, *case.q.shape[1:]), torch.nan, dtype=case.q.dtype, device=device)
    q[place] = case.q[: case.rows]
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=device)
    attention.plan(Composition((view,)) if seed % 2 else view)
    attention.run(q, case.kv, out=out, lse=lse, sm_scale=case.spec.sm_scale, logits_soft_cap=case.spec.logits_soft_cap)
    assert same_bits(out[place], case.out[: case.rows])
    assert same_bits(lse[place], case.lse[: case.rows])
    left = torch.ones(len(q), dtype=torch.bool, device=device)
    left[place] = False
    assert out[left].isnan().all()
    assert lse[left].isnan().all()


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
    without_requests = BSRView(torch.zeros(1, dtype=torch.int32, device=device), problem.memory.table(rng, []))
    for empty in (without_rows, without_requests):
        for at in range(len(levels) + 1):
            problem.run(attention, Composition((*levels[:at], empty, *levels[at:])))
            problem.check()
            if len(levels) > 1:     # one level may take a shorter way, and round once less
                assert same_bits(problem.out, first)
                assert same_bits(problem.lse, first_lse)


@pytest.mark.parametrize("seed", range(20))
def test_order_of_levels_does_not_matter(device: torch.device, seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    problem = tree_problem(rng, random_shape(rng, device), device, depth=1 + seed % 6)
    attention = problem.attention()
    for _ in range(3):
        problem.run(attention, Composition(tuple(problem.composition.levels[i] for i in rng.permutation(len(problem.composition.levels)))))
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
        if depth == 0 and rng.random() < 0.5:     # a plain view, causal
            qo_lens = rng.integers(0, 9, len(parents)).tolist()
            return BSRView(torch.tensor(prefix_sum(qo_lens), dtype=torch.int32, device=device), memory.table(rng, segments))
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


@pytest.mark.gpu
def test_plan_and_run_never_synchronise() -> None:
    rng, device = numpy.random.default_rng(0), torch.device("cuda")
    problem = tree_problem(rng, Shape(2, 4, 64, torch.bfloat16, 16, None), device, depth=3)
    attention = problem.attention()
    problem.run(attention)
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run(attention)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    problem.check()


# Row lists that lead outside Q.

BAD_ROWS = [-1, -(2**31), 8, 2**31 - 1, 10**6]


def views_with_row(device: torch.device, row: int) -> tuple[Memory, list[Composition]]:
    """Rows of Q 0 .. 5, one of them replaced by `row`: in one level, and in each of two."""
    rng = numpy.random.default_rng(0)
    memory = make_memory(rng, Shape(2, 4, 64, torch.bfloat16, 4, None), device, [30, 9, 70])
    qo_indptr = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)

    def view(segments: list[int], rows: list[int]) -> BSRView:
        return BSRView(qo_indptr, memory.table(rng, segments), causal=False, rows=torch.tensor(rows, dtype=torch.int32, device=device))

    good, bad = [5, 1, 2, 0, 4, 3], [5, 1, 2, row, 4, 3]
    other = view([2, 2], good)
    return memory, [
        Composition((view([0, 1], bad),)),
        Composition((view([0, 1], bad), other)),
        Composition((other, view([0, 1], bad))),
        Composition((view([0, 1], bad), view([2, 2], bad))),
    ]


@pytest.mark.parametrize("row", BAD_ROWS)
def test_bad_rows_are_refused_on_a_cpu(row: int) -> None:
    device = torch.device("cpu")
    _, compositions = views_with_row(device, row)
    for composition in compositions:
        attention = Attention(8, 2, 64, device=device, max_rows=8, max_batch=8, max_levels=2)
        with pytest.raises(ValueError, match=rf"\brows\[3\] is {row}, must be "):
            attention.plan(composition)


@pytest.mark.gpu
@pytest.mark.parametrize("row", BAD_ROWS)
def test_bad_rows_are_reported_from_a_gpu(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q, O and lse lie between walls: what is written outside would show."""
    device, wall = torch.device("cuda"), 64
    memory, compositions = views_with_row(device, row)
    room = torch.ones(wall + 8 + wall, 8, 64, dtype=torch.bfloat16, device=device)
    for composition in compositions:
        out, lse = torch.full_like(room, torch.nan), torch.full(room.shape[:2], torch.nan, device=device)
        attention = Attention(8, 2, 64, device=device, max_rows=8, max_batch=8, max_levels=2)
        attention.plan(composition)
        attention.run(room[wall:-wall], memory.kv, out=out[wall:-wall], lse=lse[wall:-wall])
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match=r"\brows\b"):
            attention.raise_for_errors()
        for tensor in (out, lse):
            assert tensor[:wall].isnan().all()
            assert tensor[-wall:].isnan().all()

        _, good = views_with_row(device, 0)      # still usable; the error word is the last plan's
        attention.plan(good[0])
        attention.raise_for_errors()
    monkeypatch.setenv("ATTN_BACKEND_DEBUG", "1")
    with pytest.raises(ValueError, match=r"\brows\b"):
        Attention(8, 2, 64, device=device, max_rows=8, max_batch=8, max_levels=2).plan(compositions[0])


def test_rows_beyond_q_are_not_computed(device: torch.device) -> None:
    """Rows of a plan that q does not have, but max_rows allows."""
    memory, compositions = views_with_row(device, 7)
    heads = torch.ones(8, 8, 64, dtype=torch.bfloat16, device=device)
    for composition in compositions:
        attention = Attention(8, 2, 64, device=device, max_rows=8, max_batch=8, max_levels=2)
        attention.plan(composition)
        whole, whole_lse = torch.full_like(heads, torch.nan), torch.full((8, 8), torch.nan, device=device)
        attention.run(heads, memory.kv, out=whole, lse=whole_lse)
        out, lse = torch.full_like(heads, torch.nan), torch.full((8, 8), torch.nan, device=device)
        attention.run(heads[:4], memory.kv, out=out[:4], lse=lse[:4])
        assert out[4:].isnan().all()
        assert lse[4:].isnan().all()
        assert same_bits(out[1:4], whole[1:4])
        assert same_bits(lse[1:4], whole_lse[1:4])
        attention.raise_for_errors()


def test_row_list_that_is_too_short(device: torch.device) -> None:
    """qo_indptr ends beyond the row list: refused on a CPU, on a GPU clamped and reported."""
    memory = make_memory(numpy.random.default_rng(0), Shape(2, 4, 64, torch.bfloat16, 4, None), device, [30])
    table = memory.table(numpy.random.default_rng(0), [0])
    view = BSRView(torch.tensor([0, 6], dtype=torch.int32, device=device), table, rows=torch.arange(4, dtype=torch.int32, device=device))
    attention = Attention(8, 2, 64, device=device, max_rows=8, max_batch=8, max_levels=2)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"\brows\b"):
            attention.plan(view)
    else:
        attention.plan(view)
        attention.run(torch.ones(8, 8, 64, dtype=torch.bfloat16, device=device), memory.kv)
        with pytest.raises(ValueError, match=r"\brows\b"):
            attention.raise_for_errors()
