"""FlashInfer's custom masks, and the arguments of multi-item scoring, as the variants of this package take
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..metadata.structure import refuse
from ..variants import packbits, segment_packbits
from .arguments import indptr_of, indptr_of_equal, on_device


def pack_custom_mask(
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    device: torch.device,
    non_blocking: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The bits of a mask, and where the bytes of each request begin (int32 [batch_size + 1]), on `device`;
    None, None without a mask.

    Args:
        custom_mask: bool, q_len x kv_len of each request, flattened, one after another. Packing waits for the
            device.
        packed_custom_mask: uint8, each request from a byte of its own, the first value in the lowest bit. It
            goes before custom_mask.
        kv_lens: [batch_size].
    """
    if custom_mask is None and packed_custom_mask is None:
        return None, None
    bits = qo_indptr.diff().long() * kv_lens.to(qo_indptr.device)
    if packed_custom_mask is None:
        assert custom_mask is not None
        if custom_mask.dtype != torch.bool:
            refuse("custom_mask", custom_mask, "a bool tensor")
        packed_custom_mask, byte_indptr = segment_packbits(
            custom_mask.reshape(-1), indptr_of(bits.cpu(), torch.int64), "little"
        )
    else:
        byte_indptr = indptr_of((bits + 7) // 8, torch.int64)
    return on_device(packed_custom_mask, device, non_blocking), on_device(
        byte_indptr.to(torch.int32), device, non_blocking
    )


def pack_single_mask(
    custom_mask: Tensor | None, packed_custom_mask: Tensor | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """The same for the mask [q_len, kv_len] of one request."""
    if custom_mask is None and packed_custom_mask is None:
        return None, None
    if packed_custom_mask is None:
        assert custom_mask is not None
        packed_custom_mask = packbits(custom_mask.reshape(-1), "little")
    return packed_custom_mask, indptr_of_equal(1, len(packed_custom_mask), device)


def items_of(
    prefix_len_ptr: Tensor | None, token_pos_in_items_ptr: Tensor | None, token_pos_in_items_len: int
) -> tuple[Tensor | None, Tensor | None]:
    """prefix_len int32 [batch_size], token_pos_in_items uint16 [batch_size, token_pos_in_items_len]: of
    multi-item scoring; None, None without.
    """
    if prefix_len_ptr is None:
        if token_pos_in_items_ptr is not None:
            refuse("token_pos_in_items_ptr", token_pos_in_items_ptr, "None without prefix_len_ptr")
        return None, None
    if token_pos_in_items_ptr is None or token_pos_in_items_len < 1:
        refuse(
            "token_pos_in_items_ptr",
            token_pos_in_items_ptr,
            "a tensor, and token_pos_in_items_len its elements of each request, with prefix_len_ptr",
        )
    prefix_len = (
        prefix_len_ptr.view(torch.int32)
        if prefix_len_ptr.dtype == torch.uint32
        else prefix_len_ptr.to(torch.int32)
    ).reshape(-1)
    positions = token_pos_in_items_ptr.to(torch.uint16)
    wanted = prefix_len.shape[0] * token_pos_in_items_len
    if positions.numel() < wanted:  # the last request may have fewer
        positions = torch.cat((positions.flatten(), positions.new_zeros(wanted - positions.numel())))
    return prefix_len, positions.flatten()[:wanted].view(-1, token_pos_in_items_len)
