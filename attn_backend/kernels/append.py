"""Appends new K and V to the cache: unchanged, normalized and rotated together with Q, or as MLA latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from ..jit.manifest import append_qkv_name, kv_element_of
from ..metadata import KVCache
from ..metadata.kv_cache import (
    FORMATS_BY_DTYPE,
    SCALED_DTYPES,
    SCALED_LATENT_DTYPE,
    TOKEN_SCALED_FORMATS,
    BlockScales,
    CacheDtype,
    named_tensors,
)
from ..validation import (
    MAX_INT64,
    check_handle,
    check_int,
    check_plain,
    check_same_device,
    check_types,
    dtype_name,
    explain_failure,
    refuse,
    short_repr,
)
from . import torch_ops
from .native import CUDA_DTYPES, by_name, kernel_file, library


@torch_ops.eager
@dataclass(frozen=True, eq=False)
class Rotary:
    """A rotary position embedding (RoPE, arXiv 2104.09864). It rotates pair i of a head by angle i of the
    row's position.

    Args:
        table: float32 [rotary_dim / 2]: the angle is position * table[i], correct to 5e-7 for positions up to
            2^24. Or [positions, rotary_dim], float32 or the heads' dtype: for each position the cosines, then
            the sines. Positions outside the table are clamped to it. On the heads' device, last dimension
            contiguous.
            rotary_dim: a multiple of 8 up to head_dim; the elements after them are left alone.
        interleaved: pairs are (2i, 2i + 1), as in GPT-J; else (i, i + rotary_dim / 2), as in GPT-NeoX and
            Llama.

    Raises:
        ValueError: `table` is not such a tensor.
    """

    table: Tensor
    interleaved: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not isinstance(self.table, Tensor) or self.table.ndim not in (1, 2):
            refuse(
                "table",
                self.table,
                "a tensor [rotary_dim / 2] of frequencies, or [positions, rotary_dim] of cosines and sines",
            )
        check_plain("table", self.table)
        check_types(bool, "True or False", interleaved=self.interleaved)


@cache
def qkv_kernel_file(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: CacheDtype,
    token_scales: bool = False,
    rotation: bool = False,
) -> str:
    """The kernel that writes heads of dtype to a cache of kv_dtype. Returns "" on a CPU, and for unsupported
    dtypes, which are refused.
    """
    known = TOKEN_SCALED_FORMATS if token_scales else (*SCALED_DTYPES, *CUDA_DTYPES)
    if dtype not in CUDA_DTYPES or kv_dtype not in known:
        return ""
    kv_element = kv_element_of(kv_dtype, dtype, token_scales)
    return kernel_file(append_qkv_name(FORMATS_BY_DTYPE[dtype].element, kv_element, rotation), device)


@torch_ops.eager
def append_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: KVCache,
    slots: Tensor,
    *,
    rotary: Rotary | None = None,
    positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    out: Tensor | None = None,
    rotation: bool = False,
) -> Tensor:
    """Everything between a layer's projection and its attention, in one launch: normalizes the heads of Q and
    K, rotates them, and writes K and V to the cache.

    A head x becomes x / sqrt(mean(x^2) + norm_eps) * (weight + norm_offset) and is then rotated. This is
    per-head RMSNorm (arXiv 1910.07467), as in Qwen 3 and Gemma 3. All steps run in float32 and round once, to
    the dtype of out or of the cache. For a float8 cache, K and V are first divided by the cache's scales, or
    by a scale for each token and head, which is computed and written, too (`append_kv`).
    Float8 caches, and float16 caches under bfloat16 heads, clamp values to their largest finite number.
    Capturable in a CUDA graph; never synchronizes. `Attention.run(after_append=True)` may follow.

    Args:
        q: [tokens, num_qo_heads, head_dim], tokens >= len(slots), head_dim contiguous, a multiple of 8 up to
            256. May be a slice of the projection's output. bfloat16 or float16, on a CPU also float32.
        k, v: [tokens, num_kv_heads, head_dim], same requirements as q.
        kv: the cache of one layer, on the same device. Its dtype is q's, or the other of bfloat16 and
            float16. Or float8 with one scale for all heads or one per head; or int8 or float8_e4m3fn with one
            for each token and head.
        slots: int32 or int64 [tokens], as in `append_kv`. A token with a negative slot, or one beyond the
            cache, is not cached, but its Q is still written.
        rotary: None: no rotation.
        positions: int32 or int64 [at least tokens], for rotary: each token's position in its request.
        q_norm, k_norm: [head_dim], weights of the norms, same dtype; None: no norm.
        norm_eps: added to the mean of squares.
        norm_offset: added to the weights: 1 for Gemma.
        out: [tokens, num_qo_heads, head_dim], written; None: q itself.
        rotation: rotate K and V before they are rounded, as in `append_kv`. Q is left as it is.

    Returns:
        out.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.
    """
    if rotation is not False:
        check_types(bool, "True or False", rotation=rotation)
    if torch.compiler.is_compiling():
        _explain_qkv(
            kv,
            norm_eps,
            norm_offset,
            q=q,
            k=k,
            v=v,
            out=out,
            slots=slots,
            positions=positions,
            q_norm=q_norm,
            k_norm=k_norm,
        )
        _check_rotary(rotary)
        options = {
            "positions": positions,
            "q_norm": q_norm,
            "k_norm": k_norm,
            "norm_eps": norm_eps,
            "norm_offset": norm_offset,
            "rotation": rotation,
        }
        return torch_ops.append_qkv(q, k, v, kv, slots, out, rotary, options)
    out = q if out is None else out
    if slots is None:  # without slots the library would run rotate_qk on K
        refuse("slots", slots, "a tensor [tokens]")
    try:
        k_cache = kv.k
        table, is_interleaved = _check_qkv(
            (q, k, v, out, slots, positions, q_norm, k_norm), rotary, positions, norm_eps
        )
        by_name("append_qkv")(
            q=q,
            k=k,
            v=v,
            out=out,
            k_cache=k_cache,
            v_cache=kv.v,
            slots=slots,
            file=qkv_kernel_file(q.device, q.dtype, kv.stored_dtype, kv.has_token_scales, rotation),
            norm_eps=norm_eps,
            norm_offset=norm_offset,
            is_interleaved=is_interleaved,
            positions=positions,
            table=table,
            q_norm=q_norm,
            k_norm=k_norm,
            rotation=rotation,
            **_scale_arguments(kv),
        )
    except (
        AttributeError,
        OverflowError,
        RuntimeError,
        TypeError,
    ):  # only on failure, to keep each layer's call cheap
        _explain_qkv(
            kv,
            norm_eps,
            norm_offset,
            q=q,
            k=k,
            v=v,
            out=out,
            slots=slots,
            positions=positions,
            q_norm=q_norm,
            k_norm=k_norm,
        )
        raise
    return out


def _scale_arguments(kv: KVCache) -> dict[str, Any]:
    """A cache's scales, as the library's functions take them."""
    made: dict[str, Any] = {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
    for which in "kv":
        scale = made[f"{which}_scale"]
        if isinstance(scale, BlockScales):
            made[f"{which}_scale"], made[f"{which}_factor"] = scale
    return made


_QKV_OPTIONAL = ("out", "positions", "q_norm", "k_norm")


def _explain_qkv(kv: KVCache, norm_eps: float, norm_offset: float, **tensors: object) -> None:
    """Refuses an argument of the wrong type by its name."""
    check_types(KVCache, "a KVCache", kv=kv)
    numbers = {"norm_eps": norm_eps, "norm_offset": norm_offset}
    check_types(Real, "a number", **numbers)
    for name, number in numbers.items():
        if type(number) is int:
            check_int(name, number, -MAX_INT64, MAX_INT64)
    tensors |= named_tensors(kv)
    explain_failure(
        (name, tensor) for name, tensor in tensors.items() if tensor is not None or name not in _QKV_OPTIONAL
    )


def rotate_qk(
    q: Tensor,
    k: Tensor,
    rotary: Rotary,
    positions: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `append_qkv`, but writes K to a tensor instead of a cache.

    Args:
        q_out, k_out: same as q and k, written; None: q and k themselves.

    Returns:
        q_out, k_out.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.
    """
    q_out, k_out = q if q_out is None else q_out, k if k_out is None else k_out
    try:
        if k_out.shape != k.shape or q_out.shape[0] < q.shape[0]:
            refuse("k_out", k_out, f"of k's shape {list(k.shape)}, and q_out of no fewer rows than q")
        table, is_interleaved = _check_qkv(
            (q, k, None, q_out, None, positions, q_norm, k_norm), rotary, positions, norm_eps
        )
        by_name("append_qkv")(
            q=q,
            k=k,
            out=q_out,
            k_cache=k_out.unsqueeze(1),
            file=qkv_kernel_file(q.device, q.dtype, q.dtype),
            norm_eps=norm_eps,
            norm_offset=norm_offset,
            is_interleaved=is_interleaved,
            positions=positions,
            table=table,
            q_norm=q_norm,
            k_norm=k_norm,
        )
    except (AttributeError, OverflowError, RuntimeError, TypeError):
        check_types(Real, "a number", norm_eps=norm_eps, norm_offset=norm_offset)
        optional = {"q_norm": q_norm, "k_norm": k_norm}
        tensors = {"q": q, "k": k, "q_out": q_out, "k_out": k_out, "positions": positions}
        explain_failure(
            (tensors | {name: tensor for name, tensor in optional.items() if tensor is not None}).items()
        )
        raise
    return q_out, k_out


