"""Answers are compared token by token up to their first difference, which may be a near tie."""

from __future__ import annotations

import pytest

from integration.compare_tokens import compare
from integration.engines import Token


def answer(*ids, logprob=-1.0, alternatives=None):
    return [Token(token_id, logprob, {token_id: logprob, **(alternatives or {})}) for token_id in ids]


def test_equal_answers_are_counted():
    comparison = compare([answer(1, 2), answer(3, 4)], [answer(1, 2), answer(3, 4, logprob=-1.5)])
    assert (comparison.prompts, comparison.equal, comparison.tokens_compared, comparison.differences) == (2, 2, 4, [])
    assert comparison.largest_logprob_difference == 0.5


def test_the_first_difference_ends_a_comparison_and_has_its_gaps():
    reference = answer(1, 2, 9, alternatives={7: -1.1})
    backend = answer(1, 7, 8, alternatives={2: -1.2})
    (difference,) = compare([reference], [backend]).differences
    assert (difference.prompt, difference.position, difference.reference_token, difference.backend_token) == (0, 1, 2, 7)
    assert difference.reference_gap == pytest.approx(0.1)
    assert difference.backend_gap == pytest.approx(0.2)
    assert difference.is_near_tie(0.25)
    assert not difference.is_near_tie(0.15)


def test_a_token_outside_the_alternatives_is_no_near_tie():
    (difference,) = compare([answer(1)], [answer(2)]).differences
    assert difference.reference_gap is None
    assert not difference.is_near_tie(100)


def test_answers_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="prompt 0"):
        compare([answer(1)], [answer(1, 2)])
