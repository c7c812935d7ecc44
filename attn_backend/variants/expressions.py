"""Expressions of a traced function: a graph of unique nodes, with constants folded, and torch's types for 0-d
tensors.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from ..validation import MAX_INT32


class Kind(IntEnum):
    """C++ type of a value. If two kinds meet, the larger wins, as in torch."""

    BOOL = 0
    INT = 1  # int32
    FLOAT = 2  # float32


Constant = bool | int | float


@dataclass(frozen=True, eq=False)
class Node:
    """One operation. Only `node()` makes nodes, so that equal nodes are the same object.

    Args:
        op: one of ARITHMETIC, COMPARISONS, ..., "constant", "cast", "select" or "scalar" (a parameter). Or
            with a `value`: "variable" (its name), "load" (the name of a tensor), "size" (the name of a tensor
            and the number of a dimension).
        kind: type of its result.
        args: its operands.
        value: of a constant; or as described for `op`.
        variables: names of all variables that it depends on.
    """

    op: str
    kind: Kind
    args: tuple[Node, ...] = ()
    value: Any = None  # a constant, a name, or the name and the dimension of a size
    variables: frozenset[str] = frozenset()

    @property
    def is_constant(self) -> bool:
        return self.op == "constant"


_nodes: WeakValueDictionary[tuple[object, ...], Node] = WeakValueDictionary()


def node(
    op: str, kind: Kind, args: tuple[Node, ...] = (), value: Constant | str | tuple[str, int] | None = None
) -> Node:
    # Keyed by repr, which distinguishes 0.0 from -0.0 and 1 from True, and makes NaN equal to itself.
    key = (op, kind, args, repr(value))
    found = _nodes.get(key)
    if found is None:
        variables = (
            frozenset((str(value),))
            if op == "variable"
            else frozenset().union(*(arg.variables for arg in args))
        )
        found = _nodes.setdefault(key, Node(op, kind, args, value, variables))
    return found


class ExpressionError(Exception):
    """An unsupported operation. The message has the operation and the reason, but not the place."""


SCORE = node("variable", Kind.FLOAT, value="score")
B = node("variable", Kind.INT, value="b")
H = node("variable", Kind.INT, value="h")
Q_IDX = node("variable", Kind.INT, value="q_idx")
KV_IDX = node("variable", Kind.INT, value="kv_idx")


def constant(value: object) -> Node:
    """The node of a Python number."""
    if isinstance(value, bool | np.bool_):
        return node("constant", Kind.BOOL, value=bool(value))
    if isinstance(value, int | np.integer):
        if not -MAX_INT32 - 1 <= int(value) <= MAX_INT32:
            raise ExpressionError(f"the integer {value} does not fit into an int32")
        return node("constant", Kind.INT, value=int(value))
    if isinstance(value, float | np.floating):
        # Rounded to float32, so that folding computes the kernel's result.
        with np.errstate(over="ignore"):
            return node("constant", Kind.FLOAT, value=float(np.float32(value)))
    raise ExpressionError(f"a {type(value).__name__} is not a number")


def cast(a: Node, kind: Kind) -> Node:
    """Converts floats to ints by truncation, as in C++ and torch."""
    if a.kind == kind:
        return a
    if not a.is_constant:
        return node("cast", kind, (a,))
    value = a.value
    if kind == Kind.BOOL:
        return constant(bool(value))
    if kind == Kind.FLOAT:
        return constant(float(value))
    if not math.isfinite(value):
        raise ExpressionError(f"{value} does not fit in an int32")
    return constant(int(value))


def _float_divide(a: float, b: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(a) / np.float32(b))


def _floor_divide(a: float, b: float) -> float:
    return a // b if isinstance(a, int) and isinstance(b, int) else math.floor(_float_divide(a, b))


# Operations on two values of the same kind, and the functions that fold constants.
ARITHMETIC: dict[str, Callable[..., Constant]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floor_divide": _floor_divide,
    "floor_modulo": lambda a, b: a % b,
    "min": min,
    "max": max,
}
COMPARISONS: dict[str, Callable[..., Constant]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}
BITWISE: dict[str, Callable[..., Constant]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
SHIFTS: dict[str, Callable[..., Constant]] = {
    "shift_left": lambda a, b: a << b,
    "shift_right": lambda a, b: a >> b,
}
FUNCTIONS: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "sqrt": math.sqrt,
    "floor": math.floor,
    "ceil": math.ceil,
}


def _fold(op: str, kind: Kind, function: Callable[..., object], args: tuple[Node, ...]) -> Node:
    """The node, or the constant that it folds to."""
    if all(arg.is_constant for arg in args):
        try:
            value = function(*(arg.value for arg in args))
            return cast(constant(value), kind)
        except (ArithmeticError, ValueError, ExpressionError):
            pass  # left to the kernel: infinity, NaN, overflow
    return node(op, kind, args)


def _same_kind(a: Node, b: Node, least: Kind = Kind.BOOL) -> tuple[Node, Node]:
    kind = max(a.kind, b.kind, least)
    return cast(a, kind), cast(b, kind)


def arithmetic(op: str, a: Node, b: Node) -> Node:
    """A node for an op in ARITHMETIC, with torch's promotion."""
    if a.kind == b.kind == Kind.BOOL:
        if op in ("add", "mul", "min", "max"):
            return bitwise("or" if op in ("add", "max") else "and", a, b)
        raise ExpressionError(
            f"{op} of two booleans, which torch does not have; must be & | ^ or of integers"
        )
    if op == "sub":
        refuse_boolean("-", a, b)
    a, b = _same_kind(a, b)
    if a.kind == Kind.INT:  # these are no-ops
        if op in ("add", "sub") and b.value == 0 and b.is_constant:
            return a
        if op == "add" and a.value == 0 and a.is_constant:
            return b
        if op == "sub" and a == b:
            return constant(0)
    if op in ("mul", "floor_divide") and a.kind == Kind.INT and b.is_constant and b.value == 1:
        return a
    if op == "mul" and a.is_constant and a.value == 1:
        return b
    if op == "mul" and b.is_constant and b.value == 1:
        return a
    if op in ("floor_divide", "floor_modulo") and a.kind == Kind.INT and b.is_constant and b.value == 0:
        raise ExpressionError("an integer division by 0")
    return _fold(op, a.kind, ARITHMETIC[op], (a, b))


