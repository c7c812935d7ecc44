"""flashinfer.rope: rotary embedding of Q and K that lie in tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..kernels.append_qkv import Rotary, rotate_qk
from ..metadata.structure import refuse
from ..variants import builtin
from .rope_quantize import (
    mla_rope_quantize_fp8,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
    rotary_of_table,
)

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "mla_rope_quantize_fp8",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
]

_Pair = tuple[Tensor, Tensor]


def apply_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> _Pair:
    """Q and K, rotated, in new tensors. Nothing waits for the device.

    Args:
        q: float16 or bfloat16 [rows, num_qo_heads, head_dim], k: [rows, num_kv_heads, head_dim].
        indptr: int32 or int64 [batch_size + 1]: rows indptr[i]:indptr[i + 1] are those of request i.
        offsets: [batch_size]: the position of each request's first row.
        rotary_dim: columns that are rotated; None: all.
        interleave: pairs are columns 2i and 2i + 1; else i and i + rotary_dim / 2.
        rope_scale: angles are divided by it.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.
    """
    return apply_rope_pos_ids(
        q, k, _positions(q, indptr, offsets), rotary_dim, interleave, rope_scale, rope_theta
    )


def apply_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """As `apply_rope`, in Q and K themselves."""
    apply_rope_pos_ids_inplace(
        q, k, _positions(q, indptr, offsets), rotary_dim, interleave, rope_scale, rope_theta
    )


def apply_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> _Pair:
    """As `apply_rope`, at the positions pos_ids: int32 or int64 [rows]."""
    return _rotated(q, k, pos_ids, _rotary(q, rotary_dim, interleave, rope_scale, rope_theta))


def apply_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """As `apply_rope_pos_ids`, in Q and K themselves."""
    rotate_qk(q, k, _rotary(q, rotary_dim, interleave, rope_scale, rope_theta), pos_ids)


def apply_llama31_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> _Pair:
    """As `apply_rope`, with the frequencies of Llama 3.1."""
    positions, llama31 = _positions(q, indptr, offsets), (low_freq_factor, high_freq_factor, old_context_len)
    return apply_llama31_rope_pos_ids(
        q, k, positions, rotary_dim, interleave, rope_scale, rope_theta, *llama31
    )


def apply_llama31_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """As `apply_llama31_rope`, in Q and K themselves."""
    positions, llama31 = _positions(q, indptr, offsets), (low_freq_factor, high_freq_factor, old_context_len)
    apply_llama31_rope_pos_ids_inplace(
        q, k, positions, rotary_dim, interleave, rope_scale, rope_theta, *llama31
    )


def apply_llama31_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> _Pair:
    """As `apply_llama31_rope`, at the positions pos_ids: int32 or int64 [rows]."""
    return _rotated(
        q,
        k,
        pos_ids,
        _rotary(
            q,
            rotary_dim,
            interleave,
            rope_scale,
            rope_theta,
            (low_freq_factor, high_freq_factor, old_context_len),
        ),
    )


def apply_llama31_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """As `apply_llama31_rope_pos_ids`, in Q and K themselves."""
    rotate_qk(
        q,
        k,
        _rotary(
            q,
            rotary_dim,
            interleave,
            rope_scale,
            rope_theta,
            (low_freq_factor, high_freq_factor, old_context_len),
        ),
        pos_ids,
    )


def apply_rope_with_cos_sin_cache(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> _Pair:
    """Q and K, rotated by cosines and sines of a table, in new tensors.

    Args:
        positions: int32 or int64 [rows].
        query: [rows, num_qo_heads * head_size], key: [rows, num_kv_heads * head_size].
        cos_sin_cache: float32 [positions, rotary_dim]: cosines, then sines.
        is_neox: pairs are columns i and i + rotary_dim / 2; else 2i and 2i + 1.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.
    """
    q, k = _rotated(*_heads_of(query, key, head_size), positions, rotary_of_table(cos_sin_cache, is_neox))
    return q.view(query.shape), k.view(key.shape)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    """As `apply_rope_with_cos_sin_cache`, in query and key themselves."""
    rotate_qk(*_heads_of(query, key, head_size), rotary_of_table(cos_sin_cache, is_neox), positions)


def _rotated(q: Tensor, k: Tensor, positions: Tensor, rotary: Rotary) -> _Pair:
    return rotate_qk(
        q,
        k,
        rotary,
        positions,
        q_out=torch.empty(q.shape, dtype=q.dtype, device=q.device),
        k_out=torch.empty(k.shape, dtype=k.dtype, device=k.device),
    )


def _positions(q: Tensor, indptr: Tensor, offsets: Tensor) -> Tensor:
    row = torch.arange(q.shape[0], dtype=indptr.dtype, device=indptr.device)
    request = torch.searchsorted(indptr[1:].contiguous(), row, right=True).clamp_(
        max=max(indptr.shape[0] - 2, 0)
    )
    return (row - indptr[request] + offsets[request]).to(torch.int64)


def _heads_of(query: Tensor, key: Tensor, head_size: int) -> _Pair:
    for name, tensor in (("query", query), ("key", key)):
        if not isinstance(tensor, Tensor) or tensor.ndim != 2 or tensor.shape[1] % head_size:
            refuse(name, tensor, f"a tensor [rows, heads * {head_size}]")
    return query.unflatten(1, (-1, head_size)), key.unflatten(1, (-1, head_size))


def _rotary(
    q: Tensor,
    rotary_dim: int | None,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    llama31: tuple[Any, ...] | None = None,
) -> Rotary:
    return _known_rotary(
        q.shape[-1] if rotary_dim is None else rotary_dim,
        interleave,
        rope_scale,
        rope_theta,
        llama31,
        q.device,
    )


@lru_cache(64)
def _known_rotary(
    rotary_dim: int,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    llama31: tuple[Any, ...] | None,
    device: torch.device,
) -> Rotary:
    if llama31 is None:
        frequencies = builtin.rope_frequencies(rotary_dim, rope_theta) / rope_scale
    else:
        low, high, length = llama31
        lengths = {
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }
        frequencies = builtin.llama3_frequencies(rotary_dim, rope_theta, factor=rope_scale, **lengths)
    return Rotary(frequencies.float().to(device), interleaved=interleave)
