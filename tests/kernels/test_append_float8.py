"""Appends to 8-bit caches: K and V are divided by the scales, and rounded."""

from __future__ import annotations

import pytest
import torch
from float8_cases import DTYPES

from attn_backend import KVCache, append_kv, append_qkv


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_append_rounds(device: torch.device, dtype: torch.dtype, source: torch.dtype) -> None:
    """Divided by the scales, rounded to nearest even, saturated; as torch rounds values in range."""
    if device.type == "cuda" and source == torch.float32:
        pytest.skip("no float32 on CUDA")
    generator = torch.Generator(device).manual_seed(5)
    magnitudes = torch.logspace(-6, 6, 40, device=device)[:, None, None]
    k, v = (
        (torch.randn(40, 3, 64, device=device, generator=generator) * magnitudes).to(source) for _ in range(2)
    )
    k[3, 0, 0], k[4, 1, 1], k[5, 2, 2] = torch.nan, torch.inf, -torch.inf
    slots = torch.randperm(64, device=device, generator=generator)[:40]
    limit = torch.finfo(dtype).max
    for scale in (None, 0.5, torch.tensor([0.125, 3.0, 0.7], device=device)):
        caches = [torch.zeros(4, 16, 3, 64, device=device).to(dtype) for _ in range(4)]
        of_append, of_qkv = (
            KVCache.from_pair(*pair, k_scale=scale, v_scale=scale) for pair in (caches[:2], caches[2:])
        )
        append_kv(k, v, of_append, slots)
        q = torch.randn(40, 2, 64, device=device, generator=generator).to(source)
        append_qkv(q, k, v, of_qkv, slots)
        divisor = (
            torch.ones(3, device=device) if scale is None else torch.as_tensor(scale, device=device).expand(3)
        )
        for x, cache, other in zip((k, v), caches[:2], caches[2:], strict=True):
            wanted = (x.float() / divisor[:, None]).clamp(-limit, limit).to(dtype)
            got = cache.view(64, 3, 64)[slots]
            assert torch.equal(got.float().nan_to_num(1e9), wanted.float().nan_to_num(1e9))
            assert torch.equal(got.float().isnan(), x.isnan())
            assert torch.equal(other.view(torch.uint8), cache.view(torch.uint8))


def test_append_rounds_heads_of_different_widths(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(6)
    k, v = (
        torch.randn(9, 2, columns, device=device, generator=generator).bfloat16() for columns in (192, 72)
    )
    k_cache, v_cache = (torch.zeros(5, 4, 2, columns, device=device).to(DTYPES[0]) for columns in (192, 72))
    slots = torch.tensor([3, 19, -1, 0, 17, 16, 20, 11, 5], device=device)
    scale = torch.tensor([0.5, 3.0], device=device)
    append_kv(k, v, KVCache.from_pair(k_cache, v_cache, k_scale=0.25, v_scale=scale), slots)
    written = [i for i in range(9) if i not in (2, 6)]
    for x, cache, divisor in ((k, k_cache, torch.full_like(scale, 0.25)), (v, v_cache, scale)):
        wanted = torch.zeros(20, 2, x.shape[2], device=device).to(DTYPES[0])
        wanted[slots[written]] = (x[written].float() / divisor[:, None]).to(DTYPES[0])
        assert torch.equal(cache.flatten(0, 1).view(torch.uint8), wanted.view(torch.uint8))
    with pytest.raises(ValueError, match=r"v\.shape is \[9, 2, 64\], must be .*head_dim_v = 72"):
        append_kv(k, v[..., :64], KVCache.from_pair(k_cache, v_cache), slots)


def test_append_of_8_bits_copies(device: torch.device) -> None:
    cache = KVCache.from_pair(
        *(torch.zeros(2, 4, 1, 16, device=device).to(DTYPES[0]) for _ in range(2)), k_scale=0.25
    )
    k = torch.randn(3, 1, 16, device=device).to(DTYPES[0])
    append_kv(k, k, cache, torch.tensor([7, 0, 2], device=device))
    assert torch.equal(cache.k.flatten(0, 1)[[7, 0, 2]].view(torch.uint8), k.view(torch.uint8))
