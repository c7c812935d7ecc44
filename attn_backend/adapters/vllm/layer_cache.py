"""The KV cache of one layer: what its elements are, and which scales they have."""

from __future__ import annotations

from typing import Any

import torch

from attn_backend.metadata.kv_cache import KVCache

# Dtypes of caches by vLLM's names. "auto" is the model's dtype by the time a layer is made: what a checkpoint
# declares has taken its place.
PLAIN_CACHES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
FLOAT8_CACHES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Of latents: a row is 576 numbers, with the layer's scale; for sparse attention 656 bytes, with own scales.
FLOAT8_LATENTS = tuple(name for name, dtype in FLOAT8_CACHES.items() if dtype == torch.float8_e4m3fn)
SCALED_LATENTS = "fp8_ds_mla"


def kv_cache_view(
    kv_cache: torch.Tensor,
    head_size: int,
    float8: torch.dtype | None = None,
    layer: Any = None,
    *,
    writes: bool = True,
) -> KVCache:
    """The K and V of a layer's cache.

    Made once and kept on the tensor itself, so that it lives exactly as long: vLLM frees a trial cache before
    the real one is allocated.

    Args:
        kv_cache: [blocks, num_kv_heads, page, columns of K and of V]; uint8 where elements have 8 bits.
        head_size: columns of K.
        float8: the dtype of its elements if they have 8 bits.
        layer: vLLM's, which has the scales of such a cache: `_k_scale` and `_v_scale`, float32 [], [1] or
            [num_kv_heads] on its device. Kernels read them when they run, so what they hold may change under
            captured graphs.
        writes: whether the layer fills the cache. One that reads what another wrote reads it with that one's
            scales.
    """
    view: KVCache | None = getattr(kv_cache, "_attn_backend_view", None)
    if view is not None and (
        float8 is None or not writes or (view.k_scale is layer._k_scale and view.v_scale is layer._v_scale)
    ):
        return view
    data = kv_cache.data  # views of it do not refer to the tensor that will refer to them
    if float8 is None:
        view = KVCache.from_pair(data[..., :head_size], data[..., head_size:], layout="HND")
    else:
        data = data.view(float8)
        view = KVCache.from_pair(
            data[..., :head_size],
            data[..., head_size:],
            layout="HND",
            k_scale=layer._k_scale,
            v_scale=layer._v_scale,
        )
    kv_cache._attn_backend_view = view  # type: ignore[attr-defined]
    return view
