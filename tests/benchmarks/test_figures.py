"""The figures match the tables, and are those that the programs draw."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
from benchmarks import diagrams, figures

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    figures.draw_all(folder)
    return folder


@pytest.mark.parametrize("name", sorted(diagrams.DIAGRAMS))
def test_a_diagram_is_reproduced_byte_for_byte(name: str, drawn: Path) -> None:
    assert (drawn / f"{name}.svg").read_text() == (figures.DOCS / "figures" / f"{name}.svg").read_text()


def texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@pytest.mark.parametrize("name", ["serving", "kernels", "prefixes", "fp8", "plans", "pipeline"])
def test_a_plot_has_the_words_and_numbers_of_its_table(name: str, drawn: Path) -> None:
    """matplotlib's releases place them differently."""
    assert texts(drawn / f"{name}.svg") == texts(figures.DOCS / "figures" / f"{name}.svg")


def test_serving_tables_are_read_as_they_stand(drawn: Path) -> None:
    text = (figures.REPORTS / "serving.md").read_text()
    tables = figures.serving_tables(text)
    assert list(tables) == ["vLLM", "SGLang"]
    for engine, loads in tables.items():
        for title, rows in loads.items():
            assert title in text
            assert "attn_backend" in rows, (engine, title)
            assert all(0 < value < 1000 for value in rows.values())
    one = next(rows for title, rows in tables["vLLM"].items() if "One shared prefix" in title)
    assert f"{one['attn_backend']:.1f}" in texts(drawn / "serving.svg")


def test_a_table_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StopIteration):
        figures.draw_serving({"vLLM": {"another load": {"attn_backend": 1.0}}}, tmp_path / "serving.svg")
    with pytest.raises(StopIteration):
        figures.table("fp8", "a column that no table has")


def test_the_drawn_schedule_covers_every_kv_tile_once() -> None:
    cuts, tiles = diagrams.cut_batch(diagrams.LENGTHS, 4)
    for request, count in enumerate(tiles):
        mine = sorted((cut.begin, cut.end) for cut in cuts if cut.request == request)
        assert mine[0][0] == 0
        assert mine[-1][1] == count
        assert all(before[1] == after[0] for before, after in pairwise(mine))


@pytest.mark.parametrize("name", sorted(diagrams.MASKS))
def test_the_drawn_mask_is_the_variants_own(name: str) -> None:
    mask = diagrams.seen(diagrams.MASKS[name]()).bool()
    later = torch.ones_like(mask).triu(1)
    assert mask.diagonal().all()
    assert (mask & later).any() == (name in ("prefix_lm", "document", "bidirectional_spans"))
