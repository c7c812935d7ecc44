"""Built-in variants. They combine with each other and with users' variants: causal() & alibi() & mine.

Tensors may be given here, or to each run under the argument's name. In formulas, s is the scaled score of
query q and key k in head h of request b.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..validation import check_int, refuse
from .masks import custom_mask, tree_mask
from .params import Param
from .reference import Reference
from .rotary import llama3_frequencies, rope, rope_at, rope_frequencies, rope_in_cache
from .variant import BUILTINS, Variant

__all__ = [
    "alibi",
    "alibi_slopes",
    "bidirectional_spans",
    "causal",
    "chunked_local",
    "custom_mask",
    "document",
    "llama3_frequencies",
    "multi_item_scoring",
    "position_temperature",
    "prefix_lm",
    "request_scale",
    "rope",
    "rope_at",
    "rope_frequencies",
    "rope_in_cache",
    "sigmoid",
    "sliding_window",
    "soft_cap",
    "streaming_llm",
    "temperature",
    "tree_mask",
]


def causal() -> Variant:
    """k <= q."""

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx

    return Variant.from_functions(mask_mod=causal)


def sliding_window(left: int) -> Variant:
    """q - k <= left: Longformer (arXiv 2004.05150), Mistral 7B (arXiv 2310.06825).

    Does not limit tokens after the query: combine it with causal().

    Args:
        left: tokens before the query that it sees, in addition to itself.
    """
    left = check_int("left", left, 0)

    def sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= left

    return Variant.from_functions(mask_mod=sliding_window)


def streaming_llm(window: int, sink_tokens: int = 4) -> Variant:
    """k <= q and (q - k < window or k < sink_tokens): StreamingLLM (arXiv 2309.17453), a causal window that
    keeps the first tokens. Positions count tokens of the sequence. The paper's rotary embedding counts
    positions in the cache instead: see rope_in_cache().

    Args:
        window: tokens that a query sees, including the query's own.
        sink_tokens: first tokens, which are always seen.
    """
    window, sink_tokens = check_int("window", window, 1), check_int("sink_tokens", sink_tokens, 0)

    def streaming_llm(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & ((q_idx - kv_idx < window) | (kv_idx < sink_tokens))

    return Variant.from_functions(mask_mod=streaming_llm)


def soft_cap(cap: float | None = None) -> Variant:
    """cap * tanh(s / cap): Gemma 2 (arXiv 2408.00118), Grok-1.

    Args:
        cap: above 0; None: the parameter "cap" of each run.
    """
    if cap is not None and not (isinstance(cap, float | int) and cap > 0):
        refuse("cap", cap, "a number above 0, or None")

    def reference(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)  # type: ignore[operator]

    params = (Param("cap", float, value=cap),)
    hook = """
  float logits(float logit, const ScoreRow&, int32_t) const { return ::attn::soft_cap(logit, cap); }
"""
    return Variant.from_source(hook, params, name="soft_cap", reference=Reference(reference, None, params))


def alibi(slopes: Tensor | None = None) -> Variant:
    """s + slopes[h] * (k - q): ALiBi (arXiv 2108.12409), BLOOM, MPT.

    Args:
        slopes: float32 [query heads], for example from alibi_slopes().
    """

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        # Floats are exact up to 2^24 tokens. Combined with other logits, a difference of integers would need
        # registers that Hopper's kernels do not have.
        return score + slopes[h] * (kv_idx.to(score.dtype) - q_idx.to(score.dtype))  # type: ignore[index]

    return Variant.from_functions(
        alibi, tensors=[Param("slopes", torch.float32, value=slopes, shape=("num_qo_heads",))]
    )


def alibi_slopes(num_heads: int) -> Tensor:
    """float32 [num_heads] on the CPU: 2^(-8 i / n) for i = 1 .. n if n heads are a power of two. Otherwise
    the slopes for the next smaller power, then every second slope for the next larger one (arXiv 2108.12409,
    section 3 and its code).
    """
    num_heads = check_int("num_heads", num_heads, 1)
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-8 * i / (2 * power)) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32)


def sigmoid(bias: float | None = 0.0) -> Variant:
    """Weights sigmoid(s + bias), not normalized: no softmax.

    FlashSigmoid (arXiv 2409.04431), which uses bias = -log(kv_len). The output of a row is the sum of weight
    times value.

    Args:
        bias: added to each score; None: the parameter "bias" of each run.
    """

    def reference(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.sigmoid(score + bias)

    params = (Param("bias", float, value=bias),)
    hook = """
  static constexpr bool kUsesSoftmax = false;
  float logits(float logit, const ScoreRow&, int32_t) const { return ::attn::sigmoid(logit + bias); }
