"""Parameters of a variant: their types, and the bytes of the C++ struct that holds them."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from ..settings import refusal
from ..validation import MAX_INT32, check_plain, describe, dtype_name, refuse, require
from .expressions import Kind

MAX_BYTES = 256  # VariantParams::kBytes (csrc/attention/variant/variants.h)
MAX_DIMS = 8
# Names for the size of a tensor's dimension.
SIZES = ("num_qo_heads", "num_kv_heads", "batch", "rows")

_CPP_ELEMENTS = {
    torch.float32: "float",
    torch.float16: "StoredFloat16",
    torch.bfloat16: "StoredBFloat16",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "short",
    torch.uint32: "uint32_t",
    torch.uint16: "unsigned short",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
}
_CPP_SCALARS = {float: "float", int: "int32_t"}
_FLOATS = (float, torch.float32, torch.float16, torch.bfloat16)
# C++ keywords, and names that have a meaning in a variant.
_CPP_WORDS = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t class compl
    concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype
    default delete do double dynamic_cast else enum explicit export extern false float for friend goto if
    inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected
    public register reinterpret_cast requires return short signed sizeof static static_assert static_cast
    struct switch template this throw true try typedef typeid typename union unsigned using virtual void
    volatile wchar_t while xor xor_eq attn int32_t int64_t uint32_t uint64_t uint8_t ParamTensor ScoreRow
    KvToken Pair PairLayout Params params kUsesSoftmax query key value logits bias_slope mask output range
    logit row kv_position kv_head column abs ceil exp exp2 floor floor_divide floor_modulo infinity log
    log2 max min quick_divide rotated select sigmoid soft_cap sqrt tanh turns_of
"""

Dtype = torch.dtype | type[float] | type[int]


class Param(BaseModel):
    """A parameter: a tensor that the kernel reads in place, or a number. The same for a whole launch.

    A C++ hook refers to it by its name. A tensor is called with one index per dimension:
    `slopes(row.qo_head)`.

    Args:
        name: an identifier of C++ and Python.
        dtype: of a tensor: float32, float16 or bfloat16 (computed in float32), int64 or uint32 (computed in
            int32, which must hold their values), int32, int16, int8, uint16, uint8 or bool. `float` or `int`:
            a number, float32 or int32.
        ndim: of a tensor, 0 to 8; default 1. None for a number.
        value: the bound value; None: it is given to every `run`.
        shape: of a tensor, instead of ndim: the name of each dimension's size, or None for any other size.
            Names: "num_qo_heads", "num_kv_heads", "batch" (requests of the plan, or row groups of a level,
            including empty ones) and "rows" (of Q, including padding). Tensors may be longer, but not
            shorter.

    Raises:
        ValueError: an invalid argument; the message gives its name, its value and the requirement.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True, extra="forbid")

    name: str
    dtype: Any
    ndim: int | None = Field(None, ge=0, le=MAX_DIMS)
    value: Any = Field(None, repr=False)
    shape: tuple[str | None, ...] | None = None

    def __init__(
        self,
        name: str,
        dtype: Dtype,
        ndim: int | None = None,
        value: Tensor | float | int | None = None,
        shape: tuple[str | None, ...] | None = None,
    ) -> None:
        try:
            super().__init__(name=name, dtype=dtype, ndim=ndim, value=value, shape=shape)
        except ValidationError as error:
            raise ValueError(refusal(error, type(self).model_fields)) from None

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        name, dtype, ndim, shape = fields["name"], fields["dtype"], fields["ndim"], fields["shape"]
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            refuse(
                "name", name, "an identifier of C++ and Python: letters, digits and _, the first not a digit"
            )
        require(
            any(dtype is known for known in (*_CPP_SCALARS, *_CPP_ELEMENTS)),
            f"dtype of {name!r}",
            dtype,
            f"float or int for a number, or one of {', '.join(map(dtype_name, _CPP_ELEMENTS))}",
        )
        require(ndim is None or not isinstance(dtype, type), f"ndim of {name!r}", ndim, "None for a number")
        if shape is not None:
            is_known = isinstance(shape, tuple) and all(size is None or size in SIZES for size in shape)
            sizes = ", ".join(map(repr, SIZES))
            require(is_known, f"shape of {name!r}", shape, f"a tuple of None and {sizes}")
            require(not isinstance(dtype, type), f"shape of {name!r}", shape, "None for a number")
            is_right = ndim in (None, len(shape))
            require(is_right, f"shape of {name!r}", shape, f"of ndim = {describe(ndim)} dimensions")
            ndim = len(shape)
        return {**fields, "ndim": 1 if ndim is None and not isinstance(dtype, type) else ndim}

    @model_validator(mode="after")
    def _check_value(self) -> Param:
        if self.value is not None:
            check_value(f"value of {self.name!r}", self, self.value, None)
        return self

    @property
    def is_tensor(self) -> bool:
        return self.ndim is not None

    @property
    def kind(self) -> Kind:
        """Type of its values in computations."""
        return Kind.FLOAT if self.dtype in _FLOATS else Kind.BOOL if self.dtype is torch.bool else Kind.INT

    @property
    def cpp_dims(self) -> int:
        """Dimensions in C++: a tensor without dimensions has one, with one element."""
        return max(self.ndim or 0, 1)

    @property
    def cpp_type(self) -> str:
        return (
            f"ParamTensor<{_CPP_ELEMENTS[self.dtype]}, {self.cpp_dims}>"
            if self.is_tensor
            else _CPP_SCALARS[self.dtype]
        )

    @property
    def needs_cast(self) -> bool:
        """Whether an element's C++ type differs from the type used in computations."""
        return self.is_tensor and self.dtype not in (torch.float32, torch.int32, torch.bool)

    @property
    def cpp_name(self) -> str:
        return f"{self.name}_" if is_cpp_word(self.name) else self.name

    def describe(self) -> str:
        if not self.is_tensor:
            return "a number that a float32 holds" if self.dtype is float else "an int that an int32 holds"
        return (
            f"{'an' if dtype_name(self.dtype)[0] == 'i' else 'a'} {dtype_name(self.dtype)} tensor of "
            f"{self.ndim} dimension{'' if self.ndim == 1 else 's'}"
        )


