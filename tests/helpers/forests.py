"""Random prefix forests as engines' page tables: batches whose requests share leading pages, and the radix
tree of such a batch from its definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import oracle
import torch
from compositions import (
    Memory,
    Shape,
    check_states,
    make_attention,
    memory_of_pages,
    noise,
    prefix_sum,
    random_shape,
    random_table,
    skewed,
)
from torch import Tensor

from attn_backend import Attention, BSRView

NULL_PAGE = 0  # page id that engines put into padding rows of the table


@dataclass(frozen=True)
class Batch:
    """Requests, without K and V."""

    page_size: int
    qo_lens: list[int]
    kv_lens: list[int]
    pages: list[list[int]]  # for each request
    num_pages: int
    causal: bool = True
    window_left: int = -1
    # copy-on-write: a page, a page that begins with the same tokens, and their number
    copies: tuple[tuple[int, int, int], ...] = ()
    is_tree: bool = True  # False: two requests may share a page after a page that differs

    @property
    def rows(self) -> int:
        return sum(self.qo_lens)

    def select(self, requests: list[int]) -> Batch:
        """Some of the requests, in this order."""
        chosen = {
            name: [getattr(self, name)[i] for i in requests] for name in ("qo_lens", "kv_lens", "pages")
        }
        return replace(self, **chosen)

    def rows_of(self, requests: list[int]) -> list[int]:
        """Rows of Q of some of the requests, in this order."""
        begin = prefix_sum(self.qo_lens)
        return [row for i in requests for row in range(begin[i], begin[i + 1])]

    def view(self, rng: numpy.random.Generator, device: torch.device, form: str | None = None) -> BSRView:
        """The batch as an engine's tensors, in any form; unused entries are no page, or the null page."""
        unused = NULL_PAGE if rng.random() < 0.3 else -(2**31)
        table = random_table(rng, device, self.page_size, self.pages, self.kv_lens, form, unused)
        dtype = [torch.int32, torch.int64][rng.integers(2)]
        return BSRView(
            torch.tensor(prefix_sum(self.qo_lens), dtype=dtype, device=device),
            table,
            self.causal,
            self.window_left,
        )