def divide(a: Node, b: Node) -> Node:
    """a / b: float32, also for integers."""
    a, b = _same_kind(a, b, Kind.FLOAT)
    return _fold("divide", Kind.FLOAT, _float_divide, (a, b))


def compare(op: str, a: Node, b: Node) -> Node:
    a, b = _same_kind(a, b)
    if a == b and a.kind != Kind.FLOAT:  # a NaN does not equal itself
        return constant(op in ("le", "ge", "eq"))
    if a.kind == Kind.BOOL and op not in ("eq", "ne"):  # compilers warn about ordering booleans
        one, other = (logical_not(a), b) if op in ("lt", "le") else (a, logical_not(b))
        return bitwise("and" if op in ("lt", "gt") else "or", one, other)
    return _fold(op, Kind.BOOL, COMPARISONS[op], (a, b))


def bitwise(op: str, a: Node, b: Node) -> Node:
    if Kind.FLOAT in (a.kind, b.kind):
        raise ExpressionError(f"{op} of a float; must be booleans or integers")
    a, b = _same_kind(a, b)
    if a.kind == Kind.BOOL and op in ("and", "or"):
        for one, other in ((a, b), (b, a)):
            if one.is_constant:  # True & x, False | x: x. False & x, True | x: constant
                return other if one.value is (op == "and") else one
    if a == b:
        return cast(constant(False), a.kind) if op == "xor" else a
    return _fold(op, a.kind, BITWISE[op], (a, b))


def shift(op: str, a: Node, b: Node) -> Node:
    a, b = _same_kind(a, b)
    if a.kind != Kind.INT:
        raise ExpressionError("a shift of something that is not an integer")
    return _fold(op, Kind.INT, SHIFTS[op], (a, b))