def append_rounded(
    k: Tensor,
    v: Tensor | None,
    kv: KVCache,
    slots: Tensor,
    rotary: Rotary | None = None,
    positions: Tensor | None = None,
) -> None:
    """Like `append_kv` into a float8 cache, but rotates K first, in float32, so that K is rounded only once.

    Args:
        v: None: append only K; kv.v is not used.
        rotary, positions: as in `append_qkv`; K then has at most 256 columns.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.
    """
    try:
        table, is_interleaved = _check_qkv(
            (None, k, v, None, slots, positions, None, None), rotary, positions, 0.0
        )
        by_name("append_kv_rounded")(
            k=k,
            v=v,
            k_cache=kv.k,
            v_cache=None if v is None else kv.v,
            slots=slots,
            file=qkv_kernel_file(k.device, k.dtype, kv.stored_dtype, kv.has_token_scales),
            **_scale_arguments(kv),
            is_interleaved=is_interleaved,
            positions=positions,
            table=table,
        )
    except (AttributeError, OverflowError, RuntimeError, TypeError):
        tensors = {"k": k, "v": v, "slots": slots, "positions": positions, **dict(named_tensors(kv))}
        explain_failure((name, tensor) for name, tensor in tensors.items() if tensor is not None)
        raise


def _check_rotary(rotary: object) -> None:
    if rotary is not None and not isinstance(rotary, Rotary):
        refuse("rotary", rotary, "a Rotary or None")


