"""Inputs of attention: page tables, KV caches and the BSR views made from them.

Only data: nothing here computes, or depends on an engine.
"""

from .kv_cache import KVCache
from .views import BSRView, Composition, PageTable

__all__ = ["BSRView", "Composition", "KVCache", "PageTable"]
