"""append_kv: every storage form, skipped slots, and refusals."""

from __future__ import annotations

import pytest
import torch
from append_problems import HEADS, empty_cache

from attn_backend import KVCache, append_kv


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["tensor", "pair", "packed", "slots"])
def test_every_form(device: torch.device, form: str, layout: str, page_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(page_size)
    for head_dim in (64, 128) if device.type == "cuda" else (8, 80, 128):
        pages, tokens = 40, 25
        kv, storage = empty_cache(form, layout, pages, page_size, head_dim, dtype, device)
        before = storage.clone()
        slots = torch.randperm(pages * page_size, generator=generator)[:tokens]
        skipped = torch.tensor([-1, -(2**31), pages * page_size, 2**31 - 1])
        slots[[0, 7, 11, 24]] = skipped
        k, v = (
            torch.randn(tokens, HEADS, head_dim, generator=generator).to(dtype).to(device) for _ in range(2)
        )
        kept = [i for i in range(tokens) if i not in (0, 7, 11, 24)]
        for index_dtype in (torch.int32, torch.int64):
            storage.copy_(before)
            append_kv(k, v, kv, slots.to(device, index_dtype))
            written_k, written_v = (view.clone() for view in (kv.k, kv.v))
            for i in kept:
                page, place = divmod(int(slots[i]), page_size)
                assert torch.equal(written_k[page, place], k[i])
                assert torch.equal(written_v[page, place], v[i])
            # Everything else is unchanged: NaN.
            assert int((~storage.isnan()).sum()) == 2 * len(kept) * HEADS * head_dim


def test_strided_input_and_padding(device: torch.device) -> None:
    """k and v as slices of a fused projection, with more tokens than slots."""
    qkv = torch.randn(9, 10, 64, device=device).bfloat16()
    k, v = qkv[:, 4:7], qkv[:, 7:]
    kv, storage = empty_cache("pair", "HND", 4, 4, 64, torch.bfloat16, device)
    slots = torch.tensor([5, 0, 15, -1, 6], device=device)
    append_kv(k, v, kv, slots)
    for i, slot in enumerate([5, 0, 15, None, 6]):
        if slot is not None:
            assert torch.equal(kv.k[slot // 4, slot % 4], k[i])
            assert torch.equal(kv.v[slot // 4, slot % 4], v[i])
    assert int((~storage.isnan()).sum()) == 2 * 4 * HEADS * 64


@pytest.mark.parametrize("form", ["slots", "view of K"])
def test_append_writes_rows_of_different_widths(device: torch.device, form: str) -> None:
    generator = torch.Generator(device).manual_seed(1)
    k = torch.randn(9, 2, 192, device=device, generator=generator).bfloat16()
    v = (
        k[..., :128]
        if form == "view of K"
        else torch.randn(9, 2, 128, device=device, generator=generator).bfloat16()
    )
    k_cache = torch.full((40, 2, 192), torch.nan, dtype=torch.bfloat16, device=device)
    v_cache = (
        k_cache[..., :128]
        if form == "view of K"
        else torch.full((40, 2, 128), torch.nan, dtype=torch.bfloat16, device=device)
    )
    slots = torch.tensor([3, 39, -1, 0, 17, 16, 40, 21, 5], device=device)
    append_kv(k, v, KVCache.from_slots(k_cache, v_cache, 4), slots)
    written = [i for i in range(9) if i not in (2, 6)]
    places = slots[written]
    assert k_cache[places].equal(k[written])
    assert v_cache[places].equal(v[written])
    untouched = torch.ones(40, dtype=torch.bool, device=device)
    untouched[places] = False
    assert k_cache[untouched].isnan().all()
    assert v_cache[untouched].isnan().all()


@pytest.mark.parametrize("of_v", ["heads first", "dense", "wide tokens", "wide heads"])
def test_k_and_v_lie_in_different_ways(device: torch.device, of_v: str) -> None:
    """K and V of the tokens, and both halves of the cache, have different token and head strides."""
    tokens, head_dim = 9, 64
    k = torch.randn(tokens, 10, head_dim, device=device).bfloat16()[:, 4 : 4 + HEADS]
    random_v = torch.randn(tokens, HEADS, head_dim, device=device).bfloat16()
    v = {
        "heads first": torch.empty(HEADS, tokens, head_dim, dtype=torch.bfloat16, device=device).transpose(
            0, 1
        ),
        "dense": torch.empty(tokens, HEADS, head_dim, dtype=torch.bfloat16, device=device),
        "wide tokens": torch.empty(tokens, HEADS + 9, head_dim, dtype=torch.bfloat16, device=device)[
            :, 2 : 2 + HEADS
        ],
        "wide heads": torch.empty(tokens, HEADS, 2 * head_dim, dtype=torch.bfloat16, device=device)[
            ..., head_dim:
        ],
    }[of_v].copy_(random_v)
    k_pages = torch.full((5, 4, HEADS, head_dim), torch.nan, dtype=torch.bfloat16, device=device)
    v_pages = torch.full((5, HEADS, 6, 2 * head_dim), torch.nan, dtype=torch.bfloat16, device=device)
    kv = KVCache(k_pages, v_pages[:, :, 1:5, :head_dim].transpose(1, 2))
    slots = [19, 0, 7, -1, 4, 5, 16, 11, 2]
    append_kv(k, v, kv, torch.tensor(slots, device=device))
    for i, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(kv.k[slot // 4, slot % 4], k[i])
            assert torch.equal(kv.v[slot // 4, slot % 4], random_v[i])
    for pages in (k_pages, v_pages):
        assert int((~pages.isnan()).sum()) == 8 * HEADS * head_dim


def test_slots_beyond_int32_are_skipped(device: torch.device) -> None:
    kv, storage = empty_cache("pair", "NHD", 4, 4, 64, torch.bfloat16, device)
    k = torch.zeros(4, HEADS, 64, dtype=torch.bfloat16, device=device)
    append_kv(k, k, kv, torch.tensor([2**32, 2**32 + 5, -(2**32) + 3, 2**63 - 1], device=device))
    assert storage.isnan().all()


def test_no_tokens(device: torch.device) -> None:
    kv, storage = empty_cache("tensor", "NHD", 4, 4, 64, torch.bfloat16, device)
    k = torch.zeros(0, HEADS, 64, dtype=torch.bfloat16, device=device)
    append_kv(k, k, kv, torch.zeros(0, dtype=torch.int64, device=device))
    assert storage.isnan().all()


def test_refuses(device: torch.device) -> None:
    kv, storage = empty_cache("pair", "NHD", 4, 4, 64, torch.bfloat16, device)
    good = torch.zeros(3, HEADS, 64, dtype=torch.bfloat16, device=device)
    slots = torch.zeros(3, dtype=torch.int32, device=device)
    transposed = torch.zeros(3, 64, HEADS, dtype=torch.bfloat16, device=device).transpose(1, 2)
    for argument, arguments in [
        ("k", (good.float(), good, kv, slots)),
        ("v", (good.half(), good, kv, slots)),
        ("v", (good, good.half(), kv, slots)),
        ("k", (good[:, :2], good, kv, slots)),
        ("v", (good, good[:, :2], kv, slots)),
        ("k", (good[..., :32], good, kv, slots)),
        ("k", (good[0], good, kv, slots)),
        ("k", (good[:2], good, kv, slots)),
        ("v", (good, good[:2], kv, slots)),
        ("k", (transposed, good, kv, slots)),
        ("v", (good, transposed, kv, slots)),
        ("k", (None, good, kv, slots)),
        ("v", (good, [0.0], kv, slots)),
        ("kv", (good, good, None, slots)),
        ("kv", (good, good, good, slots)),
        ("slots", (good, good, kv, [0, 1, 2])),
        ("slots", (good, good, kv, slots.float())),
        ("slots", (good, good, kv, slots.short())),
        ("slots", (good, good, kv, slots[None])),
        ("slots", (good, good, kv, torch.zeros(6, dtype=torch.int32, device=device)[::2])),
    ]:
        with pytest.raises(ValueError, match=rf"^{argument}\b.* is .*, must be "):
            append_kv(*arguments)
    if device.type == "cuda":
        for argument, arguments in [
            ("k", (good.cpu(), good, kv, slots)),
            ("v", (good, good.cpu(), kv, slots)),
            ("slots", (good, good, kv, slots.cpu())),
        ]:
            with pytest.raises(ValueError, match=rf"^{argument}\b.*device is cpu, must be cuda"):
                append_kv(*arguments)
    assert storage.isnan().all()
