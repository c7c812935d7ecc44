"""Expressions have torch's types and values; and integers known to be nonnegative are nonnegative."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_backend.variants import TracingError
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
    cast,
    compare,
    constant,
    invert,
    is_never_negative,
    negate,
    node,
    select,
    shift,
)
from attn_backend.variants.tracing import trace

KINDS = {torch.bool: Kind.BOOL, torch.int32: Kind.INT, torch.int64: Kind.INT, torch.float32: Kind.FLOAT}
VALUES = {Kind.BOOL: (True, False), Kind.INT: (5, -3, 0), Kind.FLOAT: (2.5, -0.5)}
DTYPES = {Kind.BOOL: torch.bool, Kind.INT: torch.int32, Kind.FLOAT: torch.float32}

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{
        name: getattr(operator, name)
        for name in (
            "add",
            "sub",
            "mul",
            "truediv",
            "floordiv",
            "mod",
            "lt",
            "le",
            "gt",
            "ge",
            "eq",
            "ne",
            "and_",
            "or_",
            "xor",
        )
    },
    **{
        name: getattr(torch, name)
        for name in ("minimum", "maximum", "fmin", "fmax", "logical_and", "logical_or", "logical_xor")
    },
    "where": lambda a, b: torch.where(torch.eq(a, a), a, b),
    "where_not": lambda a, b: torch.where(torch.ne(a, a), a, b),
    "shift_left": lambda a, b: a << abs(b),
    "shift_right": lambda a, b: a >> (b * b),
    "clamp_min": lambda a, b: torch.clamp(a, min=b),
    "clamp_max": lambda a, b: torch.clamp(a, max=b),
    "add_alpha": lambda a, b: torch.add(a, b, alpha=2),
}
UNARY: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(operator, name) for name in ("neg", "pos", "invert")},
    **{
        name: getattr(torch, name)
        for name in (
            "abs",
            "logical_not",
            "relu",
            "floor",
            "ceil",
            "square",
            "exp",
            "sigmoid",
            "ones_like",
            "zeros_like",
        )
    },
    "power": lambda a: a**2,
    "bool": lambda a: a.bool(),
    "int": lambda a: a.to(torch.int32),
    "float": lambda a: a.float(),
    "plus a boolean": lambda a: a + True,
    "minus a boolean": lambda a: a - True,
    "a boolean minus": lambda a: True - a,
    "an integer minus": lambda a: 1 - a,
    "times a float": lambda a: a * 1.5,
    "half": lambda a: a // 2,
    "or a number": lambda a: torch.where(torch.eq(a, a), a, 2),
    "or a float": lambda a: torch.where(torch.ne(a, a), a, 0.5),
    "clamp": lambda a: torch.clamp(a, 1, 3),
    "clamp to floats": lambda a: torch.clamp(a, 0.5, 1.5),
    "clamp to nothing": lambda a: torch.clamp(a, 3, 1),
}


def by_torch(
    function: Callable[..., Any], values: tuple[Any, ...], kinds: tuple[Kind, ...]
) -> torch.Tensor | None:
    """None: torch refuses, or divides an integer by 0."""
    try:
        result = function(
            *(torch.tensor(value, dtype=DTYPES[kind]) for value, kind in zip(values, kinds, strict=True))
        )
    except (RuntimeError, TypeError, ZeroDivisionError):
        return None
    assert isinstance(result, torch.Tensor)
    return result


def traced(function: Callable[..., Any], kinds: tuple[Kind, ...]) -> Node | None:
    """The node of `function` of traced values; None: refused."""
    found: list[Any] = []
    add = found.append  # a list of functions would be copied

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        values = {0: h == 0, 1: q_idx, 2: score}
        add(function(*(values[int(kind)] for kind in kinds)).node)
        return score

    try:
        trace("score_mod", score_mod, ("score", "b", "h", "q_idx", "kv_idx"), [], {})
    except TracingError:
        return None
    node_found: Node = found[0]
    return node_found


@pytest.mark.parametrize("name", [*BINARY, *UNARY])
def test_types_are_those_of_torch(name: str) -> None:
    """Of all types of the arguments. Also refuses what torch refuses."""
    function = BINARY.get(name) or UNARY[name]
    for kinds in itertools.product(Kind, repeat=2 if name in BINARY else 1):
        values = tuple(VALUES[kind][0] for kind in kinds)
        expected, found = by_torch(function, values, kinds), traced(function, kinds)
        assert (expected is None) == (found is None), kinds
        if expected is not None and found is not None:
            assert found.kind == KINDS[expected.dtype], kinds


@pytest.mark.parametrize("name", [*BINARY, *UNARY])
def test_constants_fold_to_the_values_of_torch(name: str) -> None:
    """Where the arguments are constants."""
    function = BINARY.get(name) or UNARY[name]
    for kinds in itertools.product(Kind, repeat=2 if name in BINARY else 1):
        for values in itertools.product(*(VALUES[kind] for kind in kinds)):
            expected = by_torch(function, values, kinds)
            found = traced(lambda *like, values=values: function(*map(torch.full_like, like, values)), kinds)
            if expected is None or found is None or not found.is_constant:
                continue
            assert isinstance(found.value, bool | int | float)
            value = torch.tensor(float(found.value))
            assert torch.allclose(value, expected.float(), rtol=1e-6, atol=1e-6, equal_nan=True), (
                kinds,
                values,
                value,
                expected,
            )


# For q_idx, kv_idx, b and h, which are 0 or more.
AT = [
    dict(zip((Q_IDX, KV_IDX, B, H), values, strict=True))
    for values in itertools.product((0, 1, 7), (0, 1, 8), (0, 2), (0, 5))
]
NUMBERS = [Q_IDX, KV_IDX, H, constant(3), constant(-4), constant(0)]


def value_of(of: Node, at: dict[Node, int]) -> int:
    if of in at:
        return at[of]
    args = [value_of(arg, at) for arg in of.args]
    match of.op:
        case "constant":
            return int(of.value)  # type: ignore[arg-type]
        case "cast":
            return args[0]
        case "select":
            return args[1] if args[0] else args[2]
        case "floor_divide" | "floor_modulo" if args[1] == 0:
            return 0
        case "negate":
            return -args[0]
        case "invert":
            return ~args[0]
        case "shift_left":
            return args[0] << args[1]
        case "shift_right":
            return args[0] >> args[1]
        case "min" | "max" | "abs":
            return int({"min": min, "max": max, "abs": abs}[of.op](*args))
    names = {"floor_divide": "floordiv", "floor_modulo": "mod", "and": "and_", "or": "or_"}
    return int(getattr(operator, names.get(of.op, of.op))(*args))


def made_of(a: Node, b: Node) -> list[Node]:
    found = [arithmetic(op, a, b) for op in ("add", "sub", "mul", "min", "max")] + [
        bitwise(op, a, b) for op in ("and", "or", "xor")
    ]
    if not (b.is_constant and b.value == 0):
        found += [arithmetic("floor_divide", a, b), arithmetic("floor_modulo", a, b)]
    condition = compare("lt", KV_IDX, Q_IDX)
    found += [
        shift("shift_right", a, constant(1)),
        shift("shift_left", a, constant(1)),
        select(condition, a, b),
        cast(condition, Kind.INT),
    ]
    return [*found, negate(a), absolute(a), invert(a)]


def test_what_is_known_as_never_negative_is_not() -> None:
    """All expressions of one operation, and of two; and many are recognized."""
    once = list(dict.fromkeys(of for a, b in itertools.product(NUMBERS, NUMBERS) for of in made_of(a, b)))
    twice = list(dict.fromkeys(of for a in once for b in (Q_IDX, constant(-4)) for of in made_of(a, b)))
    known = 0
    for of in [*NUMBERS, *once, *twice]:
        if is_never_negative(of):
            known += not of.is_constant
            assert min(value_of(of, at) for at in AT) >= 0, of
    assert known > 300
    for of in (
        negate(KV_IDX),
        arithmetic("floor_modulo", KV_IDX, constant(-3)),
        arithmetic("sub", Q_IDX, KV_IDX),
        invert(KV_IDX),
    ):
        assert not is_never_negative(of)


def test_long_expressions_need_no_deep_recursion() -> None:
    of = KV_IDX
    for i in range(5000):
        of = arithmetic("add", arithmetic("min", of, constant(i)), Q_IDX)
    assert is_never_negative(of) is False or is_never_negative(of) is True
    assert of.variables == {"q_idx", "kv_idx"}
    assert node("cast", Kind.FLOAT, (of,)).variables == of.variables
