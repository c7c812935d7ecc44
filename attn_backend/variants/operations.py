"""What traced functions may do: torch's functions and methods by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import expressions
from .expressions import (
    ExpressionError,
    Kind,
    Node,
    arithmetic,
    bitwise,
    cast,
    compare,
    constant,
    divide,
    function,
    logical_not,
    negate,
    select,
)

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
IN_PLACE = tuple(f"__i{name}__" for name in BINARY)
# Functions and methods that make a Python value of a traced one.
TO_PYTHON = frozenset(
    (
        "item",
        "tolist",
        "numpy",
        "data_ptr",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__len__",
        "__iter__",
        "__array__",
        "is_nonzero",
    )
)
RANDOM = frozenset(
    (
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "randint_like",
        "bernoulli",
        "multinomial",
        "normal",
        "dropout",
    )
)

# What can be traced, in the words of messages.
KNOWN = (
    "arithmetic, comparisons, & | ^ ~ << >>, where, minimum, maximum, clamp, exp, exp2, log, log2, tanh, "
    "sigmoid, sqrt, rsqrt, abs, relu, floor, ceil, "
    "logical_and, logical_or, logical_not, casts, and indices of tensors"
)

_KINDS = {torch.float32: Kind.FLOAT, torch.int32: Kind.INT, torch.int64: Kind.INT, torch.bool: Kind.BOOL}


def _to(a: Node, *args: Any, **options: Any) -> Node:
    """x.to(dtype), x.to(other), x.to(device), x.to(device, dtype)."""
    for wanted in (*args, *options.values()):
        if isinstance(wanted, torch.dtype):
            if wanted not in _KINDS:
                raise ExpressionError(
                    f"a cast to {wanted}; must be to torch.float32, torch.int32, torch.int64 (computed with "
                    f"as int32) or torch.bool"
                )
            a = cast(a, _KINDS[wanted])
        elif isinstance(wanted, Node) and wanted.op != "constant":
            a = cast(a, wanted.kind)
    return a


def _divide(a: Node, b: Node, *, rounding_mode: str | None = None) -> Node:
    if rounding_mode is None:
        return divide(a, b)
    if rounding_mode != "floor":
        raise ExpressionError(f"a division with rounding_mode={rounding_mode!r}; must be None or 'floor'")
    return arithmetic("floor_divide", a, b)


def _scaled(like: Node, b: Node, alpha: Node | None) -> Node:
    """alpha * b. In a sum of booleans torch makes alpha a boolean, too."""
    if alpha is None:
        return b
    return arithmetic("mul", b, cast(alpha, Kind.BOOL) if like.kind == b.kind == Kind.BOOL else alpha)


def _add(a: Node, b: Node, *, alpha: Node | None = None) -> Node:
    return arithmetic("add", a, _scaled(a, b, alpha))


def _subtract(a: Node, b: Node, *, alpha: Node | None = None) -> Node:
    return arithmetic("sub", a, _scaled(a, b, alpha))


def _clamp(a: Node, min: Node | None = None, max: Node | None = None) -> Node:
    if min is not None:
        a = arithmetic("max", a, min)
    return a if max is None else arithmetic("min", a, max)


def _smaller(a: Node, b: Node) -> Node:
    return arithmetic("min", a, b)


def _larger(a: Node, b: Node) -> Node:
    return arithmetic("max", a, b)


def _logical(op: str) -> Callable[[Node, Node], Node]:
    return lambda a, b: bitwise(op, cast(a, Kind.BOOL), cast(b, Kind.BOOL))


def _filled(value: float) -> Callable[..., Node]:
    """ones_like and its kin: of the type of their argument, or dtype."""

    def fill(like: Node, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Node:
        a = cast(constant(value), like.kind)
        return a if dtype is None else _to(a, dtype)

    return fill


def _full(like: Node, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Node:
    """full_like(x, value), x.new_full((), value)."""
    value = options.get("fill_value", args[-1] if args else None)
    if not isinstance(value, Node):
        raise ExpressionError("full_like() without a value")
    a = cast(value, like.kind)
    return a if dtype is None else _to(a, dtype)


def _positive(a: Node) -> Node:
    expressions.refuse_boolean("+", a)
    return a


def _relu(a: Node, inplace: bool | Node = False) -> Node:
    expressions.refuse_boolean("relu", a)
    return arithmetic("max", a, constant(0))


NAMED: dict[str, Callable[..., Node]] = {
    "add": _add,
    "sub": _subtract,
    "mul": lambda a, b: arithmetic("mul", a, b),
    "div": _divide,
    "truediv": divide,
    "floor_divide": lambda a, b: arithmetic("floor_divide", a, b),
    "floordiv": lambda a, b: arithmetic("floor_divide", a, b),
    "mod": lambda a, b: arithmetic("floor_modulo", a, b),
    "remainder": lambda a, b: arithmetic("floor_modulo", a, b),
    "pow": expressions.power,
    "square": lambda a: expressions.power(a, constant(2)),
    "neg": negate,
    "pos": _positive,
    "abs": expressions.absolute,
    "min": _smaller,
    "max": _larger,
    "minimum": _smaller,
    "maximum": _larger,
    "fmin": _smaller,
    "fmax": _larger,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _larger,
    "clamp_max": _smaller,
    "relu": _relu,
    "reciprocal": lambda a: divide(constant(1.0), a),
    "rsqrt": lambda a: divide(constant(1.0), function("sqrt", a)),
    "where": select,
    "and": lambda a, b: bitwise("and", a, b),
    "or": lambda a, b: bitwise("or", a, b),
    "xor": lambda a, b: bitwise("xor", a, b),
    "bitwise_and": lambda a, b: bitwise("and", a, b),
    "bitwise_or": lambda a, b: bitwise("or", a, b),
    "bitwise_xor": lambda a, b: bitwise("xor", a, b),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": logical_not,
    "invert": expressions.invert,
    "bitwise_not": expressions.invert,
    "lshift": lambda a, b: expressions.shift("shift_left", a, b),
    "rshift": lambda a, b: expressions.shift("shift_right", a, b),
    "to": _to,
    "type": _to,
    "type_as": _to,
    "float": lambda a: cast(a, Kind.FLOAT),
    "int": lambda a: cast(a, Kind.INT),
    "long": lambda a: cast(a, Kind.INT),
    "bool": lambda a: cast(a, Kind.BOOL),
    "detach": lambda a: a,
    "clone": lambda a: a,
    "contiguous": lambda a: a,
    "ones_like": _filled(1),
    "zeros_like": _filled(0),
    "new_ones": _filled(1),
    "new_zeros": _filled(0),
    "full_like": _full,
    "new_full": _full,
    **{name: lambda a, b, name=name: compare(name, a, b) for name in expressions.COMPARISONS},
    **{name: lambda a, name=name: function(name, a) for name in expressions.FUNCTIONS},
}
for _alias, _name in {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "truediv",
    "negative": "neg",
    "positive": "pos",
    "absolute": "abs",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "not_equal": "ne",
    "expit": "sigmoid",
    "special_expit": "sigmoid",
}.items():
    NAMED[_alias] = NAMED[_name]
