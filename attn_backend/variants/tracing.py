"""Traces Python functions to expressions: a function runs once, with values that record their operations."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import expressions
from .expressions import (
    COMPARISONS,
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
    is_never_negative,
    logical_not,
    negate,
    node,
    select,
)
from .params import Param

_NOT_THE_USERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


class TracingError(ValueError):
    """A function that cannot become a variant. The message names the obstacle, and the user's file, line and
    source.
    """


def with_names(
    function: Callable[..., Any], values: Mapping[str, object]
) -> tuple[Callable[..., Any], set[str]]:
    """A copy of `function` in which globals and closure cells of these names have these values, whether or
    not they existed. Functions that it calls by a global name, or finds in its closure, are copied the same
    way. Also returns the names that occurred.

    The original functions are unchanged. Functions that it finds in other ways, such as attributes of a
    module, are not copied.
    """
    copier = _Copier(values)
    return copier.copy(function), copier.found


class _Copier:
    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values
        self._copies: dict[int, tuple[object, Any]] = {}  # by the id of the original, which is kept alive
        self.found: set[str] = set()

    def copy(self, value: Any) -> Any:
        """Copies a function, or functions in a list, tuple or dict; returns anything else unchanged."""
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(self.copy(value.__func__), value.__self__)
        if isinstance(value, partial):
            return partial(
                self.copy(value.func),
                *map(self.copy, value.args),
                **{name: self.copy(v) for name, v in value.keywords.items()},
            )
        if type(value) in (tuple, list):
            return type(value)(map(self.copy, value)) if any(map(callable, value)) else value
        if type(value) is dict:
            return (
                {key: self.copy(v) for key, v in value.items()}
                if any(map(callable, value.values()))
                else value
            )
        call = _call_of(value)
        return value if call is None else MethodType(self.copy(call), value)

    def _function(self, function: FunctionType) -> FunctionType:
        if _is_foreign(function.__code__) and not function.__closure__:
            return function
        code = function.__code__
        namespace = function.__globals__ if _is_foreign(code) else dict(function.__globals__)
        cells = tuple(CellType() for _ in code.co_freevars)
        copied = FunctionType(code, namespace, function.__name__, function.__defaults__, cells or None)
        copied.__kwdefaults__ = function.__kwdefaults__
        # stored before its names are visited, because functions may call each other
        self._copies[id(function)] = (function, copied)
        for name, cell, old in zip(code.co_freevars, cells, function.__closure__ or (), strict=True):
            if name in self._values:
                self.found.add(name)
                cell.cell_contents = self._values[name]
                continue
            with suppress(ValueError):  # the cell is empty
                cell.cell_contents = self.copy(old.cell_contents)
        if namespace is not function.__globals__:
            for name in _global_names(code):
                if name in self._values:
                    self.found.add(name)
                    namespace[name] = self._values[name]
                elif name in namespace:
                    namespace[name] = self.copy(namespace[name])
        return copied


def captured(function: Callable[..., Any]) -> Iterator[tuple[str, object]]:
    """Names and values that a function, and functions that it calls, find in closures and among globals."""
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, MethodType):
            yield from ((name, v) for name, v in getattr(value.__self__, "__dict__", {}).items())
            value = value.__func__
        if isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
            yield from value.keywords.items()
        if not isinstance(value, FunctionType):
            call = _call_of(value)
            waiting += (
                list(value)
                if type(value) in (tuple, list)
                else []
                if call is None
                else [MethodType(call, value)]
            )
            continue
        for name, found in _free_variables(value):
            yield name, found
            waiting += [found] if callable(found) or type(found) in (tuple, list) else []


def _free_variables(function: FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the cell is empty
            yield name, cell.cell_contents
    if not _is_foreign(function.__code__):
        yield from (
            (name, function.__globals__[name])
            for name in _global_names(function.__code__)
            if name in function.__globals__
        )


def _global_names(code: CodeType) -> set[str]:
    """Names that code, including nested functions, may look up among its globals. Also contains names of
    attributes.
    """
    names = set(code.co_names)
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            names |= _global_names(inside)
    return names


def _call_of(value: object) -> FunctionType | None:
    """__call__ of an object of a user-defined class."""
    call = getattr(type(value), "__call__", None)  # noqa: B004
    return call if isinstance(call, FunctionType) and not _is_foreign(call.__code__) else None


def _is_foreign(code: CodeType) -> bool:
    return code.co_filename.startswith(_NOT_THE_USERS[1])


def check_signature(what: str, function: object, names: tuple[str, ...]) -> None:
    """Refuses objects that cannot be called with len(names) positional arguments."""
    must = f"{what} must be a function of ({', '.join(names)})"
    if not callable(function):
        raise TracingError(f"{must}, is a {type(function).__name__}")
    try:
        signature = inspect.signature(function)
        signature.bind(*names)
    except TypeError:
        raise TracingError(f"{must}, takes {signature}{_defined_at(function)}") from None
    except ValueError:  # a builtin without a signature
        raise TracingError(f"{must} in Python, is {function!r}") from None


def _defined_at(function: object) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return "" if code is None else _place(code.co_filename, code.co_firstlineno)


def error_at_definition(function: Callable[..., Any], message: str) -> TracingError:
    while isinstance(function, partial):
        function = function.func
    return TracingError(message + _defined_at(function))


def error_here(message: str) -> TracingError:
    """An error at the line of the user's code that is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return TracingError(message + ("" if frame is None else _place(frame.f_code.co_filename, frame.f_lineno)))


