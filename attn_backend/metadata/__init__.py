"""What is attended to: page tables, KV caches and the BSR views made of them.

Pure data: nothing here computes or knows an engine.
"""

from .kv_cache import KVCache
from .page_table import PageTable
from .views import BSRView, Composition

__all__ = ["BSRView", "Composition", "KVCache", "PageTable"]
