"""The search for the highest request rate that keeps a limit. Measurements are noisy and expensive.

It is a function of the measurements, so an interrupted search continues with the same next step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """The state of a search.

    Attributes:
        next_rate: measure this rate once more. None: the search has ended.
        low: the highest rate that kept the limit. None: no rate kept it.
        high: the lowest rate above `low` that broke the limit. None: no rate broke it.
    """

    next_rate: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class RateSearch:
    """Doubles or halves the rate from `first` until the limit is between two rates, then bisects.

    limit: of the measured value. lowest, highest: rates, per second. tolerance: the search ends when the rate
    that breaks the limit is at most this part higher. repeats: an odd number of measurements, whose median
    decides.
    """

    limit: float
    first: float = 4.0
    lowest: float = 0.25
    highest: float = 256.0
    tolerance: float = 0.05
    repeats: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.first <= self.highest:
            raise ValueError(
                f"rates: lowest {self.lowest:g}, first {self.first:g}, highest {self.highest:g}, must be "
                f"positive and in this order"
            )
        if self.repeats < 1 or self.repeats % 2 == 0:
            raise ValueError(f"repeats: {self.repeats}, must be odd: their median decides")
        if self.tolerance < 0.01:
            raise ValueError(f"tolerance: {self.tolerance:g}, must be at least 0.01")

    def keeps_limit(self, values: Sequence[float]) -> bool | None:
        """Whether the median of `repeats` measurements is within the limit. None: these do not decide it.

        `repeats` equal verdicts, of at most 2 * repeats - 1, overrule the first ones.
        """
        overruled = self._majority(values, self.repeats)
        return (
            self._majority(values[: self.repeats], self.repeats // 2 + 1) if overruled is None else overruled
        )

    def _majority(self, values: Sequence[float], votes: int) -> bool | None:
        within = sum(value <= self.limit for value in values)
        if within >= votes:
            return True
        return False if len(values) - within >= votes else None

    def look(self, measured: Mapping[float, Sequence[float]]) -> Found:
        """Follows the search through these measurements (of each rate) to the first missing one.

        Both ends of the result are confirmed by `repeats` equal verdicts. If one is overruled, the search
        goes on from there, so it recovers from an outlier at one of its first rates.
        """
        low = high = None
        rate: float | None = self.first
        while rate is not None:
            keeps = self.keeps_limit(measured.get(rate, ()))
            if keeps is None:
                return Found(rate, low, high)
            if keeps:
                low = rate
            else:
                high = rate
            rate = self._after(low, high)
        for end in (high, low):
            if end is not None and self._majority(measured[end], self.repeats) is None:
                return Found(end, low, high)
        return Found(None, low, high)

    def _after(self, low: float | None, high: float | None) -> float | None:
        if high is None and low is not None:
            return min(2 * low, self.highest) if low < self.highest else None
        if low is None and high is not None:
            return max(high / 2, self.lowest) if high > self.lowest else None
        assert low is not None
        assert high is not None
        if high <= low * (1 + self.tolerance):
            return None
        middle = float(f"{math.sqrt(low * high):.3g}")  # a rate that can be read
        return middle if low < middle < high else None
