"""Page tables: the content and the refusals of each form."""

from __future__ import annotations

import pytest
import torch

from attn_backend import PageTable


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


TABLE = torch.zeros(2, 8, dtype=torch.int32)


def test_csr_keeps_its_tensors() -> None:
    indptr, indices, last = ints(0, 2, 5), ints(4, 2, 0, 1, 9), ints(3, 16, dtype=torch.int64)
    table = PageTable.csr(indptr, indices, last, 16)
    assert table.form == "csr"
    assert (table.page_size, table.entry_step, table.batch_size) == (16, 1, 2)
    assert table.indptr is indptr
    assert table.indices is indices
    assert table.last_page_len is last
    assert table.device == torch.device("cpu")


def test_csr_with_lengths_keeps_them() -> None:
    lens = ints(7, 0, dtype=torch.int64)
    table = PageTable.csr(ints(0, 2, 5), ints(4, 2, 0, 1, 9), None, 16, kv_lens=lens)
    assert (table.form, table.batch_size) == ("csr", 2)
    assert table.kv_lens is lens
    assert table.last_page_len is None
    with pytest.raises(ValueError, match=r"^kv_last_page_len is .*, must be None where kv_lens is given"):
        PageTable.csr(ints(0, 2, 5), ints(4, 2, 0, 1, 9), ints(1, 1), 16, kv_lens=lens)
    with pytest.raises(ValueError, match=r"^kv_lens is .*, must be "):
        PageTable.csr(ints(0, 2, 5), ints(4, 2, 0, 1, 9), None, 16, kv_lens=ints(1, 2, 3))


def test_block_table_keeps_its_tensors() -> None:
    wide = torch.zeros(2, 20, dtype=torch.int32)
    table = PageTable.block_table(wide[:, :8], ints(3, 70), 16)
    assert table.form == "block_table"
    assert table.batch_size == 2
    assert table.indices.stride() == (20, 1)
    assert table.indices.data_ptr() == wide.data_ptr()


def test_token_slots_reads_one_entry_a_page() -> None:
    table = PageTable.token_slots(
        torch.zeros(10, 64, dtype=torch.int32), ints(7, 0, 9, dtype=torch.int64), ints(1, 2, 3), 4
    )
    assert table.form == "token_slots"
    assert (table.page_size, table.entry_step, table.batch_size) == (4, 4, 3)
    assert PageTable.token_slots(TABLE, ints(1), ints(1)).entry_step == 1


def test_ragged_has_pages_of_one_token() -> None:
    table = PageTable.ragged(ints(0, 4, 4, 9, dtype=torch.int64))
    assert table.form == "ragged"
    assert (table.page_size, table.batch_size) == (1, 3)


def test_empty_batches() -> None:
    empty = ints()
    assert PageTable.csr(ints(0), empty, empty, 1).batch_size == 0
    assert PageTable.block_table(torch.zeros(0, 8, dtype=torch.int32), empty, 16).batch_size == 0
    assert PageTable.block_table(torch.zeros(2, 0, dtype=torch.int32), ints(0, 0), 16).batch_size == 2
    assert PageTable.token_slots(torch.zeros(0, 8, dtype=torch.int32), empty, empty).batch_size == 0
    assert PageTable.ragged(ints(0)).batch_size == 0


def test_one_column_may_have_any_stride() -> None:
    PageTable.block_table(torch.zeros(3, 9, dtype=torch.int32)[:, ::9], ints(1, 1, 1), 16)


