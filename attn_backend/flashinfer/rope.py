"""flashinfer.rope: rotary embedding of Q and K in tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..kernels.append import Rotary, append_rounded, rotate_qk
from ..metadata import KVCache
from ..metadata.kv_cache import SCALED_DTYPES
from ..validation import refuse
from ..variants import builtin
from .arguments import check_kv_layout, is_number, paged_cache
from .features import not_supported
from .page import slots_of

_COLUMNS = 8  # columns that an append moves at a time


def rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotates the first columns of Q and K. Then multiplies all columns by a scale, limits them to the
    largest float8 number, and rounds them. Does not wait for the device.

    Args:
        q_rope: float16 or bfloat16 [rows, num_qo_heads, rotary_dim]; k_rope: [rows, num_kv_heads,
            rotary_dim], or [rows, rotary_dim] for MLA. Widths are multiples of 8.
        q_nope, k_nope: the columns that are not rotated, of the same rows and heads; None: none.
        cos_sin_cache: float32 [positions, rotary_dim]: cosines, then sines.
        pos_ids: int32 or int64 [rows].
        is_neox: pairs are columns i and i + rotary_dim / 2; else 2i and 2i + 1.
        quantize_dtype: float8_e4m3fn or float8_e5m2; None: the outputs' dtype, or float8_e4m3fn.
        q_rope_out, ...: written; allocated if None.
        enable_pdl: not used.

    Returns:
        q_rope_out, k_rope_out, q_nope_out, k_nope_out.

    Raises:
        ValueError: an argument is wrong in type, shape, dtype, device or stride.
        NotImplementedError: an argument is not supported; the message names it.
    """
    if backend != "cuda":
        not_supported(f"backend = {backend!r}")
    parts = {
        "q_rope": q_rope,
        "k_rope": k_rope,
        "q_nope": _part_of(q_rope, q_nope),
        "k_nope": _part_of(k_rope, k_nope),
    }
    outs = {
        "q_rope_out": q_rope_out,
        "k_rope_out": k_rope_out,
        "q_nope_out": q_nope_out,
        "k_nope_out": k_nope_out,
    }
    dtype = _float8_type(quantize_dtype, outs)
    made = {name: _output(f"{name}_out", outs[f"{name}_out"], part, dtype) for name, part in parts.items()}
    scales = {"q": _divisor("quant_scale_q", quant_scale_q), "k": _divisor("quant_scale_kv", quant_scale_kv)}
    rotary = rotary_of_table(cos_sin_cache, is_neox)
    _check_columns(**parts)
    rows = torch.arange(q_rope.shape[0], device=q_rope.device)
    for name, scale in scales.items():
        rope, nope = f"{name}_rope", f"{name}_nope"
        places = KVCache.unchecked(
            _in_heads(made[rope]).unsqueeze(1), _in_heads(made[nope]).unsqueeze(1), scale, scale
        )
        _append(parts[rope], parts[nope], places, rows, rotary, pos_ids)
    return made["q_rope"], made["k_rope"], made["q_nope"], made["k_nope"]


