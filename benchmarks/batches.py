"""The timed launches: batches of random tensors, this package over them, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_backend import Attention, BSRView, Composition, KVCache, PageTable
from benchmarks.cases import Case, SharedCase

LARGEST_ERROR = 1e-2  # for bf16 compared with float64; a larger error means a wrong result


@dataclass(frozen=True, eq=False)
class Batch:
    """Random tensors of a case.

    q: bf16 [rows, num_qo_heads, head_dim]; cache: bf16 [pages, 2, page_size, num_kv_heads, head_dim], ragged
    [2, tokens, num_kv_heads, head_dim]; qo_indptr: int32 [batch + 1]; kv_lens: int32 [batch], tokens;
    block_table: int32 [batch, pages of the longest request], ragged [batch, 0].
    """

    case: Case
    q: torch.Tensor
    cache: torch.Tensor
    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def make(cls, case: Case, seed: int = 0, device: str = "cuda") -> Batch:
        generator = torch.Generator(device).manual_seed(seed)
        if case.ragged:
            shape = (2, sum(case.kv_lens), case.num_kv_heads, case.head_dim)
            tokens = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
            return cls._of_table(
                case, tokens, torch.zeros(len(case.kv_lens), 0, dtype=torch.int32, device=device), generator
            )
        pages = [-(-length // case.page_size) for length in case.kv_lens]
        order = (
            torch.arange(sum(pages), device=device)
            if case.in_order
            else torch.randperm(sum(pages), device=device, generator=generator)
        )
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
        start = 0
        for row, count in enumerate(pages):
            table[row, :count] = order[start : start + count]
            start += count
        return cls._of_table(case, make_cache(case, sum(pages), generator, device), table, generator)

    @classmethod
    def _of_table(
        cls, case: Case, cache: torch.Tensor, table: torch.Tensor, generator: torch.Generator
    ) -> Batch:
        qo_indptr = torch.zeros(len(case.qo_lens) + 1, dtype=torch.int32)
        qo_indptr[1:] = torch.tensor(case.qo_lens).cumsum(0)
        device = cache.device
        q = torch.randn(
            sum(case.qo_lens),
            case.num_qo_heads,
            case.head_dim,
            dtype=torch.bfloat16,
            device=device,
            generator=generator,
        )
        return cls(
            case,
            q,
            cache,
            qo_indptr.to(device),
            torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
            table,
        )

    @property
    def kv_indptr(self) -> torch.Tensor:
        """int32 [batch + 1]: prefix sum of kv_lens."""
        return torch.cat([self.kv_lens.new_zeros(1), self.kv_lens.cumsum(0, dtype=torch.int32)])

    @property
    def kv(self) -> KVCache:
        return KVCache.from_ragged(*self.cache) if self.case.ragged else KVCache.from_tensor(self.cache)

    def tokens(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a request: [kv_len, num_kv_heads, head_dim]."""
        case, kv_len = self.case, self.case.kv_lens[request]
        if case.ragged:
            first = sum(case.kv_lens[:request])
            return self.cache[0, first : first + kv_len], self.cache[1, first : first + kv_len]
        pages = self.cache[self.block_table[request, : -(-kv_len // case.page_size)].long()]
        return pages[:, 0].flatten(0, 1)[:kv_len], pages[:, 1].flatten(0, 1)[:kv_len]

    @property
    def view(self) -> BSRView:
        """All requests, each with all of its tokens."""
        return self.view_with()

    def view_with(self, **visibility: Any) -> BSRView:
        """The same view with other arguments of BSRView."""
        visibility = ({} if self.case.causal else {"causal": False}) | visibility
        if self.case.ragged:
            return BSRView(self.qo_indptr, PageTable.ragged(self.kv_indptr), **visibility)
        return BSRView(
            self.qo_indptr,
            PageTable.block_table(self.block_table, self.kv_lens, self.case.page_size),
            **visibility,
        )


@dataclass(frozen=True, eq=False)
class SharedBatch:
    """Random tensors of a case with shared prefixes. Both orders of the requests read one cache, in which the
    pages of all nodes are shuffled.

    grouped: requests that share a prefix are consecutive, as hand-made levels and FlashInfer's cascade need
    it. interleaved: request i is request order[i] of `grouped`: a random order, as in an engine's batch.
    qo_indptrs: for each level int32 [nodes + 1], its row groups in `grouped`. page_tables: for each level
    int32 [nodes, pages of a node].
    """

    shared: SharedCase
    grouped: Batch
    interleaved: Batch
    order: torch.Tensor
    qo_indptrs: list[torch.Tensor]
    page_tables: list[torch.Tensor]

    @classmethod
    def make(cls, shared: SharedCase, cache: torch.Tensor | None = None, seed: int = 0) -> SharedBatch:
        """`cache`: as in Batch, with enough pages; created if None."""
        case, batch = shared.case, shared.batch
        generator = torch.Generator("cuda").manual_seed(seed)
        pages = [-(-tokens // case.page_size) for _, tokens in shared.levels]
        counts = [nodes * of_node for (nodes, _), of_node in zip(shared.levels, pages, strict=True)]
        if cache is None:
            cache = make_cache(case, sum(counts), generator)
        ids = (
            torch.randperm(len(cache), device="cuda", generator=generator)[: sum(counts)].int().split(counts)
        )
        tables = [of_level.view(nodes, -1) for of_level, (nodes, _) in zip(ids, shared.levels, strict=True)]
        grouped = Batch._of_table(
            case,
            cache,
            torch.cat([table.repeat_interleave(batch // len(table), 0) for table in tables], 1),
            generator,
        )
        order = torch.randperm(batch, device="cuda", generator=generator)
        # all lengths are equal
        interleaved = replace(grouped, q=grouped.q[order], block_table=grouped.block_table[order])
        indptrs = [
            torch.arange(0, batch + 1, batch // nodes, dtype=torch.int32, device="cuda")
            for nodes, _ in shared.levels
        ]
        return cls(shared, grouped, interleaved, order, indptrs, tables)

    @property
    def levels(self) -> Composition:
        """Hand-made levels over `grouped`."""
        tables = []
        for table, (nodes, tokens) in zip(self.page_tables, self.shared.levels, strict=True):
            kv_lens = torch.full((nodes,), tokens, dtype=torch.int32, device="cuda")
            tables.append(PageTable.block_table(table, kv_lens, self.grouped.case.page_size))
        return Composition.cascade(self.qo_indptrs, tables)


def make_cache(
    case: Case, pages: int, generator: torch.Generator | None = None, device: str = "cuda"
) -> torch.Tensor:
    """Random bf16 [pages, 2, page_size, num_kv_heads, head_dim]."""
    return torch.randn(
        pages,
        2,
        case.page_size,
        case.num_kv_heads,
        case.head_dim,
        dtype=torch.bfloat16,
        device=device,
        generator=generator,
    )


@dataclass(frozen=True, eq=False)
class Ours:
    """This package over a batch: `plan` plans it again, `run` runs the plan and returns the output."""

    attention: Attention
    plan: Callable[[], None]
    run: Callable[[], torch.Tensor]


def prepare(attention: Attention, batch: Batch, composition: BSRView | Composition) -> Ours:
    """Plans the composition; the result is valid until `attention` plans another."""
    kv = batch.kv
    out = torch.empty_like(batch.q)
    attention.plan(composition)
    return Ours(attention, lambda: attention.plan(composition), lambda: attention.run(batch.q, kv, out=out))


def ours(batch: Batch, **changes: Any) -> Ours:
    """One view of all requests. `changes`: arguments of Attention."""
    case = batch.case
    room: dict[str, Any] = {
        "device": batch.q.device,
        "max_rows": len(batch.q),
        "max_batch": len(case.kv_lens),
    }
    return prepare(
        Attention(case.num_qo_heads, case.num_kv_heads, case.head_dim, **(room | changes)), batch, batch.view
    )


def hand_made(batch: SharedBatch) -> Ours:
    """Hand-made levels of the shared prefixes."""
    case = batch.grouped.case
    room = batch.shared.batch
    levels = len(batch.shared.levels)
    attention = Attention(
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        max_rows=room,
        max_batch=room,
        max_levels=levels,
        cascade=False,
    )
    return prepare(attention, batch.grouped, batch.levels)


def reference(batch: Batch, request: int) -> torch.Tensor:
    """Attention of one request in float64: [qo_len, num_qo_heads, head_dim]."""
    case = batch.case
    qo_len, kv_len = case.qo_lens[request], case.kv_lens[request]
    first = int(batch.qo_indptr[request])
    k, v = (tokens.double() for tokens in batch.tokens(request))
    q = batch.q[first : first + qo_len].double()
    group = case.num_qo_heads // case.num_kv_heads
    position = torch.arange(kv_len - qo_len, kv_len, device=q.device)
    hidden = case.causal & (torch.arange(kv_len, device=q.device)[None] > position[:, None])
    out = torch.empty_like(q)
    for head in range(case.num_qo_heads):
        logits = q[:, head] @ k[:, head // group].T * case.head_dim**-0.5
        out[:, head] = logits.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, head // group]
    return out


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """‖out − expected‖ / ‖expected‖."""
    return float((out.double() - expected).norm() / expected.norm())
