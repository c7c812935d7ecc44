"""What a mask lets through, as far as it is an interval around the query: plans skip what lies outside it."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..metadata.structure import MAX_INT32
from .expressions import KV_IDX, Q_IDX, Kind, Node, bitwise, bottom_up, compare, constant, logical_not


@dataclass(frozen=True)
class Reach:
    """A query at q sees no token outside [q - left, q + right]."""

    left: float  # integers, or infinity
    right: float

    def __and__(self, other: Reach) -> Reach:
        return Reach(min(self.left, other.left), min(self.right, other.right))

    def __or__(self, other: Reach) -> Reach:
        return Reach(max(self.left, other.left), max(self.right, other.right))


ALL = Reach(math.inf, math.inf)
NOTHING = Reach(-math.inf, -math.inf)


@dataclass(frozen=True)
class Visibility:
    """An interval that contains what a mask lets through, as plans know it (csrc/planner/visibility.h), and
    what is left of the mask inside it.

    Args:
        causal: nothing after the query is seen.
        window_left: nothing more than this many tokens before the query is seen; -1: no limit.
        mask: None: all in the interval is seen.
    """

    causal: bool
    window_left: int
    mask: Node | None


def visibility_of(mask: Node) -> Visibility:
    """Derives the interval from comparisons of q_idx with kv_idx, and drops those that the interval says
    completely.
    """
    terms = list(_terms(mask))
    reach = ALL
    for term in terms:
        reach &= _reaches(term)[0]
    causal = reach.right <= 0
    window_left = (
        int(max(reach.left, 0)) if -math.inf < reach.left <= MAX_INT32 else 0 if reach.left < 0 else -1
    )
    interval = Reach(window_left if window_left >= 0 else math.inf, 0 if causal else math.inf)
    left = [term for term in terms if not _is_implied(term, interval)]
    rest = None
    for term in left:
        rest = term if rest is None else bitwise("and", rest, term)
    return Visibility(causal, window_left, rest)


def is_interval(mask: Node) -> bool:
    """Whether a mask is known to let each query see one run of tokens, without holes.

    False: it may have some.
    """
    return Shape.INTERVAL in _shapes(mask)


class Shape(enum.Flag):
    """What the tokens that a query sees may be: with a token all before it, with a token all after it, or one
    run of tokens.
    """

    BEGINNING = enum.auto()
    END = enum.auto()
    INTERVAL = enum.auto()


_ANY = Shape.BEGINNING | Shape.END | Shape.INTERVAL


@bottom_up
def _shapes(mask: Node) -> Shape:
    """All shapes that the mask is known to have."""
    if mask.kind != Kind.BOOL:
        return Shape(0)
    if not _reads_token(mask):
        return _ANY  # all tokens or none
    match mask.op:
        case "and":
            return _shapes(mask.args[0]) & _shapes(mask.args[1])
        case "or":
            both = _shapes(mask.args[0]) & _shapes(mask.args[1]) & (Shape.BEGINNING | Shape.END)
            return both | Shape.INTERVAL if both else Shape(0)
        case "not":
            inside = _shapes(mask.args[0])
            shape = Shape(0)
            if Shape.BEGINNING in inside:
                shape |= Shape.END | Shape.INTERVAL
            if Shape.END in inside:
                shape |= Shape.BEGINNING | Shape.INTERVAL
            return shape
        case "lt" | "le" | "gt" | "ge" | "eq":
            a, b = mask.args
            op: str = mask.op
            growth, other = _growth(a), b
            if growth is None or growth == 0:
                growth, other, op = _growth(b), a, _MIRRORED.get(op, op)
            if not growth or _reads_token(other):
                return Shape(0)
            if op == "eq":
                return Shape.INTERVAL
            return Shape.INTERVAL | (Shape.BEGINNING if (op in ("lt", "le")) == (growth > 0) else Shape.END)
    return Shape(0)


def _reads_token(node: Node) -> bool:
    return "kv_idx" in node.variables


@bottom_up
def _growth(node: Node) -> int | None:
    """1 if it never decreases from token to token, -1 if it never increases, 0 if it is the same for all;
    None: not known. Only of integers.
    """
    if not _reads_token(node):
        return 0
    if node is KV_IDX:
        return 1
    if node.kind != Kind.INT:
        return None
    growths = [_growth(arg) for arg in node.args]
    if any(growth is None for growth in growths):
        return None
    match node.op:
        case "negate":
            return -growths[0]  # type: ignore[operator]
        case "add" | "sub":
            one, other = growths[0], growths[1] if node.op == "add" else -growths[1]  # type: ignore[operator]
            return None if one * other < 0 else one or other  # type: ignore[operator]
        case "mul" | "floor_divide" if node.args[1].is_constant:
            assert isinstance(node.args[1].value, int)
            return growths[0] if node.args[1].value > 0 else None
    return None


def _terms(mask: Node) -> Iterator[Node]:
    """The terms whose conjunction is the mask."""
    waiting, seen = [mask], set[Node]()
    while waiting:
        term = waiting.pop()
        if term in seen:
            continue
        seen.add(term)
        if term.op == "and":
            waiting += reversed(term.args)
        elif term.op == "not" and term.args[0].op == "or":
            waiting += map(logical_not, reversed(term.args[0].args))
        elif term.op == "not" and _has_opposite(term.args[0]):
            waiting.append(_opposite(term.args[0]))
        elif term.op in ("lt", "le", "gt", "ge"):
            yield from _without_abs(term)
        elif not (term.is_constant and term.value is True):
            yield term


_OPPOSITES = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _has_opposite(comparison: Node) -> bool:
    # neither of two opposites holds for a NaN
    return comparison.op in _OPPOSITES and comparison.args[0].kind == Kind.INT


def _opposite(comparison: Node) -> Node:
    return compare(_OPPOSITES[comparison.op], *comparison.args)


def _without_abs(comparison: Node) -> Iterator[Node]:
    """|x| <= y as x <= y and -x <= y."""
    a, b = comparison.args
    op = comparison.op
    if a.op != "abs" and b.op == "abs":
        a, b, op = b, a, _MIRRORED[op]
    if a.op == "abs" and a.kind == Kind.INT and b.is_constant and op in ("lt", "le"):
        inside = a.args[0]
        limit = b.value
        assert isinstance(limit, int)
        yield compare(op, inside, b)
        yield compare(_MIRRORED[op], inside, constant(-limit))
    else:
        yield comparison


@bottom_up
def _reaches(term: Node) -> tuple[Reach, Reach]:
    """The reaches of a term and of its negation."""
    if term.kind != Kind.BOOL:
        return ALL, ALL
    if term.is_constant:
        return (ALL, NOTHING) if term.value else (NOTHING, ALL)
    match term.op:
        case "or" | "and":
            (one, not_one), (other, not_other) = map(_reaches, term.args)
            return (
                (one | other, not_one & not_other) if term.op == "or" else (one & other, not_one | not_other)
            )
        case "not":
            inside, negated = _reaches(term.args[0])
            return negated, inside
        case "select":
            (condition, not_condition), (yes, not_yes), (no, not_no) = map(_reaches, term.args)
            return (condition & yes) | (not_condition & no), (condition & not_yes) | (not_condition & not_no)
    return _reach_of_comparison(term), _reach_of_comparison(_opposite(term)) if _has_opposite(term) else ALL


def _reach_of_comparison(term: Node) -> Reach:
    """ALL for other terms."""
    match term.op:
        case "constant":
            return ALL if term.value else NOTHING
        case "lt" | "le" | "gt" | "ge":
            reach = ALL
            for part in _without_abs(term):
                reach &= _reach_of_inequality(part)
            return reach
        case "eq":
            a, b = term.args
            if a.op == b.op == "floor_divide" and a.args[1] == b.args[1] and a.args[1].is_constant:
                return _reach_of_equal_quotients(a.args[0], b.args[0], a.args[1].value)
            return _reach_of_inequality(compare("le", a, b)) & _reach_of_inequality(compare("ge", a, b))
    return ALL


def _reach_of_inequality(comparison: Node) -> Reach:
    """The reach of factor * (q - kv) + offset >= 0."""
    if comparison.is_constant:
        return ALL if comparison.value else NOTHING
    linear = _difference_of(comparison)
    if linear is None:
        return ALL
    factor, offset = linear
    if factor == 0:
        return ALL if offset >= 0 else NOTHING
    if factor > 0:  # kv - q <= offset / factor
        return Reach(math.inf, offset // factor)
    return Reach(offset // -factor, math.inf)


def _reach_of_equal_quotients(a: Node, b: Node, divisor: object) -> Reach:
    """The reach of a // divisor == b // divisor: a and b lie less than |divisor| apart."""
    assert isinstance(divisor, int)
    difference = _subtract(_linear(a), _linear(b))
    if difference is None or difference[0] != -difference[1] or abs(difference[0]) != 1:
        return ALL
    offset = difference[2] * difference[0]  # q - kv + offset
    return Reach(abs(divisor) - 1 - offset, abs(divisor) - 1 + offset)


