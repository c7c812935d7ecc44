"""Which layers of a model can share a plan."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PlanKey(NamedTuple):
    """Layers with the same key share a plan: the same heads over the same tokens.

    Attributes:
        window_left: tokens to the left of the query that stay visible; -1: all.
        causal: whether a query sees no token after its own.
        in_window_pool: whether K and V lie in the sliding-window half of SGLang's hybrid pool, which numbers
            its slots differently.
        of_this_step: whether K and V are those of the step's own tokens, in no cache (vLLM's encoders,
            decompressed keys of MLA in SGLang).
        of_encoder: whether K and V are those of the request's encoder (SGLang's cross attention).
        window_right: tokens to the right of the query that stay visible in a step that is not causal; -1:
            all.
        chunk: tokens of the chunks that a query does not see out of (Llama 4); 0: there are none.
        has_spans: whether some tokens of a prompt see both sides, those of an image for one (Gemma 3).
        cuts_spans: whether the window also cuts what a token of a span sees of it (Gemma 4).
        has_items: whether a prompt may have several items that do not see each other (SGLang's multi-item
            scoring).
        has_alibi: whether logits get ALiBi's slopes.
        temperature_len: position after which logits grow with the query's position (Grok 2); 0: they never
            do.
        has_tree: whether the new tokens are a tree, not a chain (speculative drafts in SGLang).
        has_sinks: whether the softmax has a sink for each head.
        logits_soft_cap: 0: there is none.
        head_dim_v: columns of a head of V; None: head_dim.
        kv_dtype: of a cache whose elements differ from those of the output; None: they do not.
        float8_q: whether Q has kv_dtype, too.
        float8_out: whether some layers' outputs may be float8_e4m3fn, with a scale.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    window_left: int
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
    kv_dtype: torch.dtype | None = None
    float8_q: bool = False
    float8_out: bool = False

    @property
    def needs_variant(self) -> bool:
        """Whether plain attention cannot serve these layers.

        It has a soft cap, a window to the left and sinks.
        """
        masks = self.chunk > 0 or self.window_right >= 0 or self.has_spans or self.has_items or self.has_tree
        return masks or self.has_alibi or self.temperature_len > 0
