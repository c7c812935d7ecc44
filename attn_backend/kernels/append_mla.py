"""append_mla_kv: new tokens of multi-head latent attention into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..metadata import KVCache
from ..metadata.structure import check_plain, check_same_device, check_types, dtype_name, explain_failure, refuse
from . import compiled
from .append import append_kv


def append_mla_kv(latent: Tensor, rope: Tensor, kv: KVCache, slots: Tensor) -> None:
    """Writes token i to slot `slots[i]` of a cache of MLA (DeepSeek-V2, arXiv 2405.04434): its latent and, behind it, the part of the key that was rotated.

    One launch, that of `append_kv`. Capturable in a CUDA graph; never synchronises. `Attention.run(after_append=True)` may follow.

    Args:
        latent: [tokens, width of the latent], tokens >= len(slots), last dimension contiguous: 512 columns in DeepSeek's models.
        rope: [tokens, width of the rotated part], as latent: 64 columns there.
        kv: the cache of one layer, as `KVCache.from_latent` makes it: one KV head, whose V is the first columns of K's bytes. Same device, same dtype.
        slots: int32 or int64 [tokens], as `append_kv` takes them: a negative slot, or one beyond the cache, is skipped.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.
    """
    if torch.compiler.is_compiling():
        return compiled.append_mla_kv(latent, rope, kv, slots)
    try:
        k, v = kv.k, kv.v
        width = v.shape[3]
        if k.data_ptr() != v.data_ptr() or k.dtype != latent.dtype:
            _explain(latent, rope, kv, slots)
        # The two parts are K and V of different widths, which lie side by side.
        append_kv(latent.unsqueeze(1), rope.unsqueeze(1), KVCache.unchecked(k[..., :width], k[..., width:]), slots)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # looked into only here: a layer's call has no time for it
        _explain(latent, rope, kv, slots)
        raise


def _explain(latent: object, rope: object, kv: object, slots: object) -> None:
    """Refuses what is wrong by the name that it has here."""
    check_types(KVCache, "a KVCache", kv=kv)
    assert isinstance(kv, KVCache)
    steps = zip(kv.k.shape[:2], kv.k.stride(), kv.v.stride(), strict=False)
    if kv.num_kv_heads != 1 or kv.k.data_ptr() != kv.v.data_ptr() or any(size > 1 and of_k != of_v for size, of_k, of_v in steps):
        refuse("kv", kv, "a cache of one KV head whose V is the first columns of K: KVCache.from_latent")
    columns = kv.v.shape[3], kv.k.shape[3] - kv.v.shape[3]
    for name, given, width in zip(("latent", "rope"), (latent, rope), columns, strict=True):
        tensor = check_plain(name, given)
        if tensor.ndim != 2 or tensor.shape[1] != width or tensor.dtype != kv.dtype or (tensor.stride(1) != 1 and width > 1):
            refuse(name, tensor, f"a {dtype_name(kv.dtype)} tensor [at least slots.shape[0], {width}], contiguous along its rows")
        check_same_device(name, tensor, "kv", kv.device)
        if isinstance(slots, Tensor) and slots.ndim == 1 and tensor.shape[0] < slots.shape[0]:
            refuse(f"{name}.shape[0]", tensor.shape[0], f"at least slots.shape[0] = {slots.shape[0]}")
    explain_failure((("latent", latent), ("rope", rope), ("kv.k", kv.k)))
