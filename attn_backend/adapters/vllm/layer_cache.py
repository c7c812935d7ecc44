"""The KV cache of one layer: what its elements are, and which scales they have."""

from __future__ import annotations

from typing import Any

import torch

from attn_backend.metadata.kv_cache import KVCache

# By vLLM's names. "auto" is the model's dtype by the time a layer is made: what a checkpoint declares has taken its place.
PLAIN_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
FLOAT8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def kv_cache_view(kv_cache: torch.Tensor, float8: torch.dtype | None = None, writer: Any = None) -> KVCache:
    """The K and V of a layer's cache. Made once and kept on the tensor itself, so that it lives exactly as long: vLLM frees a trial cache before the real one
    is allocated.

    Args:
        kv_cache: [blocks, num_kv_heads, page, 2 * head_size]; uint8 where vLLM has no name for its elements.
        float8: the dtype of its elements if they have 8 bits.
        writer: vLLM's layer that fills the cache, which has its scales: `_k_scale` and `_v_scale`, float32 [], [1] or [num_kv_heads] on the device. Kernels
            read them when they run, so values may change under captured graphs. None: a layer that only reads; the scales stay those of the writer.
    """
    view: KVCache | None = getattr(kv_cache, "_attn_backend_view", None)
    scales = (None, None) if float8 is None or writer is None else (writer._k_scale, writer._v_scale)
    if view is None or (scales[0] is not None and (scales[0] is not view.k_scale or scales[1] is not view.v_scale)):
        # Views of `data` do not refer to the tensor that will refer to them.
        elements = kv_cache.data if float8 is None else kv_cache.data.view(float8)
        view = KVCache.from_packed(elements, layout="HND", k_scale=scales[0], v_scale=scales[1])
        kv_cache._attn_backend_view = view  # type: ignore[attr-defined]
    return view
