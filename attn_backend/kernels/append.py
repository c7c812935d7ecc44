"""append: new tokens into the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_compiling

from ..metadata import KVCache
from ..metadata.kv_cache import SCALED_DTYPES
from ..metadata.structure import check_types, explain_failure
from . import compiled
from .append_qkv import qkv_kernel_file
from .attention_config import DTYPE_NAMES
from .kernel_files import kernel_file
from .library import library
from .named_calls import by_name


class _Launchers(dict[int, Callable[..., Any]]):
    """The host library's append_kv for each device, whose kernel is loaded.

    Keys are Tensor.get_device() (-1 for a CPU): faster than torch.device.
    """

    def __missing__(self, device: int) -> Callable[..., Any]:
        if device >= 0:
            library().load_append(kernel_file("append", torch.device("cuda", device)), device)
        self[device] = library().append_kv
        return self[device]


_launchers = _Launchers()


def append_kv(k: torch.Tensor, v: torch.Tensor, kv: KVCache, slots: torch.Tensor) -> None:
    """Writes token i of k and v to slot `slots[i]` of the cache: page `slots[i] // page_size`, token
    `slots[i] % page_size` in it.

    Capturable in a CUDA graph; never synchronises. Into a cache of another dtype numbers are rounded to the
    nearest (to even among equals), into a float8 cache divided by its scales before. What is beyond the
    largest number of float8 or float16 becomes that one.

    Args:
        k, v: [tokens, num_kv_heads, head_dim], tokens >= len(slots), head_dim contiguous.
        kv: the cache of one layer, same device, same dtype, or float8, whose scales are one for all, or one
            for each head. Under bfloat16 it may be float16, and under float16 bfloat16, with heads of
            multiples of 8 columns up to 512.
        slots: int32 or int64 [tokens]; a negative slot, or one beyond the cache, is skipped.

    Raises:
        ValueError: an argument that is wrong in type, shape, dtype, device or stride.
    """
    if is_compiling():
        _explain(k, v, kv, slots)
        return compiled.append_kv(k, v, kv, slots)
    try:
        if (
            k.is_neg()
            or v.is_neg()
            or slots.is_neg()
            or (is_grad_enabled() and (k.requires_grad or v.requires_grad))
        ):
            explain_failure((("k", k), ("v", v), ("slots", slots)))
        k_cache = kv.k
        if k.dtype is not k_cache.dtype and (
            k_cache.dtype in SCALED_DTYPES or {k.dtype, k_cache.dtype} == DTYPE_NAMES.keys()
        ):
            file = qkv_kernel_file(k_cache.device, k.dtype, k_cache.dtype)
            by_name("append_kv_rounded", last="v_scale")(
                k=k,
                v=v,
                k_cache=k_cache,
                v_cache=kv.v,
                slots=slots,
                file=file,
                k_scale=kv.k_scale,
                v_scale=kv.v_scale,
            )
            return
        _launchers[k_cache.get_device()](k, v, k_cache, kv.v, slots)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # examined only on failure: each layer's call would pay for it
        _explain(k, v, kv, slots)
        raise


def _explain(k: object, v: object, kv: KVCache, slots: object) -> None:
    """Refuses an argument of the wrong type by its name."""
    check_types(KVCache, "a KVCache", kv=kv)
    explain_failure((("k", k), ("v", v), ("slots", slots), ("kv.k", kv.k), ("kv.v", kv.v)))
