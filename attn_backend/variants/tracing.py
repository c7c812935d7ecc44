"""Python functions to expressions: a function runs once, with values that record what is done with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import operations
from .expressions import (
    COMPARISONS,
    ExpressionError,
    Kind,
    Node,
    arithmetic,
    compare,
    constant,
    is_never_negative,
    node,
    select,
)
from .functions import (
    TracingError,
    captured,
    check_signature,
    error_at_definition,
    error_from,
    error_here,
    with_names,
)
from .params import Param

SCORE_MOD = ("score", "b", "h", "q_idx", "kv_idx")
MASK_MOD = ("b", "h", "q_idx", "kv_idx")

# g++ compiles this many in seconds, nvcc needs minutes: it inlines them for every score that a thread holds.
MAX_OPERATIONS = 2048
_BRANCH = "a branch depends on values that only the kernel knows"
_TO_PYTHON = "a value that only the kernel knows is made a Python number"


# captured tensors by their ids; each tensor is kept, so that no other one gets its id
Bound = dict[int, tuple[Tensor, Param]]


@dataclass(frozen=True)
class Traced:
    """What a function computes, and which of the declared names it uses."""

    result: Node
    used: set[str]


def trace(
    what: str, function: Callable[..., Any], names: tuple[str, ...], params: Sequence[Param], bound: Bound
) -> Traced:
    """Runs `function` once.

    Args:
        what: what messages call it.
        names: of its arguments.
        params: what its free variables of these names stand for.
        bound: tensors that the variant's functions captured; those of this one are added.

    Raises:
        TracingError: the function does what cannot be traced; the message has the user's line.
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
    """While it is active, torch's operations on traced values are recorded; those on tensors alone are
    executed, and their results are captured tensors.
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
            if name in operations.RANDOM:
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
        """Applies a function of torch or a method, by its name."""
        operation = operations.NAMED.get(name.strip("_"))
        if operation is None:
            if name in operations.TO_PYTHON:
                self.refuse(f"{_TO_PYTHON} ({name})")
            self.refuse(f"{name}() is unknown here; known are {operations.KNOWN}")
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
        """A tensor that the function captured, bound as a parameter."""
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
    """Refuses what operations refuse, with the user's line.

    (No @contextmanager: its frames would be between here and the user's.)
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ExpressionError):
            self._tracer.refuse(str(error))
        if isinstance(error, TypeError):  # arguments that an operation does not take
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

    for name in operations.BINARY:
        setattr(_Operators, f"__{name}__", forward(name))
        setattr(_Operators, f"__r{name}__", backward(name))
    for name in operations.IN_PLACE:
        setattr(_Operators, name, in_place(name))
    for name in COMPARISONS:
        setattr(_Operators, f"__{name}__", forward(name))
    for name in ("neg", "pos", "invert", "abs"):
        setattr(_Operators, f"__{name}__", alone(name))
    for name in ("int", "float", "index", "len", "iter", "complex", "round", "contains", "array"):
        setattr(_Operators, f"__{name}__", to_python(name))


_add_operators()


class Value(_Operators):
    """A number that only the kernel knows; behaves as a tensor without dimensions."""

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
        if name in operations.TO_PYTHON:
            self.tracer.refuse(f"{_TO_PYTHON} ({name}); must be torch operations throughout")
        if name == "where":
            return lambda condition, other: self.tracer.apply("where", condition, self, other)
        if name.strip("_") not in operations.NAMED:
            self.tracer.refuse(f".{name} is unknown here; known are {operations.KNOWN}")
        return lambda *args, **kwargs: self.tracer.apply(name, self, *args, **kwargs)


class Table(_Operators):
    """A tensor parameter, some of whose dimensions may have an index already."""

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
        or (name.startswith("__i") and name in operations.IN_PLACE)
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
