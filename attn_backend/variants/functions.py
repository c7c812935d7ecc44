"""Python functions with other values for some of their free variables, and the user's line where something
went wrong.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any

import torch

_NOT_THE_USERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


class TracingError(ValueError):
    """A function that cannot be a variant: the message names what is in the way, and the user's file, line
    and source.
    """


def with_names(
    function: Callable[..., Any], values: Mapping[str, object]
) -> tuple[Callable[..., Any], set[str]]:
    """A copy of `function` whose globals and closure cells of these names have these values, whether they
    existed or not; the same for the functions that it calls by a global name or finds in its closure. Also
    returns the names that occurred.

    The functions themselves are left alone, as are those that it finds otherwise (as attributes of a module,
    for example).
    """
    copier = _Copier(values)
    return copier.copy(function), copier.found


class _Copier:
    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values
        self._copies: dict[int, tuple[object, Any]] = {}  # by the id of the original, which is kept, too
        self.found: set[str] = set()

    def copy(self, value: Any) -> Any:
        """Of a function, or of a list, tuple or dict with functions; anything else is returned itself."""
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
        # before its own names are looked at: functions may call each other
        self._copies[id(function)] = (function, copied)
        for name, cell, old in zip(code.co_freevars, cells, function.__closure__ or (), strict=True):
            if name in self._values:
                self.found.add(name)
                cell.cell_contents = self._values[name]
                continue
            with suppress(ValueError):  # not assigned yet
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
    """Names and values that a function finds in its closure and among its globals; of the functions that it
    calls, too.
    """
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
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    if not _is_foreign(function.__code__):
        yield from (
            (name, function.__globals__[name])
            for name in _global_names(function.__code__)
            if name in function.__globals__
        )


def _global_names(code: CodeType) -> set[str]:
    """Names that code, with the functions inside it, may look up among its globals (names of attributes are
    among them).
    """
    names = set(code.co_names)
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            names |= _global_names(inside)
    return names


def _call_of(value: object) -> FunctionType | None:
    """__call__ of an object of a user's class."""
    call = getattr(type(value), "__call__", None)  # noqa: B004
    return call if isinstance(call, FunctionType) and not _is_foreign(call.__code__) else None


def _is_foreign(code: CodeType) -> bool:
    return code.co_filename.startswith(_NOT_THE_USERS[1])


def check_signature(what: str, function: object, names: tuple[str, ...]) -> None:
    """Refuses what cannot be called with len(names) positional arguments."""
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
