"""Inputs of attention: page tables, KV caches and the BSR views made from them.

Only data: nothing here computes, or depends on an engine.
"""

from .kv_cache import BlockScales, KVCache
from .views import BSRView, Composition, PageTable

__all__ = ["BSRView", "BlockScales", "Composition", "KVCache", "PageTable"]
