"""The latents of one layer: what a token's row is, and how new ones are written."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backend.adapters.vllm.layer_cache import FLOAT8_LATENTS
from attn_backend.kernels.append import append_mla_kv
from attn_backend.metadata.kv_cache import KVCache


class LatentCache:
    """Makes KVCaches of the tensors that vLLM hands over."""

    def __init__(self, kv_cache_dtype: str, width: int) -> None:
        """
        Args:
            kv_cache_dtype: vLLM's name for it.
            width: columns of the latent, which are V.
        """
        self._has_float8 = kv_cache_dtype in FLOAT8_LATENTS
        self._width = width

    def view(self, kv_cache: Tensor, scale: Tensor) -> KVCache:
        """
        Args:
            kv_cache: [blocks, page, latent and rotated part], any strides; uint8 where its numbers have 8
                bits, or where a row is bytes (fp8_ds_mla).
            scale: float32 [], the layer's, which kernels read when they run. Of numbers of 8 bits, which come
                in a new view at every step.
        """
        if not self._has_float8:
            return latent_view(kv_cache, self._width)
        k = kv_cache.view(torch.float8_e4m3fn).unsqueeze(2)
        return KVCache.unchecked(k, k[..., : self._width], scale, scale)

    def append(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scale: Tensor
    ) -> None:
        """Writes new latents.

        Args:
            kv_c_normed: [tokens, latent], k_pe: [tokens, 1, rotated part].
            kv_cache, scale: as view() has them.
            slot_mapping: int64 [tokens]; negative for padding. Tokens beyond it are padding too.
        """
        if kv_cache.numel() > 0:
            append_mla_kv(
                kv_c_normed,
                k_pe.squeeze(1),
                self.view(kv_cache, scale),
                slot_mapping.flatten()[: kv_c_normed.shape[0]],
            )


def latent_view(kv_cache: Tensor, head_dim_v: int) -> KVCache:
    """A layer's latents as K and V.

    Made once and kept on the tensor itself, so that it lives exactly as long.

    Args:
        kv_cache: [blocks, page, latent and rotated part], or uint8 [blocks, page, 656].
    """
    view: KVCache | None = getattr(kv_cache, "_attn_backend_view", None)
    if view is None:
        # Views of `data` do not refer to the tensor that will refer to them.
        view = KVCache.from_latent(kv_cache.data, head_dim_v)
        kv_cache._attn_backend_view = view  # type: ignore[attr-defined]
    return view
