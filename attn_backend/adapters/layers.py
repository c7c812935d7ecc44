"""The needs of an attention layer, and what serves them: a variant, an Attention, the arguments of its runs.

Both engines describe each layer as a LayerSpec. Layers with equal specs share one Attention and its plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cache, reduce
from operator import and_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_backend.adapters.metrics import record_attention
from attn_backend.kernels.attention import Attention
from attn_backend.metadata.kv_cache import CacheDtype
from attn_backend.settings import Settings
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


class LayerSpec(NamedTuple):
    """The needs of a layer. Layers with equal specs share a plan: the same heads over the same tokens.

    Attributes:
        window_left: tokens to the left of the query that stay visible; -1: all.
        causal: whether a query sees no token after its own.
        in_window_pool: whether K and V lie in the sliding-window half of SGLang's hybrid pool, which numbers
            its slots differently.
        of_this_step: whether K and V belong to the step's own tokens and are in no cache (vLLM's encoders,
            decompressed keys of MLA in SGLang).
        of_encoder: whether K and V come from the request's encoder (SGLang's cross attention).
        window_right: tokens to the right of the query that stay visible in a step that is not causal; -1:
            all.
        chunk: length of chunks, of which a query sees only its own (Llama 4); 0: there are none.
        has_spans: whether some tokens of a prompt, such as an image's, see left and right (Gemma 3).
        cuts_spans: whether the window also limits which tokens of its own span a token sees (Gemma 4).
        has_items: whether a prompt may have several items that do not see each other (SGLang's multi-item
            scoring).
        has_alibi: whether logits get ALiBi's slopes.
        temperature_len: position after which logits grow with the query's position (Grok 2); 0: they never
            do.
        has_tree: whether the new tokens are a tree, not a chain (speculative drafts in SGLang).
        has_sinks: whether the softmax has a sink for each head.
        logits_soft_cap: 0: there is none.
        head_dim_v: columns of a head of V; None: head_dim.
        kv_dtype: dtype of a cache that differs from the output's; None: they are equal.
        token_scales: whether the cache has a scale for each token and head.
        rotation: whether append rotates rows of K and V.
        float8_out: whether some layers' outputs may be float8_e4m3fn, with a scale.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    window_left: int = -1
    causal: bool = True
    in_window_pool: bool = False
    of_this_step: bool = False
    of_encoder: bool = False
    window_right: int = -1
    chunk: int = 0
    has_spans: bool = False
    cuts_spans: bool = False
    has_items: bool = False
    has_alibi: bool = False
    temperature_len: int = 0
    has_tree: bool = False
    has_sinks: bool = False
    logits_soft_cap: float = 0.0
    head_dim_v: int | None = None
    kv_dtype: CacheDtype | None = None
    token_scales: bool = False
    rotation: bool = False
    float8_out: bool = False

    @property
    def needs_variant(self) -> bool:
        """Whether plain attention cannot serve these layers.

        Plain attention supports a soft cap, a window to the left and sinks.
        """
        masks = self.chunk > 0 or self.window_right >= 0 or self.has_spans or self.has_items or self.has_tree
        return masks or self.has_alibi or self.temperature_len > 0

    @property
    def visibility(self) -> tuple[bool, int]:
        """`causal` and `window_left` of the views of a causal step. Spans have both in their mask."""
        if self.has_spans:
            return False, self.window_left if self.cuts_spans else -1
        return self.causal, self.window_left

    @property
    def run_soft_cap(self) -> float:
        """The soft cap that runs must pass: 0 for a variant, which knows its own."""
        return 0.0 if self.needs_variant else self.logits_soft_cap