@pytest.mark.parametrize("page_size", [0, -1, 1.0, None, torch.tensor(4)])
def test_page_size(page_size: object) -> None:
    for make in (
        lambda: PageTable.csr(ints(0, 1), ints(0), ints(1), page_size),
        lambda: PageTable.block_table(TABLE, ints(1, 1), page_size),
        lambda: PageTable.token_slots(TABLE, ints(1), ints(1), page_size),
    ):
        with pytest.raises(ValueError, match=r"^page_size is .*, must be an int in \[1, 2147483647\]"):
            make()


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("kv_indptr", (ints(0, 1, 2).float(), ints(0, 0), ints(1, 1), 4)),
        ("kv_indptr", (ints(0, 1, 2)[None], ints(0, 0), ints(1, 1), 4)),
        ("kv_indptr", (ints(0, 9, 1, 9, 2)[::2], ints(0, 0), ints(1, 1), 4)),
        ("kv_indptr", ([0, 1, 2], ints(0, 0), ints(1, 1), 4)),
        ("kv_indptr", (ints(), ints(0, 0), ints(), 4)),
        ("kv_indptr", (None, ints(0, 0), ints(1, 1), 4)),
        ("kv_indices", (ints(0, 1, 2), None, ints(1, 1), 1)),
        ("kv_indices", (ints(0, 1, 2), ints(0, 0, dtype=torch.int64), ints(1, 1), 4)),
        ("kv_indices", (ints(0, 1, 2), ints(0, 0)[None], ints(1, 1), 4)),
        ("kv_indices", (ints(0, 1, 2), ints(0, 9, 0, 9)[::2], ints(1, 1), 4)),
        ("kv_indices", (ints(0, 1, 2), ints(0, 0).to("meta"), ints(1, 1), 4)),
        ("kv_last_page_len", (ints(0, 1, 2), ints(0, 0), ints(1, 1).short(), 4)),
        ("kv_last_page_len", (ints(0, 1, 2), ints(0, 0), ints(1, 1, 1), 4)),
        ("kv_last_page_len", (ints(0, 1, 2), ints(0, 0), None, 4)),
        ("kv_last_page_len", (ints(0, 1, 2), ints(0, 0), ints(1, 1).to("meta"), 4)),
    ],
)
def test_csr_refuses(argument: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=rf"^{argument} is .*, must be "):
        PageTable.csr(*arguments)


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("block_table", (TABLE.long(), ints(1, 1), 4)),
        ("block_table", (TABLE[0], ints(1, 1), 4)),
        ("block_table", (TABLE.t(), ints(*[1] * 8), 4)),
        ("block_table", (TABLE[:, ::2], ints(1, 1), 4)),
        ("kv_lens", (TABLE, ints(1, 1).short(), 4)),
        ("kv_lens", (TABLE, ints(1), 4)),
        ("kv_lens", (TABLE, ints(1, 1)[None], 4)),
        ("kv_lens", (TABLE, ints(1, 9, 1, 9)[::2], 4)),
        ("kv_lens", (TABLE, None, 4)),
        ("kv_lens", (TABLE, ints(1, 1).to("meta"), 4)),
    ],
)
def test_block_table_refuses(argument: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=rf"^{argument} is .*, must be "):
        PageTable.block_table(*arguments)


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("req_to_token", (TABLE.long(), ints(1), ints(1))),
        ("req_to_token", (TABLE.t(), ints(1), ints(1))),
        ("req_to_token", (TABLE[:0], ints(1), ints(1))),
        ("rows", (TABLE, ints(1).float(), ints(1))),
        ("rows", (TABLE, None, ints(1))),
        ("rows", (TABLE, ints(1, 0).to("meta"), ints(1, 1))),
        ("kv_lens", (TABLE, ints(1, 0), ints(1))),
        ("kv_lens", (TABLE, ints(1), ints(1).float())),
        ("kv_lens", (TABLE, ints(1, 0), ints(1, 1).to("meta"))),
    ],
)
def test_token_slots_refuses(argument: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=rf"^{argument} is .*, must be "):
        PageTable.token_slots(*arguments)


def test_ragged_refuses() -> None:
    with pytest.raises(ValueError, match=r"^kv_indptr is .*, must be "):
        PageTable.ragged(ints(0, 1).float())
    with pytest.raises(ValueError, match=r"^kv_indptr is None, must be "):
        PageTable.ragged(None)


def test_fields_are_checked_however_they_come() -> None:
    with pytest.raises(ValueError, match="block_table"):
        PageTable(4)
    with pytest.raises(ValueError, match=r"^entry_step is 2, must be 1 or page_size = 4"):
        PageTable(4, indices=TABLE, rows=ints(1), kv_lens=ints(1), entry_step=2)
    with pytest.raises(ValueError, match=r"^page_size is 4, must be 1 for ragged"):
        PageTable(4, indptr=ints(0, 1))
