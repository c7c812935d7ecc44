"""The oracle compared with torch's scaled_dot_product_attention, and on cases that torch does not cover."""

from __future__ import annotations

import math

import oracle
import pytest
import torch

generator = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("group_size", [1, 3, 4])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 37), (5, 37), (37, 37)])
@pytest.mark.parametrize(
    ("causal", "window_left"), [(False, -1), (True, -1), (True, 6), (False, 6), (True, 0)]
)
def test_agrees_with_sdpa(rows: int, tokens: int, group_size: int, causal: bool, window_left: int) -> None:
    q, k, v = randn(rows, 2 * group_size, 16), randn(tokens, 2, 16), randn(tokens, 2, 16)
    positions = range(tokens - rows, tokens)
    visible = torch.tensor(
        [
            [(not causal or t <= p) and (window_left < 0 or p - t <= window_left) for t in range(tokens)]
            for p in positions
        ]
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=visible, scale=0.3, enable_gqa=True
    ).transpose(0, 1)
    o, lse = oracle.attention(q, k, v, sm_scale=0.3, causal=causal, window_left=window_left)
    torch.testing.assert_close(o, expected)

    logits = torch.einsum("rhd,thd->rht", q, k.repeat_interleave(group_size, 1)) * 0.3
    expected_lse = logits.masked_fill(~visible[:, None], -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected_lse)


def test_soft_cap() -> None:
    q, k, v = 5 * randn(3, 2, 8), randn(9, 2, 8), randn(9, 2, 8)
    logits = torch.einsum("rhd,thd->rht", q, k) * 8**-0.5
    capped = 2 * torch.tanh(logits / 2)
    o, lse = oracle.attention(q, k, v, causal=False, logits_soft_cap=2.0)
    torch.testing.assert_close(lse, capped.logsumexp(-1))
    torch.testing.assert_close(o, torch.einsum("rht,thd->rhd", capped.softmax(-1), v))


def test_rows_that_see_nothing() -> None:
    q, k, v = randn(5, 2, 8), randn(3, 1, 8), randn(3, 1, 8)
    o, lse = oracle.attention(q, k, v)  # positions -2 .. 2
    assert (o[:2] == 0).all()
    assert (lse[:2] == -math.inf).all()
    assert lse[2:].isfinite().all()
    torch.testing.assert_close(o[2], v[0].expand(2, 8))
    o, lse = oracle.attention(q, k[:0], v[:0], causal=False)
    assert (o == 0).all()
    assert (lse == -math.inf).all()


def test_batch_is_its_requests() -> None:
    q, k, v = randn(6, 4, 8), randn(20, 2, 8), randn(20, 2, 8)
    slots = [torch.tensor([3, 1, 4]), torch.tensor([], dtype=torch.int64), torch.tensor([9, 3, 1, 19])]
    o, lse = oracle.paged_attention(q, k, v, [2, 1, 3], slots, window_left=1)
    for i, begin, end in [(0, 0, 2), (1, 2, 3), (2, 3, 6)]:
        expected_o, expected_lse = oracle.attention(q[begin:end], k[slots[i]], v[slots[i]], window_left=1)
        assert torch.equal(o[begin:end], expected_o)
        assert torch.equal(lse[begin:end], expected_lse)
