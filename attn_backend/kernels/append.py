"""append: new tokens into the paged cache."""

from __future__ import annotations

from functools import cache

import torch

from ..metadata import KVCache
from ..metadata.kv_cache import FLOAT8_DTYPES
from ..metadata.structure import check_types, explain_failure
from . import compiled
from .append_qkv import kernel_file
from .cubins import arch_of, find_kernel
from .library import library


@cache
def _kernel_file(device: torch.device) -> str:
    return str(find_kernel("append", arch_of(torch.cuda.get_device_capability(device)))) if device.type == "cuda" else ""


def append_kv(k: torch.Tensor, v: torch.Tensor, kv: KVCache, slots: torch.Tensor) -> None:
    """Writes token i of k and v to slot `slots[i]` of the cache: page `slots[i] // page_size`, token `slots[i] % page_size` in it.

    Capturable in a CUDA graph; never synchronises. Into a float8 cache k and v of another dtype are divided by its scales, rounded to the nearest number (to
    even among equals), and limited to the largest that there is.

    Args:
        k, v: [tokens, num_kv_heads, head_dim], tokens >= len(slots), head_dim contiguous.
        kv: the cache of one layer, same device, same dtype or float8; its scales are one for all, or one for each head.
        slots: int32 or int64 [tokens]; a negative slot, or one beyond the cache, is skipped.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.
    """
    if torch.compiler.is_compiling():
        return compiled.append_kv(k, v, kv, slots)
    try:
        if k.is_neg() or v.is_neg() or slots.is_neg() or (torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)):
            explain_failure((("k", k), ("v", v), ("slots", slots)))
        if kv.dtype in FLOAT8_DTYPES and k.dtype != kv.dtype:
            file = kernel_file(kv.device, k.dtype, kv.dtype)
            library().append_kv_rounded(k, v, kv.k, kv.v, slots, file, *kv.scale_tensors, *kv.scale_values)
            return
        library().append_kv(k, v, kv.k, kv.v, slots, _kernel_file(kv.k.device))
    except (AttributeError, RuntimeError, TypeError):  # looked into only here: a layer's call has no time for it
        check_types(KVCache, "a KVCache", kv=kv)
        explain_failure((("k", k), ("v", v), ("slots", slots), ("kv.k", kv.k), ("kv.v", kv.v)))
        raise
