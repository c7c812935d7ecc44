"""Seeds for requests without one, and seeds that are out of range."""

from __future__ import annotations

import random

import pytest

from attn_backend.kernels.sampling import SeedSource, signed_64_bits


def test_sources_of_one_origin_agree_whatever_else_draws() -> None:
    """The ranks of a group must derive the same seeds without communication."""
    sources = [SeedSource(3, 0), SeedSource(3, 0)]
    drawn = []
    for source in sources:
        random.seed(0)
        drawn.append([(source.draw(), random.random())[0] for _ in range(100)])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in drawn[0])
    assert min(drawn[0]) < 0 < max(drawn[0])
    state = random.getstate()
    sources[0].draw()
    assert random.getstate() == state, "the generator is the source's own"
    firsts = {SeedSource(*origin).draw() for origin in ((3, 0), (3, 1), (4, 0), ("3", 0), (0, 3))}
    assert len(firsts) == 5, "the engine's seed and the rank both count"


@pytest.mark.parametrize(
    "seed", [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 3 * 2**64 + 5]
)
def test_lowest_64_bits(seed: int) -> None:
    signed = signed_64_bits(seed)
    assert -(2**63) <= signed < 2**63
    assert (signed - seed) % 2**64 == 0