def invert(a: Node) -> Node:
    """~a."""
    if a.kind == Kind.FLOAT:
        raise ExpressionError("~ of a float; must be a boolean or an integer")
    if a.kind == Kind.BOOL:
        return logical_not(a)
    return _fold("invert", Kind.INT, lambda x: ~x, (a,))


def logical_not(a: Node) -> Node:
    a = cast(a, Kind.BOOL)
    return a.args[0] if a.op == "not" else _fold("not", Kind.BOOL, lambda x: not x, (a,))


def refuse_boolean(what: str, *args: Node) -> None:
    if any(arg.kind == Kind.BOOL for arg in args):
        raise ExpressionError(
            f"{what} of a boolean, which torch does not have; must be ~, or of a number: .to(torch.int32)"
        )


def negate(a: Node) -> Node:
    refuse_boolean("-", a)
    return _fold("negate", a.kind, lambda x: -x, (a,))


def absolute(a: Node) -> Node:
    refuse_boolean("abs", a)
    return _fold("abs", a.kind, abs, (a,))


def function(op: str, a: Node) -> Node:
    """A node for an op in FUNCTIONS. floor and ceil leave integers unchanged; all others return float32."""
    if op in ("floor", "ceil"):
        refuse_boolean(op, a)
        if a.kind == Kind.INT:
            return a
    return _fold(op, Kind.FLOAT, FUNCTIONS[op], (cast(a, Kind.FLOAT),))


def select(condition: Node, yes: Node, no: Node) -> Node:
    if condition.kind != Kind.BOOL:
        raise ExpressionError("where() with a condition that is not a boolean")
    yes, no = _same_kind(yes, no)
    if condition.is_constant:
        return yes if condition.value else no
    if yes == no:
        return yes
    if yes.kind == Kind.BOOL:
        if no.is_constant:  # mask_visibility() looks through & and |, not through where
            return (
                bitwise("and", condition, yes)
                if no.value is False
                else bitwise("or", logical_not(condition), yes)
            )
        if yes.is_constant:
            return (
                bitwise("or", condition, no)
                if yes.value is True
                else bitwise("and", logical_not(condition), no)
            )
    return node("select", yes.kind, (condition, yes, no))


def power(a: Node, b: Node) -> Node:
    """a ** b, if products, square roots or powers of a constant can express it."""
    exponent: Any = b.value if b.is_constant and b.kind != Kind.BOOL else None
    if exponent in (0.5, -0.5):
        root = function("sqrt", a)
        return root if exponent == 0.5 else divide(constant(1.0), root)
    if exponent is not None and float(exponent).is_integer() and 1 <= abs(exponent) <= 8:
        a = cast(a, max(a.kind, Kind.INT))
        if b.kind == Kind.INT and a.kind == Kind.INT and exponent < 0:
            raise ExpressionError("an integer to a negative integer power, which torch does not have")
        if b.kind == Kind.FLOAT:
            a = cast(a, Kind.FLOAT)
        product = a
        for _ in range(abs(int(exponent)) - 1):
            product = arithmetic("mul", product, a)
        return product if exponent > 0 else divide(constant(1.0), product)
    if a.is_constant and a.value > 0 and b.kind == Kind.FLOAT:
        return function("exp2", arithmetic("mul", b, constant(math.log2(a.value))))
    raise ExpressionError(
        "** that is neither x ** 0.5, x ** -0.5 or x ** n for an integer n up to 8, nor a ** x for a "
        "positive constant a and a float x"
    )


_T = TypeVar("_T")


def bottom_up(function: Callable[[Node], _T]) -> Callable[[Node], _T]:
    """Caches a recursive function of nodes.

    It visits args first, so that long expressions need no deep recursion.
    """
    known: WeakKeyDictionary[Node, _T] = WeakKeyDictionary()

    def of(root: Node) -> _T:
        if root not in known:
            for each in nodes_of(root, done=known):
                known[each] = function(each)
        return known[root]

    return of


