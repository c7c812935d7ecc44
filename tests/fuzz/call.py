"""Calls of the public API, right and wrong, and their outcomes."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

RIGHT = "valid, right"
REFUSED = "refused by name"
# wrong values in metadata on a GPU: clamped, and reported by raise_for_errors
REPORTED = "taken, reported by name"
UNNAMED = "refused without its name"
ACCEPTED = "accepted though invalid"
WRONG_RESULT = "wrong result"
VALID_REFUSED = "valid, refused"
CRASH = "crash"
HANG = "hang"
BROKEN = "the fuzz itself failed"
GOOD = (RIGHT, REFUSED, REPORTED)
FINDINGS = (UNNAMED, ACCEPTED, WRONG_RESULT, VALID_REFUSED, CRASH, HANG, BROKEN)

MISSING = object()  # the value of an omitted argument


@dataclass(frozen=True)
class Argument:
    """The properties of an argument that are needed to make it wrong.

    surface: the function or class that should refuse it; "": the call's own. named: how errors name it; ()
    its own name. others: arguments that errors may name instead if two disagree in size, dtype or device.
    optional: None is valid.
    """

    surface: str = ""
    named: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class TensorArgument(Argument):
    """A tensor.

    dtypes: the valid ones. exact: dimensions that must have exactly this size. written: an output. number: a
    number is also valid. leads: its device is the call's. ways: to make it wrong, of OF_TENSORS in
    mutations.py; (): all.
    """

    dtypes: tuple[torch.dtype, ...] = ()
    exact: tuple[int, ...] = ()
    written: bool = False
    number: bool = False
    leads: bool = False
    ways: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScaleArgument(TensorArgument):
    """A cache's scales of each token and head: a tensor, or BlockScales.

    wrong: other invalid values.
    """

    wrong: tuple[object, ...] = ()


@dataclass(frozen=True)
class IntArgument(Argument):
    """low, high: the smallest and the largest valid value. wrong: other invalid values."""

    low: int = -(2**63)
    high: int = 2**63 - 1
    wrong: tuple[object, ...] = ()


@dataclass(frozen=True)
class FloatArgument(Argument):
    """wrong: numbers that must be refused, besides NaN."""

    wrong: tuple[float, ...] = ()


@dataclass(frozen=True)
class ChoiceArgument(Argument):
    """One of a few values, or an object of a class. wrong: values to refuse. types: objects of other types,
    also to refuse; None: the usual ones.
    """

    wrong: tuple[object, ...] = ()
    types: tuple[object, ...] | None = None


@dataclass(frozen=True)
class Wrong:
    """An argument that was made wrong: how, and the names with which the message may begin. reported: on a
    GPU the call is accepted, and reported later.
    """

    argument: str
    how: str
    value: object
    names: tuple[str, ...]
    reported: bool = False


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Call:
    """One call.

    function: called with `arguments` by name. public: it is the API's own function, so an argument may also
    be missing or superfluous. check: gets the arguments and the result; raises AssertionError if they are
    wrong. prepare: called before each call, including repeated ones. values: this call's own wrong values,
    beyond the ones for the kinds of its arguments. reported: for a call with wrong metadata that a GPU
    accepted: raises the reported error. without: kinds of errors that this call need not detect.
    """

    surface: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    kinds: dict[str, Argument]
    check: Callable[[dict[str, Any], Any], None]
    prepare: Callable[[], object] = _nothing
    public: bool = False
    values: Callable[[numpy.random.Generator], list[Wrong]] | None = None
    reported: Callable[[], object] = _nothing
    without: frozenset[str] = frozenset()
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    variant: str = ""
    wrong: Wrong | None = None

    @property
    def blamed(self) -> str:
        """The function or class that should refuse the wrong argument."""
        kind = self.kinds.get(self.wrong.argument) if self.wrong else None
        return (kind.surface if kind else "") or self.surface

    @property
    def title(self) -> str:
        if self.wrong is not None:
            return f"{self.blamed}: {self.wrong.argument}: {self.wrong.how}"
        return f"{self.surface}{': ' if self.variant else ''}{self.variant}"


@dataclass
class Outcome:
    kind: str
    message: str = ""
    details: str = field(default="", compare=False)  # a traceback


class StalePlanError(AssertionError):
    """run() used a plan although the last plan was refused."""


def is_named(message: str, names: tuple[str, ...]) -> bool:
    """Whether a message, or one of its sentences, begins with one of the names; a level's number may precede
    it.
    """
    alternatives = "|".join(map(re.escape, names))
    return (
        re.search(
            rf"(?:^|; )(?:levels\[\d+\](?:\.|: ))?(?:len\()?(?:composition\.)?(?:{alternatives})(?!\w)",
            message,
        )
        is not None
    )


def judge(call: Call) -> Outcome:
    """Makes the call. Fatal GPU errors are left to the caller."""
    try:
        call.prepare()
        with call.context():
            arguments = {name: value for name, value in call.arguments.items() if value is not MISSING}
            result = call.function(**arguments)
    except StalePlanError as error:
        return Outcome(WRONG_RESULT, str(error))
    except Exception as error:
        return _judge_refusal(call, error)
    if call.wrong is not None:
        return _judge_report(call) if call.wrong.reported else Outcome(ACCEPTED, _described(call))
    try:
        call.check(call.arguments, result)
    except AssertionError as error:
        return Outcome(
            WRONG_RESULT,
            str(error).partition("\n")[0] or "(no message)",
            f"{traceback.format_exc()}\n{_described(call)}",
        )
    return Outcome(RIGHT)


def _judge_refusal(call: Call, error: Exception) -> Outcome:
    message = f"{type(error).__name__}: {error}"
    if is_fatal(error):
        raise error
    if call.wrong is None:
        return Outcome(VALID_REFUSED, message, f"{traceback.format_exc()}\n{_described(call)}")
    if call.wrong.how in ("missing", "unknown"):
        named = isinstance(error, TypeError | ValueError) and any(
            name in str(error) for name in call.wrong.names
        )
    else:
        named = isinstance(error, ValueError) and is_named(str(error), call.wrong.names)
    return Outcome(REFUSED if named else UNNAMED, message, f"{traceback.format_exc()}\n{_described(call)}")


def _judge_report(call: Call) -> Outcome:
    assert call.wrong is not None
    try:
        call.reported()
    except ValueError as error:
        return Outcome(
            REPORTED if is_named(str(error), call.wrong.names) else UNNAMED, f"raise_for_errors: {error}"
        )
    return Outcome(ACCEPTED, f"{_described(call)}, and raise_for_errors() says nothing")


def is_fatal(error: Exception) -> bool:
    """After a device error this process cannot continue on the device."""
    text = str(error)
    return any(
        word in text
        for word in (
            "CUDA error",
            "CUDA_ERROR",
            "cudaError",
            "illegal memory access",
            "unspecified launch failure",
        )
    )


def _described(call: Call) -> str:
    if call.wrong is None:
        return ", ".join(f"{name} = {describe(value)}" for name, value in call.arguments.items())
    return f"{call.wrong.argument} = {describe(call.wrong.value)}"


def describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        try:
            text = f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            small = (
                type(value) is torch.Tensor
                and value.layout == torch.strided
                and value.device.type != "meta"
                and not value.is_quantized
            )
            small = small and 0 < value.numel() <= 12 and value.untyped_storage().nbytes() > 0
            return f"{text} {value.tolist()}" if small else text
        except RuntimeError:
            return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) < 200 else f"a {type(value).__name__}"
