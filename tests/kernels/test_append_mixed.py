"""append into caches of the other 16-bit type: values are rounded, and clamped to the float16 range."""

from __future__ import annotations

import pytest
import torch
from append_problems import HEADS, check, empty_cache, expected, frequencies
from mixed_cases import MIXTURES

from attn_backend import KVCache, Rotary, append_kv, append_mla_kv, append_qkv


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max if dtype == torch.float16 else torch.inf
    return x.double().clamp(-limit, limit).to(dtype)


def numbers(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Values of every magnitude, some above and some below the float16 range; some infinite, some NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-30, 18, shape, generator=generator)
    x[torch.rand(shape, generator=generator) < 0.02] = torch.inf
    x[torch.rand(shape, generator=generator) < 0.02] = torch.nan
    return x.to(dtype).to(device)


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 8, 512])
def test_append_kv(device: torch.device, dtypes: tuple[torch.dtype, torch.dtype], head_dim: int) -> None:
    """Aligned and unaligned, with skipped slots."""
    dtype, kv_dtype = dtypes
    for form, layout, offset in (("pair", "NHD", 0), ("tensor", "HND", 3), ("packed", "NHD", 0)):
        kv, storage = empty_cache(form, layout, 5, 4, head_dim, kv_dtype, device)
        k, v = (
            numbers(9, HEADS, head_dim + offset, dtype=dtype, device=device, seed=seed)[..., offset:]
            for seed in range(2)
        )
        slots = torch.tensor([3, 19, -1, 0, 17, 16, 20, 5], device=device)
        append_kv(k, v, kv, slots)
        written = [i for i in range(8) if i not in (2, 6)]
        page, place = slots[written] // 4, slots[written] % 4
        for cache, given in ((kv.k, k), (kv.v, v)):
            torch.testing.assert_close(
                cache[page, place], rounded(given[written], kv_dtype), rtol=0, atol=0, equal_nan=True
            )
        kv.k[page, place] = kv.v[page, place] = torch.nan
        assert storage.isnan().all(), "nothing else was written"


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_append_qkv(device: torch.device, dtypes: tuple[torch.dtype, torch.dtype], interleaved: bool) -> None:
    """With and without norms, aligned and not: covers each kernel. Q keeps its dtype."""
    dtype, kv_dtype = dtypes
    for seed, (head_dim, rotary_dim, offset, norms) in enumerate(
        ((128, 128, 0, 2), (64, 32, 0, 0), (72, 64, 3, 1))
    ):
        generator = torch.Generator().manual_seed(seed)
        kv, _ = empty_cache("pair", "NHD", 5, 4, head_dim, kv_dtype, device)
        qkv = (
            torch.randn(9, 4 + 2 * HEADS, head_dim + offset, generator=generator)
            .to(dtype)
            .to(device)[..., offset:]
        )
        q, k, v = qkv.clone().split([4, HEADS, HEADS], dim=1)
        weights = [
            torch.randn(head_dim, generator=generator).to(dtype).to(device) if i < norms else None
            for i in range(2)
        ]
        angles = torch.arange(50)[:, None] * frequencies(rotary_dim)
        rotary = Rotary(
            torch.cat([angles.cos(), angles.sin()], dim=-1)
            .to(dtype if seed % 2 else torch.float32)
            .to(device),
            interleaved,
        )
        slots, positions = (
            torch.randperm(20, generator=generator)[:9].to(device),
            torch.arange(9, device=device) * 5,
        )
        wanted = [
            expected(x, positions, rotary, weight, 1e-5, 1.0)
            for x, weight in zip((q, k), weights, strict=True)
        ]
        out = append_qkv(
            q,
            k,
            v,
            kv,
            slots,
            rotary=rotary,
            positions=positions,
            q_norm=weights[0],
            k_norm=weights[1],
            norm_eps=1e-5,
            norm_offset=1.0,
        )
        assert out is q
        check(out, wanted[0])
        page, place = slots // 4, slots % 4
        check(kv.k[page, place], wanted[1])
        assert torch.equal(kv.v[page, place], rounded(v, kv_dtype))


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
def test_append_mla_kv(device: torch.device, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    dtype, kv_dtype = dtypes
    cache = torch.full((3, 4, 576), torch.nan, dtype=kv_dtype, device=device)
    rows = numbers(5, 576, dtype=dtype, device=device)
    append_mla_kv(
        rows[:, :512],
        rows[:, 512:],
        KVCache.from_latent(cache, head_dim_v=512),
        torch.arange(5, device=device) + 2,
    )
    torch.testing.assert_close(
        cache.flatten(0, 1)[2:7], rounded(rows, kv_dtype), rtol=0, atol=0, equal_nan=True
    )
    assert cache.flatten(0, 1)[[0, 1, 7, 11]].isnan().all()


def test_refusals(device: torch.device) -> None:
    cache = torch.zeros(3, 4, HEADS, 64, dtype=torch.float16, device=device)
    kv, slots = KVCache.from_pair(cache, cache.clone()), torch.arange(2, device=device)
    k = torch.zeros(2, HEADS, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"v.dtype is float16, must be bfloat16"):
        append_kv(k, k.half(), kv, slots)
    with pytest.raises(ValueError, match=r"k.dtype is float32, must be float16"):
        append_kv(k.float(), k.float(), kv, slots)
    narrow = KVCache.from_pair(cache[..., :60], cache[..., :60])
    with pytest.raises(ValueError, match=r"kv.k.shape\[3\] \(head_dim\) is 60, must be a multiple of 8"):
        append_kv(k[..., :60], k[..., :60], narrow, slots)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"kv.k.dtype is float16, must be float32"):
            append_qkv(k.float(), k.float(), k.float(), kv, slots)
