"""Attention for serving engines, planned on the device, with the same schedule on GPU and CPU."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kernels.append import Rotary, append_kv, append_mla_kv, append_qkv, rotate_qk
    from .kernels.attention import Attention
    from .kernels.sampling import (
        Samples,
        SpeculativeSamples,
        chain_speculative_sampling,
        sample,
        sample_from_probs,
        sampling_workspace,
        softmax,
        top_k_mask_logits,
        top_k_renorm_probs,
        top_p_renorm_probs,
    )
    from .kernels.selection import SelectedTokens, selected_slots
    from .kernels.states import merge_state, merge_states
    from .metadata import BlockScales, BSRView, Composition, KVCache, PageTable
    from .variants import Param, Variant, packbits, segment_packbits

__all__ = [
    "Attention",
    "BSRView",
    "BlockScales",
    "Composition",
    "KVCache",
    "PageTable",
    "Param",
    "Rotary",
    "Samples",
    "SelectedTokens",
    "SpeculativeSamples",
    "Variant",
    "append_kv",
    "append_mla_kv",
    "append_qkv",
    "chain_speculative_sampling",
    "merge_state",
    "merge_states",
    "packbits",
    "rotate_qk",
    "sample",
    "sample_from_probs",
    "sampling_workspace",
    "segment_packbits",
    "selected_slots",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_p_renorm_probs",
]

_HOMES = {
    "Attention": ".kernels.attention",
    **dict.fromkeys(("Rotary", "append_kv", "append_mla_kv", "append_qkv", "rotate_qk"), ".kernels.append"),
    **dict.fromkeys(("merge_state", "merge_states"), ".kernels.states"),
    **dict.fromkeys(("BSRView", "BlockScales", "Composition", "KVCache", "PageTable"), ".metadata"),
    **dict.fromkeys(("SelectedTokens", "selected_slots"), ".kernels.selection"),
    **dict.fromkeys(("Param", "Variant", "packbits", "segment_packbits"), ".variants"),
}


def __getattr__(name: str) -> Any:
    """Imports public names on first use, so that `attn-backend doctor` runs, and reports it, if torch is
    missing.
    """
    if name == "__version__":
        with suppress(PackageNotFoundError):  # a checkout
            return version("attn-backend")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, ".kernels.sampling"), __name__), name)
    globals()[name] = value
    return value
