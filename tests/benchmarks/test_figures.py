"""The figures match the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from benchmarks import figures


def test_serving_tables_are_read_as_they_stand(tmp_path: Path) -> None:
    text = (figures.DOCS / "benchmarks.md").read_text()
    tables = figures.serving_tables(text)
    assert list(tables) == ["vLLM", "SGLang"]
    for engine, loads in tables.items():
        for title, rows in loads.items():
            assert title in text
            assert "attn_backend" in rows, (engine, title)
            assert all(0 < value < 1000 for value in rows.values())
    figures.draw_serving(tables, tmp_path / "serving.svg")
    one = next(rows for title, rows in tables["vLLM"].items() if "One shared prefix" in title)
    assert f"{one['attn_backend']:.1f}" in (tmp_path / "serving.svg").read_text()


def test_a_table_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StopIteration):
        figures.draw_serving({"vLLM": {"another load": {"attn_backend": 1.0}}}, tmp_path / "serving.svg")
