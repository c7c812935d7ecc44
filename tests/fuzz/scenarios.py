"""Which calls exist: call number n of a seed belongs to scenario n // CALLS, which shares its objects and
depends on nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy
import torch

from . import attention_calls, cache_calls, format_calls, graphs, sampling_calls, selection_calls
from .call import Call

CALLS = 10  # per scenario

Scenario = Callable[[numpy.random.Generator, torch.device], Iterator[Call]]

# Each with its share of all scenarios.
SCENARIOS: dict[Scenario, float] = {
    attention_calls.batches: 0.2,
    attention_calls.float8_batches: 0.05,
    format_calls.token_scaled_batches: 0.06,
    format_calls.rotated_batches: 0.03,
    attention_calls.float8_outputs: 0.04,
    attention_calls.prefix_forests: 0.08,
    attention_calls.trees: 0.05,
    attention_calls.cascades: 0.05,
    attention_calls.constructors: 0.08,
    cache_calls.appends: 0.05,
    cache_calls.projections: 0.07,
    cache_calls.structures: 0.05,
    selection_calls.packings: 0.02,
    sampling_calls.sampling: 0.12,
    graphs.replays: 0.05,
}
GPU_SHARES = {graphs.replays: 0.3}  # instead of those above


NAMES = {make.__name__: make for make in SCENARIOS}


def calls_of(seed: int, scenario: int, device: torch.device, names: Sequence[str] = ()) -> Iterator[Call]:
    """The calls of one scenario, on one thread, since there is a process for each core. names: only these
    from NAMES; none: all.
    """
    torch.set_num_threads(1)
    rng = numpy.random.default_rng([seed, scenario])
    shares = SCENARIOS | (GPU_SHARES if device.type == "cuda" else {})
    shares = {NAMES[name]: shares[NAMES[name]] for name in names} or shares
    weights = numpy.array(list(shares.values()))
    make = list(shares)[rng.choice(len(weights), p=weights / weights.sum())]
    return itertools.islice(make(rng, device), CALLS)
