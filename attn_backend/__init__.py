"""Attention for serving engines: planned on the device, the same schedule on GPU and CPU."""

from .kernels.append import append_kv
from .kernels.attention import Attention
from .metadata import BSRView, Composition, KVCache, PageTable

__all__ = ["Attention", "BSRView", "Composition", "KVCache", "PageTable", "append_kv"]
