"""Variants whose mask is a tensor, and the packed form of such masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from ..validation import INT32_OR_INT64, MAX_INT32, check_types, index_tensor, refuse, require
from .cpp import Body
from .params import Param
from .reference import Reference
from .variant import Variant

BitOrder = Literal["big", "little"]


def packbits(x: Tensor, bitorder: BitOrder = "big") -> Tensor:
    """Packs eight values into a byte, like numpy.packbits: the last byte is padded with zeros.

    Args:
        x: [n], bool or integers: nonzero values set bits.
        bitorder: "big": the first value is the highest bit of its byte. Attention masks use "little".

    Returns:
        uint8 [ceil(n / 8)], on the device of x.

    Raises:
        ValueError: another shape, dtype or bit order.
    """
    bits = _bits(x, bitorder)
    padded = torch.zeros(-(-bits.shape[0] // 8) * 8, dtype=torch.bool, device=bits.device)
    padded[: bits.shape[0]] = bits
    return _packed(padded, bitorder)


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: BitOrder = "big") -> tuple[Tensor, Tensor]:
    """Packs each segment separately: each segment starts at a new byte.

    Waits for the device of `indptr`, once, because the length of the result depends on it.

    Args:
        x: [at least indptr[-1]], bool or integers, the concatenated segments. For custom masks: q_len x
            kv_len values of each request.
        indptr: int32 or int64 [segments + 1], on the device of x or on the host: segment i is
            x[indptr[i]:indptr[i + 1]].
        bitorder: as in packbits.

    Returns:
        uint8 [new_indptr[-1]], and new_indptr int32 [segments + 1], both on the device of x: segment i is
        packed[new_indptr[i]:new_indptr[i + 1]].

    Raises:
        ValueError: another shape, dtype or bit order; an indptr that is negative or decreases; or a result of
            2^31 bytes or more.
    """
    bits = _bits(x, bitorder)
    index_tensor("indptr", indptr, INT32_OR_INT64, "[segments + 1]")
    if indptr.shape[0] == 0:
        refuse("indptr", indptr, "of at least one element: [segments + 1]")
    # counting on the host takes less time than launching a kernel, as there are few numbers
    begin = indptr.cpu().numpy().astype(numpy.int64)
    if begin[0] < 0 or (begin[1:] < begin[:-1]).any():
        refuse("indptr", begin.tolist(), "0 or more first, and then never less than before")
    new_begin = numpy.zeros_like(begin)
    numpy.cumsum((begin[1:] - begin[:-1] + 7) // 8, out=new_begin[1:])
    last, num_bytes = begin.item(-1), new_begin.item(-1)
    if last > bits.shape[0]:
        refuse("indptr[-1]", last, f"at most len(x) = {bits.shape[0]}")
    if num_bytes > MAX_INT32:
        refuse("indptr", indptr, f"of segments that take less than 2^31 bytes: they take {num_bytes}")
    end, gap = torch.from_numpy(numpy.stack((begin[1:], new_begin[:-1] * 8 - begin[:-1]))).to(
        x.device, non_blocking=True
    )
    position = torch.arange(begin.item(0), last, device=x.device)
    segment = torch.searchsorted(end, position, right=True)
    padded = torch.zeros(num_bytes * 8, dtype=torch.bool, device=x.device)
    padded.scatter_(0, position.add_(gap.index_select(0, segment)), bits[begin.item(0) : last])
    return _packed(padded, bitorder), torch.from_numpy(new_begin.astype(numpy.int32)).to(
        x.device, non_blocking=True
    )


def _bits(x: object, bitorder: object) -> Tensor:
    """Booleans: which values are not 0."""
    if not isinstance(x, Tensor) or x.ndim != 1 or x.is_floating_point() or x.is_complex():
        refuse("x", x, "a vector of booleans or integers")
    require(bitorder in ("big", "little"), "bitorder", bitorder, "'big' or 'little'")
    return x if x.dtype == torch.bool else x != 0


def _packed(bits: Tensor, bitorder: BitOrder) -> Tensor:
    first, last, step = (7, -1, -1) if bitorder == "big" else (0, 8, 1)
    shifts = torch.arange(first, last, step, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)


__all__ = ["custom_mask", "tree_mask"]

# Index of a pair's bit or boolean in its request's mask. For pairs that do not exist it is arbitrary: tensors
# clamp it.
_CUSTOM = """\
    const int64_t at = static_cast<int64_t>(row.index) * row.kv_len + kv_position;
    return {value};