_QKV_NAMES = ("q", "k", "v", "out", "slots", "positions", "q_norm", "k_norm")


def _check_qkv(
    tensors: tuple[Tensor | None, ...], rotary: Rotary | None, positions: Tensor | None, norm_eps: float
) -> tuple[Tensor | None, bool]:
    """Checks what the library does not. tensors: the tensors in _QKV_NAMES.

    Returns the table of the rotary embedding, and whether it is interleaved.
    """
    for tensor in tensors:
        if tensor is not None and (tensor.is_neg() or (tensor.requires_grad and torch.is_grad_enabled())):
            for name, found in zip(_QKV_NAMES, tensors, strict=True):
                if found is tensor:
                    check_plain(name, tensor)
    if not norm_eps >= 0:
        refuse("norm_eps", norm_eps, "0 or above")
    if rotary is None:
        if positions is not None:
            refuse("positions", positions, "None without a rotary embedding")
        return None, False
    _check_rotary(rotary)
    if positions is None:
        refuse("positions", positions, "a tensor [tokens] with a rotary embedding")
    return rotary.table, rotary.interleaved


class _Launchers(dict[int, Callable[..., Any]]):
    """The host library's append_kv for each device, with its kernel loaded.

    Keys are Tensor.get_device() (-1 for a CPU): faster than torch.device.
    """

    def __missing__(self, device: int) -> Callable[..., Any]:
        if device >= 0:
            library().load_append(kernel_file("append", torch.device("cuda", device)), device)
        self[device] = library().append_kv
        return self[device]


_launchers = _Launchers()


_TOKEN_SCALED_BYTES = (*TOKEN_SCALED_FORMATS, torch.uint8)  # as tensors have them


