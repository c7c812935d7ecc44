"""Locations of the tokens of each request: one type for the page tables of all engines."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..validation import (
    INT32,
    INT32_OR_INT64,
    MAX_INT32,
    check_int,
    check_same_device,
    index_tensor,
    indptr_tensor,
    refuse,
    short_repr,
    table_tensor,
)


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
        kv_lens = self.kv_lens
        if kv_lens is None:
            assert self.last_page_len is not None
            pages = self.indptr[1:] - self.indptr[:-1]
            kv_lens = torch.where(pages > 0, (pages - 1) * self.page_size + self.last_page_len, 0)
        return replace(
            self,
            page_size=page_size,
            indices=indices,
            indptr=self.indptr * parts,
            last_page_len=None,
            kv_lens=kv_lens,
        )

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