mla_rope_quantize_fp8 = rope_quantize_fp8


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Like `rope_quantize_fp8`, but writes K and V to a paged float8 cache, at position positions[i] of
    request batch_indices[i].

    Args:
        v: [rows, num_kv_heads, head_dim]; None for MLA, whose k_rope and k_nope are [rows, columns].
        paged_kv_cache: (k, v) in kv_layout; each row of K consists of k_rope, then k_nope. For MLA (latents
            [pages, page_size, columns of k_nope], rotated parts [pages, page_size, rotary_dim]).
        kv_indices, kv_indptr, batch_indices, positions: as in `append_paged_kv_cache`; negative requests are
            skipped.

    Returns:
        q_rope_out, q_nope_out.

    Raises:
        ValueError: an argument is wrong in type, shape, dtype, device or stride.
        NotImplementedError: an argument is not supported; the message names it.
    """
    is_mla = v is None
    if is_mla and k_nope is None:
        refuse("k_nope", k_nope, "a tensor without v: the latent of MLA")
    if not isinstance(paged_kv_cache, tuple) or len(paged_kv_cache) != 2:
        refuse("paged_kv_cache", paged_kv_cache, "the tuple (k, v), or of MLA (latents, rotated parts)")
    dtype = _float8_type(
        quantize_dtype, {"paged_kv_cache[0]": paged_kv_cache[0], "paged_kv_cache[1]": paged_kv_cache[1]}
    )
    q_nope = _part_of(q_rope, q_nope)
    q_rope_out, q_nope_out = (
        _output("q_rope_out", q_rope_out, q_rope, dtype),
        _output("q_nope_out", q_nope_out, q_nope, dtype),
    )
    q_scale, kv_scale = _divisor("quant_scale_q", quant_scale_q), _divisor("quant_scale_kv", quant_scale_kv)
    if is_mla:
        kv = KVCache.unchecked(paged_kv_cache[0].unsqueeze(2), paged_kv_cache[1].unsqueeze(2))
    else:
        kv = paged_cache(paged_kv_cache, check_kv_layout(kv_layout))
    if kv.page_size != page_size:
        refuse("page_size", page_size, f"{kv.page_size}, that of paged_kv_cache")
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, page_size)
    rotary = rotary_of_table(cos_sin_cache, is_neox)
    _check_columns(
        q_rope=q_rope, q_nope=q_nope, k_rope=k_rope, k_nope=_part_of(k_rope, k_nope), v=_part_of(k_rope, v)
    )
    if v is None:
        assert k_nope is not None
        _append(k_rope, k_nope, KVCache.unchecked(kv.v, kv.k, kv_scale, kv_scale), slots, rotary, pos_ids)
    elif k_nope is None:
        _append(k_rope, v, kv.with_scales(kv_scale, kv_scale), slots, rotary, pos_ids)
    else:
        columns = k_rope.shape[-1]
        _append(
            k_rope,
            k_nope,
            KVCache.unchecked(kv.k[..., :columns], kv.k[..., columns:], kv_scale, kv_scale),
            slots,
            rotary,
            pos_ids,
        )
        append_rounded(v, None, KVCache.unchecked(kv.v, kv.v, kv_scale), slots)
    rows = torch.arange(q_rope.shape[0], device=q_rope.device)
    _append(
        q_rope,
        q_nope,
        KVCache.unchecked(q_rope_out.unsqueeze(1), q_nope_out.unsqueeze(1), q_scale, q_scale),
        rows,
        rotary,
        pos_ids,
    )
    return q_rope_out, q_nope_out


def _part_of(rope: Tensor, nope: Tensor | None) -> Tensor:
    """The columns that are not rotated; zero columns if there is no tensor."""
    return rope[..., :0] if nope is None else nope


def _in_heads(part: Tensor) -> Tensor:
    """[rows, heads, columns] from itself, or from [rows, columns]."""
    return part.unsqueeze(1) if part.ndim == 2 else part


def _append(
    rotated: Tensor, rest: Tensor, kv: KVCache, slots: Tensor, rotary: Rotary, positions: Tensor
) -> None:
    """Rotates the columns for kv.k, and appends the rest, if any, to kv.v."""
    append_rounded(
        _in_heads(rotated), _in_heads(rest) if rest.shape[-1] else None, kv, slots, rotary, positions
    )


def rotary_of_table(cos_sin_cache: Tensor, is_neox: bool) -> Rotary:
    if cos_sin_cache.dtype != torch.float32:
        refuse("cos_sin_cache", cos_sin_cache, "a float32 tensor")
    return Rotary(cos_sin_cache, interleaved=not is_neox)


def _float8_type(quantize_dtype: torch.dtype | None, outs: dict[str, Tensor | None]) -> torch.dtype:
    """quantize_dtype, or the dtype of the first output."""
    given = {name: out.dtype for name, out in outs.items() if out is not None}
    dtype = quantize_dtype or next(iter(given.values()), torch.float8_e4m3fn)
    if dtype not in SCALED_DTYPES:
        refuse("quantize_dtype", dtype, " or ".join(map(str, SCALED_DTYPES)))
    for name, other in given.items():
        if other != dtype:
            refuse(f"{name}.dtype", other, f"quantize_dtype = {dtype}")
    return dtype


def _output(name: str, out: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    if out is None:
        return torch.empty(part.shape, dtype=dtype, device=part.device)
    if out.shape != part.shape or out.dtype != dtype or out.device != part.device:
        refuse(name, out, f"of dtype {dtype} and shape {list(part.shape)} on {part.device}")
    return out


def _divisor(name: str, scale: object) -> float:
    """The cache's scale that makes an append multiply elements by this one."""
    if isinstance(scale, Tensor) and not is_number(scale):
        not_supported(f"{name} as a tensor")
    value = float(scale)  # type: ignore[arg-type]
    if not value > 0:
        refuse(name, scale, "a number above 0")
    return 1.0 / value


def _check_columns(**parts: Tensor) -> None:
    for name, part in parts.items():
        if part.shape[-1] % _COLUMNS:
            refuse(f"{name}.shape[-1]", part.shape[-1], f"a multiple of {_COLUMNS}")


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
    """Q and K, rotated, in new tensors. Does not wait for the device.

    Args:
        q: float16 or bfloat16 [rows, num_qo_heads, head_dim], k: [rows, num_kv_heads, head_dim].
        indptr: int32 or int64 [batch_size + 1]: rows indptr[i]:indptr[i + 1] belong to request i.
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
    """Like `apply_rope`, but modifies Q and K in place."""
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
    """Like `apply_rope`, at the positions pos_ids: int32 or int64 [rows]."""
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
    """Like `apply_rope_pos_ids`, but modifies Q and K in place."""
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
    """Like `apply_rope`, with the frequencies of Llama 3.1."""
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
    """Like `apply_llama31_rope`, but modifies Q and K in place."""
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
    """Like `apply_llama31_rope`, at the positions pos_ids: int32 or int64 [rows]."""
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
    """Like `apply_llama31_rope_pos_ids`, but modifies Q and K in place."""
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
    """Q and K, rotated by the cosines and sines in a table, in new tensors.

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
    """Like `apply_rope_with_cos_sin_cache`, but modifies query and key in place."""
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
