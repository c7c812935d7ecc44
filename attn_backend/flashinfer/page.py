"""flashinfer.page: page tables, and appending new tokens to the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.append import append_kv
from ..metadata import KVCache
from ..validation import refuse
from .arguments import PagedKV, check_kv_layout, paged_cache
from .features import missing

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """[batch_size]: tokens of each request of a page table.

    On the arguments' device, without waiting for it.
    """
    full_pages = kv_indptr.diff().sub_(1).clamp_(min=0)
    return torch.add(kv_last_page_len, full_pages, alpha=page_size)


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The request of each new token, and the token's position in it. New tokens are the last ones of their
    request.

    Args:
        append_indptr: int32 or int64 [batch_size + 1], prefix sum of the numbers of new tokens.
        seq_lens: [batch_size], tokens of each request, including the new ones.
        nnz: length of the results; elements after the last new token are request -1, position 0.
        batch_indices, positions: int32 [nnz], written; allocated if None.

    Raises:
        ValueError: batch_indices or positions of another shape, dtype or device.
    """
    device = append_indptr.device
    for name, out in (("batch_indices", batch_indices), ("positions", positions)):
        if out is not None and (out.shape != (nnz,) or out.dtype != torch.int32 or out.device != device):
            refuse(name, out, f"an int32 tensor [{nnz}] on {device}")
    batch_size = append_indptr.shape[0] - 1
    token = torch.arange(nnz, dtype=append_indptr.dtype, device=device)
    request = torch.searchsorted(append_indptr[1:].contiguous(), token, right=True)
    is_padding = request >= batch_size
    known = request.clamp(max=max(batch_size - 1, 0))
    position = token - append_indptr[known + 1] + seq_lens.to(device)[known]
    found = (
        request.masked_fill(is_padding, -1).to(torch.int32),
        position.masked_fill(is_padding, 0).to(torch.int32),
    )
    for out, value in zip((batch_indices, positions), found, strict=True):
        if out is not None:
            out.copy_(value)
    return found[0] if batch_indices is None else batch_indices, found[1] if positions is None else positions


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: PagedKV,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes token i of append_key and append_value to position positions[i] of request batch_indices[i].
    Does not wait for the device.

    Args:
        append_key, append_value: [tokens, num_kv_heads, head_dim].
        batch_indices, positions: int32 [tokens]; negative requests are skipped.
        paged_kv_cache: (k, v), or both in one tensor, in kv_layout.
        kv_indices, kv_indptr: the page table, with room for the new tokens. kv_last_page_len is not used.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or stride.
    """
    kv = paged_cache(paged_kv_cache, check_kv_layout(kv_layout))
    if append_key.shape[0] > 0:
        append_kv(
            append_key,
            append_value,
            kv,
            slots_of(batch_indices, positions, kv_indices, kv_indptr, kv.page_size),
        )


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Writes token i of append_ckv and append_kpe to position positions[i] of request batch_indices[i]. Does
    not wait for the device.

    Args:
        append_ckv: [tokens, columns of the latent], append_kpe: [tokens, columns of the rotated part].
        ckv_cache: [pages, page_size, columns of the latent], kpe_cache: [pages, page_size, columns of the
            rotated part]: parts of one tensor or separate. All others are as in append_paged_kv_cache.

    Raises:
        ValueError: an argument that is wrong in shape, dtype, device or stride.
    """
    if append_ckv.shape[0] == 0:
        return
    slots = slots_of(batch_indices, positions, kv_indices, kv_indptr, ckv_cache.shape[1])
    append_kv(
        append_ckv.unsqueeze(1),
        append_kpe.unsqueeze(1),
        KVCache.unchecked(ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2)),
        slots,
    )


def slots_of(
    batch_indices: Tensor, positions: Tensor, kv_indices: Tensor, kv_indptr: Tensor, page_size: int
) -> Tensor:
    """int64 [tokens]: the cache slots of tokens; -1 for negative requests."""
    page = positions // page_size
    entry = (kv_indptr[batch_indices.clamp(min=0).long()] + page).clamp_(0, max(kv_indices.shape[0] - 1, 0))
    slots = kv_indices[entry.long()].long() * page_size + (positions - page * page_size)
    return slots.masked_fill_(batch_indices < 0, -1)


nvfp4_quantize_append_paged_kv_cache = missing("nvfp4_quantize_append_paged_kv_cache")
nvfp4_quantize_append_paged_kv_cache_with_slot_mapping = missing(
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
)
