"""How far answers are from one another where tokens may differ (integration/tiny_models/compare_gpu.py)."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the environment of `make test`")
sys.path.append(str(Path(__file__).resolve().parents[2]))

from integration.tiny_models.compare_gpu import compare, distance
from integration.tiny_models.questions import Answer

REFERENCE = Answer([1, 2, 3], [-1.0, -2.0, -3.0], [-4.0])


def test_distance_ends_where_tokens_differ():
    other = Answer([1, 5, 9], [-1.5, -2.1, -7.0], [-4.5])
    found = distance([REFERENCE], [other])
    assert found.rms == pytest.approx(0.5)
    assert found.tie == pytest.approx(0.1)


def test_distance_of_embeddings_and_of_nothing():
    assert distance([Answer(embedding=[0.5, 1.0])], [Answer(embedding=[0.25, 1.25])]).rms == 0.25
    with pytest.raises(ValueError, match="nothing that can be compared"):
        distance([Answer([1], [-1.0])], [Answer([2], [-1.0])])


@pytest.mark.parametrize(
    ("ours", "near"),
    [
        (Answer([1, 2, 3], [-1.14, -2.14, -3.14], [-4.14]), True),
        (Answer([1, 2, 3], [-1.2, -2.2, -3.2], [-4.2]), False),  # twice as far away as the engine's own
        (Answer([1, 7, 3], [-1.0, -2.15, -3.0], [-4.0]), True),  # a tie
        (Answer([1, 7, 3], [-1.0, -2.5, -3.0], [-4.0]), False),  # no tie
    ],
)
def test_the_engines_own_backend_is_the_measure(ours, near, tmp_path):
    for name, answer in (("reference", REFERENCE), ("vllm-stock", Answer([1, 2, 3], [-1.1, -2.1, -3.1], [-4.1])), ("vllm-ours", ours)):
        (tmp_path / "bert").mkdir(exist_ok=True)
        (tmp_path / "bert" / f"{name}.answers.json").write_text(json.dumps([asdict(answer)]))
    assert compare("vllm", "bert", tmp_path, tmp_path)[0] == near


def test_a_family_that_failed_is_not_near(tmp_path):
    assert compare("vllm", "bert", tmp_path, tmp_path) == (False, "failed")
