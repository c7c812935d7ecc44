"""The inputs of a plan: page tables, BSR views of them, and compositions of views.

The classes check the structure of their tensors. values.py checks the values.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..validation import (
    INT32,
    INT32_OR_INT64,
    MAX_INT32,
    check_int,
    check_same_device,
    check_types,
    index_tensor,
    indptr_tensor,
    refuse,
    require,
    short_repr,
    table_tensor,
)

MAX_LEVELS = 8  # per composition


@dataclass(frozen=True, eq=False)
class PageTable:
    """The pages and the lengths of a batch's requests.

    Made by `csr`, `block_table`, `token_slots` or `ragged`, which describe the tensors.

    The tensors are kept, not copied: a plan uses their contents when it is made (on CUDA: when its kernel
    runs). Structure (dtype, dimensions, strides, device) is checked here. Values are checked by
    `Attention.plan` for CPU tensors, and clamped on the device for others.

    Raises:
        ValueError: a tensor has the wrong structure.
    """

    page_size: int
    indices: Tensor | None = None
    indptr: Tensor | None = None
    last_page_len: Tensor | None = None
    kv_lens: Tensor | None = None
    rows: Tensor | None = None
    # elements of `indices` from one page to the next: 1, or page_size if `indices` has one entry per token
    entry_step: int = 1

    __repr__ = short_repr

    @classmethod
    def csr(
        cls,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_last_page_len: Tensor | None,
        page_size: int,
        *,
        kv_lens: Tensor | None = None,
    ) -> PageTable:
        """Request i owns the pages kv_indices[kv_indptr[i]:kv_indptr[i+1]].

        Args:
            kv_indptr: int32 or int64 [batch + 1].
            kv_indices: int32 [at least kv_indptr[-1]], page ids.
            kv_last_page_len: int32 or int64 [batch], tokens in the last page, 1 .. page_size; not read for
                requests without pages. None: kv_lens is given instead.
            page_size: tokens.
            kv_lens: int32 or int64 [batch], tokens, 0 .. pages * page_size, instead of kv_last_page_len: a
                request may own more pages than it uses.
        """
        if kv_indptr is None or kv_indices is None:  # None would make it a table of another form
            refuse("kv_indptr" if kv_indptr is None else "kv_indices", None, "a tensor")
        return cls(
            page_size, indices=kv_indices, indptr=kv_indptr, last_page_len=kv_last_page_len, kv_lens=kv_lens
        )

    @classmethod
    def block_table(cls, block_table: Tensor, kv_lens: Tensor, page_size: int) -> PageTable:
        """Page j of request i is block_table[i, j].

        Args:
            block_table: int32 [batch, max_pages], page ids. Rows are contiguous; their stride may exceed
                max_pages. Unused entries are not read.
            kv_lens: int32 or int64 [batch], tokens, 0 .. max_pages * page_size.
            page_size: tokens.
        """
        return cls(page_size, indices=block_table, kv_lens=kv_lens)

    @classmethod
    def token_slots(
        cls, req_to_token: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int = 1
    ) -> PageTable:
        """Token t of request i is in slot req_to_token[rows[i], t]. A slot is page * page_size + the token's
        offset in its page.

        Args:
            req_to_token: int32 [requests, max_tokens]. Rows are contiguous. Only the slot of each page's
                first token is read: the page's other tokens must follow it.
            rows: int32 or int64 [batch], the table's row of each request.
            kv_lens: int32 or int64 [batch], tokens, 0 .. max_tokens.
            page_size: tokens.
        """
        index_tensor("rows", rows, INT32_OR_INT64, "[batch]")
        return cls(page_size, indices=req_to_token, rows=rows, kv_lens=kv_lens, entry_step=page_size)

    @classmethod
    def ragged(cls, kv_indptr: Tensor) -> PageTable:
        """For K and V in tensors [tokens, num_kv_heads, head_dim]; request i owns their rows
        kv_indptr[i]:kv_indptr[i+1].

        Args:
            kv_indptr: int32 or int64 [batch + 1]. It must not exceed the rows of K and V, which only `run`
                knows. On a CPU `run` raises an error. On a GPU the missing rows read as zeros or as the last
                row, and cost time.
        """
        indptr_tensor("kv_indptr", kv_indptr)
        return cls(1, indptr=kv_indptr)

    def in_pages_of(self, page_size: int) -> PageTable:
        """The same tokens in a cache with smaller pages: page p of 64 tokens becomes the pages 4 p .. 4 p + 3
        of 16. Uses a few torch operators on the table's device, on the current contents of its tensors.

        Raises:
            ValueError: page_size does not divide this one.
        """
        parts = self.page_size // check_int("page_size", page_size, 1)
        if parts * page_size != self.page_size:
            refuse("page_size", page_size, f"a divisor of {self.page_size}")
        if parts == 1:
            return self
        assert self.indices is not None  # ragged tensors have one token per page
        if self.rows is not None:
            return replace(
                self, page_size=page_size, entry_step=page_size
            )  # slots locate tokens without pages
        places = torch.arange(parts, dtype=torch.int32, device=self.device)
        indices = (self.indices.unsqueeze(-1) * parts + places).flatten(-2)
        if self.indptr is None:
            return replace(self, page_size=page_size, indices=indices)
        return replace(
            self,
            page_size=page_size,
            indices=indices,
            indptr=self.indptr * parts,
            last_page_len=None,
            kv_lens=self.lengths(),
        )

    def lengths(self) -> Tensor:
        """Tokens of each request: [batch]."""
        if self.indptr is None or self.kv_lens is not None:
            assert self.kv_lens is not None
            return self.kv_lens
        if self.last_page_len is None:  # ragged: pages of one token
            return self.indptr[1:] - self.indptr[:-1]
        return csr_lengths(self.indptr, self.last_page_len, self.page_size)

    @property
    def form(self) -> str:
        """'csr', 'block_table', 'token_slots' or 'ragged'."""
        if self.indptr is not None:
            return "ragged" if self.indices is None else "csr"
        return "block_table" if self.rows is None else "token_slots"

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        if self.indptr is not None:
            return self.indptr.numel() - 1
        assert self.kv_lens is not None
        return self.kv_lens.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of all tensors of the table."""
        tensor = self.indices if self.indptr is None else self.indptr
        assert tensor is not None
        return tensor.device

    def __post_init__(self) -> None:
        if type(self.page_size) is not int or not 1 <= self.page_size <= MAX_INT32:
            object.__setattr__(self, "page_size", check_int("page_size", self.page_size, 1))
        if self.entry_step not in (1, self.page_size):
            refuse("entry_step", self.entry_step, f"1 or page_size = {self.page_size}")
        form = self.form
        if form == "csr":
            _check_csr(self)
        elif form == "block_table":
            _check_block_table(self)
        elif form == "token_slots":
            _check_token_slots(self)
        else:
            indptr_tensor("kv_indptr", self.indptr)
            if self.page_size != 1:
                refuse("page_size", self.page_size, "1 for ragged K and V")


