"""Random problems of append_qkv, and the expected writes, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from rotations import rotated
from torch import Tensor

from attn_backend import KVCache, Rotary

HEADS = 3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def frequencies(rotary_dim: int, theta: float = 10000.0) -> Tensor:
    return (1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)).float()


def expected(
    x: Tensor,
    positions: Tensor | None,
    rotary: Rotary | None,
    weight: Tensor | None,
    norm_eps: float,
    norm_offset: float,
) -> Tensor:
    """float64, on the CPU."""
    x = x.double().cpu()
    if weight is not None:
        x = (
            x
            / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + norm_eps)
            * (weight.double().cpu() + norm_offset)
        )
    if rotary is None or positions is None:
        return x
    table = rotary.table.double().cpu()
    if table.ndim == 1:
        angles = positions.cpu().double()[:, None] * table[None, :]
        cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    else:
        rows = table[positions.cpu().long().clamp(0, len(table) - 1)][:, None]
        cosines, sines = rows.chunk(2, dim=-1)
    pairs = cosines.shape[-1]
    result = x.clone()
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if rotary.interleaved
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    result[..., first] = x[..., first] * cosines - x[..., second] * sines
    result[..., second] = x[..., second] * cosines + x[..., first] * sines
    return result


def large_positions() -> Tensor:
    """Up to 10^6, including powers of two and their neighbors, and the largest integer that float32 holds
    exactly."""
    spread = torch.from_numpy(numpy.random.default_rng(5).integers(10**4, 10**6, 200))
    powers = 2 ** torch.arange(14, 24)
    return torch.cat([spread, powers - 1, powers, torch.tensor([10**5, 10**6, 2**24 - 1])])


def check(got: Tensor, wanted: Tensor) -> None:
    """Half a unit in the last place of the largest element of a pair, twice: rotated elements may be small
    differences.
    """
    limit = TOLERANCE[got.dtype] * wanted.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
    assert ((got.double().cpu() - wanted).abs() <= limit).all()


def random_rotary(
    rng: numpy.random.Generator, head_dim: int, dtype: torch.dtype, device: torch.device, max_position: int
) -> Rotary | None:
    if rng.random() < 0.15:
        return None
    rotary_dim = int(rng.integers(1, head_dim // 8 + 1)) * 8 if rng.random() < 0.5 else head_dim
    table = frequencies(rotary_dim, float(rng.choice([10000.0, 500000.0])))
    if rng.random() < 0.6:
        angles = torch.arange(max_position)[:, None].double() * table.double()
        table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(
            torch.float32 if rng.random() < 0.5 else dtype
        )
        if rng.random() < 0.3:  # rows that are not aligned
            wider = torch.full((max_position, rotary_dim + 1), math.nan, dtype=table.dtype)
            wider[:, :rotary_dim] = table
            table = wider.to(device)[:, :rotary_dim]
    return Rotary(table.to(device), interleaved=bool(rng.random() < 0.5))


@dataclass
class Problem:
    """out: None: Q itself."""

    qkv: Tensor  # [tokens and some more, heads of Q, K and V, head_dim]
    num_qo_heads: int
    kv: KVCache
    storage: Tensor  # the cache's memory, plus one page
    slots: Tensor
    positions: Tensor
    rotary: Rotary | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    norm_eps: float
    norm_offset: float
    out: Tensor | None

    def __post_init__(self) -> None:
        self.before = self.qkv.clone()
        self.q, self.k, self.v = self.qkv.split([self.num_qo_heads, HEADS, HEADS], dim=1)
        self.written_q = self.q if self.out is None else self.out

    @property
    def options(self) -> dict[str, Any]:
        """Of append_qkv, without `out`."""
        return {
            "rotary": self.rotary,
            "positions": None if self.rotary is None else self.positions,
            "q_norm": self.q_norm,
            "k_norm": self.k_norm,
            "norm_eps": self.norm_eps,
            "norm_offset": self.norm_offset,
        }

    def check(self, rotation: bool = False) -> None:
        """rotation: K and V were rotated."""
        tokens, q_heads, kv = len(self.slots), self.num_qo_heads, self.kv
        norm = (self.norm_eps, self.norm_offset)
        check(
            self.written_q[:tokens],
            expected(self.before[:tokens, :q_heads], self.positions, self.rotary, self.q_norm, *norm),
        )
        padding = self.written_q[tokens:]
        assert (
            torch.equal(padding, self.before[tokens:, :q_heads])
            if self.out is None
            else bool(padding.isnan().all())
        )
        assert torch.equal(self.qkv[:, q_heads:], self.before[:, q_heads:])
        wanted_k = expected(
            self.before[:tokens, q_heads : q_heads + HEADS], self.positions, self.rotary, self.k_norm, *norm
        )
        wanted_v = self.before[:tokens, q_heads + HEADS :]
        if rotation:
            wanted_k, wanted_v = rotated(wanted_k), rotated(wanted_v)
        written = 0
        for i, slot in enumerate(self.slots.tolist()):
            if 0 <= slot < kv.num_pages * kv.page_size:
                page, place = divmod(slot, kv.page_size)
                check(kv.k[page, place], wanted_k[i])
                if rotation:
                    check(kv.v[page, place], wanted_v[i])
                else:
                    assert torch.equal(kv.v[page, place], wanted_v[i])
                written += 1
        # Everything else is unchanged: NaN.
        assert int((~self.storage.isnan()).sum()) == 2 * written * HEADS * kv.head_dim


def empty_cache(
    form: str,
    layout: str,
    pages: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[KVCache, Tensor]:
    """A cache of NaN, and the tensor (or two, as one) that contains it, with one more page: slots beyond the
    cache must not be written there either.
    """

    def full(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    inner = (page_size, HEADS) if layout == "NHD" else (HEADS, page_size)
    if form == "tensor":
        kv = full(pages + 1, 2, *inner, head_dim)
        return KVCache.from_tensor(kv[:pages], layout), kv
    if form == "packed":
        kv = full(pages + 1, *inner, 2 * head_dim)
        return KVCache.from_packed(kv[:pages], layout), kv
    if form == "slots":
        kv = full(2, (pages + 1) * page_size, HEADS, head_dim)
        return KVCache.from_slots(*kv[:, :-1], page_size), kv
    kv = full(2, pages + 1, *inner, head_dim)
    return KVCache.from_pair(*kv[:, :pages], layout), kv


def random_problem(seed: int, dtype: torch.dtype, device: torch.device) -> Problem:
    rng = numpy.random.default_rng([seed, 71])
    torch.manual_seed(seed)
    head_dim = int(rng.choice([8, 24, 64, 80, 96, 112, 128, 128, 192, 256]))
    q_heads, tokens = int(rng.choice([3, 6, 12, 32])), int(rng.integers(0, 30))
    pages, page_size, max_position = 20, int(rng.choice([1, 3, 16])), 300
    kv, storage = empty_cache(
        ["pair", "packed", "tensor", "slots"][seed % 4],
        ["NHD", "HND"][seed % 2],
        pages,
        page_size,
        head_dim,
        dtype,
        device,
    )
    # The output of one projection, sometimes at an odd offset, possibly with padding after it.
    offset = int(rng.integers(0, 2)) * int(rng.integers(0, 3))
    qkv = (
        torch.randn(tokens + 2, offset + (q_heads + 2 * HEADS) * head_dim, device=device)
        .to(dtype)[:, offset:]
        .unflatten(1, (-1, head_dim))
    )
    slots = torch.from_numpy(rng.permutation(pages * page_size)[:tokens]).to(
        torch.int64 if seed % 2 else torch.int32
    )
    slots[torch.from_numpy(rng.random(len(slots)) < 0.15)] = int(rng.choice([-1, pages * page_size]))
    positions = torch.from_numpy(rng.integers(0, max_position + 20, len(slots))).to(
        torch.int32 if seed % 2 else torch.int64
    )
    norms = [torch.randn(head_dim, device=device).to(dtype) if rng.random() < 0.5 else None for _ in range(2)]
    return Problem(
        qkv,
        q_heads,
        kv,
        storage,
        slots.to(device),
        positions.to(device),
        random_rotary(rng, head_dim, dtype, device, max_position),
        *norms,
        norm_eps=float(rng.choice([1e-6, 1e-2])),
        norm_offset=float(rng.choice([0.0, 1.0])),
        out=None
        if rng.random() < 0.5
        else torch.full((tokens + 2, q_heads, head_dim), math.nan, dtype=dtype, device=device),
    )
