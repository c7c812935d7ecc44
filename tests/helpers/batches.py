"""Random batches for the planners: lengths and tables without K and V.

Rows of the tables share pages at random.
"""

from __future__ import annotations

from dataclasses import replace

import numpy
import torch
from torch import Tensor

from attn_backend import BSRView, Composition, PageTable

MAX_ROWS = 3000
MAX_BATCH = 300


def random_view(seed: int, device: torch.device | str, valid: bool = True) -> BSRView:
    """At most MAX_BATCH requests and MAX_ROWS rows.

    With valid=False some lengths, rows and prefix sums are wrong.
    """
    rng = numpy.random.default_rng(seed)
    batch = int(
        rng.choice(
            [0, 1, 2, 3, 7, 16, 33, 100, 256, 300], p=[0.01, 0.14, 0.15, 0.1, 0.1, 0.1, 0.1, 0.1, 0.15, 0.05]
        )
    )
    longest = int(rng.choice([100, 1000, 8192, 100_000]))
    kv_lens = numpy.exp(rng.uniform(0, numpy.log(longest), batch)).astype(int) * (rng.random(batch) < 0.95)
    qo_lens = numpy.ones(batch, dtype=int)
    style = rng.random()
    if style > 0.3:  # some requests, or all, with longer queries
        longer = rng.random(batch) < (1.0 if style > 0.8 else 0.2)
        qo_lens[longer] = numpy.exp(rng.uniform(0, numpy.log(2000), int(longer.sum()))).astype(int)
        qo_lens[rng.random(batch) < 0.05] = 0
        over = numpy.cumsum(qo_lens) > MAX_ROWS - batch
        qo_lens[over] = 1
    page_size = int(rng.choice([1, 3, 16, 64, 100, 256]))
    table = _random_table(rng, kv_lens, page_size, valid, torch.device(device))
    qo_indptr = _damaged(rng, _prefix_sum(qo_lens), valid, MAX_ROWS)
    window_left = int(rng.integers(0, 2 * longest)) if rng.random() < 0.3 else -1
    view = BSRView(
        _index(rng, qo_indptr, device), table, causal=bool(rng.random() < 0.7), window_left=window_left
    )
    if rng.random() < 0.7:
        return view
    prompts = rng.integers(0, 3, batch).tolist()
    return replace(view, prompts=torch.tensor(prompts, dtype=torch.int32, device=device))


def random_composition(
    seed: int, device: torch.device | str, valid: bool = True, most_levels: int = 4
) -> BSRView | Composition:
    """Up to `most_levels` levels, each over random rows of MAX_ROWS.

    With valid=False some metadata is wrong.
    """
    rng = numpy.random.default_rng(seed)
    num_levels = int(rng.integers(1, most_levels + 1))
    views: list[BSRView] = []
    page_size = 0
    for attempt in range(100):
        view = random_view(seed * 100 + attempt, device, valid)
        if views and view.table.page_size != page_size:
            continue
        page_size = view.table.page_size
        rows = rng.permutation(MAX_ROWS)
        if not valid and rng.random() < 0.5:
            rows[rng.random(MAX_ROWS) < 0.01] = rng.choice([-1, MAX_ROWS, 2**31 - 1, -(2**31)])
        row_list = (
            torch.tensor(rows.tolist(), dtype=torch.int32, device=device) if rng.random() < 0.7 else None
        )
        views.append(replace(view, rows=row_list))
        if len(views) == num_levels:
            break
    return Composition(tuple(views))


def _random_table(
    rng: numpy.random.Generator, kv_lens: numpy.ndarray, page_size: int, valid: bool, device: torch.device
) -> PageTable:
    batch, longest = len(kv_lens), int(kv_lens.max(initial=0))
    pages = -(-kv_lens // page_size)
    form = rng.choice(["csr", "block_table", "token_slots", "ragged"])
    if form == "ragged":
        return PageTable.ragged(_index(rng, _damaged(rng, _prefix_sum(kv_lens), valid, 10**6), device))
    if form == "csr":
        entries = int(pages.sum())
        indptr = _index(rng, _damaged(rng, _prefix_sum(pages), valid, entries), device)
        last = _index(rng, _damaged(rng, (kv_lens - 1) % page_size + 1, valid, page_size), device)
        return PageTable.csr(indptr, _entries(rng, entries, device), last, page_size)
    lens = _index(rng, _damaged(rng, kv_lens, valid, longest), device)
    pad = int(rng.integers(3))
    if form == "block_table":
        return PageTable.block_table(
            _table(rng, batch, -(-longest // page_size), pad, device), lens, page_size
        )
    rows = _index(rng, _damaged(rng, rng.permutation(batch + 5)[:batch], valid, batch + 5), device)
    return PageTable.token_slots(_table(rng, batch + 5, longest, pad, device), rows, lens, page_size)


def _table(rng: numpy.random.Generator, rows: int, width: int, pad: int, device: torch.device) -> Tensor:
    """Rows overlap, so a table of long rows needs no memory."""
    return _entries(rng, rows * (pad + 1) + width, device).as_strided((rows, width), (pad + 1, 1))


def _entries(rng: numpy.random.Generator, count: int, device: torch.device) -> Tensor:
    """Entries of page tables: all the same, long runs of a few, or all different."""
    style = rng.random()
    if style < 0.2:
        entries = numpy.zeros(count, dtype=int)
    elif style < 0.8:
        run = int(numpy.exp(rng.uniform(0, numpy.log(1000))))
        entries = numpy.repeat(rng.integers(0, 1 + int(rng.choice([1, 2, 50])), count // run + 1), run)[
            :count
        ]
    else:
        entries = rng.permutation(count)
    return torch.tensor(entries, dtype=torch.int32, device=device)


def _prefix_sum(lengths: numpy.ndarray) -> numpy.ndarray:
    return numpy.concatenate([[0], numpy.cumsum(lengths)])


def _damaged(rng: numpy.random.Generator, values: numpy.ndarray, valid: bool, limit: int) -> numpy.ndarray:
    """Unless valid, sometimes puts wrong values in some places."""
    if valid or rng.random() < 0.5:
        return values
    wrong = rng.choice(
        [-1, -5, limit + 1, limit * 2 + 7, 2**31 - 1, -(2**31), 0, limit // 2], size=values.shape
    )
    return numpy.where(rng.random(values.shape) < rng.choice([0.02, 0.5, 1.0]), wrong, values)


def _index(rng: numpy.random.Generator, values: numpy.ndarray, device: torch.device | str) -> Tensor:
    return torch.tensor(
        values.tolist(), dtype=torch.int64 if rng.random() < 0.4 else torch.int32, device=device
    )