@torch_ops.eager
def append_kv(
    k: torch.Tensor, v: torch.Tensor, kv: KVCache, slots: torch.Tensor, *, rotation: bool = False
) -> None:
    """Writes token i of k and v to slot `slots[i]` of the cache: page `slots[i] // page_size`, token
    `slots[i] % page_size` in that page.

    Capturable in a CUDA graph; never synchronizes. If the cache has another dtype, values are rounded to
    nearest even, and clamped to the largest finite number of float8 or float16. For a float8 cache they are
    first divided by its scales. If each token and head has a scale, append computes it: the largest magnitude
    / 448, or / 127 for int8, at least 1e-6. int8 stores NaN as 0. For int4 it is (largest - smallest) / 15,
    and the zero point is -smallest / scale, rounded and limited to 0 to 15.

    FP4 has a scale for 16 columns, which append computes, too. In NVFP4 it is the largest magnitude / 6 /
    factor, rounded to e4m3. In fp4_mx_block16 it is the next power of 2 from the largest magnitude / 6 on.
    Ties go to even codes in NVFP4, and away from zero in fp4_mx_block16.

    Args:
        k, v: [tokens, num_kv_heads, head_dim], tokens >= len(slots), head_dim contiguous.
        kv: the cache of one layer, on the same device. It has k's dtype or fewer bits. Float8 takes one scale
            for all heads, or one per head. int8, float8_e4m3fn and int4 take one for each token and head. FP4
            takes BlockScales. K of "int8_k_nvfp4_v" is as in int8, V as in FP4. A bfloat16 k may also be
            written to a float16 cache and vice versa, if head_dim is a multiple of 8 up to 512.
        slots: int32 or int64 [tokens]; negative slots and slots beyond the cache are skipped.
        rotation: rotate rows before they are rounded, for `Attention(rotation=True)`: signs, then a Hadamard
            matrix. k is not float8, v is as wide as k, head_dim is a multiple of 8 up to 256.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.
    """
    if rotation is not False:
        check_types(bool, "True or False", rotation=rotation)
    if is_compiling():
        _explain_kv(k, v, kv, slots)
        return torch_ops.append_kv(k, v, kv, slots, rotation)
    try:
        if (
            k.is_neg()
            or v.is_neg()
            or slots.is_neg()
            or (is_grad_enabled() and (k.requires_grad or v.requires_grad))
        ):
            explain_failure((("k", k), ("v", v), ("slots", slots)))
        k_cache = kv.k
        if rotation or k.dtype is not k_cache.dtype or kv.k_scale is not None:  # most calls: neither
            has_token_scales = k_cache.dtype in _TOKEN_SCALED_BYTES and kv.has_token_scales
            if has_token_scales and k.dtype is k_cache.dtype:
                refuse(
                    "k", k, "bfloat16, float16 or float32: append computes the scale of each token and head"
                )
            rounds = k.dtype is not k_cache.dtype and (
                has_token_scales
                or k_cache.dtype in SCALED_DTYPES
                or (k.dtype in CUDA_DTYPES and k_cache.dtype in CUDA_DTYPES)
            )
            if rotation or rounds:
                file = qkv_kernel_file(k_cache.device, k.dtype, kv.stored_dtype, has_token_scales, rotation)
                options = _scale_arguments(kv)
                if rotation:
                    options["rotation"] = rotation
                last = next(
                    name for name in ("v_factor", "k_factor", "rotation", "v_scale") if name in options
                )
                by_name("append_kv_rounded", last=last)(
                    k=k,
                    v=v,
                    k_cache=k_cache,
                    v_cache=kv.v,
                    slots=slots,
                    file=file,
                    **options,
                )
                return
        _launchers[k_cache.get_device()](k, v, k_cache, kv.v, slots)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # only on failure, to keep each layer's call cheap
        _explain_kv(k, v, kv, slots)
        raise


def _explain_kv(k: object, v: object, kv: KVCache, slots: object) -> None:
    """Refuses an argument of the wrong type by its name."""
    check_types(KVCache, "a KVCache", kv=kv)
    explain_failure((("k", k), ("v", v), ("slots", slots), *named_tensors(kv)))


def rotation_matrix(head_dim: int) -> Tensor:
    """float32 [head_dim, head_dim] on a CPU: x @ rotation_matrix is the row that append writes for x."""
    rows = torch.eye(head_dim)[:, None]
    kv = KVCache.unchecked(*torch.empty(2, head_dim, 1, 1, head_dim))
    append_kv(rows, rows, kv, torch.arange(head_dim), rotation=True)
    return kv.k[:, 0, 0]


# Dtypes that can be written to a cache of another dtype.
_SOURCE_DTYPES = {
    SCALED_LATENT_DTYPE: (torch.bfloat16,),
    torch.bfloat16: (torch.bfloat16, torch.float16),
    torch.float16: (torch.float16, torch.bfloat16),
    **{dtype: (dtype, torch.bfloat16, torch.float16, torch.float32) for dtype in SCALED_DTYPES},
}


@cache
def _latent_kernel(device: torch.device) -> str:
    """The kernel that quantizes to rows with one scale per 128 columns; "" on a CPU."""
    return kernel_file("append_latent", device)


