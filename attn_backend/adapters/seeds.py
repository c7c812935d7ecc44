"""A seed for every request, also for those that bring none."""

from __future__ import annotations

import random


class SeedSource:
    """Draws seeds for requests in the order in which they come.

    The engine's processes that sample the same requests (the ranks of a tensor-parallel group) see them in
    the same order, and must come to the same seeds without asking each other: so the source has a generator
    of its own, which nothing else advances.
    """

    def __init__(self, *origin: object) -> None:
        """
        Args:
            origin: what the seeds depend on: the engine's own seed, the data-parallel rank.
        """
        self._random = random.Random(repr(origin))

    def draw(self) -> int:
        """A new seed, -2^63 ... 2^63 - 1."""
        return self._random.getrandbits(64) - 2**63


def signed_64_bits(seed: int) -> int:
    """The int64 that has the same bits as the lowest 64 of `seed`."""
    return (seed + 2**63) % 2**64 - 2**63