def error_from(message: str, traceback: TracebackType | None) -> TracingError:
    """An error at the innermost line of the user's code in a traceback."""
    place = ""
    while traceback is not None:
        if not _is_ours(traceback.tb_frame.f_code.co_filename):
            place = _place(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return TracingError(message + place)


def _is_ours(filename: str) -> bool:
    return filename.startswith(_NOT_THE_USERS) and not filename.endswith("builtin.py")


def _place(filename: str, line: int) -> str:
    source = linecache.getline(filename, line).strip()
    return f"\n  {filename}:{line}" + (f": {source}" if source else "")


BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
IN_PLACE = tuple(f"__i{name}__" for name in BINARY)
# Functions and methods that convert a traced value to a Python value.
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

# Traceable operations, for messages.
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
    """alpha * b. In a sum of booleans, torch also converts alpha to a boolean."""
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


def _logical(op: str) -> Callable[[Node, Node], Node]:
    return lambda a, b: bitwise(op, cast(a, Kind.BOOL), cast(b, Kind.BOOL))


def _filled(value: float) -> Callable[..., Node]:
    """ones_like and similar functions: of the argument's type, or dtype."""

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


_smaller, _larger = partial(arithmetic, "min"), partial(arithmetic, "max")
NAMED: dict[str, Callable[..., Node]] = {
    "add": _add,
    "sub": _subtract,
    "mul": partial(arithmetic, "mul"),
    "div": _divide,
    "truediv": divide,
    "floor_divide": partial(arithmetic, "floor_divide"),
    "floordiv": partial(arithmetic, "floor_divide"),
    "mod": partial(arithmetic, "floor_modulo"),
    "remainder": partial(arithmetic, "floor_modulo"),
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
    "and": partial(bitwise, "and"),
    "or": partial(bitwise, "or"),
    "xor": partial(bitwise, "xor"),
    "bitwise_and": partial(bitwise, "and"),
    "bitwise_or": partial(bitwise, "or"),
    "bitwise_xor": partial(bitwise, "xor"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": logical_not,
    "invert": expressions.invert,
    "bitwise_not": expressions.invert,
    "lshift": partial(expressions.shift, "shift_left"),
    "rshift": partial(expressions.shift, "shift_right"),
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
    **{name: partial(compare, name) for name in expressions.COMPARISONS},
    **{name: partial(function, name) for name in expressions.FUNCTIONS},
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


SCORE_MOD = ("score", "b", "h", "q_idx", "kv_idx")
MASK_MOD = ("b", "h", "q_idx", "kv_idx")

# g++ compiles this many in seconds. nvcc needs minutes, as it inlines them for every score of a thread.
MAX_OPERATIONS = 2048
_BRANCH = "a branch depends on values that only the kernel knows"
_TO_PYTHON = "a value that only the kernel knows is made a Python number"


# captured tensors by id; each tensor is kept alive, so that its id is not reused
Bound = dict[int, tuple[Tensor, Param]]


@dataclass(frozen=True)
class Traced:
    """The result of tracing a function, and the declared names that it uses."""

    result: Node
    used: set[str]


def trace(
    what: str, function: Callable[..., Any], names: tuple[str, ...], params: Sequence[Param], bound: Bound
) -> Traced:
    """Runs `function` once.

    Args:
        what: the function's name in messages.
        names: of its arguments.
        params: values of its free variables, by name.
        bound: tensors that the variant's functions captured; tensors captured by this one are added.

    Raises:
        TracingError: the function cannot be traced; the message has the user's line.
    """
    check_signature(what, function, names)
    tracer = Tracer(what, function, {param.name for param in params}, bound)
    free = {param.name: tracer.parameter(param) for param in params}
    copy, used = with_names(function, free)
    arguments = [
        Value(tracer, node("variable", Kind.FLOAT if name == "score" else Kind.INT, value=name))
        for name in names
    ]
    try:
        with tracer:
            result = copy(*arguments)
    except TracingError:
        raise
    except NameError as error:
        hint = (
            f"; a tensor that is given at run time is declared: tensors={{{error.name!r}: torch.float32}}"
            if error.name
            else ""
        )
        raise error_from(f"{what} cannot be traced: {error}{hint}", error.__traceback__) from None
    except Exception as error:
        raise error_from(
            f"{what} cannot be traced: {type(error).__name__}: {error}", error.__traceback__
        ) from error
    return Traced(_returned(what, function, tracer, result), used)


def _returned(what: str, function: Callable[..., Any], tracer: Tracer, result: object) -> Node:
    must = "a boolean: the mask" if what == "mask_mod" else "a float32: the score"
    try:
        found = tracer.node_of(result)
    except (ExpressionError, TracingError) as error:
        kind = "None" if result is None else f"a {type(result).__name__}"
        raise error_at_definition(
            function, f"{what} returns {kind}, must return {must} ({str(error).splitlines()[0]})"
        ) from None
    if found.kind != (Kind.BOOL if what == "mask_mod" else Kind.FLOAT):
        kind = {Kind.BOOL: "a boolean", Kind.INT: "an integer", Kind.FLOAT: "a float"}[found.kind]
        raise error_at_definition(function, f"{what} returns {kind}, must return {must}")
    return found


class Tracer(TorchFunctionMode):
    """While active, records torch operations on traced values. Operations on only tensors are executed, and
    their results become captured tensors.
    """

    def __init__(self, what: str, function: Callable[..., Any], declared: set[str], bound: Bound) -> None:
        super().__init__()
        self.what = what
        self._bound = bound
        self._function = function
        self._names = declared | {param.name for _, param in bound.values()}
        self._operations = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(function, "__name__", repr(function))
        if _is_in_place(name) and args and isinstance(args[0], Tensor | Value | Table):
            self.refuse(f"an in-place write ({name}) to a tensor; must make a new value")
        if not any(isinstance(argument, Value | Table) for argument in _flat((args, kwargs))):
            if name in RANDOM:
                self.refuse(
                    f"{name}() would be drawn once, when the variant is made; must be a tensor that is "
                    f"declared or captured"
                )
            return function(*args, **kwargs)
        if name == "__getitem__":
            table, index = args
            return (self.table_of(table) if isinstance(table, Tensor) else table)[index]
        if name == "where" and function is Tensor.where:
            args = (args[1], args[0], *args[2:])
        return self.apply(name, *args, **kwargs)

    def apply(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Applies a torch function or a method, by name."""
        operation = NAMED.get(name.strip("_"))
        if operation is None:
            if name in TO_PYTHON:
                self.refuse(f"{_TO_PYTHON} ({name})")
            self.refuse(f"{name}() is unknown here; known are {KNOWN}")
        self._operations += 1
        if self._operations > MAX_OPERATIONS:
            self.refuse(
                f"it does more than {MAX_OPERATIONS} operations; must do fewer: put numbers into a tensor, "
                f"and index it"
            )
        with self.at_users_line():
            return Value(
                self,
                operation(
                    *(self._argument(a) for a in args),
                    **{key: self._argument(a) for key, a in kwargs.items()},
                ),
            )

    def _argument(self, value: object) -> object:
        return (
            self.node_of(value) if isinstance(value, Value | Table | Tensor | bool | int | float) else value
        )

    def node_of(self, value: object) -> Node:
        """The node of a traced value, a number, or a tensor without dimensions."""
        if isinstance(value, Value):
            return value.node
        if isinstance(value, Table):
            raise ExpressionError(f"{value.param.name} has {len(value.free)} dimension(s) without an index")
        if isinstance(value, Tensor):
            if value.ndim:
                raise ExpressionError(
                    f"a captured tensor of shape {list(value.shape)} is used whole; must be indexed"
                )
            if value.device.type == "cpu":
                return constant(value.item())
            return self.table_of(value).load().node
        return constant(value)

    def parameter(self, param: Param) -> Value | Table:
        if not param.is_tensor:
            return Value(self, node("scalar", param.kind, value=param.name))
        table = Table(self, param, tuple(range(param.ndim or 0)), {})
        return table if param.ndim else table.load()

    def table_of(self, tensor: Tensor) -> Table:
        """Binds a captured tensor as a parameter."""
        _, param = self._bound.get(id(tensor), (None, None))
        if param is None:
            name = next((name for name, value in captured(self._function) if value is tensor), "captured")
            while name in self._names:
                name += "_"
            try:
                param = Param(name, tensor.dtype, tensor.ndim, tensor.detach())
            except ValueError as error:
                self.refuse(str(error))
            self._names.add(name)
            self._bound[id(tensor)] = (tensor, param)
        return Table(self, param, tuple(range(tensor.ndim)), {})

    def refuse(self, message: str) -> NoReturn:
        raise error_here(f"{self.what} cannot be traced: {message}")

    def at_users_line(self) -> _AtUsersLine:
        return _AtUsersLine(self)


class _AtUsersLine:
    """Adds the user's line to errors of operations.

    (Not a @contextmanager, whose frames would be between here and the user's.)
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ExpressionError):
            self._tracer.refuse(str(error))
        if isinstance(error, TypeError):  # unsupported arguments
            self._tracer.refuse(f"arguments that are not known here: {error}")


class _Operators:
    """Python's operators, which Python looks up on the class."""

    tracer: Tracer

    def __setitem__(self, index: object, value: object) -> NoReturn:
        self.tracer.refuse("an in-place write ([...] =); kernels only read their tensors")

    __hash__ = object.__hash__


def _add_operators() -> None:
    def forward(name: str) -> Callable[..., Any]:
        return lambda self, other: self.tracer.apply(name, self, other)

    def backward(name: str) -> Callable[..., Any]:
        return lambda self, other: self.tracer.apply(name, other, self)

    def alone(name: str) -> Callable[..., Any]:
        return lambda self: self.tracer.apply(name, self)

    def in_place(name: str) -> Callable[..., Any]:
        return lambda self, _: self.tracer.refuse(
            f"an in-place write ({name}); must make a new value: x = x + ..."
        )

    def to_python(name: str) -> Callable[..., Any]:
        advice = (
            "must be torch.from_numpy() of NumPy arrays"
            if name == "array"
            else "must be torch operations throughout"
        )
        return lambda self, *_: self.tracer.refuse(f"{_TO_PYTHON} ({name}()); {advice}")

    conversions = ("int", "float", "index", "len", "iter", "complex", "round", "contains", "array")
    operators = {
        **{f"__{name}__": forward(name) for name in (*BINARY, *COMPARISONS)},
        **{f"__r{name}__": backward(name) for name in BINARY},
        **{name: in_place(name) for name in IN_PLACE},
        **{f"__{name}__": alone(name) for name in ("neg", "pos", "invert", "abs")},
        **{f"__{name}__": to_python(name) for name in conversions},
    }
    for name, operator in operators.items():
        setattr(_Operators, name, operator)


_add_operators()


class Value(_Operators):
    """A number that only the kernel knows; behaves like a tensor without dimensions."""

    shape = torch.Size([])
    ndim = 0
    device = torch.device("cpu")

    def __init__(self, tracer: Tracer, of: Node) -> None:
        self.tracer = tracer
        self.node = of

    @property
    def dtype(self) -> torch.dtype:
        return {Kind.BOOL: torch.bool, Kind.INT: torch.int32, Kind.FLOAT: torch.float32}[self.node.kind]

    def dim(self) -> int:
        return 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TracingError(
            f"{getattr(function, '__name__', function)}() of a value of a function that is no longer being "
            f"traced"
        )

    def __repr__(self) -> str:
        return f"<{self.node.kind.name.lower()} that only the kernel knows>"

    def __bool__(self) -> NoReturn:  # noqa: PLE0304
        self.tracer.refuse(
            f"{_BRANCH} (if, and, or, not, min(), max() or a chained comparison); must be torch.where, &, |, "
            f"~, torch.minimum or torch.maximum"
        )

    def __getitem__(self, index: object) -> NoReturn:
        self.tracer.refuse("a value without dimensions is indexed")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if _is_in_place(name):
            self.tracer.refuse(f"an in-place write ({name}); must make a new value")
        if name in TO_PYTHON:
            self.tracer.refuse(f"{_TO_PYTHON} ({name}); must be torch operations throughout")
        if name == "where":
            return lambda condition, other: self.tracer.apply("where", condition, self, other)
        if name.strip("_") not in NAMED:
            self.tracer.refuse(f".{name} is unknown here; known are {KNOWN}")
        return lambda *args, **kwargs: self.tracer.apply(name, self, *args, **kwargs)


class Table(_Operators):
    """A tensor parameter. Some of its dimensions may already have an index."""

    def __init__(
        self, tracer: Tracer, param: Param, free: tuple[int, ...], indices: Mapping[int, Node]
    ) -> None:
        self.tracer = tracer
        self.param = param
        self.free = free  # dimensions without an index
        self.indices = indices

    dtype = property(lambda self: self.param.dtype)
    ndim = property(lambda self: len(self.free))
    device = torch.device("cpu")

    @property
    def shape(self) -> tuple[Value, ...]:
        return tuple(Value(self.tracer, self._size(dim)) for dim in self.free)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.free)

    __torch_function__ = Value.__torch_function__

    def _size(self, dim: int) -> Node:
        return node("size", Kind.INT, value=(self.param.name, dim))

    def __getitem__(self, index: object) -> Any:
        indices = list(index) if isinstance(index, tuple) else [index]
        if len(indices) > len(self.free):
            self.tracer.refuse(
                f"{self.param.name} has {len(indices)} indices for {len(self.free)} dimension(s)"
            )
        chosen, free = dict(self.indices), list(self.free)
        with self.tracer.at_users_line():
            for dim, one in zip(self.free, indices, strict=False):
                if isinstance(one, slice) and one == slice(None):
                    continue
                if one is None or one is Ellipsis or isinstance(one, slice | list | str):
                    raise ExpressionError(
                        f"{self.param.name} is indexed with {one!r}; must be an integer for each dimension, "
                        f"or :"
                    )
                chosen[dim] = self._index(dim, self.tracer.node_of(one))
                free.remove(dim)
        table = Table(self.tracer, self.param, tuple(free), chosen)
        return table if free else table.load()

    def _index(self, dim: int, index: Node) -> Node:
        if index.kind != Kind.INT:
            raise ExpressionError(
                f"{self.param.name} is indexed with a {index.kind.name.lower()}; must be an integer: "
                f".to(torch.int32)"
            )
        if is_never_negative(index):
            return index
        from_end = arithmetic("add", index, self._size(dim))
        return from_end if index.is_constant else select(compare("lt", index, constant(0)), from_end, index)

    def load(self) -> Value:
        indices = tuple(self.indices[dim] for dim in sorted(self.indices)) or (constant(0),)
        return Value(self.tracer, node("load", self.param.kind, indices, self.param.name))

    def _whole(self, *_: Any, **__: Any) -> NoReturn:
        self.tracer.refuse(
            f"{self.param.name} is used with {len(self.free)} dimension(s) without an index; must have an "
            f"integer for each"
        )

    def __bool__(self) -> NoReturn:  # noqa: PLE0304
        self._whole()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if _is_in_place(name):
            self.tracer.refuse(
                f"an in-place write ({name}) to {self.param.name}; kernels only read their parameters"
            )
        return self._whole()


def _is_in_place(name: str) -> bool:
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.startswith("_"))
        or (name.startswith("__i") and name in IN_PLACE)
    )


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _flat(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _flat(part)
    else:
        yield value
