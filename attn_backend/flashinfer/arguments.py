"""FlashInfer's arguments as this package has them: element types, layouts of K and V, scales, indptrs."""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..metadata import KVCache, PageTable
from ..metadata.kv_cache import FLOAT8_DTYPES
from ..metadata.structure import refuse
from ..variants.builtin import alibi_slopes
from .features import not_supported

PagedKV = Tensor | tuple[Tensor, Tensor]
DType = str | torch.dtype
Scale = float | Tensor

_POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")


def dtype_of(name: str, value: DType) -> torch.dtype:
    """torch.float16 of "float16", or of itself."""
    if isinstance(value, torch.dtype):
        return value
    found = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(found, torch.dtype):
        refuse(name, value, "a torch.dtype or its name")
    return found


def element_types(q_data_type: DType, kv_data_type: DType | None = None, o_data_type: DType | None = None) -> tuple[torch.dtype, torch.dtype | None, bool]:
    """The type of the output, which is that of Q if Q has 16 bits or more; that of K and V if it is an 8-bit one, else None; whether Q has that type, too.

    Raises:
        NotImplementedError: other types that differ, or one that the kernels do not have.
    """
    q_type = dtype_of("q_data_type", q_data_type)
    kv_type = q_type if kv_data_type is None else dtype_of("kv_data_type", kv_data_type)
    o_type = q_type if o_data_type is None else dtype_of("o_data_type", o_data_type)
    float8_q = q_type in FLOAT8_DTYPES
    if q_type.itemsize == 1 and not float8_q:
        not_supported(f"q_data_type = {q_type}")
    if kv_type != q_type and (float8_q or kv_type not in FLOAT8_DTYPES):
        not_supported(f"kv_data_type = {kv_type} with q_data_type = {q_type}")
    if o_type.itemsize == 1:
        not_supported(f"o_data_type = {o_type}")
    if o_type != q_type and not float8_q:
        not_supported(f"o_data_type = {o_type} with q_data_type = {q_type}")
    return o_type, kv_type if kv_type in FLOAT8_DTYPES else None, float8_q


def check_kv_layout(kv_layout: object) -> str:
    if kv_layout not in ("NHD", "HND"):
        refuse("kv_layout", kv_layout, "'NHD' or 'HND'")
    return str(kv_layout)


class PosEncoding(NamedTuple):
    """How positions count. rope: (scale, theta) of a rotary embedding of Q and K, whose cache holds keys that were not rotated."""

    alibi: bool = False
    rope: tuple[float, float] | None = None


NO_POS_ENCODING = PosEncoding()


def pos_encoding(mode: object, rope_scale: float | None = None, rope_theta: float | None = None) -> PosEncoding:
    if mode == "NONE":
        return NO_POS_ENCODING
    if mode not in _POS_ENCODING_MODES:
        refuse("pos_encoding_mode", mode, f"one of {', '.join(map(repr, _POS_ENCODING_MODES))}")
    if mode == "ROPE_LLAMA":
        return PosEncoding(rope=(1.0 if rope_scale is None else float(rope_scale), 1e4 if rope_theta is None else float(rope_theta)))
    return PosEncoding(alibi=mode == "ALIBI")


def paged_cache(paged_kv_cache: PagedKV, kv_layout: str) -> KVCache:
    """paged_kv_cache: (k, v), each NHD [pages, page_size, num_kv_heads, head_dim] or HND [pages, num_kv_heads, page_size, head_dim]; or both in one tensor,
    along its second dimension. Without page_size: pages of one token.
    """
    known = _views.get(id(paged_kv_cache))
    if known is not None and known.of(paged_kv_cache, kv_layout):
        return known.cache
    if isinstance(paged_kv_cache, tuple):
        if len(paged_kv_cache) != 2:
            refuse("len(paged_kv_cache)", len(paged_kv_cache), "2: K and V")
        k, v = paged_kv_cache
    elif isinstance(paged_kv_cache, Tensor) and paged_kv_cache.ndim in (4, 5) and paged_kv_cache.shape[1] == 2:
        # Detached: the views must not keep the caller's tensor alive, as they are kept until it ends.
        k, v = paged_kv_cache.detach().unbind(1)
    else:
        refuse("paged_kv_cache", paged_kv_cache, "a tensor [pages, 2, ...], or the tuple (k, v)")
    if k.element_size() == 1 and k.dtype not in FLOAT8_DTYPES:
        not_supported(f"a KV-cache of {k.dtype}")
    if k.ndim == 3 and v.ndim == 3:  # [pages, num_kv_heads, head_dim]
        cache = KVCache.unchecked(k.unsqueeze(1), v.unsqueeze(1))
    else:
        for i, tensor in enumerate((k, v)):
            if tensor.ndim != 4:
                refuse(f"paged_kv_cache[{i}]", tensor, "a tensor of 4 dimensions")
        cache = KVCache.unchecked(k.transpose(1, 2), v.transpose(1, 2)) if kv_layout == "HND" else KVCache.unchecked(k, v)
    if isinstance(paged_kv_cache, Tensor):
        key = id(paged_kv_cache)
        end = weakref.ref(paged_kv_cache, lambda _: _views.pop(key, None))
        _views[key] = _Views(end, paged_kv_cache.data_ptr(), paged_kv_cache.shape, kv_layout, cache)
    return cache