def csr_lengths(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    """Tokens of each request of a CSR page table: [batch]."""
    pages = indptr[1:] - indptr[:-1]
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0)


def _check_csr(table: PageTable) -> None:
    indptr = indptr_tensor("kv_indptr", table.indptr)
    indices = index_tensor("kv_indices", table.indices, INT32, "[pages]")
    name, lengths = (
        ("kv_last_page_len", table.last_page_len) if table.kv_lens is None else ("kv_lens", table.kv_lens)
    )
    lengths = index_tensor(name, lengths, INT32_OR_INT64, "[batch]", indptr.numel() - 1)
    if table.kv_lens is not None and table.last_page_len is not None:
        refuse("kv_last_page_len", table.last_page_len, "None where kv_lens is given")
    device = indptr.device
    check_same_device("kv_indices", indices, "kv_indptr", device)
    check_same_device(name, lengths, "kv_indptr", device)


def _check_block_table(table: PageTable) -> None:
    block_table = table_tensor("block_table", table.indices, "[batch, max_pages]")
    kv_lens = index_tensor("kv_lens", table.kv_lens, INT32_OR_INT64, "[batch]", block_table.shape[0])
    check_same_device("kv_lens", kv_lens, "block_table", block_table.device)


def _check_token_slots(table: PageTable) -> None:
    req_to_token = table_tensor("req_to_token", table.indices, "[requests, max_tokens]")
    rows = index_tensor("rows", table.rows, INT32_OR_INT64, "[batch]")
    kv_lens = index_tensor("kv_lens", table.kv_lens, INT32_OR_INT64, "[batch]", rows.shape[0])
    check_same_device("rows", rows, "req_to_token", req_to_token.device)
    check_same_device("kv_lens", kv_lens, "req_to_token", req_to_token.device)
    if req_to_token.shape[0] == 0 and rows.shape[0] > 0:
        refuse("req_to_token", req_to_token, "of at least one row")


