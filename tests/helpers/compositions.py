"""Compositions of several levels over a paged cache (random trees and cascades), and attention over all
tokens that a row sees, from its definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import attention_kernels
import cases
import numpy
import oracle
import torch
from torch import Tensor

from attn_backend import Attention, BSRView, Composition, KVCache, PageTable

MAX_ROWS = 200


@dataclass(frozen=True)
class Shape:
    """Properties shared by all levels."""

    num_kv_heads: int
    group_size: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    num_ctas: int | None
    sm_scale: float | None = None
    logits_soft_cap: float = 0.0
    seed: int = 0  # picks the kernel on a GPU
    head_dim_v: int | None = None  # None: head_dim
    v_in_k: bool = False  # V is the first columns of K, in the same memory

    @property
    def columns_of_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v


@dataclass
class Memory:
    """A paged cache that holds segments of tokens; slots in no segment are NaN."""

    k_slots: Tensor  # [slots, num_kv_heads, head_dim]
    v_slots: Tensor
    kv: KVCache
    page_size: int
    pages: list[list[int]]  # for each segment
    slots: list[Tensor]  # int64, for each segment: the slots of its tokens

    def table(self, rng: numpy.random.Generator, segments: list[int]) -> PageTable:
        """A table whose request i is the segment segments[i], in any form."""
        return random_table(
            rng,
            self.k_slots.device,
            self.page_size,
            [self.pages[s] for s in segments],
            [len(self.slots[s]) for s in segments],
        )


@dataclass
class Seen:
    """Tokens that some rows of Q see: all of `shared`; of `own` all or, if causal, the tokens up to the row's
    position and inside its window.
    """

    rows: list[int]
    shared: Tensor  # int64: slots
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
    out: Tensor  # like q, NaN
    lse: Tensor  # float32 [rows, num_qo_heads], NaN

    def attention(self, **changes: object) -> Attention:
        levels = self.composition.levels
        room = {
            "max_rows": len(self.q) + 1,
            "max_batch": sum(level.batch_size for level in levels) + 1,
            "max_levels": max(len(levels), 2),
        } | changes
        return make_attention(self.shape, self.q.device, **room)

    def run(self, attention: Attention, composition: Composition | None = None) -> None:
        attention.plan(self.composition if composition is None else composition)
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)
        shape = self.shape
        attention.run(
            self.q,
            self.memory.kv,
            out=self.out,
            lse=self.lse,
            sm_scale=shape.sm_scale,
            logits_soft_cap=shape.logits_soft_cap,
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """float64 o and lse; NaN for rows in no level."""
        o = torch.full(self.out.shape, torch.nan, dtype=torch.float64, device=self.q.device)
        lse = torch.full(self.lse.shape, torch.nan, dtype=torch.float64, device=self.q.device)

        def attend(rows: list[int], slots: Tensor, causal: bool) -> None:
            shape, memory = self.shape, self.memory
            k, v = memory.k_slots[slots], memory.v_slots[slots]
            o[rows], lse[rows] = oracle.attention(
                self.q[rows],
                k,
                v,
                sm_scale=shape.sm_scale,
                causal=causal,
                logits_soft_cap=shape.logits_soft_cap,
            )

        for seen in self.seen:
            rows, shared, own = seen.rows, seen.shared, seen.own
            if seen.window_left >= 0:
                for j, row in enumerate(rows):
                    position = len(own) - len(rows) + j
                    begin, end = (
                        max(position - seen.window_left, 0),
                        max(position + 1, 0) if seen.causal else len(own),
                    )
                    attend([row], torch.cat([shared, own[begin:end]]), False)
            elif seen.causal:
                # Rows before their own tokens see only the shared ones; the others are at the end of all
                # tokens.
                first = max(len(rows) - len(own), 0)
                attend(rows[:first], shared, False)
                attend(rows[first:], torch.cat([shared, own]), True)
            else:
                attend(rows, torch.cat([shared, own]), False)
        return o, lse

    def check(self) -> None:
        """Compares `out` and `lse` with the oracle; rows in no level must still be NaN."""
        rows = sorted({row for seen in self.seen for row in seen.rows})
        o_ref, lse_ref = self.expected()
        check_states(self.shape, rows, self.out, self.lse, o_ref[rows], lse_ref[rows])


def check_states(
    shape: Shape,
    rows: list[int],
    out: Tensor,
    lse: Tensor,
    o_ref: Tensor,
    lse_ref: Tensor,
    tolerances: tuple[float, float] | None = None,
) -> None:
    """Compares the rows `rows` of `out` and `lse` with float64 states of these rows; the other rows must be
    NaN. tolerances: of out and lse; None: the dtype's.
    """
    tolerance, lse_tolerance = tolerances or (cases.TOLERANCE[shape.dtype], cases.LSE_TOLERANCE)
    absent = torch.ones(len(out), dtype=torch.bool, device=out.device)
    absent[rows] = False
    assert out[absent].isnan().all(), f"unused rows were written\n{shape}"
    assert lse[absent].isnan().all(), f"lse of unused rows was written\n{shape}"
    error = out[rows].double() - o_ref
    assert not error.isnan().any(), (
        f"{int(error.isnan().any(-1).sum())} rows of {error.shape[:2].numel()} hold NaN\n{shape}"
    )
    assert error.norm() <= tolerance * o_ref.norm(), (
        f"||o - ref|| / ||ref|| = {float(error.norm() / o_ref.norm()):.2e} > {tolerance}\n{shape}"
    )
    assert (error.norm(dim=-1) <= 10 * tolerance * o_ref.norm(dim=-1)).all(), (
        f"one row is more than {10 * tolerance} off\n{shape}"
    )
    infinite = lse_ref == -torch.inf
    assert torch.equal(lse[rows] == -torch.inf, infinite), (
        f"lse is -inf in other rows than it should be\n{shape}"
    )
    lse_error = (lse[rows].double() - lse_ref).masked_fill(infinite, 0).abs()
    assert (lse_error <= lse_tolerance).all(), (
        f"lse is {float(lse_error.nan_to_num(torch.inf).max()):.2e} off\n{shape}"
    )


def make_attention(shape: Shape, device: torch.device, **room: object) -> Attention:
    heads = shape.num_kv_heads * shape.group_size
    options = {
        "dtype": shape.dtype,
        "num_ctas": shape.num_ctas,
        "kernel": attention_kernels.kernel_of(device, shape.seed),
    } | room
    return Attention(
        heads, shape.num_kv_heads, shape.head_dim, device=device, head_dim_v=shape.head_dim_v, **options
    )


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
        seed=int(rng.integers(2**31)) if device.type == "cuda" else 0,
    )


def make_memory(rng: numpy.random.Generator, shape: Shape, device: torch.device, lens: list[int]) -> Memory:
    """Segments of the given lengths, their pages in any order over the cache."""
    counts = [-(-n // shape.page_size) for n in lens]
    free = rng.permutation(sum(counts) + 3).tolist()
    return memory_of_pages(
        rng, shape, device, [[free.pop() for _ in range(count)] for count in counts], lens, sum(counts) + 3
    )


def memory_of_pages(
    rng: numpy.random.Generator,
    shape: Shape,
    device: torch.device,
    pages: list[list[int]],
    lens: list[int],
    num_pages: int,
    copies: Sequence[tuple[int, int, int]] = (),
) -> Memory:
    """Segments with the given pages, possibly shared.

    `copies`: page, a page that begins with a copy of it, copied tokens (all are used, or none is copied).
    """
    size = shape.page_size
    slots = [
        (torch.tensor(own, dtype=torch.int64)[:, None] * size + torch.arange(size)).flatten()[:n].to(device)
        for own, n in zip(pages, lens, strict=True)
    ]
    used = torch.cat(slots).unique() if slots else torch.zeros(0, dtype=torch.int64, device=device)
    columns = max(shape.head_dim, shape.columns_of_v)
    cache = torch.full(
        (num_pages, 2, size, shape.num_kv_heads, columns), torch.nan, dtype=shape.dtype, device=device
    )
    cache[used // size, :, used % size] = noise(rng, device, len(used), 2, shape.num_kv_heads, columns).to(
        shape.dtype
    )
    for source, target, tokens in copies:
        if not cache[source, :, :tokens].isnan().any():
            cache[target, :, :tokens] = cache[source, :, :tokens]
    k, v = cache.unbind(1)
    if shape.v_in_k:
        kv = KVCache.from_pair(k.contiguous(), v)
        kv = KVCache(kv.k, kv.k[..., : shape.columns_of_v])
        return Memory(k.flatten(0, 1), kv.v.flatten(0, 1), kv, size, pages, slots)
    if shape.head_dim_v is not None:
        k, v = k[..., : shape.head_dim], v[..., : shape.head_dim_v]
        kv = KVCache.from_pair(k.contiguous(), v.contiguous())
    elif rng.random() < 0.5:
        kv = KVCache.from_tensor(cache)
    elif rng.random() < 0.5:
        kv = KVCache.from_pair(k.contiguous(), v.contiguous())
    else:
        kv = KVCache.from_pair(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), "HND")
    return Memory(k.flatten(0, 1), v.flatten(0, 1), kv, size, pages, slots)


def random_table(
    rng: numpy.random.Generator,
    device: torch.device,
    page_size: int,
    pages: list[list[int]],
    lens: list[int],
    form: str | None = None,
    unused: int = -(2**31),
) -> PageTable:
    """The table of requests with these pages and lengths, in a random or the given form; unused entries are
    `unused`, which is no page.
    """
    size, dtype = page_size, [torch.int32, torch.int64][rng.integers(2)]
    form = str(rng.choice(["csr", "block_table", "token_slots"])) if form is None else form

    def index(values: list[int], as_dtype: torch.dtype = dtype) -> Tensor:
        return torch.tensor(values, dtype=as_dtype, device=device)

    if form == "csr":
        indices = index([page for own in pages for page in own] + [-1, 10**6], torch.int32)
        return PageTable.csr(
            index(prefix_sum([len(own) for own in pages])),
            indices,
            index([(n - 1) % size + 1 for n in lens]),
            size,
        )
    per_entry = size if form == "token_slots" else 1
    width = max((len(own) for own in pages), default=0) + int(rng.integers(3))
    entries = numpy.full((len(pages) + 2, width * per_entry), unused, dtype=numpy.int32)
    for row, own in enumerate(pages):
        entries[row, : len(own) * per_entry : per_entry] = [page * per_entry for page in own]
    matrix = torch.from_numpy(entries).to(device)
    if form == "block_table":
        return PageTable.block_table(matrix[: len(pages)], index(lens), size)
    order = rng.permutation(len(pages) + 2)
    rows = numpy.argsort(order)[: len(pages)].tolist()
    return PageTable.token_slots(matrix[torch.from_numpy(order).to(device)], index(rows), index(lens), size)


def noise(rng: numpy.random.Generator, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator(device).manual_seed(int(rng.integers(2**31))), device=device
    )


def make_problem(
    rng: numpy.random.Generator,
    shape: Shape,
    memory: Memory,
    composition: Composition,
    seen: list[Seen],
    rows: int,
) -> Problem:
    device, heads = memory.k_slots.device, shape.num_kv_heads * shape.group_size
    q = noise(rng, device, rows, heads, shape.head_dim).to(shape.dtype)
    absent = torch.ones(rows, dtype=torch.bool, device=device)
    absent[[row for s in seen for row in s.rows]] = False
    q[absent] = torch.nan
    out = torch.full((rows, heads, shape.columns_of_v), torch.nan, dtype=shape.dtype, device=device)
    return Problem(
        shape, q, memory, composition, seen, out, torch.full((rows, heads), torch.nan, device=device)
    )


def random_forest(rng: numpy.random.Generator, depth: int) -> list[int]:
    """The parent of each node of a random forest of this depth, in any order with parents first."""
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
    """The node of each row: requests of 1 ..

    40 rows at random nodes, the rows of all requests mixed; -1 for some.
    """
    deepest = max(range(len(parents)), key=lambda node: len(path_to(parents, node)))
    nodes = [deepest]
    for _ in range(int(rng.integers(1, 25))):
        node = -1 if rng.random() < 0.08 else int(rng.integers(len(parents)))
        nodes += [node] * int(rng.integers(1, 41) if rng.random() < 0.3 else rng.integers(1, 4))
    nodes = nodes[:MAX_ROWS]
    return rng.permutation(nodes).tolist() if rng.random() < 0.8 else nodes


def tree_problem(
    rng: numpy.random.Generator, shape: Shape, device: torch.device, depth: int | None = None
) -> Problem:
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


def cascade_problem(
    rng: numpy.random.Generator, shape: Shape, device: torch.device, num_levels: int, window_left: int = -1
) -> Problem:
    """Requests in groups with a common prefix, the groups in larger groups."""
    causal = bool(rng.random() < 0.8)
    paths: list[tuple[int, ...]] = [()]  # for each request: its segment in each level
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
    else:  # a window inside the last level's KV
        shared = [
            BSRView(qo_indptr, table, causal=False)
            for qo_indptr, table in zip(qo_indptrs[:-1], tables[:-1], strict=True)
        ]
        composition = Composition(
            (*shared, BSRView(qo_indptrs[-1], tables[-1], causal=causal, window_left=window_left))
        )

    seen, begin = [], 0
    for path, qo_len in zip(paths, qo_lens, strict=True):
        shared_slots = [memory.slots[segment] for segment in path[:-1]] or [memory.slots[0][:0]]
        seen.append(
            Seen(
                list(range(begin, begin + qo_len)),
                torch.cat(shared_slots),
                memory.slots[path[-1]],
                causal,
                window_left,
            )
        )
        begin += qo_len
    return make_problem(rng, shape, memory, composition, seen, begin)


def views_with_row(device: torch.device, row: int) -> tuple[Memory, list[Composition]]:
    """Rows 0 .. 5 of Q, one of them replaced by `row`: in one level, and in each of two."""
    rng = numpy.random.default_rng(0)
    memory = make_memory(rng, Shape(2, 4, 64, torch.bfloat16, 4, None), device, [30, 9, 70])
    qo_indptr = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)

    def view(segments: list[int], rows: list[int]) -> BSRView:
        return BSRView(
            qo_indptr,
            memory.table(rng, segments),
            causal=False,
            rows=torch.tensor(rows, dtype=torch.int32, device=device),
        )

    good, bad = [5, 1, 2, 0, 4, 3], [5, 1, 2, row, 4, 3]
    other = view([2, 2], good)
    return memory, [
        Composition((view([0, 1], bad),)),
        Composition((view([0, 1], bad), other)),
        Composition((other, view([0, 1], bad))),
        Composition((view([0, 1], bad), view([2, 2], bad))),
    ]


def same_bits(a: Tensor, b: Tensor) -> bool:
    as_int = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(as_int), b.contiguous().view(as_int))
