"""Merged attention states in tensors, compared with float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_backend import Attention, BSRView, KVCache, PageTable, merge_state, merge_states

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def merged(o: Tensor, lse: Tensor, log2: bool) -> tuple[Tensor, Tensor]:
    """o [states, heads, head_dim], lse [states, heads], in float64."""
    natural = lse.double() * (math.log(2) if log2 else 1.0)
    total = torch.logsumexp(natural, 0)
    weights = torch.where(total.isneginf(), 0.0, (natural - total).exp())
    return torch.einsum("sh,shd->hd", weights, o.double()), total / (math.log(2) if log2 else 1.0)


def states(*shape: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Some of them have seen nothing."""
    o, lse = torch.randn(*shape, dtype=dtype), torch.randn(*shape[:-1]) * 3
    lse[torch.rand(lse.shape) < 0.2] = -math.inf
    return o.to(device), lse.to(device)


def check(found: tuple[Tensor, Tensor], expected: list[tuple[Tensor, Tensor]]) -> None:
    o, lse = (torch.stack(parts) for parts in zip(*expected, strict=True))
    tolerance = TOLERANCE[found[0].dtype]
    torch.testing.assert_close(found[0].cpu().double(), o, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1].cpu().double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [8, 13, 64, 256])
@pytest.mark.parametrize("log2", [False, True])
def test_states_of_each_row(device: str, dtype: torch.dtype, head_dim: int, log2: bool) -> None:
    torch.manual_seed(head_dim)
    o, lse = states(7, 5, 3, head_dim, dtype=dtype, device=device)
    found = merge_states(o, lse, log2=log2)
    assert found[0].dtype == dtype
    check(found, [merged(o[row].cpu(), lse[row].cpu(), log2) for row in range(7)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_states_counted_by_an_indptr(device: str, index_dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    counts = torch.tensor([3, 0, 1, 70, 2])
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    o, lse = states(int(indptr[-1]), 4, 64, dtype=torch.bfloat16, device=device)
    found = merge_states(o, lse, indptr.to(index_dtype).to(device))
    parts = list(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True))
    check(found, [merged(o[begin:end].cpu(), lse[begin:end].cpu(), False) for begin, end in parts])
    assert found[1][1].isneginf().all()
    assert not found[0][1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_place", [False, True])
def test_two_states_and_a_mask(device: str, in_place: bool) -> None:
    torch.manual_seed(2)
    o_a, lse_a = states(9, 4, 128, dtype=torch.float16, device=device)
    o_b, lse_b = states(9, 4, 128, dtype=torch.float16, device=device)
    mask = torch.arange(9, device=device) % 3 != 1
    expected = [
        merged(torch.stack((o_a[r], o_b[r])).cpu(), torch.stack((lse_a[r], lse_b[r])).cpu(), False)
        for r in range(9)
    ]
    left = o_a.clone(), lse_a.clone()
    out, out_lse = (o_a, lse_a) if in_place else (o_a.clone(), lse_a.clone())
    found = merge_state(o_a, lse_a, o_b, lse_b, out=out, out_lse=out_lse, mask=mask)
    assert found[0] is out
    check((out[mask], out_lse[mask]), [expected[row] for row in mask.nonzero().flatten().tolist()])
    for was, now in zip(left, found, strict=True):
        assert torch.equal(was[~mask], now[~mask])


@pytest.mark.parametrize("device", DEVICES)
def test_strided_states(device: str) -> None:
    torch.manual_seed(3)
    o, lse = states(6, 2, 4, 72, dtype=torch.float16, device=device)
    (o_a, o_b), (lse_a, lse_b) = o[..., 8:].unbind(1), lse.unbind(1)
    check(
        merge_state(o_a, lse_a, o_b, lse_b),
        [merged(o[row, ..., 8:].cpu(), lse[row].cpu(), False) for row in range(6)],
    )


def test_merging_is_associative() -> None:
    torch.manual_seed(4)
    (o_a, lse_a), (o_b, lse_b), (o_c, lse_c) = (
        states(5, 2, 32, dtype=torch.float32, device="cpu") for _ in range(3)
    )
    left = merge_state(*merge_state(o_a, lse_a, o_b, lse_b), o_c, lse_c)
    right = merge_state(o_a, lse_a, *merge_state(o_b, lse_b, o_c, lse_c))
    both = merge_states(torch.stack((o_a, o_b, o_c), 1), torch.stack((lse_a, lse_b, lse_c), 1))
    for one, other, third in zip(left, right, both, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, third)


def test_no_rows() -> None:
    o, lse = merge_states(torch.empty(0, 3, 2, 8), torch.empty(0, 3, 2))
    assert o.shape == (0, 2, 8)
    assert lse.shape == (0, 2)


STATES, LSE = torch.zeros(4, 2, 8), torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: merge_states(STATES, LSE), "o is a float32 tensor of shape"),
        (
            lambda: merge_states(STATES.unsqueeze(1).double(), LSE.unsqueeze(1)),
            "o.dtype is float64, must be float32, float16 or bfloat16",
        ),
        (
            lambda: merge_states(STATES.unsqueeze(1).bool(), LSE.unsqueeze(1)),
            "o.dtype is bool, must be float32, float16 or bfloat16",
        ),
        (lambda: merge_states(STATES.unsqueeze(1), LSE), "lse.shape is"),
        (lambda: merge_states(STATES.unsqueeze(1), LSE.unsqueeze(1).double()), "lse.dtype is float64"),
        (lambda: merge_states(STATES, LSE, torch.zeros(3)), "indptr.dtype is float32"),
        (lambda: merge_states(STATES, LSE, torch.zeros(0, dtype=torch.int32)), "indptr is"),
        (lambda: merge_state(STATES, LSE, STATES[:3], LSE), "o_b.shape is"),
        (lambda: merge_state(STATES, LSE, STATES.half(), LSE), "o_b.dtype is float16"),
        (lambda: merge_state(STATES, LSE, torch.zeros(4, 2, 16)[..., :8], LSE), "o_b.stride"),
        (lambda: merge_state(STATES, LSE, STATES, LSE.T.contiguous().T), "lse_b.stride"),
        (lambda: merge_state(STATES, LSE, STATES, LSE, mask=torch.zeros(3, dtype=torch.bool)), "mask.shape"),
        (lambda: merge_state(STATES, LSE, STATES, LSE, out=torch.zeros(4, 2, 9)), "out.shape"),
        (lambda: merge_state(STATES, LSE, STATES, None), "lse_b is None"),  # type: ignore[arg-type]
        (lambda: merge_state(STATES, LSE, STATES, LSE, log2=1), "log2 is 1"),  # type: ignore[arg-type]
    ],
)
def test_refusals(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("device", DEVICES)
def test_a_prefix_in_tensors_of_its_own(device: str) -> None:
    """Merging two runs over two caches gives the result of one run over all tokens."""
    prefix_len, own_lens, heads, kv_heads, head_dim = 70, [9, 33, 20], 8, 2, 64
    q = torch.randn(len(own_lens), heads, head_dim, device=device).bfloat16()
    prefix = torch.randn(2, prefix_len, kv_heads, head_dim, device=device).bfloat16()
    own = torch.randn(2, sum(own_lens), kv_heads, head_dim, device=device).bfloat16()
    attention = Attention(heads, kv_heads, head_dim, device=device, max_rows=16, max_batch=8)

    def indptr(lens: list[int]) -> Tensor:
        return torch.tensor([0, *lens]).cumsum(0).int().to(device)

    def state(rows: list[int], lens: list[int], kv: Tensor) -> tuple[Tensor, Tensor]:
        attention.plan(BSRView(indptr(rows), PageTable.ragged(indptr(lens)), causal=False))
        return attention.run(q, KVCache.from_ragged(*kv), return_lse=True)

    o, lse = merge_state(*state([3], [prefix_len], prefix), *state([1, 1, 1], own_lens, own))
    whole = torch.cat([part for tokens in own.split(own_lens, 1) for part in (prefix, tokens)], 1)
    expected_o, expected_lse = state([1, 1, 1], [prefix_len + length for length in own_lens], whole)
    torch.testing.assert_close(o, expected_o, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
    buffers = torch.empty_like(q), torch.empty(3, heads, device=device)
    given = attention.run(q, KVCache.from_ragged(*whole), out=buffers[0], lse=buffers[1], return_lse=True)
    assert given[0] is buffers[0]
    assert given[1] is buffers[1]
    assert torch.equal(given[0], expected_o)
