"""The lines of the benchmark that compares two versions. Nothing is measured."""

from __future__ import annotations

import pytest

from benchmarks.cases import SharedCase, shared_cases
from benchmarks.versions import DEVICE, IN_LAYERS, PAGE_SIZE, block_table_of


@pytest.mark.parametrize("case", shared_cases(), ids=lambda case: case.name)
def test_shared_prefixes_are_those_of_their_benchmark(case: SharedCase) -> None:
    name = f"decode {case.name}"
    assert name in DEVICE
    problem = IN_LAYERS[name]
    assert problem["qo_lens"] == list(case.case.qo_lens)
    assert problem["kv_lens"] == list(case.case.kv_lens)
    pages = [-(-tokens // PAGE_SIZE) for tokens in problem["kv_lens"]]
    table = block_table_of(pages, problem["common"] // PAGE_SIZE, problem["of_group"] // PAGE_SIZE, "cpu")
    assert table.unique().numel() == case.pages
    prefixes = table[:, : (problem["common"] + problem["of_group"]) // PAGE_SIZE]
    assert len(prefixes.unique(dim=0)) == case.levels[-2][0]


def test_nothing_is_shared_by_default() -> None:
    table = block_table_of([3, 1, 5], 0, 0, "cpu")
    assert sorted(table[table > 0].tolist()) == list(range(1, 9))
    assert table.shape == (3, 5)
