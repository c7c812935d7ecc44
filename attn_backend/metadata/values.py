"""The values of a view's tensors: checks on a CPU, and copies for batch files."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..validation import refuse, require
from .views import BSRView, PageTable


def describe_batch(view: BSRView) -> dict[str, Any]:
    """The lengths and the page ids of a view as lists, for a batch file of `attn-backend plan`. Wrong values
    stay as they are. Copies from the device, so it waits.

    Returns:
        qo_indptr, kv_lens and page_size, and prompts if the view has them. Except for ragged K and V also
        block_table: the pages of each request that its length needs and its row of the table has.
    """
    table, page_size = view.table, view.table.page_size
    batch: dict[str, Any] = {"qo_indptr": view.qo_indptr.tolist(), "page_size": page_size}
    if view.prompts is not None:
        batch["prompts"] = view.prompts.tolist()
    if table.indices is None:
        return batch | {"kv_lens": table.lengths().tolist()}
    # Only the batch's part is copied: an engine's table has room for all its requests.
    if table.form == "token_slots":  # a row outside the table becomes its first or last row
        rows = _present(table.rows).clamp(0, table.indices.shape[0] - 1)
        entries = list(table.indices[rows.to(table.indices.device), ::page_size].cpu() // page_size)
    elif table.form == "block_table":
        entries = list(table.indices[: view.batch_size].cpu())
    else:
        indices, indptr = table.indices.cpu(), _present(table.indptr).clamp(min=0).tolist()
        entries = [indices[slice(*bounds)] for bounds in pairwise(indptr)]
    if table.kv_lens is not None:
        kv_lens = table.kv_lens.tolist()
    else:  # of the pages that exist, as plan() reads a wrong kv_indptr
        lasts = _present(table.last_page_len).tolist()
        kv_lens = [
            (len(ids) - 1) * page_size + last if len(ids) else 0
            for ids, last in zip(entries, lasts, strict=True)
        ]
    pages = [
        ids[: max(-(-kv_len // page_size), 0)].tolist() for ids, kv_len in zip(entries, kv_lens, strict=True)
    ]
    return batch | {"kv_lens": kv_lens, "block_table": pages}


def check_values(view: BSRView, max_rows: int) -> None:
    """Checks lengths, the row list, table rows, and the page ids that are used.

    Args:
        view: its tensors are on the CPU.
        max_rows: upper limit of the end of qo_indptr; the row list stays below it.

    Raises:
        ValueError: an indptr that does not start at 0, decreases or ends too far. A row list that is too
            short or exceeds max_rows. A length that is negative or longer than its row of the table. A last
            page length outside 1 .. page_size. A row outside the table. A negative page id.
    """
    if view.batch_size == 0:
        return
    num_rows = _check_indptr("qo_indptr", view.qo_indptr, max_rows, "max_rows")
    if view.rows is not None:
        _check_rows(view.rows, num_rows, max_rows)
    checks = {"csr": _check_csr, "block_table": _check_block_table, "token_slots": _check_token_slots}
    if view.table.form in checks:  # a ragged table has page ids only
        checks[view.table.form](view.table)
    check_page_ids(view)


def check_page_ids(view: BSRView, num_pages: int | None = None) -> None:
    """Checks the page ids that are used.

    Args:
        view: its lengths have been checked.
        num_pages: of the cache, or the rows of ragged K and V; None: unknown.

    Raises:
        ValueError: a page id below 0 or not below num_pages, or a kv_indptr that ends beyond the rows of
            ragged K and V.
    """
    table, page_size = view.table, view.table.page_size
    if view.batch_size == 0:
        return
    if table.form == "ragged":
        _check_indptr("kv_indptr", _present(table.indptr), num_pages, "the rows of K and V")
    elif table.form == "csr":
        used = _present(table.indices)[: int(_present(table.indptr)[-1])]
        wrong = _wrong_ids(used, num_pages)
        if table.kv_lens is not None and wrong.any():
            wrong &= _is_used(table, len(used))
        if wrong.any():
            entry = _first(wrong)
            refuse(f"kv_indices[{entry}]", used[entry].item(), _must_be(num_pages))
    else:
        kv_lens = _present(table.kv_lens)
        longest = int(kv_lens.max())
        if table.form == "block_table":
            _check_entries(
                "block_table",
                _present(table.indices)[: view.batch_size, : -(-longest // page_size)],
                kv_lens,
                page_size,
                num_pages,
            )
        else:
            slots = _present(table.indices)[:, :longest:page_size].index_select(0, _present(table.rows))
            _check_entries(
                "req_to_token",
                slots,
                kv_lens,
                page_size,
                None if num_pages is None else num_pages * page_size,
            )


def _check_rows(rows: Tensor, num_rows: int, max_rows: int) -> None:
    """Checks the part of the row list that qo_indptr uses: its first num_rows elements."""
    require(rows.shape[0] >= num_rows, "rows", rows, f"of at least {num_rows} elements, the end of qo_indptr")
    used = rows[:num_rows]
    wrong = (used < 0) | (used >= max_rows)
    if wrong.any():
        i = _first(wrong)
        refuse(f"rows[{i}]", used[i].item(), f"a row of Q, 0 .. max_rows - 1 = {max_rows - 1}")


def _check_csr(table: PageTable) -> None:
    indptr, indices = _present(table.indptr), _present(table.indices)
    _check_indptr("kv_indptr", indptr, indices.shape[0], "the length of kv_indices")
    if table.kv_lens is not None:
        room = (indptr[1:] - indptr[:-1]) * table.page_size
        wrong = (table.kv_lens < 0) | (table.kv_lens > room)
        if wrong.any():
            request = _first(wrong)
            refuse(
                f"kv_lens[{request}]",
                table.kv_lens[request].item(),
                f"0 .. {room[request].item()}, the room in the request's pages",
            )
        return
    last_page_len = _present(table.last_page_len)
    wrong = ((last_page_len < 1) | (last_page_len > table.page_size)) & (indptr[1:] > indptr[:-1])
    if wrong.any():
        request = _first(wrong)
        refuse(
            f"kv_last_page_len[{request}]",
            last_page_len[request].item(),
            f"1 .. page_size = {table.page_size}",
        )


def _is_used(table: PageTable, num_entries: int) -> Tensor:
    """bool [num_entries]: which entries of a CSR table with kv_lens a request uses."""
    indptr, entry = _present(table.indptr).long(), torch.arange(num_entries)
    request = torch.searchsorted(indptr, entry, right=True) - 1
    return (entry - indptr[request]) * table.page_size < _present(table.kv_lens)[request]


def _check_block_table(table: PageTable) -> None:
    block_table, kv_lens = _present(table.indices), _present(table.kv_lens)
    max_pages = block_table.shape[1]
    _check_range(
        "kv_lens",
        kv_lens,
        max_pages * table.page_size,
        f"the room in a row of block_table: {max_pages} pages of {table.page_size} tokens",
    )


def _check_token_slots(table: PageTable) -> None:
    req_to_token, rows, kv_lens = _present(table.indices), _present(table.rows), _present(table.kv_lens)
    _check_range("rows", rows, req_to_token.shape[0] - 1, "the last row of req_to_token")
    _check_range("kv_lens", kv_lens, req_to_token.shape[1], "the tokens that a row of req_to_token holds")


def _check_indptr(name: str, indptr: Tensor, limit: int | None = None, what: str = "") -> int:
    """Returns the last element, which may be at most `limit` (`what` describes the limit)."""
    first, last = int(indptr[0]), int(indptr[-1])
    require(first == 0, f"{name}[0]", first, "0")
    falls = indptr[1:] < indptr[:-1]
    if falls.any():
        i = _first(falls) + 1
        refuse(f"{name}[{i}]", indptr[i].item(), f"at least {indptr[i - 1].item()}, the element before it")
    if limit is not None and last > limit:
        refuse(f"{name}[{indptr.shape[0] - 1}]", last, f"at most {limit}, {what}")
    return last


def _check_range(name: str, values: Tensor, limit: int, what: str) -> None:
    """Checks that all elements are in 0 .. `limit`; `what` describes the limit."""
    smallest, largest = (int(value) for value in values.aminmax())
    if smallest < 0:
        refuse(f"{name}[{int(values.argmin())}]", smallest, "at least 0")
    if largest > limit:
        refuse(f"{name}[{int(values.argmax())}]", largest, f"at most {limit}, {what}")


def _check_entries(name: str, entries: Tensor, kv_lens: Tensor, page_size: int, limit: int | None) -> None:
    """entries: int32 [batch, pages of the longest request]: the page ids, or first slots of pages, of every
    request; anything beyond its length.
    """
    wrong = _wrong_ids(entries, limit)
    if not wrong.any():
        return
    wrong &= torch.arange(entries.shape[1]) * page_size < kv_lens[:, None]
    if wrong.any():
        request, page = (int(i) for i in wrong.nonzero()[0])
        refuse(f"{name}: page {page} of request {request}", entries[request, page].item(), _must_be(limit))


def _wrong_ids(entries: Tensor, limit: int | None) -> Tensor:
    return entries < 0 if limit is None else (entries < 0) | (entries >= limit)


def _must_be(limit: int | None) -> str:
    return "0 or more" if limit is None else f"in [0, {limit}), what the cache has"


def _first(mask: Tensor) -> int:
    return int(mask.nonzero()[0, 0])


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
