"""ATTN_BACKEND_METRICS=1: the counts of plans, compared with batches that are computed by hand."""

from __future__ import annotations

import pytest
import torch

from attn_backend import Attention, BSRView, PageTable
from attn_backend.kernels import schedule
from attn_backend.kernels.native import dtype_of, values_of

PAGE = 16


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_METRICS", "1")
    monkeypatch.setattr(schedule, "counted", [])


def attention(device: torch.device, **options: object) -> Attention:
    kernel = "generic" if device.type == "cpu" else None
    return Attention(4, 2, 64, device=device, max_rows=256, max_batch=4, kernel=kernel, **options)


def view(
    device: torch.device, qo_lens: list[int], kv_lens: list[int], shared_pages: int = 0, window_left: int = -1
) -> BSRView:
    """Requests that share their first pages."""
    indptr = torch.tensor([0, *qo_lens]).cumsum(0)
    pages = torch.arange(len(kv_lens) * 16, dtype=torch.int32).view(-1, 16)
    pages[:, :shared_pages] = pages[0, :shared_pages].clone()
    table = PageTable.block_table(pages.to(device), torch.tensor(kv_lens, device=device), PAGE)
    return BSRView(indptr.to(device), table, window_left=window_left)


def counts(of: Attention) -> dict[str, int]:
    assert of._counts is not None
    return dict(zip(schedule.COUNTS, of._counts.total.sums.tolist(), strict=True))


# Packed rows: rows of Q times two. 2 fill a row tile of 16 rows; 2 * 40 = 80 fill one of 128.
@pytest.mark.parametrize(
    ("cascade", "read", "rows"), [(False, 74 + 84 + 30, 3), ("always", 74 + 84 + 30 - 64, 3 + 2)]
)
def test_a_batch_with_a_shared_prefix(
    device: torch.device, cascade: bool | str, read: int, rows: int
) -> None:
    # The first two requests share 4 pages: 64 tokens. Two rows of a row group then read them once.
    batch = view(device, [1, 1, 1], [74, 84, 30])
    pages = batch.table.indices
    assert pages is not None
    pages[1, :4] = pages[0, :4]
    of = attention(device, cascade=cascade)
    for number in (1, 2):
        of.plan(batch)
        expected = dict.fromkeys(schedule.COUNTS, 0) | {
            "plans": number,
            "kv_tokens": number * (74 + 84 + 30),
            "kv_tokens_read": number * read,
            "rows_16": number * rows,
        }
        assert counts(of) == expected


def test_nested_prefixes_save_what_each_request_would_read(device: torch.device) -> None:
    # All four share 2 pages, the last two share 6.
    batch = view(device, [1] * 4, [100, 101, 102, 103], shared_pages=2)
    pages = batch.table.indices
    assert pages is not None
    pages[3, :6] = pages[2, :6]
    of = attention(device, cascade="always")
    of.plan(batch)
    assert sum(node.group >= 0 for node in of.schedule().forest) == 2
    assert counts(of)["kv_tokens"] == 406
    assert counts(of)["kv_tokens_read"] == 406 - 3 * 2 * PAGE - 1 * 4 * PAGE


def test_rows_by_their_row_tiles(device: torch.device) -> None:
    of = attention(device)
    of.plan(view(device, [40, 1, 0], [50, 60, 70]))
    seen = counts(of)
    assert (seen["rows_16"], seen["rows_128"]) == (1, 40)
    assert seen["kv_tokens"] == seen["kv_tokens_read"] == 110  # a request without rows reads nothing


def test_tokens_outside_a_window_are_not_counted(device: torch.device) -> None:
    of = attention(device)
    of.plan(view(device, [1], [200], window_left=15))
    half = of.schedule().kv_tile // 2  # a KV tile begins at a multiple of it
    assert counts(of)["kv_tokens_read"] == 200 - (200 - 16) // half * half < 200


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_chunks_of_a_request_add_up(device: torch.device, batch_invariant: bool) -> None:
    of = attention(device, batch_invariant=batch_invariant)
    of.plan(view(device, [1, 3], [256, 40]))
    assert counts(of)["kv_tokens"] == counts(of)["kv_tokens_read"] == 296


def test_clamped_plans_are_counted_by_the_next_plan(device: torch.device) -> None:
    of = attention(device)
    batch = view(device, [1], [30])
    of.plan(batch)
    fields = dtype_of("ScheduleHeader").fields
    assert fields is not None
    errors = of._schedule[fields["errors"][1] :][:4].view(torch.int32)
    errors[0] = values_of("ScheduleError")["kPageIndexInvalid"]  # as an attention kernel reports it
    of.plan(batch)
    assert counts(of)["clamped_plans"] == 1
    of.plan(batch)
    assert counts(of)["clamped_plans"] == 1
    assert counts(of)["plans"] == 3


def test_refusals_are_counted() -> None:
    of = attention(torch.device("cpu"))
    with pytest.raises(ValueError, match="max_batch"):
        of.plan(view(torch.device("cpu"), [1] * 5, [1] * 5))
    with pytest.raises(ValueError, match="kv_lens"):
        of.plan(view(torch.device("cpu"), [1], [257]))
    assert of._counts is not None
    assert (of._counts.total.refusals, counts(of)["plans"]) == (2, 0)


@pytest.mark.parametrize("is_made_in", [False, True])
def test_inside_and_outside_of_inference_mode(device: torch.device, is_made_in: bool) -> None:
    with torch.inference_mode(is_made_in):
        of = attention(device)
    batch = view(device, [1], [30])
    for inside in (True, False):
        with torch.inference_mode(inside):
            of.plan(batch)
    assert (counts(of)["plans"], counts(of)["kv_tokens_read"]) == (2, 60)


def test_a_graph_counts_each_replay(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    of, batch = attention(device), view(device, [1], [30])
    of.plan(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of.plan(batch)
    for _ in range(3):
        graph.replay()
    assert (counts(of)["plans"], counts(of)["kv_tokens_read"]) == (4, 120)


def test_nothing_is_counted_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTN_BACKEND_METRICS")
    assert attention(torch.device("cpu"))._counts is None
    assert schedule.counted == []