def _is_implied(term: Node, interval: Reach) -> bool:
    """Whether the interval says all that the term says."""
    if term.op not in ("lt", "le", "gt", "ge"):
        return False
    linear = _difference_of(term)
    if linear is None:
        return False
    factor, offset = linear
    if factor == 0:
        return offset >= 0
    return interval.right <= offset // factor if factor > 0 else interval.left <= offset // -factor


def _difference_of(comparison: Node) -> tuple[int, int] | None:
    """(factor, offset), if the comparison is factor * (q - kv) + offset >= 0."""
    a, b = comparison.args
    if a.kind != Kind.INT:
        return None
    if comparison.op in ("lt", "le"):
        a, b = b, a
    difference = _subtract(_linear(a), _linear(b))
    if difference is None or difference[0] != -difference[1]:
        return None
    return difference[0], difference[2] - (1 if comparison.op in ("lt", "gt") else 0)


_Linear = tuple[int, int, int]  # factors of q and kv, and what is added


def _subtract(a: _Linear | None, b: _Linear | None) -> _Linear | None:
    return None if a is None or b is None else (a[0] - b[0], a[1] - b[1], a[2] - b[2])


def _scaled(a: _Linear, factor: int) -> _Linear:
    return (a[0] * factor, a[1] * factor, a[2] * factor)


@bottom_up
def _linear(a: Node) -> _Linear | None:
    if a is Q_IDX:
        return (1, 0, 0)
    if a is KV_IDX:
        return (0, 1, 0)
    if a.is_constant and isinstance(a.value, int):
        return (0, 0, int(a.value))
    if a.op == "negate":
        inside = _linear(a.args[0])
        return None if inside is None else _scaled(inside, -1)
    if a.op not in ("add", "sub", "mul"):
        return None
    one, other = _linear(a.args[0]), _linear(a.args[1])
    if one is None or other is None:
        return None
    if a.op != "mul":
        return _subtract(one, _scaled(other, -1 if a.op == "add" else 1))
    if one[:2] == (0, 0):
        return _scaled(other, one[2])
    return _scaled(one, other[2]) if other[:2] == (0, 0) else None
