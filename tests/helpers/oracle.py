"""Attention in float64 from its definition.

It shares no code with the package: tokens are gathered by plain slot numbers, and masks are whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Coordinates of scores, as variants see them (csrc/attention/variant/variants.h).

    int64 tensors that broadcast to [heads, rows, tokens], or numbers.
    """

    request: int
    row: Tensor  # of Q
    index: Tensor  # of the row in its request
    position: Tensor
    head: Tensor
    kv_head: Tensor
    token: Tensor
    kv_len: int


@dataclass(frozen=True)
class Variant:
    """A variant's hooks on whole matrices in float64."""

    logits: Callable[[Tensor, Pairs], Tensor] = lambda logits, _pairs: logits  # [heads, rows, tokens]
    mask: Callable[[Pairs], Any] = lambda _pairs: True
    output: Callable[[Tensor, Pairs], Tensor] = lambda o, _pairs: o  # [heads, rows, head_dim]
    uses_softmax: bool = True
    query: Callable[[Tensor, Pairs], Tensor] = lambda q, _pairs: q  # [heads, rows, head_dim]
    key: Callable[[Tensor, Pairs], Tensor] = lambda k, _pairs: k  # [KV heads, tokens, head_dim]
    value: Callable[[Tensor, Pairs], Tensor] = lambda v, _pairs: v


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    variant: Variant | None = None,
    sinks: Tensor | None = None,
    request: int = 0,
    first_row: int = 0,
) -> tuple[Tensor, Tensor]:
    """One request: q [rows, num_qo_heads, head_dim] over k [tokens, num_kv_heads, head_dim] and v [tokens,
    num_kv_heads, head_dim_v], on any device, in any float dtype.

    Row i is at position tokens - rows + i. Returns float64 o [rows, num_qo_heads, head_dim_v] and lse [rows,
    num_qo_heads] (natural logarithm). A row that sees no token has o = 0 and lse = -inf. sinks:
    [num_qo_heads], logits; each adds to the sums of its head's rows. request, first_row: passed to variants.
    """
    variant = variant or Variant()
    rows, num_qo_heads, head_dim = q.shape
    tokens, num_kv_heads, _ = k.shape
    group_size = num_qo_heads // num_kv_heads
    if rows == 0:
        return q.new_zeros((*q.shape[:2], v.shape[2]), dtype=torch.float64), q.new_full(
            (rows, num_qo_heads), -torch.inf, dtype=torch.float64
        )

    index, head = (
        torch.arange(rows, device=q.device)[None, :, None],
        torch.arange(num_qo_heads, device=q.device)[:, None, None],
    )
    token = torch.arange(tokens, device=q.device)
    pairs = Pairs(
        request, first_row + index, index, tokens - rows + index, head, head // group_size, token, tokens
    )
    # Heads first; the query heads of one KV head become rows of one matrix: [num_kv_heads, group_size * rows,
    # head_dim].
    queries = _rounded(variant.query, q.transpose(0, 1), pairs).view(
        num_kv_heads, group_size * rows, head_dim
    )
    keys, values = (
        _rounded(variant.key, k.transpose(0, 1), pairs),
        _rounded(variant.value, v.transpose(0, 1), pairs),
    )
    logits = (queries * (head_dim**-0.5 if sm_scale is None else sm_scale)) @ keys.transpose(1, 2)
    if logits_soft_cap > 0:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    logits = logits.view(num_qo_heads, rows, tokens)
    logits = variant.logits(logits, pairs)
    hidden, seen = hidden_pairs(rows, tokens, causal, window_left, q.device), variant.mask(pairs)
    if seen is not True:
        hidden = hidden | ~torch.as_tensor(seen, device=q.device)
    if variant.uses_softmax:
        logits = logits.masked_fill(hidden, -torch.inf)
        sink = (
            torch.full((num_qo_heads, 1, 1), -torch.inf, dtype=torch.float64, device=q.device)
            if sinks is None
            else sinks.double().view(-1, 1, 1)
        )
        peak = torch.maximum(logits.amax(dim=-1, keepdim=True), sink) if tokens else sink.expand(-1, rows, 1)
        finite_peak = peak.clamp_min(torch.finfo(torch.float64).min)
        weights = logits.sub_(finite_peak).exp_()  # a row that sees nothing: exp(-inf) = 0
        total = weights.sum(dim=-1, keepdim=True) + torch.exp(sink - finite_peak)
        lse = (peak + torch.log(total)).squeeze(-1)
    else:
        weights = logits.masked_fill(hidden, 0.0)
        total = torch.ones(num_qo_heads, 1, 1, dtype=torch.float64, device=q.device)
        lse = torch.zeros(num_qo_heads, rows, dtype=torch.float64, device=q.device)
    o = weights.view(num_kv_heads, group_size * rows, tokens) @ values
    o = variant.output(o.view(num_qo_heads, rows, v.shape[2]) / total.clamp_min(1e-300), pairs)
    return o.permute(1, 0, 2).reshape(rows, num_qo_heads, v.shape[2]), lse.permute(1, 0).reshape(
        rows, num_qo_heads
    )


def _rounded(transform: Callable[[Tensor, Pairs], Tensor], x: Tensor, pairs: Pairs) -> Tensor:
    """Rows [heads, rows, head_dim], transformed in float64 and rounded to their dtype, as kernels multiply
    them; float64 again.
    """
    given = x.contiguous().double()
    made = transform(given, pairs)
    return made if made is given else made.to(x.dtype).double().contiguous()


def hidden_pairs(rows: int, tokens: int, causal: bool, window_left: int, device: torch.device) -> Tensor:
    """bool [rows, tokens]: the pairs that the mask hides."""
    position = torch.arange(tokens - rows, tokens, device=device)[:, None]
    token = torch.arange(tokens, device=device)[None, :]
    hidden = torch.zeros(rows, tokens, dtype=torch.bool, device=device)
    if causal:
        hidden |= token > position
    if window_left >= 0:
        hidden |= token < position - window_left
    return hidden


def paged_attention(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    qo_lens: list[int],
    slots: list[Tensor],
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    variant: Variant | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A batch: request i has the next qo_lens[i] rows of q, and its tokens are in the slots slots[i] (int64)
    of k_slots, v_slots [slots, num_kv_heads, head_dim].

    Returns float64 o [sum of qo_lens, num_qo_heads, head_dim_v] and lse [sum of qo_lens, num_qo_heads].
    """
    outputs, sums, begin = [], [], 0
    for request, (qo_len, own) in enumerate(zip(qo_lens, slots, strict=True)):
        o, lse = attention(
            q[begin : begin + qo_len],
            k_slots[own],
            v_slots[own],
            sm_scale=sm_scale,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            variant=variant,
            sinks=sinks,
            request=request,
            first_row=begin,
        )
        outputs.append(o)
        sums.append(lse)
        begin += qo_len
    if not outputs:
        return q.new_zeros((0, *q.shape[1:]), dtype=torch.float64), q.new_zeros(
            (0, q.shape[1]), dtype=torch.float64
        )
    return torch.cat(outputs), torch.cat(sums)
