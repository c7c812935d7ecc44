"""Attention for serving engines: planned on the device, the same schedule on GPU and CPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kernels.append import append_kv
    from .kernels.attention import Attention
    from .metadata import BSRView, Composition, KVCache, PageTable

__all__ = ["Attention", "BSRView", "Composition", "KVCache", "PageTable", "append_kv"]

_HOMES = {"Attention": ".kernels.attention", "append_kv": ".kernels.append"}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `attn-backend doctor` can run, and say so, where torch is missing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, ".metadata"), __name__), name)
    globals()[name] = value
    return value
