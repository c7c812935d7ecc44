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
    missing = ["FA3 fp8", *(f"Triton {name}" for name in fp8.TOKEN_SCALED)]
    assert [
        text.split(": ")[1] for text in printed.err.splitlines() if text.startswith("small: ")
    ] == missing, "each peer that is missing says why"
    assert all(line[column] is None for column in missing)
    assert line["FlashInfer fp8"] == line["FlashInfer fp8 Q"] == 1.0
    assert (
        line["FlashInfer fp8 error"]
        < fp8.LARGEST_ERROR
        < line["FlashInfer fp8 Q error"]
        < fp8.LARGEST_FLOAT8_Q_ERROR
    )
    without = fp8.measure(Case("small", (qo_len,) * 3, (100, 64, 77), 8, 2), OneMoreEach(), MACHINE, peers=())  # type: ignore[arg-type]
    assert [without[column] for column in fp8.PEER_COLUMNS] == [None] * len(fp8.PEER_COLUMNS)
    assert capsys.readouterr().err == "", "no peer is asked"
    assert "small" in fp8.markdown([without], "header")
    texts = [text.splitlines() for text in fp8.markdown([line], "header").split("\n\n")[1:]]
    times, ratios, errors = (
        dict(zip(*([cell.strip() for cell in row.split("|")[2:]] for row in (text[0], text[2])), strict=True))
        for text in texts
    )
    assert times["FA3 fp8"] == ratios["fp8 / FA3"] == "-"
    assert (ratios["fp8 / FlashInfer"], ratios["fp8 Q / FlashInfer"]) == ("2.00", "6.00")
    assert "FA3 fp8" not in errors
    assert float(errors["int8, token scales"]) < fp8.LARGEST_ERROR