"""
    return Variant.from_source(hook, params, name="sigmoid", reference=Reference(reference, None, params))


def prefix_lm(prefix_lens: Tensor | None = None) -> Variant:
    """k <= q or k < prefix_lens[b]: every token sees the whole prefix (T5, arXiv 1910.10683; PaliGemma, arXiv
    2407.07726).

    Args:
        prefix_lens: int32 [batch].
    """

    def prefix_lm(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) | (kv_idx < prefix_lens[b])  # type: ignore[index]

    return Variant.from_functions(
        mask_mod=prefix_lm, tensors=[Param("prefix_lens", torch.int32, value=prefix_lens, shape=("batch",))]
    )


def bidirectional_spans(span_ids: Tensor | None = None) -> Variant:
    """k <= q or span_ids[b, q] == span_ids[b, k] >= 0: causal, but tokens of one span (such as an image) see
    each other (Gemma 3, arXiv 2503.19786).

    Args:
        span_ids: int32 [batch, at least the longest kv_len]: the span of each token; negative: none.
    """

    def bidirectional_spans(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        span = span_ids[b, q_idx]  # type: ignore[index]
        return (kv_idx <= q_idx) | ((span == span_ids[b, kv_idx]) & (span >= 0))  # type: ignore[index]

    return Variant.from_functions(
        mask_mod=bidirectional_spans,
        tensors=[Param("span_ids", torch.int32, value=span_ids, shape=("batch", None))],
    )


def chunked_local(chunk: int) -> Variant:
    """k <= q and q // chunk == k // chunk: Llama 4's local layers.

    Args:
        chunk: tokens of a chunk.
    """
    chunk = check_int("chunk", chunk, 1)

    def chunked_local(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx // chunk == kv_idx // chunk)

    return Variant.from_functions(mask_mod=chunked_local)


def document(document_ids: Tensor | None = None) -> Variant:
    """document_ids[b, q] == document_ids[b, k]: tokens see their own document of a packed sequence.

    Combine it with causal().

    Args:
        document_ids: int32 [batch, at least the longest kv_len].
    """

    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return document_ids[b, q_idx] == document_ids[b, kv_idx]  # type: ignore[index]

    return Variant.from_functions(
        mask_mod=document,
        tensors=[Param("document_ids", torch.int32, value=document_ids, shape=("batch", None))],
    )


def multi_item_scoring(prefix_len: Tensor | None = None, token_pos_in_items: Tensor | None = None) -> Variant:
    """Several items after one prompt, scored in one pass: FlashInfer's multi-item scoring.

    k <= q, and beyond the prompt also (k < prefix_len[b] or q - k < token_pos_in_items[b, q -
    prefix_len[b]]). A token of an item sees the prompt, and the tokens of its item up to itself, without the
    delimiter before the item. A delimiter sees the prompt. FlashInfer's max_item_len is not needed.

    Args:
        prefix_len: int32 [batch]: tokens of the prompt.
        token_pos_in_items: uint16 [batch, at least the longest kv_len - prefix_len]: for each token after the
            prompt, its position in its item. The delimiter before an item has position 0: 0 1 2 3 0 1 2 0 for
            items of 3 and 2 tokens.
    """

    def multi_item_scoring(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        prefix = prefix_len[b]  # type: ignore[index]
        place = torch.clamp(q_idx - prefix, min=0)
        before = token_pos_in_items[b, place].to(torch.int32)  # type: ignore[index]
        return (kv_idx <= q_idx) & ((q_idx < prefix) | (kv_idx < prefix) | (q_idx - kv_idx < before))

    params = [
        Param("prefix_len", torch.int32, value=prefix_len, shape=("batch",)),
        Param("token_pos_in_items", torch.uint16, value=token_pos_in_items, shape=("batch", None)),
    ]
    return Variant.from_functions(mask_mod=multi_item_scoring, tensors=params)


def temperature(scale: float = 0.1, floor_scale: int = 8192) -> Variant:
    """s * (scale * log(floor((q + 1) / floor_scale) + 1) + 1): sharper for later queries. Llama 4's
    attn_scale and floor_scale (Scalable-Softmax, arXiv 2501.19399).
    """
    floor_scale = check_int("floor_scale", floor_scale, 1)

    def temperature(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * (scale * torch.log(((q_idx + 1) // floor_scale + 1).to(score.dtype)) + 1)

    return Variant.from_functions(temperature)


def position_temperature(scales: Tensor | None = None) -> Variant:
    """s * scales[q]: one factor for each query position.

    Args:
        scales: float32 [at least the longest kv_len].
    """

    def position_temperature(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * scales[q_idx]  # type: ignore[index]

    return Variant.from_functions(position_temperature, tensors=[Param("scales", torch.float32, 1, scales)])


def request_scale(sm_scales: Tensor | None = None) -> Variant:
    """s * sm_scales[b]: a softmax scale for each request, multiplied with the run's `sm_scale`, which may be
    1.

    Put it first in combinations, so that soft caps and biases apply to the scaled score.

    Args:
        sm_scales: float32 [batch]; or [1], one value for all requests, on the device.
    """

    def request_scale(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * sm_scales[b]  # type: ignore[index]

    return Variant.from_functions(request_scale, tensors=[Param("sm_scales", torch.float32, 1, sm_scales)])


BUILTINS.update(  # the other public functions compute parameters
    {name: globals()[name] for name in __all__ if globals()[name].__annotations__["return"] == "Variant"}
)
