"""The times at which a client sends its requests, if it must not draw them: recorded arrivals, and answers to
one prompt that start together.
"""

from __future__ import annotations

import itertools
import random


def poisson(num_prompts: int, rate: float, seed: int) -> list[float]:
    """Seconds after the first prompt. Like vLLM's client, the gaps are scaled so that the rate is exact."""
    draw = random.Random(seed)
    ends = list(itertools.accumulate(draw.expovariate(rate) for _ in range(num_prompts)))
    scale = num_prompts / rate / ends[-1]
    return [(end - ends[0]) * scale for end in ends]


def of_requests(prompts: list[float], samples: int) -> list[float]:
    """Of the requests of prompts that are answered `samples` times: all of a prompt's at once."""
    return [arrival for arrival in prompts for _ in range(samples)]


def mean_rate(arrivals: list[float]) -> float:
    """Requests per second; infinite if all arrive at once."""
    return len(arrivals) / arrivals[-1] if arrivals[-1] > 0 else float("inf")