@torch_ops.eager
def append_mla_kv(latent: Tensor, rope: Tensor, kv: KVCache, slots: Tensor) -> None:
    """Writes token i to slot `slots[i]` of an MLA cache (DeepSeek-V2, arXiv 2405.04434): its latent, followed
    by the rotated part of the key.

    Capturable in a CUDA graph; never synchronizes. `Attention.run(after_append=True)` may follow. If the
    cache has another dtype, latent and rope are rounded. For a float8 cache they are first divided by its
    scale, as in `append_kv`. For uint8 rows, each block of 128 columns of the latent gets its own scale: the
    largest magnitude / 448, not rounded to a power of two. rope is stored unchanged.

    Args:
        latent: [tokens, width of the latent], tokens >= len(slots), last dimension contiguous: 512 columns in
            DeepSeek's models.
        rope: [tokens, width of the rotated part], same requirements as latent: 64 columns in these models.
        kv: the cache of one layer, from `KVCache.from_latent`: one KV head, whose V is the first columns of
            K's bytes. On the same device. Its dtype is latent's, the other of bfloat16 and float16, float8
            with one scale for all, or uint8 if latent is bfloat16.
        slots: int32 or int64 [tokens], as in `append_kv`: negative slots and slots beyond the cache are
            skipped.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.
    """
    if torch.compiler.is_compiling():
        check_types(KVCache, "a KVCache", kv=kv)
        explain_failure((("latent", latent), ("rope", rope), ("slots", slots)))
        return torch_ops.append_mla_kv(latent, rope, kv, slots)
    try:
        k, v = kv.k, kv.v
        width = v.shape[3]
        if kv.has_token_scales:
            refuse("kv.k_scale", kv.k_scale, "one for all: latents have no scale for each token")
        if (
            k.data_ptr() != v.data_ptr()
            or (k.dtype != latent.dtype and k.dtype not in _SOURCE_DTYPES)
            or latent.dtype != rope.dtype
        ):
            _explain_mla(latent, rope, kv, slots)
        if k.dtype == SCALED_LATENT_DTYPE:
            check_handle("latent", latent)
            check_handle("rope", rope)
            library().append_latent(latent, rope, k, slots, _latent_kernel(k.device))
            return
        # Treat the two parts as K and V of different widths, which are adjacent in memory.
        parts = KVCache.unchecked(k[..., :width], k[..., width:], kv.k_scale, kv.k_scale)
        append_kv(latent.unsqueeze(1), rope.unsqueeze(1), parts, slots)
    except (
        AttributeError,
        IndexError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # only on failure, to keep each layer's call cheap
        _explain_mla(latent, rope, kv, slots)
        raise


def _explain_mla(latent: object, rope: object, kv: object, slots: object) -> None:
    """Refuses the wrong argument by this function's name for it."""
    check_types(KVCache, "a KVCache", kv=kv)
    assert isinstance(kv, KVCache)
    steps = zip(kv.k.shape[:2], kv.k.stride(), kv.v.stride(), strict=False)
    if (
        kv.num_kv_heads != 1
        or kv.k.data_ptr() != kv.v.data_ptr()
        or any(size > 1 and of_k != of_v for size, of_k, of_v in steps)
    ):
        refuse("kv", kv, "a cache of one KV head whose V is the first columns of K: KVCache.from_latent")
    columns = kv.v.shape[3], kv.head_dim - kv.v.shape[3]
    dtypes = _SOURCE_DTYPES.get(kv.dtype, (kv.dtype,))
    expected = " or ".join(map(dtype_name, dtypes))
    for name, given, width in zip(("latent", "rope"), (latent, rope), columns, strict=True):
        tensor = check_plain(name, given)
        if (
            tensor.ndim != 2
            or tensor.shape[1] != width
            or tensor.dtype not in dtypes
            or (tensor.stride(1) != 1 and width > 1)
        ):
            refuse(
                name,
                tensor,
                f"a {expected} tensor [at least slots.shape[0], {width}], contiguous along its rows",
            )
        check_same_device(name, tensor, "kv", kv.device)
        if isinstance(slots, Tensor) and slots.ndim == 1 and tensor.shape[0] < slots.shape[0]:
            refuse(f"{name}.shape[0]", tensor.shape[0], f"at least slots.shape[0] = {slots.shape[0]}")
    if isinstance(latent, Tensor) and isinstance(rope, Tensor) and latent.dtype != rope.dtype:
        refuse("rope", rope, f"of latent's dtype {dtype_name(latent.dtype)}")
    explain_failure((("latent", latent), ("rope", rope), ("kv.k", kv.k)))
