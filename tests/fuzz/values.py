"""Wrong values in the metadata of a batch: lengths, prefix sums, rows and page ids.

A CPU refuses them; a GPU clamps and reports them.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

from attn_backend import PageTable

from .call import Wrong

HIGH_BITS = 2**32  # an int64 that becomes valid when truncated to 32 bits


def with_value(tensor: Tensor, at: int | tuple[int, ...], value: int) -> Tensor | None:
    """A copy with one element changed; None if the dtype cannot hold the value."""
    if not torch.iinfo(tensor.dtype).min <= value <= torch.iinfo(tensor.dtype).max:
        return None
    changed = tensor.clone()
    changed[at] = value
    return changed


def wrong_values(
    rng: numpy.random.Generator, arguments: dict[str, Any], table: PageTable, max_rows: int, num_pages: int
) -> list[Wrong]:
    """Ways to make one value wrong.

    Only values that are read: no page of a request without rows, no last length of a request without pages.
    """
    found: list[Wrong] = []
    batch = table.batch_size
    qo_indptr, q = arguments["qo_indptr"].tolist(), arguments["q"]
    total = qo_indptr[-1]
    if batch == 0:
        return found

    def add(argument: str, how: str, at: int | tuple[int, ...], value: int, *names: str) -> None:
        changed = with_value(arguments[argument], at, value)
        if changed is not None:
            found.append(Wrong(argument, how, changed, names, reported=changed.is_cuda))

    def add_indptr(name: str, end: int, *names: str) -> None:
        """end: the last element must not exceed it."""
        indptr = arguments[name]
        at = int(rng.integers(1, batch + 1))
        add(name, "does not begin at 0", 0, 1, *names)
        add(name, "negative", at, -1, *names)
        add(name, "negative", at, -(2**31), *names)
        add(name, "too far", batch, end + 1, *names)
        add(name, "too far", batch, 2**31 - 1, *names)
        add(name, "high bits", at, int(indptr[at]) + HIGH_BITS, *names)
        if int(indptr[-1]) > 0 and at < batch:
            add(name, "decreases", at, int(indptr[-1]) + 1, *names)

    rows_of_q = max_rows if arguments["row_list"] is None else min(max_rows, len(arguments["row_list"]))
    add_indptr("qo_indptr", rows_of_q, "qo_indptr", "rows")
    if arguments["row_list"] is not None and total > 0:
        at = int(rng.integers(total))
        for value in (-1, -(2**31), max_rows, 2**31 - 1):
            add("row_list", "a row outside", at, value, "rows")
        found.append(
            Wrong(
                "row_list",
                "too short",
                arguments["row_list"][: total - 1].clone(),
                ("rows", "qo_indptr"),
                q.is_cuda,
            )
        )

    lens = _kv_lens(table)
    # All rows of these requests are computed, and their last row sees the last page.
    read = (
        [i for i in range(batch) if lens[i] > 0 and qo_indptr[i + 1] > qo_indptr[i]]
        if len(q) >= total and arguments["row_list"] is None
        else []
    )
    page_ids = [-1, -(2**31), num_pages, 2**31 - 1]
    if table.form == "ragged":
        in_tensor = int(table.indptr[-1])
        add("kv_indptr", "does not begin at 0", 0, 1, "kv_indptr")
        add("kv_indptr", "negative", int(rng.integers(1, batch + 1)), -1, "kv_indptr")
        if batch > 1:
            add("kv_indptr", "decreases", int(rng.integers(1, batch)), in_tensor + 1, "kv_indptr")
        if len(q) >= total and arguments["row_list"] is None and qo_indptr[batch] > qo_indptr[batch - 1]:
            for value in (num_pages + 1, 10**6, 2**31 - 1, HIGH_BITS + in_tensor, 2**40):
                add("kv_indptr", "beyond K", batch, value, "kv_indptr", "a page id")
        return found
    if table.form == "csr":
        add_indptr("kv_indptr", len(table.indices), "kv_indptr")
        used = [i for i in range(batch) if lens[i] > 0]
        if used:
            at = used[rng.integers(len(used))]
            for value in (
                0,
                -1,
                table.page_size + 1,
                -(2**31),
                2**31 - 1,
                HIGH_BITS + int(table.last_page_len[at]),
            ):
                add("kv_last_page_len", "out of range", at, value, "kv_last_page_len")
        for i in read[:1]:
            for value in page_ids:
                add(
                    "kv_indices",
                    "a page id outside",
                    int(table.indptr[i + 1]) - 1,
                    value,
                    "kv_indices",
                    "a page id",
                )
        return found
    at = int(rng.integers(batch))
    widest = table.indices.shape[1] * (table.page_size if table.form == "block_table" else 1)
    for value in (-1, -(2**31), widest + 1, 2**31 - 1, HIGH_BITS + lens[at], 2**63 - 1):
        add("kv_lens", "out of range", at, value, "kv_lens")
    if table.form == "token_slots":
        for value in (-1, len(table.indices), -(2**31), 2**31 - 1, HIGH_BITS + int(table.rows[at])):
            add("rows", "a row outside", at, value, "rows")
    for i in read[:1]:
        page = (lens[i] - 1) // table.page_size
        if table.form == "block_table":
            for value in page_ids:
                add("block_table", "a page id outside", (i, page), value, "block_table", "a page id")
        else:
            for value in (-1, -(2**31), num_pages * table.page_size, 2**31 - 1):
                add(
                    "req_to_token",
                    "a slot outside",
                    (int(table.rows[i]), page * table.page_size),
                    value,
                    "req_to_token",
                    "a page id",
                )
    return found


def _kv_lens(table: PageTable) -> list[int]:
    """Tokens of each request; in a page table, at least one if the request has pages."""
    if table.kv_lens is not None:
        return table.kv_lens.tolist()
    assert table.indptr is not None
    return (table.indptr[1:] - table.indptr[:-1]).tolist()