@dataclass
class Problem:
    """A batch with a cache, which holds NaN outside the requests' tokens."""

    shape: Shape
    batch: Batch
    memory: Memory
    q: Tensor  # [rows + padding, num_qo_heads, head_dim], NaN after the batch's rows
    out: Tensor  # like q, NaN
    lse: Tensor  # float32 [rows + padding, num_qo_heads], NaN

    def attention(self, **changes: object) -> Attention:
        room = {"max_rows": len(self.q) + 1, "max_batch": len(self.batch.qo_lens) + 1} | changes
        return make_attention(self.shape, self.q.device, **room)

    def run(self, attention: Attention, view: BSRView, **options: object) -> tuple[Tensor, Tensor]:
        """Plans and runs into `out` and `lse`; returns copies of them. options: of Attention.run."""
        attention.plan(view)
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
            **options,
        )  # type: ignore[arg-type]
        return self.out.clone(), self.lse.clone()

    def select(self, requests: list[int]) -> Problem:
        """Some of the requests, in this order, over the same cache."""
        rows, memory = self.batch.rows_of(requests), self.memory
        chosen = replace(
            memory, pages=[memory.pages[i] for i in requests], slots=[memory.slots[i] for i in requests]
        )
        return replace(
            self,
            batch=self.batch.select(requests),
            memory=chosen,
            q=self.q[rows],
            out=self.out[rows],
            lse=self.lse[rows],
        )

    def expected(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """float64 o and lse of the batch's rows. changes: to the oracle's arguments."""
        shape, batch, memory = self.shape, self.batch, self.memory
        return oracle.paged_attention(
            self.q[: batch.rows],
            memory.k_slots,
            memory.v_slots,
            batch.qo_lens,
            memory.slots,
            sm_scale=shape.sm_scale,
            causal=batch.causal,
            window_left=batch.window_left,
            **{"logits_soft_cap": shape.logits_soft_cap, **changes},
        )

    def check(self, expected: tuple[Tensor, Tensor] | None = None) -> None:
        """Compares `out` and `lse` with the oracle; rows after the batch must still be NaN."""
        check_states(
            self.shape,
            list(range(self.batch.rows)),
            self.out,
            self.lse,
            *(self.expected() if expected is None else expected),
        )


def random_problem(
    rng: numpy.random.Generator, device: torch.device, shape: Shape | None = None, **kinds: object
) -> Problem:
    shape = random_shape(rng, device) if shape is None else shape
    elements = shape.num_kv_heads * shape.head_dim
    # Elements of K and V that the oracle reads, and a fraction of its multiplications.
    budget = [4e6, 4e7][rng.random() < 0.04] if device.type == "cpu" else [3e7, 2e8][rng.random() < 0.06]
    batch = random_batch(
        rng,
        shape.page_size,
        kv_cost=elements,
        pair_cost=shape.group_size * elements / 30,
        budget=budget,
        **kinds,
    )
    return make_problem(rng, shape, batch, device)


def make_problem(rng: numpy.random.Generator, shape: Shape, batch: Batch, device: torch.device) -> Problem:
    memory = memory_of_pages(rng, shape, device, batch.pages, batch.kv_lens, batch.num_pages, batch.copies)
    q = noise(
        rng,
        device,
        batch.rows + int(rng.choice([0, 0, 1, 9])),
        shape.num_kv_heads * shape.group_size,
        shape.head_dim,
    ).to(shape.dtype)
    q[batch.rows :] = torch.nan
    out = torch.full((*q.shape[:2], shape.columns_of_v), torch.nan, dtype=shape.dtype, device=device)
    return Problem(shape, batch, memory, q, out, torch.full(q.shape[:2], torch.nan, device=device))


def random_batch(
    rng: numpy.random.Generator,
    page_size: int,
    *,
    kv_cost: float = 1.0,
    pair_cost: float = 0.0,
    budget: float = 1e6,
    depth: int | None = None,
    max_requests: int | None = None,
    max_rows: int = 600,
    style: str | None = None,
) -> Batch:
    """Requests at the nodes of a random forest, in any order.

    Args:
        kv_cost, pair_cost: of a token, and of a (row, token) pair: together at most `budget`.
        depth: most shared prefixes above a request.
        style: "decode", "mixed" or "chunks".
    """
    max_requests = (
        int(rng.choice([1, 2, 5, 12, 24, 64, 130], p=[0.04, 0.1, 0.2, 0.26, 0.2, 0.17, 0.03]))
        if max_requests is None
        else max_requests
    )
    depth = int(rng.choice([0, 1, 1, 2, 2, 3, 4, 5, 6, 9])) if depth is None else depth
    parents = random_tree(rng, depth, max_requests)
    node_of = random_members(rng, parents, max_requests)
    style = str(rng.choice(["decode", "mixed", "chunks"], p=[0.4, 0.4, 0.2])) if style is None else style
    qo_lens = [random_rows(rng, style) for _ in node_of]
    while sum(qo_lens) > max(max_rows, len(qo_lens)):
        qo_lens = [(qo_len + 1) // 2 for qo_len in qo_lens]

    longest = int(rng.choice([40, 600, 4000, 16000], p=[0.2, 0.4, 0.2, 0.2]))
    lens = [skewed(rng, longest) for _ in parents]
    own_lens = [skewed(rng, 300, zero=0.1) for _ in node_of]
    own_lens = [own + qo_len * (rng.random() < 0.7) for own, qo_len in zip(own_lens, qo_lens, strict=True)]
    while True:
        batch = place_requests(page_size, parents, lens, node_of, qo_lens, own_lens)
        cost = sum(
            kv_len * (kv_cost + pair_cost * qo_len)
            for kv_len, qo_len in zip(batch.kv_lens, batch.qo_lens, strict=True)
        )
        if cost <= budget or max(lens + own_lens) <= 1:
            break
        lens, own_lens = [(n + 1) // 2 for n in lens], [(n + 1) // 2 if n else 0 for n in own_lens]

    kv_longest = max(batch.kv_lens)
    window_left = int(rng.integers(0, 2 * kv_longest + 1)) if rng.random() < 0.25 else -1
    batch = replace(batch, causal=bool(rng.random() < 0.75), window_left=window_left)
    if rng.random() < 0.3:
        batch = with_duplicates(rng, batch)
    if rng.random() < 0.15:
        batch = with_replaced_pages(rng, batch)
    if rng.random() < 0.25:
        batch = with_padding(rng, batch, int(rng.integers(1, 6)))
    batch = batch.select(rng.permutation(len(batch.qo_lens)).tolist())
    return renumbered(rng, batch) if rng.random() < 0.8 else batch


def random_tree(rng: numpy.random.Generator, depth: int, max_leaves: int) -> list[int]:
    """The parent of each node, parents first; -1: a root.

    One or two nodes of every depth have 1 .. 64 children.
    """
    if depth == 0:
        return []
    level = list(range(min(int(rng.integers(1, 4)), max_leaves)))
    parents, leaves = [-1] * len(level), len(level)
    for _ in range(depth - 1):
        grown = [int(node) for node in rng.permutation(level)[: rng.integers(1, 3)]]
        children = []
        for node in grown:
            count = min(skewed(rng, 64), max((max_leaves - leaves) // 2, 0) + 1)
            leaves += count - 1
            children += [node] * count
        level = list(range(len(parents), len(parents) + len(children)))
        parents += children
    return parents


def random_members(rng: numpy.random.Generator, parents: list[int], max_requests: int) -> list[int]:
    """The node of each request; -1: it shares nothing. Every leaf has at least one."""
    leaves = sorted(set(range(len(parents))) - set(parents))
    members = list(leaves)
    for leaf in rng.permutation(leaves)[:3].tolist():
        members += [leaf] * (skewed(rng, 64) - 1)
    members += (
        rng.integers(-1, max(len(parents), 1), int(rng.integers(0, max_requests + 1))).tolist()
        if parents
        else [-1] * skewed(rng, max_requests)
    )
    return members[: max(max_requests, len(leaves))]


def random_rows(rng: numpy.random.Generator, style: str) -> int:
    """Query length of one request."""
    if style == "decode" or (style == "mixed" and rng.random() < 0.7):
        return 1
    if rng.random() < 0.05:
        return 0
    return skewed(rng, 400) if rng.random() < 0.1 else int(rng.integers(1, 41))


def place_requests(
    page_size: int,
    parents: list[int],
    lens: list[int],
    node_of: list[int],
    qo_lens: list[int],
    own_lens: list[int],
) -> Batch:
    """All requests below a node share its full pages. Each longer one copies the node's last, partial
    page.
    """
    num_pages = NULL_PAGE + 1
    ends: list[int] = []
    pages: list[list[int]] = []
    copies: list[tuple[int, int, int]] = []
    source: dict[int, int] = {}  # for each node: the first page that holds its end
    for i, node in enumerate([*parents, *node_of]):
        begin, inherited = (ends[node], pages[node]) if node >= 0 else (0, [])
        is_request = i >= len(parents)
        end = begin + (own_lens[i - len(parents)] if is_request else lens[i])
        count = -(-end // page_size) if is_request else end // page_size
        own = inherited + list(range(num_pages, num_pages + count - len(inherited)))
        tail = begin % page_size
        if tail and len(own) > len(inherited):
            first = source.setdefault(node, num_pages)
            copies += [(first, num_pages, tail)] if first != num_pages else []
        num_pages += count - len(inherited)
        ends.append(end)
        pages.append(own)
    return Batch(
        page_size, qo_lens, ends[len(parents) :], pages[len(parents) :], num_pages, copies=tuple(copies)
    )


def with_duplicates(rng: numpy.random.Generator, batch: Batch) -> Batch:
    """Some requests have all the pages of another one, and the same length."""
    kv_lens, pages = list(batch.kv_lens), list(batch.pages)
    for _ in range(int(rng.integers(1, 4))):
        i, j = rng.integers(len(pages), size=2).tolist()
        kv_lens[j], pages[j] = kv_lens[i], pages[i]
    return replace(batch, kv_lens=kv_lens, pages=pages)


def with_replaced_pages(rng: numpy.random.Generator, batch: Batch) -> Batch:
    """Some requests have a separate page with the same content before pages that they share."""
    pages, copies, num_pages = [list(own) for own in batch.pages], list(batch.copies), batch.num_pages
    for i in rng.integers(len(pages), size=int(rng.integers(1, 4))).tolist():
        if pages[i]:
            at = int(rng.integers(len(pages[i])))
            copies.append(
                (pages[i][at], num_pages, min(batch.page_size, batch.kv_lens[i] - at * batch.page_size))
            )
            pages[i][at] = num_pages
            num_pages += 1
    return replace(batch, pages=pages, copies=tuple(copies), num_pages=num_pages, is_tree=False)


def with_padding(rng: numpy.random.Generator, batch: Batch, count: int) -> Batch:
    """Requests that fill up a batch: no token or the first token of the null page, one row or none."""
    kv_lens = rng.integers(0, 2, count).tolist()
    pages = [[NULL_PAGE] * kv_len for kv_len in kv_lens]
    return replace(
        batch,
        qo_lens=batch.qo_lens + rng.integers(0, 2, count).tolist(),
        kv_lens=batch.kv_lens + kv_lens,
        pages=batch.pages + pages,
    )


def renumbered(rng: numpy.random.Generator, batch: Batch) -> Batch:
    """Moves pages anywhere in the cache; the null page stays."""
    place = [NULL_PAGE, *(1 + rng.permutation(batch.num_pages - 1)).tolist()]
    copies = tuple((place[source], place[target], tokens) for source, target, tokens in batch.copies)
    return replace(batch, pages=[[place[page] for page in own] for own in batch.pages], copies=copies)


@contextmanager
def naming(seed: int) -> Iterator[None]:
    """Names the failed forest among a test's many."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


@dataclass(frozen=True)
class Node:
    """All its members share the first `end_page` pages, and no more."""

    members: tuple[int, ...]
    end_page: int
    parent: int  # -1: none


def shareable_pages(batch: Batch, request: int, row_limit: float = math.inf) -> int:
    """Leading pages of a request whose tokens all its rows see; none for requests with at least `row_limit`
    rows.
    """
    qo_len, kv_len = batch.qo_lens[request], batch.kv_lens[request]
    if qo_len == 0 or qo_len >= row_limit:
        return 0
    first, last = kv_len - qo_len, kv_len - 1  # positions of its rows
    if batch.window_left >= 0 and last - batch.window_left > 0:
        return 0
    return max(min(kv_len, first + 1 if batch.causal else kv_len), 0) // batch.page_size


def radix_tree(batch: Batch, row_limit: float = math.inf) -> list[Node]:
    """All prefixes that at least two requests share, parents first."""
    shareable = [shareable_pages(batch, i, row_limit) for i in range(len(batch.pages))]
    pages = [
        numpy.array(own[:count], dtype=numpy.int64) for own, count in zip(batch.pages, shareable, strict=True)
    ]
    nodes: list[Node] = []
    left = [(tuple(range(len(pages))), 0, -1)]  # requests that share this number of pages, and their node
    while left:
        members, begin, parent = left.pop()
        parts: dict[int, list[int]] = {}
        for i in members:
            if shareable[i] > begin:
                parts.setdefault(int(pages[i][begin]), []).append(i)
        for part in parts.values():
            if len(part) > 1:
                length = min(shareable[i] for i in part)
                differs = (
                    numpy.stack([pages[i][begin:length] for i in part]) != pages[part[0]][begin:length]
                ).any(axis=0)
                end = begin + int(differs.argmax()) if differs.any() else length
                left.append((tuple(part), end, len(nodes)))
                nodes.append(Node(tuple(part), end, parent))
    return nodes


def with_lengths(batch: Batch, qo_lens: list[int], kv_lens: list[int]) -> Batch:
    """The batch with every length reduced to one of these, which include 0, so that oracles that compile for
    every shape need few shapes.
    """

    def cut(length: int, allowed: list[int]) -> int:
        return max(n for n in allowed if n <= length)

    cut_lens = [cut(kv_len, kv_lens) for kv_len in batch.kv_lens]
    pages = [own[: -(-kv_len // batch.page_size)] for own, kv_len in zip(batch.pages, cut_lens, strict=True)]
    return replace(
        batch, qo_lens=[cut(qo_len, qo_lens) for qo_len in batch.qo_lens], kv_lens=cut_lens, pages=pages
    )
