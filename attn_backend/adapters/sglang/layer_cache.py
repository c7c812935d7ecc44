"""The buffers that SGLang's pools have for a layer, as a cache of pages, and what is written into those of 8
bits.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from attn_backend import KVCache


class LayerCache:
    """The buffers of one layer_id, which several layers may read.

    The view is made again only when the engine reallocates them or changes the scales.
    """

    def __init__(self, makes_v_anew: bool = False) -> None:
        """makes_v_anew: the pool returns another view as V at every step: a part of K's columns, latents.

        SGLang's models write these themselves, too, and know no scale: it is 1, whatever a checkpoint says.
        """
        self._makes_v_anew = makes_v_anew
        self._kv: KVCache | None = None
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._addresses: tuple[int, int, int] | None = None

    def view(self, k: Tensor, v: Tensor, page_size: int) -> KVCache:
        """k: [slots, num_kv_heads, head_dim], v: [slots, num_kv_heads, head_dim_v], of the model's dtype: the
        same tensors at every step.
        """
        if (
            self._kv is None
            or self._buffers is None
            or k is not self._buffers[0]
            or (v is not self._buffers[1] and not self._makes_v_anew)
        ):
            self._kv, self._buffers = KVCache.from_slots(k, v, page_size), (k, v)
        return self._kv

    def float8_view(
        self, layer: RadixAttention, k: Tensor, v: Tensor, page_size: int, *, writes: bool
    ) -> KVCache:
        """
        Args:
            layer: has the scales that elements are multiplied by: tensors [] of a checkpoint, which kernels
                read when they run, numbers of --quantization-param-path, or None, which is 1.
            k, v: as for view(), but float8: a pool stores those as uint8, and returns new views of them at
                every step.
            writes: whether the layer brings K and V. A layer that reads what another one wrote uses the
                scales of that one.
        """
        kv = self._kv
        scales = (layer.k_scale, layer.v_scale) if kv is None or writes else (kv.k_scale, kv.v_scale)
        if self._makes_v_anew:
            scales = (None, None)
        addresses = (k.data_ptr(), v.data_ptr(), k.shape[0])
        if (
            kv is None
            or addresses != self._addresses
            or kv.k_scale is not scales[0]
            or kv.v_scale is not scales[1]
        ):
            kv = self._kv = KVCache.from_slots(k, v, page_size, k_scale=scales[0], v_scale=scales[1])
            self._addresses = addresses
        return kv


def quantise(x: Tensor, scale: Tensor | float | None, dtype: torch.dtype) -> Tensor:
    """What append_kv would write: x / scale rounded to a float8 dtype, and limited to the largest number that
    there is.

    For the pools that must write by themselves. They would divide K and V in place, in the projection's
    output, and turn values that are too large into NaN.
    """
    largest = torch.finfo(dtype).max
    scaled = x.float() if scale is None else x.float() / scale
    return scaled.clamp(-largest, largest).to(dtype)
