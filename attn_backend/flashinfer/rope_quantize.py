"""Q and K, rotated and rounded to 8 bits; K and V to a paged cache. It takes several launches of kernels that are here for other
reasons: numbers are rounded to 16 bits when they are rotated, and to 8 bits by an append, whose cache is the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.append import append_kv
from ..kernels.append_qkv import Rotary, append_qkv, rotate_qk
from ..metadata import KVCache
from ..metadata.kv_cache import FLOAT8_DTYPES
from ..metadata.structure import refuse
from .arguments import check_kv_layout, is_number, paged_cache
from .features import not_supported
from .page import slots_of

_COLUMNS = 16  # a head is rounded as two halves, which an append takes for K and V


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
    """The first columns of Q and K rotated; all of them multiplied by a scale, limited to the largest float8 number, and rounded. Nothing waits for the device.

    Args:
        q_rope: float16 or bfloat16 [rows, num_qo_heads, rotary_dim]; k_rope: [rows, num_kv_heads, rotary_dim], or [rows, rotary_dim] of MLA. Widths are
            multiples of 16.
        q_nope, k_nope: the columns that are not rotated, of the same rows and heads; None: none.
        cos_sin_cache: float32 [positions, rotary_dim]: cosines, then sines.
        pos_ids: int32 or int64 [rows].
        is_neox: pairs are columns i and i + rotary_dim / 2; else 2i and 2i + 1.
        quantize_dtype: float8_e4m3fn or float8_e5m2; None: that of the outputs, or float8_e4m3fn.
        q_rope_out, ...: written; made if None.
        enable_pdl: not used.

    Returns:
        q_rope_out, k_rope_out, q_nope_out, k_nope_out.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride. NotImplementedError: one that is not supported, by its name.
    """
    if backend != "cuda":
        not_supported(f"backend = {backend!r}")
    parts = {"q_rope": q_rope, "k_rope": k_rope, "q_nope": _part_of(q_rope, q_nope), "k_nope": _part_of(k_rope, k_nope)}
    outs = {"q_rope_out": q_rope_out, "k_rope_out": k_rope_out, "q_nope_out": q_nope_out, "k_nope_out": k_nope_out}
    dtype = _float8_type(quantize_dtype, outs)
    made = {name: _output(f"{name}_out", outs[f"{name}_out"], part, dtype) for name, part in parts.items()}
    scales = {"q": _divisor("quant_scale_q", quant_scale_q), "k": _divisor("quant_scale_kv", quant_scale_kv)}
    q, k = _rotated(q_rope, k_rope, cos_sin_cache, pos_ids, is_neox)
    rows = torch.arange(q.shape[0], device=q.device)
    for name, part in (parts | {"q_rope": q, "k_rope": k}).items():
        _round(name, _in_heads(part), _in_heads(made[name]).unsqueeze(1), rows, scales[name[0]])
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
    """As `rope_quantize_fp8`, with K and V written to a paged cache of float8: where position positions[i] of request batch_indices[i] is.

    Args:
        v: [rows, num_kv_heads, head_dim]; None for MLA, whose k_rope and k_nope are [rows, columns].
        paged_kv_cache: (k, v) in kv_layout, whose rows of K are k_rope, then k_nope; of MLA (latents [pages, page_size, columns of k_nope], rotated parts
            [pages, page_size, rotary_dim]).
        kv_indices, kv_indptr, batch_indices, positions: as in `append_paged_kv_cache`; a request below 0 is skipped.

    Returns:
        q_rope_out, q_nope_out.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride. NotImplementedError: one that is not supported, by its name.
    """
    is_mla = v is None
    if is_mla and k_nope is None:
        refuse("k_nope", k_nope, "a tensor without v: the latent of MLA")
    if not isinstance(paged_kv_cache, tuple) or len(paged_kv_cache) != 2:
        refuse("paged_kv_cache", paged_kv_cache, "the tuple (k, v), or of MLA (latents, rotated parts)")
    dtype = _float8_type(quantize_dtype, {"paged_kv_cache[0]": paged_kv_cache[0], "paged_kv_cache[1]": paged_kv_cache[1]})
    q_nope = _part_of(q_rope, q_nope)
    q_rope_out, q_nope_out = _output("q_rope_out", q_rope_out, q_rope, dtype), _output("q_nope_out", q_nope_out, q_nope, dtype)
    q_scale, kv_scale = _divisor("quant_scale_q", quant_scale_q), _divisor("quant_scale_kv", quant_scale_kv)
    if is_mla:
        kv = KVCache.unchecked(paged_kv_cache[0].unsqueeze(2), paged_kv_cache[1].unsqueeze(2))
    else:
        kv = paged_cache(paged_kv_cache, check_kv_layout(kv_layout))
    if kv.page_size != page_size:
        refuse("page_size", page_size, f"{kv.page_size}, that of paged_kv_cache")
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, page_size)
    if v is not None and k_nope is None:  # Q is rotated, K and V are in the cache, after one launch
        cache = kv.with_scales(kv_scale, kv_scale)
        q = torch.empty(q_rope.shape, dtype=q_rope.dtype, device=q_rope.device)
        append_qkv(q_rope, k_rope, v, cache, slots, rotary=_table(cos_sin_cache, is_neox), positions=pos_ids, out=q)
    else:
        assert k_nope is not None
        q, k = _rotated(q_rope, k_rope, cos_sin_cache, pos_ids, is_neox)
        if v is None:
            append_kv(k_nope.unsqueeze(1), k, kv.with_scales(kv_scale, kv_scale), slots)
        else:
            columns = k_rope.shape[-1]
            append_kv(k, k_nope, KVCache.unchecked(kv.k[..., :columns], kv.k[..., columns:], kv_scale, kv_scale), slots)
            _round("v", v, kv.v, slots, kv_scale)
    rows = torch.arange(q.shape[0], device=q.device)
    _round("q_rope", q, q_rope_out.unsqueeze(1), rows, q_scale)
    _round("q_nope", q_nope, q_nope_out.unsqueeze(1), rows, q_scale)
    return q_rope_out, q_nope_out


def _part_of(rope: Tensor, nope: Tensor | None) -> Tensor:
    """The columns that are not rotated: none of them where there is no tensor."""
    return rope[..., :0] if nope is None else nope


def _in_heads(part: Tensor) -> Tensor:
    """[rows, heads, columns] of itself, or of [rows, columns]."""
    return part.unsqueeze(1) if part.ndim == 2 else part


def _rotated(q: Tensor, k: Tensor, cos_sin_cache: Tensor, pos_ids: Tensor, is_neox: bool) -> tuple[Tensor, Tensor]:
    """Q, and K as [rows, num_kv_heads, rotary_dim], in new tensors."""
    k = _in_heads(k)
    outs = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k))
    return rotate_qk(q, k, _table(cos_sin_cache, is_neox), pos_ids, q_out=next(outs), k_out=next(outs))


def _table(cos_sin_cache: Tensor, is_neox: bool) -> Rotary:
    if cos_sin_cache.dtype != torch.float32:
        refuse("cos_sin_cache", cos_sin_cache, "a float32 tensor")
    return Rotary(cos_sin_cache, interleaved=not is_neox)


def _float8_type(quantize_dtype: torch.dtype | None, outs: dict[str, Tensor | None]) -> torch.dtype:
    """quantize_dtype, or that of the first output."""
    given = {name: out.dtype for name, out in outs.items() if out is not None}
    dtype = quantize_dtype or next(iter(given.values()), torch.float8_e4m3fn)
    if dtype not in FLOAT8_DTYPES:
        refuse("quantize_dtype", dtype, "torch.float8_e4m3fn or torch.float8_e5m2")
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
    """What a cache's scale must be for its elements to be multiplied by this one."""
    if isinstance(scale, Tensor) and not is_number(scale):
        not_supported(f"{name} as a tensor")
    value = float(scale)  # type: ignore[arg-type]
    if not value > 0:
        refuse(name, scale, "a number above 0")
    return 1.0 / value


def _round(name: str, part: Tensor, to: Tensor, slots: Tensor, divisor: float) -> None:
    """Row i of part [rows, heads, columns], divided, to slot slots[i] of `to` [pages, page_size, heads, columns]."""
    columns = part.shape[-1]
    if columns % _COLUMNS:
        refuse(f"{name}.shape[-1]", columns, f"a multiple of {_COLUMNS}")
    if part.numel():
        half = columns // 2
        append_kv(part[..., :half], part[..., half:], KVCache.unchecked(to[..., :half], to[..., half:], divisor, divisor), slots)
