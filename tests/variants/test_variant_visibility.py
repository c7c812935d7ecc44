"""Intervals of masks: they never hide visible tokens, and they replace only what they imply."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch

from attn_backend.validation import MAX_INT32
from attn_backend.variants.expressions import (
    KV_IDX,
    Q_IDX,
    B,
    H,
    Kind,
    Node,
    absolute,
    arithmetic,
    bitwise,
    compare,
    constant,
    is_interval,
    logical_not,
    mask_visibility,
    negate,
    select,
)

LENGTH = 24
Q, KV = torch.meshgrid(torch.arange(LENGTH), torch.arange(LENGTH), indexing="ij")
VALUES: dict[Node, torch.Tensor] = {Q_IDX: Q, KV_IDX: KV, B: torch.full_like(Q, 2), H: torch.full_like(Q, 1)}
FUNCTIONS: dict[str, Any] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "negate": torch.neg,
    "abs": torch.abs,
    "floor_divide": torch.floor_divide,
    "floor_modulo": torch.remainder,
    "min": torch.minimum,
    "max": torch.maximum,
    "select": torch.where,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "not": torch.logical_not,
    **{name: getattr(torch, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}


def value_of(node: Node) -> torch.Tensor:
    if node in VALUES:
        return VALUES[node]
    if node.is_constant:
        return torch.full_like(Q, node.value, dtype=torch.bool if node.kind == Kind.BOOL else Q.dtype)
    return FUNCTIONS[node.op](*map(value_of, node.args))


def random_integer(draw: random.Random, depth: int) -> Node:
    if depth == 0 or draw.random() < 0.25:
        return draw.choice([Q_IDX, KV_IDX, Q_IDX, KV_IDX, B, constant(draw.randint(-6, 12))])
    one, other = random_integer(draw, depth - 1), random_integer(draw, depth - 1)
    return draw.choice(
        [
            lambda: arithmetic("sub", Q_IDX, KV_IDX),
            lambda: arithmetic("sub", KV_IDX, Q_IDX),
            lambda: arithmetic("add", one, other),
            lambda: arithmetic("sub", one, other),
            lambda: arithmetic("mul", one, constant(draw.choice([-2, -1, 2, 3]))),
            lambda: absolute(one),
            lambda: arithmetic("floor_divide", one, constant(draw.choice([2, 3, 5, -4]))),
            lambda: arithmetic("floor_modulo", one, constant(draw.choice([2, 3, 5]))),
            lambda: arithmetic(draw.choice(["min", "max"]), one, other),
        ]
    )()


def random_mask(draw: random.Random, depth: int) -> Node:
    if depth == 0 or draw.random() < 0.3:
        return compare(
            draw.choice(["lt", "le", "gt", "ge", "eq", "ne"]),
            random_integer(draw, 2),
            random_integer(draw, 1),
        )
    one, other = random_mask(draw, depth - 1), random_mask(draw, depth - 1)
    return draw.choice(
        [
            lambda: bitwise("and", one, other),
            lambda: bitwise("and", one, other),
            lambda: bitwise("or", one, other),
            lambda: logical_not(one),
            lambda: select(random_mask(draw, 0), one, other),
            lambda: one,
        ]
    )()


def test_random_masks() -> None:
    draw = random.Random(0)
    derived = dropped = 0
    for _ in range(2000):
        mask = random_mask(draw, 3)
        visibility = mask_visibility(mask)
        inside = torch.ones_like(Q, dtype=torch.bool)
        if visibility.causal:
            inside &= KV <= Q
        if visibility.window_left >= 0:
            inside &= visibility.window_left >= Q - KV
        seen = value_of(mask)
        assert not (seen & ~inside).any(), "the interval hides what the mask shows"
        rest = torch.ones_like(inside) if visibility.mask is None else value_of(visibility.mask)
        assert torch.equal(rest & inside, seen), "a term was dropped that the interval does not say"
        derived += visibility.causal or visibility.window_left >= 0
        dropped += (visibility.causal or visibility.window_left >= 0) and visibility.mask is None
    assert derived > 100
    assert dropped > 20


def test_masks_known_as_intervals_have_no_holes() -> None:
    """And at least some are known."""
    rng = random.Random(7)
    known = 0
    for _ in range(3000):
        mask = random_mask(rng, 3)
        if mask.is_constant or not is_interval(mask):
            continue
        known += 1
        seen = value_of(mask).int()
        begins = (seen.diff(dim=1, prepend=torch.zeros(LENGTH, 1, dtype=torch.int32)) == 1).sum(1)
        assert int(begins.max()) <= 1, mask
    assert known > 300


@pytest.mark.parametrize("offset", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("divisor", [1, 2, 3, 5, -2, -3])
def test_reach_of_equal_quotients(divisor: int, offset: int) -> None:
    """(q + offset) // divisor == kv // divisor: the interval holds everything that any query sees, and no
    more on the left.
    """
    shifted, number = arithmetic("add", Q_IDX, constant(offset)), constant(divisor)
    quotients = [arithmetic("floor_divide", shifted, number), arithmetic("floor_divide", KV_IDX, number)]
    for a, b in (quotients, quotients[::-1]):
        mask = compare("eq", a, b)
        seen = value_of(mask)
        visibility = mask_visibility(mask)
        assert visibility.causal == (not (seen & (KV > Q)).any())
        assert visibility.window_left == max(int((Q - KV)[seen].max()), 0)


def test_sums_that_rise_and_fall_are_no_intervals() -> None:
    """Each term is known to rise or fall; their sum and difference may not be monotonic."""
    rising = [KV_IDX, arithmetic("floor_divide", KV_IDX, constant(3)), arithmetic("mul", KV_IDX, constant(2))]
    falling = [negate(term) for term in rising]
    for term in rising:
        for other in rising:
            if term is other:
                continue
            steps = arithmetic(
                "sub", arithmetic("mul", other, constant(3)), arithmetic("mul", term, constant(2))
            )
            for sum_of in (
                arithmetic("add", term, negate(other)),
                arithmetic("sub", term, other),
                arithmetic("add", negate(other), term),
                steps,
            ):
                for op, limit in itertools.product(("lt", "le", "gt", "ge", "eq"), (-4, -1, 1, 3)):
                    mask = compare(op, sum_of, constant(limit))
                    runs = (
                        (
                            value_of(mask)
                            .int()
                            .diff(dim=1, prepend=torch.zeros(LENGTH, 1, dtype=torch.int32))
                            == 1
                        )
                        .sum(1)
                        .max()
                    )
                    assert runs <= 1 or not is_interval(mask), mask
    for one in rising:
        for sum_of in (
            arithmetic("add", one, rising[0]),
            arithmetic("sub", one, falling[1]),
            arithmetic("add", falling[0], negate(one)),
        ):
            assert is_interval(compare("lt", sum_of, constant(5)))


def test_unions_are_intervals_only_if_both_have_the_same_open_end() -> None:
    def one_of(*tokens: int) -> Node:
        return functools.reduce(
            lambda a, b: bitwise("or", a, b), (compare("eq", KV_IDX, constant(token)) for token in tokens)
        )

    before, after = compare("lt", KV_IDX, Q_IDX), compare("gt", KV_IDX, constant(5))
    assert is_interval(bitwise("or", before, compare("lt", KV_IDX, constant(5))))
    assert is_interval(bitwise("or", after, compare("ge", KV_IDX, Q_IDX)))
    for holes in (
        one_of(2, 9),
        bitwise("or", before, after),
        bitwise("or", bitwise("and", before, after), one_of(3)),
        bitwise("or", before, one_of(20)),
    ):
        assert not is_interval(holes)


def test_either_branch_may_reach_further() -> None:
    """A query sees the tokens that one of two branches shows; the condition and its opposite narrow them."""
    causal, near = compare("le", KV_IDX, Q_IDX), compare("le", arithmetic("sub", Q_IDX, KV_IDX), constant(3))
    window = bitwise("and", causal, near)
    head = compare("eq", H, constant(0))
    yes, no = compare("lt", KV_IDX, H), compare("ge", B, KV_IDX)
    for mask, causal_is, window_left in (
        (select(head, causal, window), True, -1),
        (select(head, window, causal), True, -1),
        (select(head, window, near), False, 3),
        (select(causal, near, window), True, 3),
        (select(causal, window, yes), False, 3),
        (select(logical_not(causal), yes, window), False, 3),
        (select(near, causal, no), True, -1),
        (logical_not(select(head, logical_not(causal), logical_not(window))), True, -1),
    ):
        found = mask_visibility(mask)
        assert (found.causal, found.window_left) == (causal_is, window_left), mask


def test_largest_windows() -> None:
    distance = arithmetic("sub", Q_IDX, KV_IDX)
    assert mask_visibility(compare("le", distance, constant(MAX_INT32))).window_left == MAX_INT32
    wider = mask_visibility(
        compare(
            "le",
            arithmetic("add", arithmetic("mul", distance, constant(1)), constant(-5)),
            constant(MAX_INT32),
        )
    )
    assert (wider.window_left, wider.mask is None) == (-1, False)
