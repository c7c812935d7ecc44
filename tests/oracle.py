"""Attention in float64 from its definition. It shares nothing with the package: tokens are gathered by plain slot numbers, and masks are whole matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """One request: q [rows, num_qo_heads, head_dim] over k, v [tokens, num_kv_heads, head_dim], on any device, in any float dtype.

    Row i stands at position tokens - rows + i. Returns float64 o [rows, num_qo_heads, head_dim] and lse [rows, num_qo_heads] (natural logarithm); a row that
    sees no token has o = 0 and lse = -inf.
    """
    rows, num_qo_heads, head_dim = q.shape
    tokens, num_kv_heads, _ = k.shape
    group_size = num_qo_heads // num_kv_heads
    if rows == 0 or tokens == 0:
        return q.new_zeros(q.shape, dtype=torch.float64), q.new_full((rows, num_qo_heads), -torch.inf, dtype=torch.float64)

    # Heads in front, the query heads of one KV head as rows of one matrix: [num_kv_heads, group_size * rows, head_dim].
    queries = q.double().view(rows, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, group_size * rows, head_dim)
    logits = queries @ k.double().permute(1, 2, 0) * (head_dim**-0.5 if sm_scale is None else sm_scale)
    if logits_soft_cap > 0:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    logits = logits.view(num_kv_heads, group_size, rows, tokens)
    hidden = hidden_pairs(rows, tokens, causal, window_left, q.device)
    logits.masked_fill_(hidden, -torch.inf)

    peak = logits.amax(dim=-1, keepdim=True)
    weights = torch.exp(logits - peak.clamp_min(torch.finfo(torch.float64).min))  # a row that sees nothing: exp(-inf) = 0
    total = weights.sum(dim=-1, keepdim=True)
    lse = (peak + torch.log(total)).squeeze(-1)
    weights = weights / total.clamp_min(1e-300)
    o = weights.view(num_kv_heads, group_size * rows, tokens) @ v.double().transpose(0, 1)
    return o.view(num_kv_heads, group_size, rows, head_dim).permute(2, 0, 1, 3).reshape(q.shape), lse.permute(2, 0, 1).reshape(rows, num_qo_heads)


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
) -> tuple[Tensor, Tensor]:
    """A batch: request i has the next qo_lens[i] rows of q; its tokens are in the slots slots[i] (int64) of k_slots, v_slots [slots, num_kv_heads, head_dim].

    Returns float64 o [sum of qo_lens, num_qo_heads, head_dim] and lse [sum of qo_lens, num_qo_heads].
    """
    outputs, sums, begin = [], [], 0
    for qo_len, own in zip(qo_lens, slots, strict=True):
        o, lse = attention(
            q[begin : begin + qo_len],
            k_slots[own],
            v_slots[own],
            sm_scale=sm_scale,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
        )
        outputs.append(o)
        sums.append(lse)
        begin += qo_len
    if not outputs:
        return q.new_zeros((0, *q.shape[1:]), dtype=torch.float64), q.new_zeros((0, q.shape[1]), dtype=torch.float64)
    return torch.cat(outputs), torch.cat(sums)
