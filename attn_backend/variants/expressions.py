"""Expressions of a traced function: a graph of nodes without duplicates, constants folded, with torch's types
for 0-d tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from ..metadata.structure import MAX_INT32


class Kind(IntEnum):
    """Type of a value, as C++ has it. The larger wins where two meet, as in torch."""

    BOOL = 0
    INT = 1  # int32
    FLOAT = 2  # float32


Constant = bool | int | float


@dataclass(frozen=True, eq=False)
class Node:
    """One operation; made by `node()` only, so that nodes of the same meaning are the same object.

    Args:
        op: the operation: one of ARITHMETIC, COMPARISONS, ..., or "constant", "variable" (`value` is its
            name), "cast", "select", "load" (`value` is the name of a tensor), "scalar" (of a parameter),
            "size" (`value` is the name of a tensor and the number of a dimension).
        kind: type of its result.
        args: what it is computed from.
        value: of a constant; or as `op` says.
        variables: names of all variables that it depends on.
    """

    op: str
    kind: Kind
    args: tuple[Node, ...] = ()
    value: Constant | str | tuple[str, int] | None = None
    variables: frozenset[str] = frozenset()

    @property
    def is_constant(self) -> bool:
        return self.op == "constant"


_nodes: WeakValueDictionary[tuple[object, ...], Node] = WeakValueDictionary()


def node(
    op: str, kind: Kind, args: tuple[Node, ...] = (), value: Constant | str | tuple[str, int] | None = None
) -> Node:
    # By its repr: 0.0 and -0.0 are different constants, as are 1 and True; a NaN is itself.
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
    """An operation that has no meaning here; the message says which and why, without the place."""


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
        # As a float32 holds it, so that folding computes what the kernel would.
        with np.errstate(over="ignore"):
            return node("constant", Kind.FLOAT, value=float(np.float32(value)))
    raise ExpressionError(f"a {type(value).__name__} is not a number")


def cast(a: Node, kind: Kind) -> Node:
    """Floats to ints: towards 0, as C++ and torch do."""
    if a.kind == kind:
        return a
    if not a.is_constant:
        return node("cast", kind, (a,))
    value = a.value
    assert isinstance(value, bool | int | float)
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


# Operations of two values of the same kind, and the function that folds constants.
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
            pass  # left to the kernel: an infinity, a NaN, an overflow
    return node(op, kind, args)


def _same_kind(a: Node, b: Node, least: Kind = Kind.BOOL) -> tuple[Node, Node]:
    kind = max(a.kind, b.kind, least)
    return cast(a, kind), cast(b, kind)


def arithmetic(op: str, a: Node, b: Node) -> Node:
    """A node of one of ARITHMETIC, with torch's promotion."""
    if a.kind == b.kind == Kind.BOOL:
        if op in ("add", "mul", "min", "max"):
            return bitwise("or" if op in ("add", "max") else "and", a, b)
        raise ExpressionError(
            f"{op} of two booleans, which torch does not have; must be & | ^ or of integers"
        )
    if op == "sub":
        refuse_boolean("-", a, b)
    a, b = _same_kind(a, b)
    if a.kind == Kind.INT:  # nothing is lost by leaving these out
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
    """a / b: float32, also of integers."""
    a, b = _same_kind(a, b, Kind.FLOAT)
    return _fold("divide", Kind.FLOAT, _float_divide, (a, b))


def compare(op: str, a: Node, b: Node) -> Node:
    a, b = _same_kind(a, b)
    if a == b and a.kind != Kind.FLOAT:  # a NaN does not equal itself
        return constant(op in ("le", "ge", "eq"))
    if a.kind == Kind.BOOL and op not in ("eq", "ne"):  # compilers warn about an order of booleans
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
    """A node of one of FUNCTIONS. floor and ceil leave integers as they are; all others are float32."""
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
        if no.is_constant:  # visibility is found through & and |, not through where
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
    """a ** b, where products, square roots or powers of a constant say it."""
    if b.is_constant and b.value in (0.5, -0.5):
        root = function("sqrt", a)
        return root if b.value == 0.5 else divide(constant(1.0), root)
    if b.is_constant and b.kind != Kind.BOOL and float(b.value).is_integer() and 1 <= abs(b.value) <= 8:  # type: ignore[arg-type]
        a = cast(a, max(a.kind, Kind.INT))
        if b.kind == Kind.INT and a.kind == Kind.INT and b.value < 0:  # type: ignore[operator]
            raise ExpressionError("an integer to a negative integer power, which torch does not have")
        if b.kind == Kind.FLOAT:
            a = cast(a, Kind.FLOAT)
        product = a
        for _ in range(abs(int(b.value)) - 1):  # type: ignore[arg-type]
            product = arithmetic("mul", product, a)
        return product if b.value > 0 else divide(constant(1.0), product)  # type: ignore[operator]
    if a.is_constant and a.value > 0 and b.kind == Kind.FLOAT:  # type: ignore[operator]
        return function("exp2", arithmetic("mul", b, constant(math.log2(a.value))))  # type: ignore[arg-type]
    raise ExpressionError(
        "** that is neither x ** 0.5, x ** -0.5 or x ** n for an integer n up to 8, nor a ** x for a "
        "positive constant a and a float x"
    )


_T = TypeVar("_T")


def bottom_up(function: Callable[[Node], _T]) -> Callable[[Node], _T]:
    """Caches a function of a node that calls itself for the node's args.

    These come first: long expressions need no deep recursion.
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
    """Whether an integer can be seen to be 0 or more.

    Of q_idx only where the row has a token: what the others compute is not used.
    """
    match a.op:
        case "constant":
            return a.value >= 0  # type: ignore[operator]
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
    """Every node once, after its args; without nodes that are done, and what only they need."""
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
