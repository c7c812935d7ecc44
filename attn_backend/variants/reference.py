"""Runs variants in torch, by their Python functions: for tests, and for a CPU without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .params import Param
from .tracing import with_names

_CHUNK = 2**16  # scores per call of a mapped function


@dataclass(frozen=True)
class Reference:
    """The Python functions that a variant was made from, or that are equivalent to its C++.

    Args:
        score_mod, mask_mod: in flex_attention's signatures.
        params: parameters, which are free variables of the functions.
        wants_row: a mask_mod with six arguments also gets the query's index in its request, and kv_len; so do
            transforms.
        query: (x, b, h, q_idx) -> a transformed row of Q; with wants_row (x, b, h, q_idx, row, kv_len), where
            row is the row of Q.
        key, value: (x, b, h, kv_idx) -> a transformed row of K or V, in KV head h; with wants_row (x, b, h,
            kv_idx, kv_len).
    """

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    params: tuple[Param, ...] = ()
    wants_row: bool = False
    query: Callable[..., Any] | None = None
    key: Callable[..., Any] | None = None
    value: Callable[..., Any] | None = None

    def bound(
        self, function: Callable[..., Any], args: Mapping[str, Any], dtype: torch.dtype
    ) -> Callable[..., Any]:
        tensors = {
            param.name: _as_tensor(args[param.name] if param.value is None else param.value, dtype)
            for param in self.params
        }
        return with_names(
            function, {name: _Indexed(tensor) if tensor.ndim else tensor for name, tensor in tensors.items()}
        )[0]


class ReferenceFunctions:
    """Evaluates a variant's Python functions, with one 0-d tensor per argument, under torch.vmap."""

    def __init__(self, parts: tuple[Reference, ...]) -> None:
        self.parts = parts

    def logits(
        self,
        score: Tensor,
        b: Tensor,
        h: Tensor,
        q_idx: Tensor,
        kv_idx: Tensor,
        args: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Transformed scores: applies the functions of all parts, in order.

        Args:
            score: float32 or float64, which is also the type of the computation; broadcast with the others.
            b, h, q_idx, kv_idx: tensors of integers, which broadcast.
            args: parameters that are given at run time.
        """
        for part in self.parts:
            if part.score_mod is not None:
                score = _map(part.bound(part.score_mod, args or {}, score.dtype), score, b, h, q_idx, kv_idx)
        return score

    def mask(
        self,
        b: Tensor,
        h: Tensor,
        q_idx: Tensor,
        kv_idx: Tensor,
        args: Mapping[str, Any] | None = None,
        *,
        index: Tensor | None = None,
        kv_len: Tensor | None = None,
    ) -> Tensor:
        """Whether the query attends to the token, as booleans: the intersection of the masks and intervals of
        all parts.

        Args:
            b, h, q_idx, kv_idx: tensors of integers, which broadcast.
            args: parameters that are given at run time.
            index: of the query in its request; kv_len: tokens of its request. Only custom masks need them.
        """
        seen = torch.ones(
            torch.broadcast_shapes(b.shape, h.shape, q_idx.shape, kv_idx.shape),
            dtype=torch.bool,
            device=q_idx.device,
        )
        for part in self.parts:
            if part.mask_mod is None:
                continue
            arguments = [b, h, q_idx, kv_idx]
            if part.wants_row:
                if index is None or kv_len is None:
                    raise ValueError("index and kv_len are missing; this variant's mask depends on them")
                arguments += [index, kv_len]
            seen = seen & _map(part.bound(part.mask_mod, args or {}, torch.float32), *arguments)
        return seen

    def query(
        self,
        q: Tensor,
        b: Tensor,
        h: Tensor,
        q_idx: Tensor,
        args: Mapping[str, Any] | None = None,
        *,
        row: Tensor | None = None,
        kv_len: Tensor | None = None,
    ) -> Tensor:
        """Transformed rows of Q, not rounded: applies the functions of all parts, in order.

        Args:
            q: [..., head_dim], float32 or float64, which is also the type of the computation.
            b, h, q_idx: integers, broadcast with each other to [...].
            args: parameters that are given at run time.
            row: of Q; kv_len: tokens of the request. Few variants need them.
        """
        return self._transformed("query", q, [b, h, q_idx], args, {"row": row, "kv_len": kv_len})

    def key(
        self,
        k: Tensor,
        b: Tensor,
        h: Tensor,
        kv_idx: Tensor,
        args: Mapping[str, Any] | None = None,
        *,
        kv_len: Tensor | None = None,
    ) -> Tensor:
        """Transformed rows of K [..., head_dim], like `query`; h: the KV head."""
        return self._transformed("key", k, [b, h, kv_idx], args, {"kv_len": kv_len})

    def value(
        self,
        v: Tensor,
        b: Tensor,
        h: Tensor,
        kv_idx: Tensor,
        args: Mapping[str, Any] | None = None,
        *,
        kv_len: Tensor | None = None,
    ) -> Tensor:
        """Transformed rows of V [..., head_dim], like `query`; h: the KV head."""
        return self._transformed("value", v, [b, h, kv_idx], args, {"kv_len": kv_len})

    def _transformed(
        self,
        hook: str,
        x: Tensor,
        at: list[Tensor],
        args: Mapping[str, Any] | None,
        more: dict[str, Tensor | None],
    ) -> Tensor:
        for part in self.parts:
            function = getattr(part, hook)
            if function is None:
                continue
            arguments = list(at)
            if part.wants_row:
                missing = [name for name, value in more.items() if value is None]
                if missing:
                    raise ValueError(
                        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; this "
                        f"variant's {hook} depends on them"
                    )
                arguments += [value for value in more.values() if value is not None]
            x = _map_rows(part.bound(function, args or {}, x.dtype), x, *arguments)
        return x


def _as_tensor(value: Any, dtype: torch.dtype) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    if tensor.is_floating_point():
        return tensor.to(dtype)
    # torch does not support arithmetic on these
    return tensor.to(torch.int32) if tensor.dtype in (torch.uint16, torch.uint32) else tensor


class _Indexed:
    """A tensor indexed as in kernels: indices out of range are clamped."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, indices: Any) -> Any:
        indices = indices if isinstance(indices, tuple) else (indices,)
        moved = (_move_inside(index, size) for index, size in zip(indices, self._tensor.shape, strict=False))
        element = self._tensor[tuple(moved)]
        return _Indexed(element) if len(indices) < self._tensor.ndim else element

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def _move_inside(index: Any, size: int) -> Any:
    if isinstance(index, Tensor):
        return index.clamp(-size, size - 1)
    return max(-size, min(index, size - 1)) if isinstance(index, int) else index


def _map(function: Callable[..., Any], *arguments: Tensor) -> Tensor:
    """Maps a function of 0-d tensors over all elements."""
    arguments = torch.broadcast_tensors(*arguments)
    shape = arguments[0].shape

    def as_tensor(*elements: Tensor) -> Tensor:
        result = function(*elements)
        return result if isinstance(result, Tensor) else torch.tensor(result, device=elements[0].device)

    flat = [argument.reshape(-1) for argument in arguments]
    if flat[0].numel() == 0:
        return as_tensor(*(argument.new_zeros(()) for argument in arguments)).new_empty(shape)
    with torch.no_grad():
        return torch.vmap(as_tensor, chunk_size=_CHUNK)(*flat).reshape(shape)


def _map_rows(function: Callable[..., Any], rows: Tensor, *arguments: Tensor) -> Tensor:
    """Maps a function of a row and 0-d tensors over all rows [..., columns]."""
    arguments = torch.broadcast_tensors(rows[..., 0], *arguments)[1:]
    rows = rows.expand(*arguments[0].shape, rows.shape[-1])
    if rows.numel() == 0:
        return rows
    flat = [argument.reshape(-1) for argument in arguments]
    with torch.no_grad():
        return torch.vmap(function, chunk_size=_CHUNK)(rows.reshape(-1, rows.shape[-1]), *flat).reshape(
            rows.shape
        )
