"""Values of CPU tensors: the error names each wrong one."""

from __future__ import annotations

import batches
import case_tensors
import cases
import pytest
import schedule_model
import torch

from attn_backend import Attention, BSRView, PageTable
from attn_backend.metadata.values import check_values

MAX_ROWS = 10
QO = [0, 1, 3]


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def csr(indptr: list[int], indices: list[int], last: list[int], page_size: int = 4) -> PageTable:
    return PageTable.csr(ints(indptr), ints(indices), ints(last), page_size)


def csr_of_lens(indptr: list[int], indices: list[int], lens: list[int], page_size: int = 4) -> PageTable:
    return PageTable.csr(ints(indptr), ints(indices), None, page_size, kv_lens=ints(lens))


def block_table(kv_lens: list[int], entries: list[list[int]], page_size: int = 4) -> PageTable:
    return PageTable.block_table(ints(entries), ints(kv_lens), page_size)


def token_slots(
    rows: list[int], kv_lens: list[int], entries: list[list[int]], page_size: int = 1
) -> PageTable:
    return PageTable.token_slots(ints(entries), ints(rows), ints(kv_lens), page_size)


GOOD = csr([0, 1, 3], [0, 1, 2], [4, 1])


@pytest.mark.parametrize(
    ("qo_indptr", "table", "message"),
    [
        ([1, 2, 3], GOOD, r"qo_indptr\[0\] is 1, must be 0"),
        ([-1, 2, 3], GOOD, r"qo_indptr\[0\] is -1, must be 0"),
        ([0, 4, 3], GOOD, r"qo_indptr\[2\] is 3, must be at least 4"),
        ([0, 4, 11], GOOD, r"qo_indptr\[2\] is 11, must be at most 10, max_rows"),
        (QO, csr([1, 1, 3], [0, 1, 2], [4, 1]), r"kv_indptr\[0\] is 1, must be 0"),
        (QO, csr([0, 2, 1], [0, 1, 2], [4, 1]), r"kv_indptr\[2\] is 1, must be at least 2"),
        (
            QO,
            csr([0, 1, 4], [0, 1, 2], [4, 1]),
            r"kv_indptr\[2\] is 4, must be at most 3, the length of kv_indices",
        ),
        (QO, csr([0, 1, 3], [0, 1, 2], [4, 0]), r"kv_last_page_len\[1\] is 0, must be 1 .. page_size = 4"),
        (QO, csr([0, 1, 3], [0, 1, 2], [5, 1]), r"kv_last_page_len\[0\] is 5, must be 1 .. page_size = 4"),
        (QO, csr([0, 1, 3], [0, -1, 2], [4, 1]), r"kv_indices\[1\] is -1, must be 0 or more"),
        (
            QO,
            csr_of_lens([0, 1, 4], [0, 1, 2], [4, 1]),
            r"kv_indptr\[2\] is 4, must be at most 3, the length of kv_indices",
        ),
        (
            QO,
            csr_of_lens([0, 1, 3], [0, 1, 2], [4, -1]),
            r"kv_lens\[1\] is -1, must be 0 .. 8, the room in the request's pages",
        ),
        (
            QO,
            csr_of_lens([0, 1, 3], [0, 1, 2], [5, 8]),
            r"kv_lens\[0\] is 5, must be 0 .. 4, the room in the request's pages",
        ),
        (QO, csr_of_lens([0, 1, 3], [0, 1, -2], [4, 5]), r"kv_indices\[2\] is -2, must be 0 or more"),
        (QO, block_table([-1, 3], [[0], [0]]), r"kv_lens\[0\] is -1, must be at least 0"),
        (
            QO,
            block_table([0, 9], [[0, 1], [0, 1]]),
            r"kv_lens\[1\] is 9, must be at most 8, the room in a row of block_table: 2 pages of 4 tokens",
        ),
        (
            QO,
            block_table([1, 5], [[0, -1], [0, -1]]),
            r"block_table: page 1 of request 1 is -1, must be 0 or more",
        ),
        (
            QO,
            token_slots([0, 2], [1, 1], [[0], [0]]),
            r"rows\[1\] is 2, must be at most 1, the last row of req_to_token",
        ),
        (QO, token_slots([-3, 1], [1, 1], [[0], [0]]), r"rows\[0\] is -3, must be at least 0"),
        (
            QO,
            token_slots([0, 1], [1, 2], [[0], [0]]),
            r"kv_lens\[1\] is 2, must be at most 1, the tokens that a row of req_to_token holds",
        ),
        (
            QO,
            token_slots([1, 0], [1, 2], [[0, -4], [0, -4]]),
            r"req_to_token: page 1 of request 1 is -4, must be 0 or more",
        ),
        (QO, PageTable.ragged(ints([0, 4, 3])), r"kv_indptr\[2\] is 3, must be at least 4"),
        (QO, PageTable.ragged(ints([2, 4, 5])), r"kv_indptr\[0\] is 2, must be 0"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_refuses(qo_indptr: list[int], table: PageTable, message: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        check_values(BSRView(ints(qo_indptr, dtype), table), MAX_ROWS)


@pytest.mark.parametrize(
    "table",
    [
        GOOD,
        # a request without pages has no last page; entries after the last are unused
        csr([0, 0, 2], [3, 0, -9], [-1, 4]),
        csr_of_lens([0, 2, 5], [3, -1, 0, 1, -9], [4, 7]),  # nor are a request's pages beyond its length
        csr_of_lens([0, 1, 1], [-3], [0, 0]),
        block_table([0, 8], [[-1, -1], [7, 0]]),
        block_table([4, 0], [[2, -1], [-1, -1]]),
        block_table([0, 0], [[], []]),
        token_slots([1, 1], [2, 1], [[-9, -9], [5, 6]]),
        # the first slot of each page counts
        token_slots([0, 1], [5, 4], [[0, -1, -1, -1, 4], [8, -1, -1, -1, -1]], page_size=4),
        PageTable.ragged(ints([0, 0, 7])),
    ],
)
def test_accepts(table: PageTable) -> None:
    check_values(BSRView(ints(QO), table), MAX_ROWS)


def test_accepts_an_empty_batch() -> None:
    empty = ints([])
    zero = ints([0])
    for table in (
        PageTable.csr(zero, empty, empty, 4),
        PageTable.block_table(empty.view(0, 2), empty, 4),
        PageTable.ragged(zero),
    ):
        check_values(BSRView(zero, table), MAX_ROWS)


def test_accepts_random_cases() -> None:
    for seed in range(200):
        case = case_tensors.build(
            cases.random_spec(seed, "cpu").with_(num_kv_heads=1, head_dim=8, group_size=1), "cpu"
        )
        check_values(case.view, case.rows)


def test_refuses_what_planners_clamp() -> None:
    """They agree with the planners' own checks (of everything except page ids)."""
    config = Attention(
        1, 1, 64, device="cpu", max_rows=batches.MAX_ROWS, max_batch=batches.MAX_BATCH
    ).schedule()
    refused = 0
    for seed in range(300):
        view = batches.random_view(seed, "cpu", valid=False)
        clamped = schedule_model.plan(view, config, 1, 1, batches.MAX_ROWS).errors
        if clamped:
            with pytest.raises(ValueError, match="must be"):
                check_values(view, batches.MAX_ROWS)
        else:
            check_values(view, batches.MAX_ROWS)
        refused += clamped != 0
    assert 50 < refused < 250