@bottom_up
def is_never_negative(a: Node) -> bool:
    """Whether an integer is known to be 0 or more.

    Assumes q_idx >= 0: rows without a token have a negative q_idx, but their results are not used.
    """
    match a.op:
        case "constant":
            return a.value >= 0
        case "variable" | "size" | "abs":
            return True
        case "cast":
            return a.args[0].kind == Kind.BOOL
        case "add" | "mul" | "min" | "floor_divide":
            return all(map(is_never_negative, a.args))
        case "max" | "and":
            return any(map(is_never_negative, a.args))
        case "floor_modulo":
            return is_never_negative(a.args[1])
        case "shift_right":
            return is_never_negative(a.args[0])
        case "select":
            return all(map(is_never_negative, a.args[1:]))
    return False


def nodes_of(*roots: Node, done: Container[Node] = ()) -> Iterator[Node]:
    """Every node once, after its args; without the nodes in `done` and nodes that only those need."""
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        here, is_ready = stack.pop()
        if here in seen or here in done:
            continue
        if is_ready:
            seen.add(here)
            yield here
        else:
            stack.append((here, True))
            stack.extend((arg, False) for arg in reversed(here.args))


def bias_slope(score: Node) -> Node | None:
    """The slope, if a traced score is score + slope * (kv_idx - q_idx) with the same slope for all tokens.
    None for others, and for a negative constant slope: kernels begin with the last tokens, which would then
    have the smallest scores.
    """
    if score.op not in ("add", "sub"):
        return None
    unbiased, bias = score.args
    if score.op == "add" and bias is SCORE:
        unbiased, bias = bias, unbiased
    if unbiased is not SCORE or bias.op != "mul":
        return None
    for slope, distance in (bias.args, bias.args[::-1]):
        of_distance = (
            tuple(_integer(arg) for arg in _integer(distance).args) if _integer(distance).op == "sub" else ()
        )
        if (
            of_distance not in ((KV_IDX, Q_IDX), (Q_IDX, KV_IDX))
            or slope.kind != Kind.FLOAT
            or slope.variables & {"score", "kv_idx"}
        ):
            continue
        is_turned = (of_distance == (Q_IDX, KV_IDX)) != (score.op == "sub")
        grows_by = negate(slope) if is_turned else slope
        is_falling = grows_by.is_constant and float(grows_by.value) < 0
        return None if is_falling else grows_by
    return None


def _integer(node: Node) -> Node:
    """The integer that a float was cast from, if any."""
    return node.args[0] if node.op == "cast" and node.args[0].kind == Kind.INT else node


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
    """An interval that contains all tokens that a mask lets through, in the planner's form
    (csrc/planner/visibility.h), and the rest of the mask inside it.

    Args:
        causal: the query sees nothing after it.
        window_left: the query sees at most this many tokens before it; -1: no limit.
        mask: None: the query sees all of the interval.
    """

    causal: bool
    window_left: int
    mask: Node | None


def mask_visibility(mask: Node) -> Visibility:
    """Derives the interval from comparisons of q_idx with kv_idx, and drops comparisons that the interval
    fully covers.
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

    False: it may have holes.
    """
    return Shape.INTERVAL in _shapes(mask)


class Shape(enum.Flag):
    """Possible shapes of the set of tokens that a query sees: a prefix of all tokens, a suffix, or one run of
    tokens.
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
        return _ANY  # all tokens, or none
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
    None: unknown. Only for integers.
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
        yield compare(op, inside, b)
        yield compare(_MIRRORED[op], inside, constant(-b.value))
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
    """Returns ALL for other terms."""
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


def _reach_of_equal_quotients(a: Node, b: Node, divisor: int) -> Reach:
    """The reach of a // divisor == b // divisor: a and b differ by less than |divisor|."""
    difference = _subtract(_linear(a), _linear(b))
    if difference is None or difference[0] != -difference[1] or abs(difference[0]) != 1:
        return ALL
    offset = difference[2] * difference[0]  # q - kv + offset
    return Reach(abs(divisor) - 1 - offset, abs(divisor) - 1 + offset)


def _is_implied(term: Node, interval: Reach) -> bool:
    """Whether the interval implies the term."""
    if term.op not in ("lt", "le", "gt", "ge") or _difference_of(term) is None:
        return False
    reach = _reach_of_inequality(term)
    return interval.left <= reach.left and interval.right <= reach.right


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


_Linear = tuple[int, int, int]  # factors of q and kv, and the offset


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
