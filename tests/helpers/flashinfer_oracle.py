"""FlashInfer's attention in float64, request by request, and random batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attn_backend.variants.builtin import alibi_slopes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_left: int = -1,
    soft_cap: float = 0.0,
    sm_scale: float | None = None,
    alibi: bool = False,
    rope: tuple[float, float] | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o [q_len, heads, head_dim] and lse [q_len, heads] to base 2. mask: bool [q_len, kv_len], replaces
    causal. rope: (scale, theta).
    """
    q, k, v = q.cpu().double(), k.cpu().double(), v.cpu().double()
    q_len, heads, head_dim = q.shape
    kv_len = k.shape[0]
    if rope is not None:
        q, k = (
            rotated(q, torch.arange(q_len) + kv_len - q_len, *rope),
            rotated(k, torch.arange(kv_len), *rope),
        )
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("qhd,khd->qhk", q, k) * (head_dim**-0.5 if sm_scale is None else sm_scale)
    # from the query to the token
    distance = torch.arange(kv_len)[None, :] - (torch.arange(q_len) + kv_len - q_len)[:, None]
    if alibi:
        s = s + alibi_slopes(heads).double()[None, :, None] * distance[:, None, :]
    if soft_cap:
        s = soft_cap * torch.tanh(s / soft_cap)
    seen = (
        mask.cpu()
        if mask is not None
        else distance <= 0
        if causal
        else torch.ones(q_len, kv_len, dtype=torch.bool)
    )
    if window_left >= 0:
        seen = seen & (-distance <= window_left)
    s = s.masked_fill(~seen[:, None, :], -math.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.cpu().double()[None, :, None].expand(q_len, heads, 1)), -1)
    lse = torch.logsumexp(s, -1)
    p = torch.where(lse[..., None].isneginf(), 0.0, (s - lse[..., None]).exp())
    return torch.einsum("qhk,khd->qhd", p[..., :kv_len], v), lse / math.log(2)


def rotated(
    x: Tensor,
    positions: Tensor,
    scale: float,
    theta: float,
    rotary_dim: int | None = None,
    interleave: bool = False,
) -> Tensor:
    """x [rows, heads, head_dim] in float64, rotated by the angles of its rows' positions."""
    x = x.cpu().double()
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    angles = (
        positions.cpu().double()[:, None, None]
        * theta ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
        / scale
    )
    turned, pairs = x.clone(), rotary_dim // 2
    first, second = (
        (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
        if interleave
        else (slice(pairs), slice(pairs, rotary_dim))
    )
    turned[..., first] = x[..., first] * angles.cos() - x[..., second] * angles.sin()
    turned[..., second] = x[..., second] * angles.cos() + x[..., first] * angles.sin()
    return turned


@dataclass
class Batch:
    """Requests over a paged cache, and the same K and V stored contiguously."""

    q: Tensor
    k: Tensor
    v: Tensor
    cache: Tensor  # [pages, 2, page_size, num_kv_heads, head_dim]
    qo_indptr: Tensor
    kv_indptr: Tensor  # for k and v
    page_indptr: Tensor
    page_indices: Tensor
    last_page_len: Tensor
    page_size: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """num_qo_heads, num_kv_heads, head_dim."""
        return self.q.shape[1], self.k.shape[1], self.q.shape[2]

    def paged(self, layout: str = "NHD") -> Tensor:
        return self.cache if layout == "NHD" else self.cache.transpose(2, 3).contiguous()

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.page_indptr, self.page_indices, self.last_page_len

    def expected(self, **options: object) -> tuple[Tensor, Tensor]:
        masks = options.pop("masks", None)
        parts = []
        for i in range(len(self.qo_indptr) - 1):
            rows = slice(int(self.qo_indptr[i]), int(self.qo_indptr[i + 1]))
            tokens = slice(int(self.kv_indptr[i]), int(self.kv_indptr[i + 1]))
            mask = None if masks is None else masks[i]  # type: ignore[index]
            parts.append(attention(self.q[rows], self.k[tokens], self.v[tokens], mask=mask, **options))  # type: ignore[arg-type]
        o, lse = zip(*parts, strict=True)
        return torch.cat(o), torch.cat(lse)


def make_batch(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    heads: tuple[int, int, int] = (4, 2, 64),
    page_size: int = 5,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """Pages are anywhere in the cache; unused tokens hold large numbers."""
    generator = torch.Generator().manual_seed(seed)
    num_qo_heads, num_kv_heads, head_dim = heads

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    pages = [-(-length // page_size) for length in kv_lens]
    total = sum(pages)
    cache = torch.full((total + 3, 2, page_size, num_kv_heads, head_dim), 1e4, dtype=dtype)
    indices = torch.randperm(total + 3, generator=generator)[:total].to(torch.int32)
    k, v = randn(sum(kv_lens), num_kv_heads, head_dim), randn(sum(kv_lens), num_kv_heads, head_dim)
    entry = token = 0
    for length, count in zip(kv_lens, pages, strict=True):
        for i in range(length):
            page = int(indices[entry + i // page_size])
            cache[page, 0, i % page_size], cache[page, 1, i % page_size] = k[token + i], v[token + i]
        entry, token = entry + count, token + length
    tensors = (
        randn(sum(q_lens), num_qo_heads, head_dim),
        k,
        v,
        cache,
        _indptr(q_lens),
        _indptr(kv_lens),
        _indptr(pages),
        indices,
    )
    last = torch.tensor(
        [(length - 1) % page_size + 1 if length else 0 for length in kv_lens], dtype=torch.int32
    )
    return Batch(*(tensor.to(device) for tensor in (*tensors, last)), page_size)


def _indptr(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def check(
    found: Tensor | tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 2e-3
) -> None:
    """Output, and lse if there is one."""
    o, lse = found if isinstance(found, tuple) else (found, None)
    torch.testing.assert_close(o.cpu().double(), expected[0], rtol=tolerance, atol=tolerance)
    if lse is not None:
        torch.testing.assert_close(lse.cpu().double(), expected[1], rtol=1e-3, atol=1e-3)


def workspace(device: str) -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device=device)
