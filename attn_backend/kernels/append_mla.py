"""append_mla_kv: new tokens of multi-head latent attention into the paged cache."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..metadata import KVCache
from ..metadata.kv_cache import SCALED_DTYPES, SCALED_LATENT_DTYPE
from ..metadata.structure import (
    check_handle,
    check_plain,
    check_same_device,
    check_types,
    dtype_name,
    explain_failure,
    refuse,
)
from . import compiled
from .append import append_kv
from .kernel_files import kernel_file
from .library import library

# What caches are made from that take other dtypes than theirs.
_SOURCE_DTYPES = {
    SCALED_LATENT_DTYPE: (torch.bfloat16,),
    torch.bfloat16: (torch.bfloat16, torch.float16),
    torch.float16: (torch.float16, torch.bfloat16),
    **{dtype: (dtype, torch.bfloat16, torch.float16, torch.float32) for dtype in SCALED_DTYPES},
}


@cache
def _latent_kernel(device: torch.device) -> str:
    """The kernel that quantises to rows with scales of their own; "" on a CPU."""
    return kernel_file("append_latent", device)


def append_mla_kv(latent: Tensor, rope: Tensor, kv: KVCache, slots: Tensor) -> None:
    """Writes token i to slot `slots[i]` of a cache of MLA (DeepSeek-V2, arXiv 2405.04434): its latent,
    followed by the rotated part of the key.

    Capturable in a CUDA graph; never synchronises. `Attention.run(after_append=True)` may follow. Into a
    cache of another dtype latent and rope are rounded, into a float8 cache divided by its scale before, as
    `append_kv` does. Into rows with scales of their own (uint8) go the latent, each 128 columns divided by
    their largest magnitude / 448, which is their scale (not rounded to a power of two), and rope as it is.

    Args:
        latent: [tokens, width of the latent], tokens >= len(slots), last dimension contiguous: 512 columns in
            DeepSeek's models.
        rope: [tokens, width of the rotated part], as latent: 64 columns there.
        kv: the cache of one layer, as `KVCache.from_latent` makes it: one KV head, whose V is the first
            columns of K's bytes. Same device, same dtype, the other one of bfloat16 and float16, or float8
            with one scale for all; or uint8 for bfloat16.
        slots: int32 or int64 [tokens], as `append_kv` takes them: a negative slot, or one beyond the cache,
            is skipped.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.
    """
    if torch.compiler.is_compiling():
        check_types(KVCache, "a KVCache", kv=kv)
        explain_failure((("latent", latent), ("rope", rope), ("slots", slots)))
        return compiled.append_mla_kv(latent, rope, kv, slots)
    try:
        k, v = kv.k, kv.v
        width = v.shape[3]
        if (
            k.data_ptr() != v.data_ptr()
            or (k.dtype != latent.dtype and k.dtype not in _SOURCE_DTYPES)
            or latent.dtype != rope.dtype
        ):
            _explain(latent, rope, kv, slots)
        if k.dtype == SCALED_LATENT_DTYPE:
            check_handle("latent", latent)
            check_handle("rope", rope)
            library().append_latent(latent, rope, k, slots, _latent_kernel(k.device))
            return
        # The two parts are K and V of different widths, which lie side by side.
        parts = KVCache.unchecked(k[..., :width], k[..., width:], kv.k_scale, kv.k_scale)
        append_kv(latent.unsqueeze(1), rope.unsqueeze(1), parts, slots)
    except (
        AttributeError,
        IndexError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # examined only on failure: each layer's call would pay for it
        _explain(latent, rope, kv, slots)
        raise


def _explain(latent: object, rope: object, kv: object, slots: object) -> None:
    """Refuses what is wrong by the name that it has here."""
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