def count_slots(slots: Tensor) -> Tensor:
    """int32 [rows]: the number of non-negative slots in each row."""
    return (table_tensor("slots", slots, "[rows, topk]") >= 0).sum(1, dtype=INT32[0])


@dataclass(frozen=True, eq=False)
class BSRView:
    """Rows of Q x pages of KV: the view's rows qo_indptr[i]:qo_indptr[i+1] attend to the pages of request i.

    Row j of a request with n rows has position kv_len - n + j. It is negative if there are more rows than KV;
    such a row sees nothing if it is causal.

    Args:
        qo_indptr: int32 or int64 [batch + 1], prefix sum of query lengths.
        table: the pages of each request.
        causal: a row sees the tokens up to its position; else all. None: False under a variant with its own
            mask, else True.
        window_left: a row sees no token more than this many tokens before its position; -1: no limit. With
            several levels, it counts tokens of the level. If `positions` are given, it counts tokens of the
            request in all levels, and must be the window of the Attention's variant.
        rows: int32 [at least qo_indptr[-1]], contiguous: row j of the view is row rows[j] of Q and O, read
            and written in place. A group's rows may belong to any request and need not be adjacent. No row
            may appear twice (not checked). None: row j itself.
        kv_offsets: int32 [batch], contiguous: tokens of its request before the first one in the table. For
            variants, which use positions in requests. Without it the first token is token 0, and a row has
            the position that `causal` uses.
        positions: int32 [rows of Q], contiguous: the position of each row of Q in its request, for variants.
        requests: int32 [rows of Q], contiguous: the request of each row of Q, for variants and for scales of
            requests. Without it, the request of the row group.
        pages_change: later runs may use other page ids in the table, for the same number of tokens. Plans
            then look for no shared prefixes. With pages of one token (a block table, neither causal nor with
            a window) there may also be fewer tokens: see `has_slots`.
        prompts: int32 [batch], contiguous: not 0 for a request whose rows are the end of a prompt. Only plans
            with `batch_invariant` read it. A row of a prompt then has the same bits, however many tokens of
            the prompt are in the cache already. None: a single row is a decode.

    Raises:
        ValueError: an argument of the wrong structure, or on another device than the table.
    """

    qo_indptr: Tensor
    table: PageTable
    causal: bool | None = None
    window_left: int = -1
    rows: Tensor | None = None
    kv_offsets: Tensor | None = None
    positions: Tensor | None = None
    requests: Tensor | None = None
    pages_change: bool = False
    prompts: Tensor | None = None

    __repr__ = short_repr

    @classmethod
    def selected(cls, slots: Tensor, kv_lens: Tensor | None = None) -> BSRView:
        """Row i of Q attends only to the tokens in the slots at the start of slots[i]: sparse attention, such
        as DeepSeek V3.2's.

        Decode and prefill are the same: each row is a separate request, so an Attention needs max_batch >=
        rows. The cache must have pages of one token (`KVCache.by_slot`).

        One plan works for all layers, though each layer selects different tokens: a plan depends only on the
        largest number of tokens. A run gets the tokens of its layer (`run(selected=...)`), writes their slots
        into this tensor and counts them. Without them it uses the tensor's contents. A row may have fewer
        tokens than were planned. A row with more attends to the first ones, and `raise_for_errors` and runs
        on a CPU report an error. `run(after_append=True)` has no effect under such a plan.

        Args:
            slots: int32 [rows, topk], in any order; a negative entry is no slot. Each run packs them: first
                the slots, then -1. A slot that occurs twice in a row counts twice. Kept, not copied.
            kv_lens: int32 or int64 [rows], the most slots of each row. None: the number of non-negative
                slots, counted now, on the device, without synchronization. A row without slots has output 0
                and lse -inf.

        Raises:
            ValueError: a tensor of the wrong dtype, shape or device.
        """
        counts = count_slots(slots) if kv_lens is None else kv_lens
        indptr = torch.arange(slots.shape[0] + 1, dtype=torch.int32, device=slots.device)
        return cls(indptr, PageTable.block_table(slots, counts, 1), causal=False, pages_change=True)

    @property
    def has_slots(self) -> bool:
        """Whether each run packs the page ids of each request, and counts the non-negative ones. True for
        pages of one token that may change, if every row of a request sees all of its tokens.
        """
        table = self.table
        is_dense = table.indices is not None and table.indptr is None and table.rows is None
        return (
            self.pages_change
            and is_dense
            and table.page_size == 1
            and self.causal is False
            and self.window_left < 0
        )

    def with_slots_counted(self) -> BSRView:
        """This view, with its slots counted again, on the device: each request has as many tokens as a run
        finds. Without slots the view itself.
        """
        if not self.has_slots or self.table.indices is None:
            return self
        return replace(
            self,
            table=PageTable.block_table(
                self.table.indices, count_slots(self.table.indices[: self.batch_size]), 1
            ),
        )

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return self.qo_indptr.numel() - 1

    @property
    def device(self) -> torch.device:
        return self.qo_indptr.device

    def __post_init__(self) -> None:
        if not isinstance(self.table, PageTable):
            refuse("table", self.table, "a PageTable")
        qo_indptr = index_tensor(
            "qo_indptr", self.qo_indptr, INT32_OR_INT64, "[batch + 1]", self.table.batch_size + 1
        )
        check_same_device("qo_indptr", qo_indptr, "the page table", self.table.device)
        if self.causal is not None and not isinstance(self.causal, bool):
            refuse("causal", self.causal, "True, False or None")
        if not isinstance(self.pages_change, bool):
            refuse("pages_change", self.pages_change, "True or False")
        if type(self.window_left) is not int or not -1 <= self.window_left <= MAX_INT32:
            object.__setattr__(self, "window_left", check_int("window_left", self.window_left, -1))
        if self.rows is not None:
            check_same_device(
                "rows",
                index_tensor("rows", self.rows, INT32, "[at least qo_indptr[-1]]"),
                "the page table",
                self.table.device,
            )
        for name, of_requests in (("kv_offsets", self.kv_offsets), ("prompts", self.prompts)):
            if of_requests is not None:
                tensor = index_tensor(name, of_requests, INT32, "[batch]", self.table.batch_size)
                check_same_device(name, tensor, "the page table", self.table.device)
        if self.positions is not None or self.requests is not None:
            self._check_of_rows()

    def _check_of_rows(self) -> None:
        num_rows = (
            None
            if self.positions is None or not isinstance(self.positions, Tensor)
            else self.positions.numel()
        )
        for name, of_rows in (("positions", self.positions), ("requests", self.requests)):
            if of_rows is not None:
                check_same_device(
                    name,
                    index_tensor(name, of_rows, INT32, "[rows of Q]", num_rows),
                    "the page table",
                    self.table.device,
                )


