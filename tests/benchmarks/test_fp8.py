"""The benchmark of 8-bit caches: a small line on a CPU.

Our own implementation of FlashInfer's API replaces FlashInfer.
"""

from __future__ import annotations

import pytest
from stand_ins import MACHINE, OneMoreEach, install_peers

from attn_backend.jit import compilers
from benchmarks import fp8
from benchmarks.batches import Batch
from benchmarks.cases import Case


@pytest.mark.skipif(
    compilers.cpp_compiler() is None, reason="scales of heads are a variant, which needs a C++ compiler"
)
@pytest.mark.parametrize("qo_len", [1, 5])
def test_a_small_line_is_right(
    qo_len: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Batch, "make", lambda case, make=Batch.make: make(case, device="cpu"))
    install_peers(monkeypatch)
    line = fp8.measure(Case("small", (qo_len,) * 3, (100, 64, 77), 8, 2), OneMoreEach(), MACHINE)  # type: ignore[arg-type]
    printed = capsys.readouterr()
    assert "WRONG" not in printed.out
    assert [text.split(": ")[1] for text in printed.err.splitlines() if text.startswith("small: ")] == [
        "FA3 fp8"
    ], "it alone says why it is missing"
    assert line["FA3 fp8"] is None
    assert line["FlashInfer fp8"] == line["FlashInfer fp8 Q"] == 1.0
    assert (
        line["FlashInfer fp8 error"]
        < fp8.LARGEST_ERROR
        < line["FlashInfer fp8 Q error"]
        < fp8.LARGEST_FLOAT8_Q_ERROR
    )
    without = fp8.measure(Case("small", (qo_len,) * 3, (100, 64, 77), 8, 2), OneMoreEach(), MACHINE, peers=())  # type: ignore[arg-type]
    assert [without[column] for column in fp8.PEER_COLUMNS] == [None] * 3
    assert capsys.readouterr().err == "", "no peer is asked"
    assert "small" in fp8.markdown([without], "header")
    cells = [row.split("|") for row in fp8.markdown([line], "header").splitlines()[2:]]
    row = dict(zip((cell.strip() for cell in cells[0]), (cell.strip() for cell in cells[2]), strict=True))
    assert (
        row["FA3 fp8"],
        row["fp8 / FA3"],
        row["fp8 / FlashInfer"],
        row["fp8 Q / FlashInfer"],
        row["FA3 error"],
    ) == ("-", "-", "2.00", "4.00", "")
