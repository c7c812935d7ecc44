"""Random functions with nested and negated conditions in branches: their C++ gives the functions' float64
results.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_variants import COMPILER
from random_functions import RandomFunctions, wrong

SEEDS = range(1000, 1024)  # others: python -m tests.variant_fuzz --functions 500


@pytest.mark.skipif(not COMPILER, reason="needs g++")
def test_same_as_in_float64(tmp_path: Path) -> None:
    assert not wrong(SEEDS, tmp_path)


def test_conditions_are_nested_and_negated() -> None:
    texts = [RandomFunctions(seed).score_text + RandomFunctions(seed).mask_text for seed in SEEDS]
    assert len(set(texts)) == len(SEEDS)
    for part in (
        "torch.where(torch.where(",
        "torch.where(~",
        ") & (",
        ") | (",
        ") ^ (",
        "torch.logical_not(",
        "True",
        "flags[",
        ".bool()",
    ):
        assert sum(part in text for text in texts) >= 2, part


@pytest.mark.skipif(not COMPILER, reason="needs g++")
def test_wrong_results_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant compared with functions other than its own."""
    variant = RandomFunctions(1000).variant()
    vars(variant)["reference"] = RandomFunctions(1001).variant().reference
    monkeypatch.setattr(RandomFunctions, "variant", lambda _self: variant)
    assert list(wrong([1000], tmp_path)) == [1000]
