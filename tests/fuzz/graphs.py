"""Scenarios of a captured CUDA graph: plan and run are captured once for a configuration, over fixed buffers,
and replayed for each of its batches.

On a CPU, which has no graphs, plan and run are called again over the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import case_tensors
import cases
import numpy
import torch
from torch import Tensor

from attn_backend import Attention, BSRView, KVCache, PageTable

from .attention_calls import MAX_BATCH, heads_of, object_options, once, small_spec
from .call import Call
from .steps import Arguments, check_result

MAX_ROWS, MAX_TOKENS = 90, 8 * 160  # per batch
GARBAGE = -(2**31)


class Buffers:
    """The buffers that an engine fills before each replay. Requests beyond a batch have no rows and no
    tokens."""

    def __init__(self, spec: cases.Spec, device: torch.device) -> None:
        """`spec`: heads, dtype, page size, the table's form and dtypes of all batches."""
        self.spec = spec
        size, heads = spec.page_size, spec.num_kv_heads * spec.group_size
        pages = MAX_TOKENS // size + 2 * MAX_BATCH + 8
        qo64, indptr64, last64, lens64, rows64 = spec.int64

        def index(count: int, is_int64: bool) -> Tensor:
            return torch.zeros(count, dtype=torch.int64 if is_int64 else torch.int32, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.full(shape, torch.nan, dtype=spec.dtype, device=device)

        self.qo_indptr = index(MAX_BATCH + 1, qo64)
        self.kv_indptr, self.last_page_len = index(MAX_BATCH + 1, indptr64), index(MAX_BATCH, last64)
        self.kv_lens, self.rows = index(MAX_BATCH, lens64), index(MAX_BATCH, rows64)
        self.q, self.out = floats(MAX_ROWS, heads, spec.head_dim), floats(MAX_ROWS, heads, spec.head_dim)
        self.lse = torch.full((MAX_ROWS, heads), torch.nan, device=device)
        self.cache = floats(2, pages, size, spec.num_kv_heads, spec.head_dim)
        width = 160 // size + 4
        self.entries = {
            "csr": lambda: torch.zeros(pages, dtype=torch.int32, device=device),
            "block_table": lambda: torch.zeros(MAX_BATCH, width, dtype=torch.int32, device=device),
            "token_slots": lambda: torch.zeros(MAX_BATCH + 3, width * size, dtype=torch.int32, device=device),
            "ragged": lambda: torch.zeros(0, dtype=torch.int32, device=device),
        }[spec.table_form]()
        self.kv = KVCache.from_pair(self.cache[0], self.cache[1])
        self.view = BSRView(self.qo_indptr, self._table(), causal=spec.causal, window_left=spec.window_left)

    def _table(self) -> PageTable:
        form, size = self.spec.table_form, self.spec.page_size
        if form == "csr":
            return PageTable.csr(self.kv_indptr, self.entries, self.last_page_len, size)
        if form == "block_table":
            return PageTable.block_table(self.entries, self.kv_lens, size)
        if form == "token_slots":
            return PageTable.token_slots(self.entries, self.rows, self.kv_lens, size)
        return PageTable.ragged(self.kv_indptr)

    def fill(self, case: case_tensors.Case) -> None:
        """Copies a batch into the buffers; everything else in them is NaN, or no page."""
        table = case.view.table
        _fill(self.qo_indptr, case.view.qo_indptr, case.rows)
        if table.indptr is not None:
            _fill(self.kv_indptr, table.indptr, int(table.indptr[-1]))
        for buffer, values in (
            (self.last_page_len, table.last_page_len),
            (self.kv_lens, table.kv_lens),
            (self.rows, table.rows),
        ):
            if values is not None:
                _fill(buffer, values, 0)
        if table.indices is not None:
            self.entries.fill_(GARBAGE)
            self.entries[tuple(slice(0, size) for size in table.indices.shape)].copy_(table.indices)
        self.cache.fill_(torch.nan)
        slots = len(case.k_slots)
        self.cache[0].flatten(0, 1)[:slots].copy_(case.k_slots)
        self.cache[1].flatten(0, 1)[:slots].copy_(case.v_slots)
        for buffer in (self.q, self.out, self.lse):
            buffer.fill_(torch.nan)
        self.q[: case.rows].copy_(case.q[: case.rows])


def _fill(buffer: Tensor, values: Tensor, rest: int) -> None:
    buffer.fill_(rest)
    buffer[: len(values)].copy_(values)


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A function that replays `step`, which has already run once."""
    if device.type == "cpu":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def replays(rng: numpy.random.Generator, device: torch.device) -> Iterator[Call]:
    """One configuration, captured with its first batch, replayed for ten."""
    spec = small_spec(rng, device, **heads_of(rng, device))
    spec = spec.with_(page_size=min(spec.page_size, 32))
    buffers = Buffers(spec, device)
    options = object_options(rng, device) | {
        "max_rows": MAX_ROWS + int(rng.integers(3)),
        "max_batch": MAX_BATCH + int(rng.integers(3)),
    }
    heads = spec.num_kv_heads * spec.group_size
    attention = Attention(
        heads,
        spec.num_kv_heads,
        spec.head_dim,
        dtype=spec.dtype,
        device=device,
        num_ctas=spec.num_ctas,
        **options,
    )
    after_append = bool(rng.random() < 0.3)
    run_options = {
        "sm_scale": spec.sm_scale,
        "logits_soft_cap": spec.logits_soft_cap,
        "after_append": after_append,
    }

    def step() -> None:
        attention.plan(buffers.view)
        attention.run(buffers.q, buffers.kv, out=buffers.out, lse=buffers.lse, **run_options)

    def batch() -> case_tensors.Case:
        lengths = small_spec(rng, device)
        same = spec.with_(
            qo_lens=lengths.qo_lens,
            kv_lens=lengths.kv_lens,
            seed=lengths.seed,
            sharing=0.0 if spec.table_form == "ragged" else lengths.sharing,
        )
        return case_tensors.build(same, device)

    buffers.fill(batch())
    step()
    replay = captured(step, device)
    while True:
        yield replay_call(buffers, batch(), replay, attention)


def replay_call(
    buffers: Buffers, case: case_tensors.Case, replay: Callable[[], None], attention: Attention
) -> Call:
    expected = once(case.expected)

    def function(**given: Any) -> Tensor:
        replay()
        return given["out"]

    def check(given: Arguments, result: Tensor) -> None:
        attention.raise_for_errors()
        rows = torch.arange(case.rows, device=result.device)
        check_result(case.spec, given, result, rows, *expected())

    arguments: Arguments = {"q": buffers.q, "out": buffers.out, "lse": buffers.lse}
    return Call("replay of plan and run", function, arguments, {}, check, prepare=lambda: buffers.fill(case))
