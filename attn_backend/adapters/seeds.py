"""A seed for every request, also for those that bring none."""

from __future__ import annotations

import random


class SeedSource:
    """Draws seeds for requests in the order of their arrival.

    Several processes of an engine may sample the same requests (the ranks of a tensor-parallel group). They
    see the requests in the same order, and must draw the same seeds without communication. So each source has
    a private generator, which nothing else advances.
    """

    def __init__(self, *origin: object) -> None:
        """
        Args:
            origin: values that determine the seeds: the engine's own seed, the data-parallel rank.
        """
        self._random = random.Random(repr(origin))

    def draw(self) -> int:
        """A new seed, -2^63 ... 2^63 - 1."""
        return self._random.getrandbits(64) - 2**63


def signed_64_bits(seed: int) -> int:
    """The int64 that has the same bits as the lowest 64 of `seed`."""
    return (seed + 2**63) % 2**64 - 2**63
