"""ATTN_BACKEND_DUMP: batches that were refused or clamped, as files that `attn-backend plan` replays."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backend import Attention, BSRView, KVCache, PageTable
from attn_backend.cli.batches import from_json
from attn_backend.cli.main import main
from attn_backend.kernels import attention as kernels
from attn_backend.kernels.attention import DumpingAttention
from attn_backend.kernels.native import dtype_of, values_of

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTN_BACKEND_DUMP", str(tmp_path / "dumps"))
    monkeypatch.setattr(kernels, "_dumps", itertools.count(1))
    return tmp_path / "dumps"


def make(**options: Any) -> Attention:
    defaults: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "max_rows": 8, "max_batch": 4}
    return Attention(4, 2, 64, **(defaults | options))


def table(kv_lens: list[int]) -> PageTable:
    """Of 4 pages of 16 tokens."""
    pages = torch.arange(4 * len(kv_lens), dtype=torch.int32).view(-1, 4)
    return PageTable.block_table(pages, torch.tensor(kv_lens), 16)


def slots(kv_lens: list[int]) -> PageTable:
    """The same, by SGLang's slots."""
    places = torch.arange(64 * len(kv_lens), dtype=torch.int32).view(-1, 64)
    return PageTable.token_slots(places, torch.arange(len(kv_lens)), torch.tensor(kv_lens), 16)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def replay(path: Path, capsys: Capture) -> tuple[int, str]:
    status = main(["plan", str(path)])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


@pytest.mark.parametrize("table_of", [table, slots])
@pytest.mark.parametrize(
    ("qo_indptr", "kv_lens", "fault"),
    [
        ([0, 1, 2], [20, 65], r"kv_lens\[1\] is 65, must be at most 64"),
        ([0, 1, 2], [-3, 20], r"kv_lens\[0\] is -3, must be at least 0"),
        ([0, 2, 1], [20, 20], r"qo_indptr\[2\] is 1, must be at least 2, the element before it"),
        ([0, 1, 9], [20, 20], r"qo_indptr\[2\] is 9, must be at most 8, max_rows"),
        (list(range(6)), [1] * 5, "at most max_batch = 4"),
    ],
    ids=lambda value: value.replace("\\", "") if isinstance(value, str) else "",
)
def test_a_refused_batch_is_refused_again(
    qo_indptr: list[int], kv_lens: list[int], fault: str, table_of: Any, folder: Path, capsys: Capture
) -> None:
    with pytest.raises(ValueError, match=fault):
        make().plan(BSRView(torch.tensor(qo_indptr), table_of(kv_lens)))
    path = only_file(folder)
    batch = json.loads(path.read_text())
    assert (batch["qo_indptr"], batch["kv_lens"]) == (qo_indptr, kv_lens)
    status, printed = replay(path, capsys)
    assert status == 2
    with pytest.raises(ValueError, match=fault):
        raise ValueError(printed)


@pytest.mark.parametrize("indptr", [[0, 5], [0, -1], [-2, 2]])
def test_a_wrong_kv_indptr_is_written_with_the_lengths_that_a_plan_reads(
    indptr: list[int], folder: Path, capsys: Capture
) -> None:
    ids = torch.tensor([3, 4], dtype=torch.int32)
    pages = PageTable.csr(torch.tensor(indptr, dtype=torch.int32), ids, torch.tensor([1]), 16)
    with pytest.raises(ValueError, match=r"kv_indptr\[.\] is "):
        make().plan(BSRView(torch.tensor([0, 1]), pages))
    path = only_file(folder)
    batch = json.loads(path.read_text())
    assert batch["kv_lens"][0] <= 16 * len(batch["block_table"][0])
    status, printed = replay(path, capsys)
    assert status == 0
    assert "kv_indptr[" in printed


def test_a_page_beyond_the_cache_is_found_by_the_run(folder: Path, capsys: Capture) -> None:
    attention = make()
    attention.plan(BSRView(torch.tensor([0, 1, 2]), table([20, 20])))
    with pytest.raises(ValueError, match="page 1 of request 1 is 5") as refused:
        attention.run(torch.zeros(2, 4, 64), KVCache.from_tensor(torch.zeros(5, 2, 16, 2, 64)))
    status, printed = replay(only_file(folder), capsys)
    assert (status, printed) == (2, f"attn-backend plan: {refused.value}\n")


def clamp(attention: Attention, error: str) -> None:
    """Leaves an error in the schedule, as a kernel on a GPU does."""
    fields = dtype_of("ScheduleHeader").fields
    assert fields is not None
    attention._schedule[fields["errors"][1] :][:4].view(torch.int32)[0] = values_of("ScheduleError")[error]


