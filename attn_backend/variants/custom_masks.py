"""Built-in variants whose mask is a tensor, a bit or a boolean for each pair of a query and a token;
`builtin` has their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..metadata.structure import check_types, refuse
from .cpp import Body
from .params import Param
from .reference import Reference
from .variant import Variant

__all__ = ["custom_mask", "tree_mask"]

# Where a pair's bit or boolean lies among its request's; anywhere for pairs that do not exist: tensors clamp.
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
    """Any mask: value i * kv_len + k of a request's q_len x kv_len for its i-th query, as bits (FlashInfer's
    packed_custom_mask) or as booleans.

    Booleans are read where they are, a byte for each: bits need an eighth of the memory, and of the traffic.

    Args:
        packed_mask: uint8: of each request q_len x kv_len booleans, flattened and packed, the first in the
            lowest bit: segment_packbits(..., "little").
        mask_indptr: int32 [batch + 1]: where each request's bytes begin (of `packed_mask`), or its booleans
            (of `mask`). At most 2^31 in all.
        mask: bool, instead of `packed_mask`: of each request q_len x kv_len booleans, flattened, one request
            after another.
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
    """A mask over a request's own queries: each sees all tokens before them, and of them what its bits or
    booleans say. For speculative trees.

    Args:
        packed_mask: uint8: of each request q_len x q_len booleans, flattened and packed, the first in the
            lowest bit: segment_packbits(..., "little").
        mask_indptr: int32 [batch + 1]: where each request's bytes begin (of `packed_mask`), or its booleans
            (of `mask`).
        mask: bool, instead of `packed_mask`: of each request q_len x q_len booleans, flattened, one request
            after another.
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
    """The value of a request's mask at a place. Its free variables are the parameters."""
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
    if packed_mask is not None and not packed:
        refuse("packed_mask", packed_mask, "None with mask, or with packed=False")
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
