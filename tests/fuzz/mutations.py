"""How arguments are made wrong: one at a time, and only in ways that cannot be valid by accident."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_backend import BlockScales

from .call import (
    MISSING,
    Argument,
    Call,
    ChoiceArgument,
    FloatArgument,
    IntArgument,
    ScaleArgument,
    TensorArgument,
    Wrong,
)

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
NOT_TENSORS = (None, 3.5, "tensor", [1.0, 2.0], object(), torch.float32, {"shape": 3})
NOT_NUMBERS = ("4", [1], object(), 1j, torch.float32, {})
NOT_CHOICES = (3.5, "x", [1], object(), {}, torch.int8)


class Wrapper(Tensor):
    """A tensor with a shape and a dtype, but no memory."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    @classmethod
    def __torch_dispatch__(
        cls, function: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        raise NotImplementedError(f"{function} of a wrapper")


class Subclass(Tensor):
    """An ordinary tensor of another class."""


# ---- Tensors ----


def _of_another_type(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> object:
    right: tuple[object, ...] = ((None,) if kind.optional else ()) + ((3.5,) if kind.number else ())
    choices = [value for value in NOT_TENSORS if value not in right]
    return choices[rng.integers(len(choices))]


def _of_another_dtype(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor:
    choices = [dtype for dtype in DTYPES if dtype not in kind.dtypes]
    return tensor.to(choices[rng.integers(len(choices))])


def _of_other_dimensions(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor:
    return (
        tensor.unsqueeze(int(rng.integers(tensor.ndim + 1)))
        if tensor.ndim < 2 or rng.random() < 0.5
        else tensor.flatten(0, 1)
    )


def _of_another_size(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor | None:
    """Makes a dimension longer or shorter by one. The rest stays, including strides if possible."""
    if not kind.exact:
        return None
    dim = kind.exact[rng.integers(len(kind.exact))]
    if rng.random() < 0.5:
        return tensor.narrow(dim, 0, tensor.shape[dim] - 1) if tensor.shape[dim] > 0 else None
    shape = list(tensor.shape)
    shape[dim] = 1
    return torch.cat(
        [tensor, tensor.narrow(dim, 0, 1) if tensor.shape[dim] else tensor.new_zeros(shape)], dim
    )


def _with_gaps(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor | None:
    """The last dimension is not contiguous. With at most one element there is no stride."""
    if tensor.ndim == 0 or tensor.shape[-1] < 2 or tensor.numel() == 0:
        return None
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def _on_another_device(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor:
    return tensor.to("cpu" if tensor.is_cuda and not kind.leads and rng.random() < 0.5 else "meta")


def _fake(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor | None:
    return FakeTensorMode().from_tensor(tensor) if tensor.numel() else None


def _wrapper(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor | None:
    return Wrapper(tensor) if tensor.numel() else None


def _freed(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor | None:
    if tensor.numel() == 0:
        return None
    freed = tensor.clone()
    freed.untyped_storage().resize_(0)
    return freed


def _negative(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor | None:
    return torch._neg_view(tensor) if tensor.numel() and tensor.dtype != torch.bool else None


def _conjugate(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor | None:
    """A conjugate view (also with a wrong dtype), or its imaginary part, which has the negative bit."""
    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return None
    conjugate = torch.complex(tensor.float(), tensor.float()).conj()
    return (
        conjugate.imag
        if torch.float32 in kind.dtypes and tensor.shape[-1] > 1 and rng.random() < 0.5
        else conjugate
    )


def _sparse(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor | None:
    """Sparse formats, a quantized one, and a library's."""
    if tensor.numel() == 0:
        return None
    style = rng.integers(4)
    if style == 0 and tensor.ndim == 2:
        return tensor.nan_to_num().to_sparse_csr()
    if style == 1 and tensor.dtype.is_floating_point:
        return torch.quantize_per_tensor(tensor.float().nan_to_num(), 0.1, 0, torch.qint8)
    if style == 2 and tensor.dtype.is_floating_point and not tensor.is_cuda:
        return tensor.float().nan_to_num().to_mkldnn()
    return tensor.nan_to_num().to_sparse()


def _with_gradient(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor | None:
    return (
        tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        if tensor.dtype.is_floating_point and tensor.numel()
        else None
    )


def _over_itself(rng: numpy.random.Generator, tensor: Tensor, kind: TensorArgument) -> Tensor | None:
    """An output in which all elements of a dimension share the same memory."""
    dims = [dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1]
    if not kind.written or not dims or tensor.numel() == 0:
        return None
    return tensor.narrow(dims[0], 0, 1).clone().expand(tensor.shape)


OF_TENSORS: dict[str, Callable[[numpy.random.Generator, Tensor, TensorArgument], object]] = {
    "another type": _of_another_type,
    "another dtype": _of_another_dtype,
    "other dimensions": _of_other_dimensions,
    "another size": _of_another_size,
    "gaps": _with_gaps,
    "another device": _on_another_device,
    "fake": _fake,
    "wrapper": _wrapper,
    "freed": _freed,
    "negative bit": _negative,
    "conjugate": _conjugate,
    "sparse or quantised": _sparse,
    "requires grad": _with_gradient,
    "overlaps itself": _over_itself,
}
# may be blamed on another argument
_DISAGREE = (
    "another dtype",
    "another size",
    "another device",
    "conjugate",
    "sparse or quantised",
    "requires grad",
)


# ---- Numbers and the rest ----


def _wrong_ints(kind: IntArgument, value: object) -> Iterator[tuple[str, object]]:
    valid = value if isinstance(value, int) else max(kind.low, 0)
    # some are valid after truncation
    edges = {
        kind.low - 1,
        kind.high + 1,
        -1,
        0,
        2**31,
        2**32 + valid,
        2**40,
        2**63,
        2**64 + valid,
        -(2**63) - 1,
    }
    yield from (("out of range", edge) for edge in sorted(edges) if not kind.low <= edge <= kind.high)
    yield from (("out of range", edge) for edge in kind.wrong)
    yield "bool", True
    yield from (
        ("another type", other)
        for other in (
            1.5,
            torch.tensor([1, 2]).float()[:0],
            *NOT_NUMBERS,
            *(() if kind.optional else (None,)),
        )
    )


def _wrong_floats(kind: FloatArgument) -> Iterator[tuple[str, object]]:
    yield "NaN", math.nan
    yield from (("out of range", value) for value in kind.wrong)
    yield "too large for a float", 10**400
    yield from (("another type", other) for other in (*NOT_NUMBERS, *(() if kind.optional else (None,))))


def _wrong_choices(kind: ChoiceArgument, value: object) -> Iterator[tuple[str, object]]:
    yield from (("out of range", other) for other in kind.wrong)
    yield from (
        ("another type", other)
        for other in (
            *(NOT_CHOICES if kind.types is None else kind.types),
            *(() if kind.optional else (None,)),
        )
    )


def _wrong_scale(
    rng: numpy.random.Generator, name: str, value: Tensor | BlockScales, kind: ScaleArgument
) -> Wrong | None:
    """One way to make scales of tokens wrong: another value, another factor, or a wrong tensor."""
    names = kind.named or (name,)
    style = rng.random()
    if style < 0.3:
        return Wrong(name, "out of range", kind.wrong[rng.integers(len(kind.wrong))], names + kind.others)
    if isinstance(value, BlockScales) and style < 0.5 and not kind.ways:
        choices = list(_wrong_floats(FloatArgument(wrong=(0.0, -0.5, math.inf, 1e300, 1e-60))))
        how, factor = choices[rng.integers(len(choices))]
        return Wrong(name, how, value._replace(factor=factor), tuple(f"{known}.factor" for known in names))
    ways = kind.ways or tuple(OF_TENSORS)
    how = ways[rng.integers(len(ways))]
    if how == "gaps" and isinstance(value, Tensor):  # its strides are free
        return None
    changed = OF_TENSORS[how](rng, value.blocks if isinstance(value, BlockScales) else value, kind)
    if changed is None and how != "another type":
        return None
    made = value._replace(blocks=changed) if isinstance(value, BlockScales) else changed
    may_disagree = how in (*_DISAGREE, "another type", "other dimensions")
    return Wrong(name, how, made, names + (kind.others if may_disagree else ()))


def _wrong_argument(rng: numpy.random.Generator, call: Call, name: str, kind: Argument) -> Wrong | None:
    """One way to make this argument wrong; None if the selected way does not apply."""
    value = call.arguments[name]
    names = kind.named or (name,)
    if isinstance(kind, ScaleArgument):
        return _wrong_scale(rng, name, value, kind)
    if isinstance(kind, TensorArgument):
        ways = kind.ways or tuple(OF_TENSORS)
        how = ways[rng.integers(len(ways))]
        if isinstance(value, Tensor):
            changed = OF_TENSORS[how](rng, value, kind)
        else:  # an optional tensor that is not given
            changed = _of_another_type(rng, torch.zeros(0), kind) if how == "another type" else None
        if changed is None and not (how == "another type" and not kind.optional):
            return None
        return Wrong(name, how, changed, names + (kind.others if how in _DISAGREE else ()))
    if isinstance(kind, IntArgument):
        choices = list(_wrong_ints(kind, value))
    elif isinstance(kind, FloatArgument):
        choices = list(_wrong_floats(kind))
    else:
        assert isinstance(kind, ChoiceArgument)
        choices = list(_wrong_choices(kind, value))
    how, changed = choices[rng.integers(len(choices))]
    return Wrong(name, how, changed, names + kind.others)


def _wrong_signature(rng: numpy.random.Generator, call: Call) -> Wrong:
    """A missing argument, or one too many."""
    needed = [
        name
        for name, kind in call.kinds.items()
        if not kind.optional and not isinstance(kind, ChoiceArgument | FloatArgument)
    ]
    if rng.random() < 0.5 or not needed:
        return Wrong("unheard_of", "unknown", 1, ("unheard_of",))
    name = needed[0]
    return Wrong(name, "missing", MISSING, (name,))


def with_wrong_argument(rng: numpy.random.Generator, call: Call) -> Call:
    """The call with one argument made wrong."""
    while True:
        try:
            if call.values is not None and rng.random() < 0.3:
                values = call.values(rng)
                wrong = values[rng.integers(len(values))] if values else None
            elif call.public and rng.random() < 0.02:
                wrong = _wrong_signature(rng, call)
            else:
                name = list(call.kinds)[rng.integers(len(call.kinds))]
                wrong = _wrong_argument(rng, call, name, call.kinds[name])
        except (RuntimeError, NotImplementedError):  # torch cannot make such a tensor
            continue
        if wrong is not None and wrong.how not in call.without:
            return replace(call, arguments=call.arguments | {wrong.argument: wrong.value}, wrong=wrong)


def with_harmless_argument(rng: numpy.random.Generator, call: Call) -> Call:
    """The call with a tensor of another class, or with a tensor that requires a gradient while none is
    recorded; as valid as before.
    """
    names = [
        name
        for name, kind in call.kinds.items()
        if isinstance(kind, TensorArgument) and isinstance(call.arguments[name], Tensor)
    ]
    floats = [name for name in names if call.arguments[name].dtype.is_floating_point]
    if not names:
        return call
    style = rng.integers(4)
    if style < 2 and floats:
        name = floats[rng.integers(len(floats))]
        context: Callable[[], contextlib.AbstractContextManager[object]] = (
            torch.no_grad if style == 0 else torch.inference_mode
        )
        changed = call.arguments[name].detach().requires_grad_()
        return replace(
            call,
            arguments=call.arguments | {name: changed},
            context=context,
            variant=f"{name} requires a gradient, {context.__name__}",
        )
    name = names[rng.integers(len(names))]
    tensor = call.arguments[name]
    changed = tensor.as_subclass(Subclass) if style == 2 else torch.nn.Parameter(tensor, requires_grad=False)
    return replace(
        call, arguments=call.arguments | {name: changed}, variant=f"{name} is a {type(changed).__name__}"
    )


def around(rng: numpy.random.Generator, call: Call) -> Iterator[Call]:
    """A call, wrong calls made from it, and sometimes the original again: a refusal must not have changed
    anything."""
    if rng.random() < 0.75:
        yield with_harmless_argument(rng, call) if rng.random() < 0.1 else call
    for _ in range(int(rng.integers(1, 4))):
        yield with_wrong_argument(rng, call)
        if rng.random() < 0.25:
            yield call