class Spans:
    """The span of each row of Q: tokens of a prompt that see each other on both sides, such as an image's.

    The tensors keep their addresses, so captured graphs see every step's spans.

    Attributes:
        begin, end: int32 [max_rows], token positions [begin, end) in the request; equal for a row in no span.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._table = torch.zeros(2, max_rows, dtype=torch.int32, device=device)
        self.begin, self.end = self._table.unbind(0)
        self._is_clear = True

    @property
    def max_rows(self) -> int:
        return self._table.shape[1]

    def clear(self, num_rows: int | None = None) -> None:
        """Takes the first rows (default: all) out of their spans. May be captured."""
        self._table[:, :num_rows].zero_()

    def fill(self, spans: Sequence[tuple[int, int, int]], qo_indptr: Tensor, kv_lens: Tensor) -> None:
        """
        Sets the span of each row of a step. Does not wait for the device.

        Args:
            spans: (request, first token, last token), which do not overlap in a request.
            qo_indptr: int32 or int64 [batch + 1].
            kv_lens: int32 or int64 [batch], tokens of each request, with the step's tokens.
        """
        spans = [span for span in spans if span[1] < span[2]]
        if not spans:
            if not self._is_clear:
                self.clear()
                self._is_clear = True
            return
        device = self._table.device
        on_host = torch.tensor(spans, dtype=torch.int64, pin_memory=device.type == "cuda")
        request, first, last = on_host.to(device, non_blocking=True).unbind(1)
        end_row = qo_indptr[request + 1]
        row_of_token_0 = end_row - kv_lens[request]
        begin_row = torch.maximum(row_of_token_0 + first, qo_indptr[request])
        end_row = torch.minimum(row_of_token_0 + last + 1, end_row)
        rows = torch.arange(self._table.shape[1], device=device)
        inside = (rows >= begin_row[:, None]) & (rows < end_row[:, None])
        torch.sum(inside * first[:, None], dim=0, dtype=torch.int32, out=self.begin)
        torch.sum(inside * (last[:, None] + 1), dim=0, dtype=torch.int32, out=self.end)
        self._is_clear = False


class Items(NamedTuple):
    """Arguments of the variant multi_item_scoring.

    Attributes:
        prefix_len: int32 [batch], tokens of each prompt.
        token_pos_in_items: uint16 [batch, longest part after a prompt].
    """

    prefix_len: Tensor
    token_pos_in_items: Tensor


@cache
def variant_of(spec: LayerSpec) -> Variant | None:
    """The variant that serves these layers; None: plain attention.

    Equal specs get one object, so that kernels compiled for it are found again.
    """
    if not spec.needs_variant:
        return None
    parts = []
    if spec.logits_soft_cap > 0:
        parts.append(builtin.soft_cap(spec.logits_soft_cap))
    if spec.temperature_len > 0:
        parts.append(_temperature(spec.temperature_len))  # it multiplies capped logits
    if spec.has_alibi:
        parts.append(builtin.alibi())
    if spec.chunk > 0:
        parts.append(builtin.chunked_local(spec.chunk))
    if spec.window_right >= 0:
        parts.append(_window_right(spec.window_right))
    if spec.has_spans:
        # A window that does not cut spans (Gemma 3) belongs to this mask, not to a view.
        params = {"span_begin": torch.int32, "span_end": torch.int32, "window": int}
        parts.append(Variant.from_source(_SPANS, params=params, name="spans"))
    if spec.has_items:
        parts.append(builtin.multi_item_scoring())
    if spec.has_tree:
        parts.append(Variant.from_source(_TREE, params={"visible": (torch.bool, 2)}, name="tree"))
    return reduce(and_, parts)


def variant_args_of(
    spec: LayerSpec, *, spans: Spans | None = None, items: Items | None = None, tree: Tensor | None = None
) -> dict[str, Tensor | int] | None:
    """Arguments of the variant in a step, without ALiBi slopes: each layer adds its own. None: no arguments.

    Args:
        tree: bool [rows, nodes], whether a row sees a node of its request's tree.
    """
    if spec.has_tree and tree is not None:
        return {"visible": tree}
    if spec.has_items and items is not None:
        return items._asdict()
    if spec.has_spans and spans is not None:
        return {
            "span_begin": spans.begin,
            "span_end": spans.end,
            "window": -1 if spec.cuts_spans else spec.window_left,
        }
    return None


def attention_of(
    spec: LayerSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_rows: int,
    max_batch: int,
    batch_invariant: bool = False,
    cascade: bool = True,
) -> Attention:
    """The Attention that serves these layers.

    Args:
        dtype: of the model.
        max_rows, max_batch: most rows of Q and most requests of a step.
        cascade: whether its plans may look for shared prefixes, unless ATTN_BACKEND_CASCADE is 0.

    Raises:
        ValueError: no kernel serves these heads and dtypes.
    """
    begin = time.perf_counter()
    attention = Attention(
        spec.num_qo_heads,
        spec.num_kv_heads,
        spec.head_dim,
        head_dim_v=spec.head_dim_v,
        dtype=dtype,
        kv_dtype=spec.kv_dtype,
        device=device,
        max_rows=max_rows,
        max_batch=max_batch,
        cascade=cascade and use_cascade(),
        batch_invariant=batch_invariant,
        variant=variant_of(spec),
        sinks=spec.has_sinks,
        float8_out=spec.float8_out,
        token_scales=spec.token_scales,
        rotation=spec.rotation,
    )
    has_cascade = cascade and use_cascade() and not batch_invariant
    record_attention(attention, has_cascade, time.perf_counter() - begin)
    return attention


def use_cascade() -> bool:
    """Whether plans look for shared prefixes in a batch: yes, unless ATTN_BACKEND_CASCADE is 0."""
    return Settings.read().cascade


def _temperature(length: int) -> Variant:
    factor = 1 / math.log2(length)

    def temperature(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * torch.where(q_idx > length, factor * torch.log2(q_idx.to(score.dtype)), 1.0)

    return Variant.from_functions(temperature)


def _window_right(right: int) -> Variant:
    def window_right(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx - q_idx <= right

    return Variant.from_functions(mask_mod=window_right)
