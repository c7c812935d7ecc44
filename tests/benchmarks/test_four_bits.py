"""The benchmark of 4-bit caches: a small line on a CPU."""

from __future__ import annotations

import pytest
from stand_ins import MACHINE, OneMoreEach

from benchmarks import four_bits
from benchmarks.batches import Batch
from benchmarks.cases import Case


@pytest.mark.parametrize("qo_len", [1, 5])
def test_a_small_line_is_right(
    qo_len: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Batch, "make", lambda case, make=Batch.make: make(case, device="cpu"))
    line = four_bits.measure(Case("small", (qo_len,) * 3, (100, 64, 77), 8, 2), OneMoreEach(), MACHINE)  # type: ignore[arg-type]
    assert "WRONG" not in capsys.readouterr().out
    assert all(0.01 < line[f"{name} error"] < four_bits.LARGEST_FOUR_BIT_ERROR for name in four_bits.FORMATS)
    text = four_bits.markdown([line], "header")
    assert all(name in text for name in ("small", "int4 / fp8", "nvfp4 / bf16"))


def test_the_floor_has_half_a_byte_an_element() -> None:
    case = Case("one", (1,), (1000,), 8, 2, head_dim=128)
    assert four_bits.floor_bytes(case) == 2 * 1000 * 2 * 68 + 2 * 8 * 128 * 2