def is_cpp_word(name: str) -> bool:
    """Whether a name has another meaning in a variant's C++."""
    return name in _CPP_WORDS.split() or "__" in name or bool(re.fullmatch(r"t\d+|_[A-Z].*", name))


def params_from(tensors: Mapping[str, Any] | Sequence[Param], argument: str) -> tuple[Param, ...]:
    """Converts Params, or {name: dtype, (dtype, ndim) or (dtype, shape)}. `argument`: name for messages."""
    if isinstance(tensors, Mapping):
        params = []
        for name, declared in tensors.items():
            dtype, dims = declared if isinstance(declared, tuple) and len(declared) == 2 else (declared, None)
            try:
                params.append(
                    Param(name, dtype, shape=dims) if isinstance(dims, tuple) else Param(name, dtype, dims)
                )
            except ValueError as error:
                raise ValueError(f"{argument}[{name!r}]: {error}") from None
    else:
        params = list(tensors)
        for i, param in enumerate(params):
            require(isinstance(param, Param), f"{argument}[{i}]", param, "a Param")
    names = [param.name for param in params]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{argument} has {name!r} {names.count(name)} times, must have it once")
    return tuple(params)


class Layout:
    """The bytes of consecutive C++ structs of parameters: `structs` has the parameters of each. Structs
    without parameters are left out.
    """

    def __init__(self, structs: Sequence[Sequence[Param]]) -> None:
        structs = [params for params in structs if params]
        self.params = tuple(param for params in structs for param in params)
        self._fields: list[str] = []  # format of struct.pack
        self.bytes, alignment = 0, 1
        for params in structs:
            own = max(8 if param.is_tensor else 4 for param in params)
            alignment = max(alignment, own)
            self._pad_to(own)
            for param in params:
                self._pad_to(8 if param.is_tensor else 4)
                field = f"Q{2 * param.cpp_dims}i" if param.is_tensor else "f" if param.dtype is float else "i"
                self._fields.append(field)
                self.bytes += struct.calcsize(f"<{field}")
            self._pad_to(own)
        self._pad_to(alignment)
        if not self.params:
            self._fields, self.bytes = ["x"], 1  # size of an empty struct
        self._struct = struct.Struct("<" + "".join(self._fields))

    def _pad_to(self, alignment: int) -> None:
        pad = -self.bytes % alignment
        self._fields += [f"{pad}x"] if pad else []
        self.bytes += pad

    def pack(self, values: Sequence[Tensor | float | int]) -> bytes:
        """values: checked, one for each entry of `params`."""
        fields: list[float | int] = []
        for value in values:
            if isinstance(value, Tensor):
                fields.append(value.data_ptr())
                fields += value.shape or (1,)
                fields += value.stride() or (1,)
            else:
                fields.append(value)
        return self._struct.pack(*fields)


def check_value(name: str, param: Param, value: object, device: torch.device | None) -> Tensor | float | int:
    """Refuses invalid values of `param`; messages call it `name`. device None: any."""
    if param.is_tensor:
        if not isinstance(value, Tensor) or value.dtype is not param.dtype or value.ndim != param.ndim:
            _refuse(name, param, value)
        if (
            device is not None
            and value.device != device
            and (value.device.type != device.type or device.index is not None)
        ):
            raise ValueError(f"{name} is {describe(value)}, must be on {device}")
        check_plain(name, value)
        if value.numel() == 0:
            raise ValueError(
                f"{name} is {describe(value)}, must have at least one element: variants are also asked about "
                f"tokens that do not exist"
            )
        if max((*value.shape, *value.stride(), 0)) > MAX_INT32:
            raise ValueError(f"{name} is {describe(value)}, must have sizes and strides below 2^31")
        return value
    if param.dtype is int:
        if (
            not isinstance(value, Integral)
            or isinstance(value, bool)
            or not -MAX_INT32 - 1 <= int(value) <= MAX_INT32
        ):
            _refuse(name, param, value)
        return int(value)
    if (
        not isinstance(value, Real)
        or isinstance(value, bool)
        or torch.finfo(torch.float32).max < abs(cast("float", value)) < math.inf
    ):
        _refuse(name, param, value)
    return float(value)


def check_shapes(params: Sequence[Param], args: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Refuses tensors that are shorter than their parameters declare. args: checked values of unbound
    parameters. sizes: the known entries of SIZES.
    """
    for param in params:
        value = args.get(param.name) if param.value is None else param.value
        dims = [size or "any" for size in param.shape or ()]
        if (
            dims
            and value is not None
            and any(has < sizes.get(size, 0) for has, size in zip(value.shape, dims, strict=True))
        ):
            name = f"variant_args[{param.name!r}]" if param.value is None else f"value of {param.name!r}"
            least = ", ".join(f"{size} = {sizes[size]}" if size in sizes else size for size in dims)
            refuse(name, value, f"at least of shape [{least}]")


def _refuse(name: str, param: Param, value: object) -> NoReturn:
    raise ValueError(f"{name} is {describe(value)}, must be {param.describe()}")