def test_a_clamped_batch_is_served_and_written_once(
    folder: Path, capsys: Capture, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Attention.plan

    def plan_and_clamp(attention: Attention, *given: Any, **options: Any) -> None:
        plan(attention, *given, **options)
        clamp(attention, "kPrefixSearchFailed")

    monkeypatch.setattr(Attention, "plan", plan_and_clamp)
    # as on a GPU it raises nothing
    monkeypatch.setattr(Attention, "_run_raw", lambda self, q, *given: q)
    attention = make()
    assert isinstance(attention, DumpingAttention)
    cache = KVCache.from_tensor(torch.zeros(8, 2, 16, 2, 64))
    with caplog.at_level(logging.WARNING):
        attention.plan(BSRView(torch.tensor([0, 1, 2]), table([20, 33]), window_left=40))
        for _ in range(2):
            attention.run(torch.zeros(2, 4, 64), cache)
    path = only_file(folder)
    assert f"Replay it: attn-backend plan {path}" in caplog.text
    status, printed = replay(path, capsys)
    assert status == 0
    assert "2 requests, 2 rows of Q, 53 tokens of KV in 5 pages of 16" in printed
    assert "written because it was clamped: the search for shared prefixes did not end in time" in printed


def test_the_file_has_the_options_of_the_plan(folder: Path, capsys: Capture) -> None:
    attention = make(batch_invariant=True, head_dim_v=32, num_ctas=7)
    attention.plan(BSRView(torch.tensor([0, 1]), table([20]), causal=False))
    clamp(attention, "kPageIndexInvalid")
    with pytest.raises(ValueError, match="outside the cache"):
        attention.raise_for_errors()
    batch = json.loads(only_file(folder).read_text())
    assert batch == {
        "fault": "clamped: a page id is outside the cache; must be in [0, pages of the cache)",
        "heads": "4/2",
        "head_dim": 64,
        "head_dim_v": 32,
        "costs": "cpu",
        "num_ctas": 7,
        "causal": False,
        "window_left": -1,
        "cascade": True,
        "batch_invariant": True,
        "variant": None,
        "max_rows": 8,
        "max_batch": 4,
        "num_pages": None,
        "qo_indptr": [0, 1],
        "page_size": 16,
        "kv_lens": [20],
        "block_table": [[0, 1]],
    }
    assert replay(only_file(folder), capsys)[0] == 0


def test_the_file_has_the_prompts(folder: Path, capsys: Capture) -> None:
    attention = make(batch_invariant=True)
    prompts = torch.tensor([1, 0], dtype=torch.int32)
    attention.plan(BSRView(torch.tensor([0, 1, 2]), table([20, 33]), prompts=prompts))
    clamp(attention, "kPageIndexInvalid")
    with pytest.raises(ValueError, match="outside the cache"):
        attention.raise_for_errors()
    path = only_file(folder)
    batch = json.loads(path.read_text())
    assert batch["prompts"] == [1, 0]
    view = from_json(path).view()
    assert view.prompts is not None
    assert view.prompts.tolist() == [1, 0]
    path.write_text(json.dumps(batch | {"prompts": [1]}))
    assert replay(path, capsys) == (
        2,
        "attn-backend plan: prompts is [1], must be a list of len(kv_lens) = 2 numbers\n",
    )


def test_other_tables_are_written_too(folder: Path, capsys: Capture) -> None:
    csr = PageTable.csr(
        torch.tensor([0, 2, 2]), torch.tensor([5, 6], dtype=torch.int32), torch.tensor([4, 1]), 16
    )
    for view in (
        BSRView(torch.tensor([0, 1, 2]), csr),
        BSRView(torch.tensor([0, 3, 4]), PageTable.ragged(torch.tensor([0, 3, 4]))),
    ):
        attention = make()
        attention.plan(view)
        clamp(attention, "kPageIndexInvalid")
        with pytest.raises(ValueError, match="outside the cache"):
            attention.raise_for_errors()
    written = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    assert [batch["kv_lens"] for batch in written] == [[20, 0], [3, 1]]
    assert [batch.get("block_table") for batch in written] == [[[5, 6], []], None]
    for path in sorted(folder.iterdir()):
        assert replay(path, capsys)[0] == 0


@pytest.mark.parametrize("kernel", [None, "generic", "hopper"])
def test_the_design_is_named_as_the_command_names_it(
    kernel: str | None, folder: Path, capsys: Capture
) -> None:
    attention = make(dtype=torch.bfloat16, kernel=kernel)
    attention.plan(BSRView(torch.tensor([0, 1]), table([20])))
    clamp(attention, "kPageIndexInvalid")
    with pytest.raises(ValueError, match="outside the cache"):
        attention.raise_for_errors()
    assert json.loads(only_file(folder).read_text())["costs"] == (kernel or "cpu")
    assert attention.design == "cpu"
    assert replay(only_file(folder), capsys)[0] == 0


def test_a_batch_without_end_is_refused(folder: Path, capsys: Capture) -> None:
    with pytest.raises(ValueError, match="kv_lens"):
        make().plan(BSRView(torch.tensor([0, 1]), table([99])))
    path = only_file(folder)
    batch = json.loads(path.read_text())
    for change in ({"block_table": None, "kv_lens": [2**62]}, {"block_table": [[0] * (2**24 + 1)]}):
        path.write_text(json.dumps(batch | change))
        status, printed = replay(path, capsys)
        assert status == 2
        assert "requests * pages of the longest" in printed


def test_a_process_writes_few_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_DUMPS", 2)
    for _ in range(3):
        with pytest.raises(ValueError, match="kv_lens"):
            make().plan(BSRView(torch.tensor([0, 1]), table([99])))
    assert [path.suffix for path in folder.iterdir()] == [".json"] * 2


def test_a_folder_that_cannot_be_written_hides_no_error(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")
    with pytest.raises(ValueError, match="kv_lens"):
        make().plan(BSRView(torch.tensor([0, 1]), table([99])))
    assert "attn_backend could not write" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lens": [1, 2]}, "len(qo_indptr) is 2, must be len(kv_lens) + 1 = 3"),
        ({"block_table": []}, "block_table is [], must be a list of len(kv_lens) = 1 lists"),
        ({"num_pages": 1}, "block_table: page 1 of request 0 is 1, must be in [0, 1)"),
        ({"max_batch": "4"}, "max_batch is '4', must be"),
    ],
)
def test_a_changed_file_is_refused_by_name(
    change: dict[str, object], message: str, folder: Path, capsys: Capture
) -> None:
    attention = make()
    attention.plan(BSRView(torch.tensor([0, 1]), table([20])))
    clamp(attention, "kPageIndexInvalid")
    with pytest.raises(ValueError, match="outside the cache"):
        attention.raise_for_errors()
    path = only_file(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    status, printed = replay(path, capsys)
    assert status == 2
    assert message in printed