@dataclass(frozen=True, eq=False)
class Composition:
    """Levels over the same rows of Q that partition the (row, token) pairs; the result is the ⊕ of the
    levels' attention states.

    A row may be absent from some levels. If a row of Q is in no level, its output and lse are not written.
    The partition is not checked: the caller must make sure that no row appears twice in a level, and that no
    row sees a page in two levels.

    Args:
        levels: 1 .. MAX_LEVELS views on the same device; any sequence, kept as a tuple. Their page sizes are
            multiples of the smallest, which is the cache's. Page p of a level of 64 tokens is the pages
            4 p .. 4 p + 3 of a cache of 16. A plan makes the smaller page tables, with a few torch operators.

    Raises:
        ValueError: no level or too many, something that is not a BSRView, page sizes that do not divide one
            another, or different devices; names the level.
    """

    levels: Sequence[BSRView]
    page_size: int = field(init=False)  # tokens of the smallest pages, which are the cache's

    __repr__ = short_repr

    @classmethod
    def cascade(
        cls,
        qo_indptrs: Sequence[Tensor],
        tables: Sequence[PageTable],
        *,
        causal: bool | None = None,
        window_left: int = -1,
        kv_offsets: Sequence[Tensor | None] | None = None,
        positions: Tensor | None = None,
        requests: Tensor | None = None,
    ) -> Composition:
        """Prefixes that are shared by runs of consecutive rows, in FlashInfer's layout: one qo_indptr and one
        table per level, the most shared level first.

        The rows `qo_indptrs[d][i]:qo_indptrs[d][i+1]` see all tokens of request i of `tables[d]`.
        `causal` applies only to the last level, which holds each request's own KV.

        Args:
            qo_indptrs: for each level int32 or int64 [batch of the level + 1], prefix sums of row counts. All
                should end at the same number of rows (not checked: rows after a level's end do not see that
                level).
            tables: for each level its pages.
            causal: of the last level.
            window_left: of all levels: a row at position p sees no token before p - window_left. With several
                levels it needs kv_offsets for each, positions, and an Attention with this window:
                variant=builtin.sliding_window(window_left). -1: no limit.
            kv_offsets: for each level, and positions, requests, for all: as in BSRView, for variants;
                requests also for a cache with scales per request.

        Raises:
            ValueError: sequences of different lengths, a window with several levels that lack positions, or
                arguments that BSRView or Composition refuse, with the level's number.
        """
        _check_sequence("qo_indptrs", qo_indptrs)
        _check_sequence("tables", tables)
        if len(tables) != len(qo_indptrs):
            refuse("len(tables)", len(tables), f"len(qo_indptrs) = {len(qo_indptrs)}")
        if (
            len(tables) > 1
            and check_int("window_left", window_left, -1) != -1
            and (kv_offsets is None or positions is None)
        ):
            refuse(
                "window_left",
                window_left,
                f"-1 for a cascade of {len(tables)} levels without "
                f"{'kv_offsets' if kv_offsets is None else 'positions'}",
            )
        if kv_offsets is None:
            kv_offsets = [None] * len(tables)
        _check_sequence("kv_offsets", kv_offsets)
        if len(kv_offsets) != len(tables):
            refuse("len(kv_offsets)", len(kv_offsets), f"len(tables) = {len(tables)}")
        levels: list[BSRView] = []
        for qo_indptr, table, offsets in zip(qo_indptrs, tables, kv_offsets, strict=True):
            is_last = len(levels) == len(tables) - 1
            try:
                levels.append(
                    BSRView(
                        qo_indptr,
                        table,
                        causal=causal if is_last else False,
                        window_left=window_left,
                        kv_offsets=offsets,
                        positions=positions,
                        requests=requests,
                    )
                )
            except ValueError as error:
                raise ValueError(f"levels[{len(levels)}]: {error}") from None
        return cls(levels)

    @classmethod
    def tree(
        cls,
        parents: Sequence[int],
        table: PageTable,
        node_of_row: Sequence[int],
        *,
        kv_offsets: Tensor | None = None,
        positions: Tensor | None = None,
        requests: Tensor | None = None,
    ) -> Composition:
        """Rows that see the tokens along a path of a tree, or of a forest: speculative trees, parallel
        samples, beams.

        Row r sees all tokens of node node_of_row[r] and of the nodes above it. Level d of the composition
        holds the nodes of depth d (a root has depth 0); the last level has the deepest node that a row sees.
        Every level uses `table` itself, and gives no rows to the nodes of other depths. The lists are read
        here, on the host; the levels' index tensors are made on the device of `table`.

        Args:
            parents: parents[n] < n is the parent of node n; -1: node n is a root. A path has at most
                MAX_LEVELS nodes.
            table: the KV of node n is its request n.
            node_of_row: one node for each row of Q; -1: the row sees nothing and is not written.
            kv_offsets: int32 [nodes], and positions, requests: as in BSRView, for variants.

        Raises:
            ValueError: a parent or a node that does not exist, too long a path, or a table of another number
                of requests.
        """
        check_types(PageTable, "a PageTable", table=table)
        require(
            _length("parents", parents) == table.batch_size,
            "len(parents)",
            len(parents),
            f"the requests of the table: {table.batch_size}",
        )
        _length("node_of_row", node_of_row)
        paths: list[tuple[int, ...]] = []  # path to each node, from its root
        for node, value in enumerate(parents):
            parent = _integer(
                f"parents[{node}]", value, -1, node - 1, "a node before this one, or -1 for a root"
            )
            path = (*paths[parent], node) if parent >= 0 else (node,)
            if len(path) > MAX_LEVELS:
                refuse(
                    f"parents[{node}]",
                    parent,
                    f"a node with at most {MAX_LEVELS - 2} nodes above it: a path has at most MAX_LEVELS = "
                    f"{MAX_LEVELS} nodes",
                )
            paths.append(path)

        rows_of_node: list[list[int]] = [[] for _ in paths]
        depth = 1
        for row, value in enumerate(node_of_row):
            node = _integer(
                f"node_of_row[{row}]",
                value,
                -1,
                len(paths) - 1,
                f"one of the {len(paths)} nodes, or -1 for a row that sees nothing",
            )
            path = paths[node] if node >= 0 else ()
            depth = max(depth, len(path))
            for seen in path:
                rows_of_node[seen].append(row)

        levels = []
        for level in range(depth):
            rows: list[int] = []
            qo_indptr = [0]
            for path, own in zip(paths, rows_of_node, strict=True):
                rows += own if len(path) == level + 1 else []
                qo_indptr.append(len(rows))
            levels.append(
                BSRView(
                    _int32(qo_indptr, table),
                    table,
                    causal=False,
                    rows=_int32(rows, table),
                    kv_offsets=kv_offsets,
                    positions=positions,
                    requests=requests,
                )
            )
        return cls(levels)

    def __post_init__(self) -> None:
        _check_sequence("levels", self.levels)
        levels = tuple(self.levels)
        if len(levels) > MAX_LEVELS:
            refuse("len(levels)", len(levels), f"at most {MAX_LEVELS}")
        page_sizes = []
        for i, level in enumerate(levels):
            if not isinstance(level, BSRView):
                refuse(f"levels[{i}]", level, "a BSRView")
            page_sizes.append(level.table.page_size)
            if i > 0 and level.qo_indptr.device != levels[0].qo_indptr.device:
                check_same_device(f"levels[{i}].qo_indptr", level.qo_indptr, "levels[0]", levels[0].device)
        page_size = min(page_sizes)
        for i, size in enumerate(page_sizes):
            if size % page_size != 0:
                refuse(
                    f"levels[{i}].table.page_size",
                    size,
                    f"a multiple of {page_size}, the smallest of the levels",
                )
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "page_size", page_size)


def _int32(values: list[int], table: PageTable) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=table.device)


def _check_sequence(name: str, values: object) -> None:
    if not isinstance(values, Sequence) or not values:
        refuse(name, values, "a sequence of one element for each level, at least one")


def _length(name: str, values: Sequence[int]) -> int:
    """The length of a list, a tuple, an array or a vector on the CPU."""
    try:
        return len(values)
    except TypeError:
        refuse(name, values, "a sequence of int")


def _integer(name: str, value: object, smallest: int, largest: int, must_be: str) -> int:
    try:
        integer = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        refuse(name, value, "an int")
    if not smallest <= integer <= largest:
        refuse(name, integer, must_be)
    return integer
