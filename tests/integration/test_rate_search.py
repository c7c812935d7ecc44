"""The search for a rate finds a simulated server's limit: a queue in front of the prompts, measured by P99 of
some hundred requests, with noise.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest

from integration.rate_search import Found, RateSearch

LIMIT = 200.0


def p99(values):
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def queue_p99_ms(rate, service_s, num_prompts, seed):
    """P99 TTFT of Poisson arrivals at a server that computes one prompt after another."""
    draw = random.Random(f"{seed} {rate:g}")
    wait, times = 0.0, []
    for _ in range(num_prompts):
        times.append(1000 * (wait + service_s))
        wait = max(wait + service_s - draw.expovariate(rate), 0.0)
    return p99(times)


def run(search, measure):
    """Follows a search to its end. Returns its result, the rates in their order, and the measurements."""
    measured, order = {}, []
    while (rate := (found := search.look(measured)).next_rate) is not None:
        measured.setdefault(rate, []).append(measure(rate, len(measured.get(rate, []))))
        order.append(rate)
        assert len(order) < 300
    return found, order, measured


@pytest.mark.parametrize("tolerance", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("limit_rate", [0.3, 1.0, 3.99, 4.0, 4.01, 17.3, 250.0])
def test_a_monotone_server_is_found_within_the_tolerance(limit_rate, tolerance):
    search = RateSearch(LIMIT, tolerance=tolerance)
    found, order, measured = run(search, lambda rate, _: LIMIT * rate / limit_rate)
    assert found.low <= limit_rate < found.high
    assert found.high <= found.low * (1 + tolerance) * 1.01  # rates are rounded
    ends = (found.low, found.high)
    assert {rate: len(values) for rate, values in measured.items()} == {
        rate: 3 if rate in ends else 2 for rate in measured
    }, "two equal verdicts of three decide, and the ends are confirmed"
    assert len(set(order)) <= 8 + math.log2(1 / tolerance) + 3


@pytest.mark.parametrize("service_s", [0.004, 0.02, 0.06])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_queue_is_found_approximately(service_s, noise, seed):
    # the rate whose P99 is the limit, if one measures long enough
    exact, _, _ = run(
        RateSearch(LIMIT, highest=1024, tolerance=0.02, repeats=1),
        lambda rate, _: queue_p99_ms(rate, service_s, 20_000, 0),
    )
    draw = random.Random(seed)

    def measure(rate, repeat):
        prompts = max(200, round(30 * rate))  # fewer would end before the queue has grown
        return queue_p99_ms(rate, service_s, prompts, (seed, repeat)) * math.exp(draw.gauss(0.0, noise))

    found, order, _ = run(RateSearch(LIMIT, highest=1024), measure)
    # 200 prompts of a slow server are few for a P99
    assert 0.85 * exact.low < found.low < (1.4 if service_s > 0.05 else 1.1) * exact.high
    assert found.high <= found.low * 1.06
    assert len(order) < 50


def test_more_repeats_are_closer_to_the_limit():
    def error(repeats):
        errors = []
        for seed in range(40):
            draw = random.Random(seed)
            found, _, _ = run(
                RateSearch(LIMIT, repeats=repeats),
                lambda rate, _, draw=draw: LIMIT * rate / 10 * math.exp(draw.gauss(0.0, 0.3)),
            )
            errors.append(abs(math.log(found.low / 10)))
        return sum(errors) / len(errors)

    assert error(9) < error(3) < error(1)


@pytest.mark.parametrize("outliers", [{4.0: 2}, {8.0: 2}, {16.0: 2}])
def test_the_search_recovers_from_outliers_at_one_of_its_rates(outliers):
    """The first two measurements of this rate are wrong."""

    def measure(rate, repeat):
        keeps = (rate <= 10) != (repeat < outliers.get(rate, 0))
        return 0.0 if keeps else 2 * LIMIT

    found, _, _ = run(RateSearch(LIMIT), measure)
    assert found.low <= 10 < found.high


def test_a_limit_that_is_never_broken():
    found, order, _ = run(RateSearch(LIMIT, first=4, highest=50), lambda rate, _: 1.0)
    assert found == Found(None, 50, None)
    assert [rate for rate, _ in itertools.groupby(order)] == [4, 8, 16, 32, 50]


def test_a_limit_that_is_always_broken():
    found, order, _ = run(RateSearch(LIMIT, first=4, lowest=0.3), lambda rate, _: float("inf"))
    assert found == Found(None, None, 0.3)
    assert [rate for rate, _ in itertools.groupby(order)] == [4, 2, 1, 0.5, 0.3]


def test_the_median_decides():
    search = RateSearch(LIMIT, repeats=5)
    assert search.keeps_limit([]) is None
    assert search.keeps_limit([1, 1, 300, 300]) is None
    assert search.keeps_limit([1, 1, 300, 300, LIMIT]) is True
    assert search.keeps_limit([300, 300, 300]) is False
    assert RateSearch(LIMIT, repeats=1).keeps_limit([300]) is False


@pytest.mark.parametrize("seed", range(5))
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(seed):
    def measure(rate, repeat):
        return queue_p99_ms(rate, 0.03, 100, (seed, repeat))

    search = RateSearch(LIMIT)
    found, order, measured = run(search, measure)
    before = {}
    for number, rate in enumerate(order):
        assert search.look(before).next_rate == rate, number
        before.setdefault(rate, []).append(measured[rate][len(before.get(rate, []))])
    assert search.look(before) == found
    # measurements of rates that the search does not visit change nothing
    assert search.look(before | {1.2345: [1e9] * 3, 99.9: [0.0] * 3}) == found
    # more repeats of a decided rate do, only if their median differs
    assert search.look(before | {rate: [*values, values[-1]] for rate, values in before.items()}) == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first": 0.1}, "rates: lowest 0.25, first 0.1"),
        ({"highest": 2.0}, "highest 2"),
        ({"repeats": 2}, "repeats: 2, must be odd"),
        ({"tolerance": 0.001}, "tolerance: 0.001"),
    ],
)
def test_searches_without_an_end_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RateSearch(LIMIT, **changes)