class _Views(NamedTuple):
    """K and V of a tensor that holds both. Layers come again every step, and making views takes longer than all else in a run."""

    tensor: weakref.ref[Tensor]
    address: int
    shape: torch.Size
    layout: str
    cache: KVCache

    def of(self, tensor: object, layout: str) -> bool:
        return (
            self.tensor() is tensor
            and isinstance(tensor, Tensor)
            and self.layout == layout
            and self.address == tensor.data_ptr()
            and self.shape == tensor.shape
        )


_views: dict[int, _Views] = {}  # by id; an entry ends with its tensor


def ragged_cache(k: Tensor, v: Tensor, kv_layout: str = "NHD") -> KVCache:
    """k, v: NHD [tokens, num_kv_heads, head_dim], HND [num_kv_heads, tokens, head_dim]."""
    if k.element_size() == 1 and k.dtype not in FLOAT8_DTYPES:
        not_supported(f"K and V of {k.dtype}")
    return KVCache.from_ragged(k.transpose(0, 1), v.transpose(0, 1)) if kv_layout == "HND" else KVCache.from_ragged(k, v)


def is_number(scale: object) -> bool:
    """Whether a scale is known to the host: a number, or a tensor of one element on the host."""
    return not isinstance(scale, Tensor) or (scale.device.type == "cpu" and scale.numel() == 1)


@lru_cache(maxsize=1024)
def indptr_of_equal(batch_size: int, length: int, device: torch.device) -> Tensor:
    """int32 [batch_size + 1]: requests of `length` each. Kept: steps of the same batch size share one."""
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * length


@lru_cache(maxsize=64)
def alibi_slopes_on(num_heads: int, device: torch.device) -> Tensor:
    return alibi_slopes(num_heads).to(device)


def rows_of(qo_indptr: Tensor) -> int | None:
    """Where qo_indptr ends; None if that would wait for a device."""
    return int(qo_indptr.numpy().item(-1)) if qo_indptr.is_cpu else None  # by numpy, in a third of the time


def on_device(tensor: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
    return tensor if tensor.device == device else tensor.to(device, non_blocking=non_blocking)


def from_zero(indptr: Tensor) -> tuple[int, Tensor]:
    """Where an indptr on the host starts, and the same from 0. One on a device is taken to start at 0: nothing waits for it."""
    first = int(indptr.numpy().item(0)) if indptr.is_cpu else 0
    return first, indptr - first if first else indptr


def copy_if_other(buffer: Tensor, tensor: Tensor, non_blocking: bool) -> None:
    """Copies what is not the buffer itself."""
    if buffer.data_ptr() != tensor.data_ptr() or buffer.device != tensor.device:
        buffer.copy_(tensor, non_blocking=non_blocking)


def buffer_length(name: str, buffer: object) -> int:
    """Of a buffer that is needed with CUDA graphs."""
    if not isinstance(buffer, Tensor):
        refuse(name, buffer, "a tensor with use_cuda_graph=True")
    return len(buffer)


def csr_on_device(
    kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, page_size: int, device: torch.device, non_blocking: bool = True
) -> PageTable:
    """A page table whose tensors may lie on the host."""
    tensors = [on_device(tensor, device, non_blocking) for tensor in (kv_indptr, kv_indices, kv_last_page_len)]
    return PageTable.csr(tensors[0], tensors[1], tensors[2], page_size)
