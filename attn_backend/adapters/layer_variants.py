"""The variant behind a plan key: what the layers of models ask for beyond a causal mask, a window, a soft cap
and sinks.
"""

from __future__ import annotations

import math
from functools import cache, reduce
from operator import and_
from typing import Any

import torch

from attn_backend.adapters.plan_key import PlanKey
from attn_backend.variants import Variant, builtin

_SPANS = """
  bool mask(const ScoreRow& row, int32_t kv_position) const {
    const bool before = kv_position <= row.position & (window < 0 | row.position - kv_position <= window);
    return before | (kv_position >= span_begin(row.row) & kv_position < span_end(row.row));
  }
"""

_TREE = """
  bool mask(const ScoreRow& row, int32_t kv_position) const {
    const int32_t node = kv_position - (row.position - row.index);  // below 0: a token before the tree
    return node < 0 | visible(row.row, max(node, 0));
  }
"""


@cache
def variant_of(key: PlanKey) -> Variant | None:
    """None: plain attention.

    One object for each kind of layer, so that what is compiled for it is found again.
    """
    if not key.needs_variant:
        return None
    parts = []
    if key.logits_soft_cap > 0:
        parts.append(builtin.soft_cap(key.logits_soft_cap))
    if key.temperature_len > 0:
        parts.append(_temperature(key.temperature_len))  # of what the soft cap leaves
    if key.has_alibi:
        parts.append(builtin.alibi())
    if key.chunk > 0:
        parts.append(builtin.chunked_local(key.chunk))
    if key.window_right >= 0:
        parts.append(_window_right(key.window_right))
    if key.has_spans:
        # A window that does not cut spans (Gemma 3) belongs to this mask, not to a view.
        params = {"span_begin": torch.int32, "span_end": torch.int32, "window": int}
        parts.append(Variant.from_source(_SPANS, params=params, name="spans"))
    if key.has_items:
        parts.append(builtin.multi_item_scoring())
    if key.has_tree:
        parts.append(Variant.from_source(_TREE, params={"visible": (torch.bool, 2)}, name="tree"))
    return reduce(and_, parts)


def visibility_of(key: PlanKey, causal: bool) -> tuple[bool, int]:
    """`causal` and `window_left` of the view that is planned for a key, in a step that is causal or not."""
    if key.has_spans:
        return False, key.window_left if key.cuts_spans else -1
    return causal and key.causal, key.window_left


def _temperature(length: int) -> Variant:
    factor = 1 / math.log2(length)

    def temperature(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * torch.where(q_idx > length, factor * torch.log2(q_idx.to(score.dtype)), 1.0)

    return Variant.from_functions(temperature)


def _window_right(right: int) -> Variant:
    def window_right(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx - q_idx <= right

    return Variant.from_functions(mask_mod=window_right)