"""
_TREE = """\
    const int32_t first = row.position - row.index;  // query
    const int64_t at = static_cast<int64_t>(row.index) * (row.kv_len - first) + max(kv_position - first, 0);
    const bool is_seen = {value};
    return (kv_position < first) | is_seen;
"""
_BIT = "packed_mask(mask_indptr(row.request) + static_cast<int32_t>(at >> 3)) >> (at & 7) & 1"
_BOOLEAN = "mask_(static_cast<int32_t>(mask_indptr(row.request) + at))"


def custom_mask(
    packed_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    packed: bool = True,
) -> Variant:
    """Any mask: value i * kv_len + k of a request's q_len x kv_len values is for its i-th query and token k.
    Given as bits (FlashInfer's packed_custom_mask) or as booleans.

    Booleans are read in place, one byte each; bits need an eighth of the memory and the traffic.

    Args:
        packed_mask: uint8: for each request q_len x kv_len booleans, flattened and packed, the first in the
            lowest bit: segment_packbits(..., "little").
        mask_indptr: int32 [batch + 1]: the offsets of each request's bytes (in `packed_mask`) or booleans (in
            `mask`). At most 2^31 in all.
        mask: bool, instead of `packed_mask`: for each request q_len x kv_len booleans, flattened and
            concatenated.
        packed: False: `mask` is given to each run.
    """

    def reference(b: Any, h: Any, q_idx: Any, kv_idx: Any, index: Any, kv_len: Any) -> Any:
        return is_set(b, index.to(torch.int64) * kv_len + kv_idx)

    is_set = _is_set(packed and mask is None)
    return _variant(
        "custom_mask", _CUSTOM, reference, packed_mask, mask_indptr, mask, packed, skips_kv_tiles=True
    )


def tree_mask(
    packed_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    packed: bool = True,
) -> Variant:
    """A mask over a request's own queries. Each query sees all tokens before them, and among them those whose
    bit or boolean is set. For speculative trees.

    Args:
        packed_mask: uint8: for each request q_len x q_len booleans, flattened and packed, the first in the
            lowest bit: segment_packbits(..., "little").
        mask_indptr: int32 [batch + 1]: the offsets of each request's bytes (in `packed_mask`) or booleans (in
            `mask`).
        mask: bool, instead of `packed_mask`: for each request q_len x q_len booleans, flattened and
            concatenated.
        packed: False: `mask` is given to each run.
    """

    def reference(b: Any, h: Any, q_idx: Any, kv_idx: Any, index: Any, kv_len: Any) -> Any:
        first = q_idx - index
        return (kv_idx < first) | is_set(
            b, index.to(torch.int64) * (kv_len - first) + torch.clamp(kv_idx - first, min=0)
        )

    is_set = _is_set(packed and mask is None)
    return _variant("tree_mask", _TREE, reference, packed_mask, mask_indptr, mask, packed)


def _is_set(packed: bool) -> Callable[[Any, Any], Any]:
    """Looks up a value of a request's mask. Its free variables are the parameters."""
    packed_mask = mask_indptr = mask = None

    def of_bits(b: Any, at: Any) -> Any:
        return (packed_mask[mask_indptr[b] + at // 8] >> (at % 8)) & 1 != 0  # type: ignore[index]

    def of_booleans(b: Any, at: Any) -> Any:
        return mask[mask_indptr[b] + at]  # type: ignore[index]

    return of_bits if packed else of_booleans


def _variant(
    name: str,
    code: str,
    reference: Any,
    packed_mask: Tensor | None,
    mask_indptr: Tensor | None,
    mask: Tensor | None,
    packed: bool,
    skips_kv_tiles: bool = False,
) -> Variant:
    check_types(bool, "True or False", packed=packed)
    packed = packed and mask is None
    require(packed or packed_mask is None, "packed_mask", packed_mask, "None with mask, or with packed=False")
    values = (
        Param("packed_mask", torch.uint8, 1, packed_mask) if packed else Param("mask", torch.bool, 1, mask)
    )
    params = (values, Param("mask_indptr", torch.int32, value=mask_indptr, shape=("batch",)))
    hook = (
        f"  ATTN_HD bool mask(const ScoreRow& row, int32_t kv_position) const "
        f"{{\n{code.format(value=_BIT if packed else _BOOLEAN)}  }}\n"
    )
    body = Body(name, params, frozenset({"mask"}), True, hook, skips_kv_tiles=skips_kv_tiles)
    return Variant(body=body, reference=Reference(None, reference, params, wants_row=True))
