"""append_mla_kv into 8-bit caches: float8 with one scale, and rows with separate scales."""

from __future__ import annotations

import latent_cases
import pytest
import torch

from attn_backend import Attention, BSRView, KVCache, PageTable, append_mla_kv

LATENT, ROPE = 512, 64


def tokens(
    count: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents whose columns differ in magnitude, some of them zeros; RoPE parts are slices of a
    projection.
    """
    generator = torch.Generator().manual_seed(count)
    latent = torch.randn(count, LATENT, generator=generator) * torch.logspace(-6, 3, LATENT)
    latent[1, 128:256] = 0
    latent[2] = 0
    return latent.to(dtype).to(device), torch.randn(count, ROPE + 24, generator=generator).to(dtype).to(
        device
    )[:, 24:]


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("row_bytes", [656, 704])
def test_rows_with_scales_of_their_own(device: torch.device, page_size: int, row_bytes: int) -> None:
    storage = torch.full((20, page_size, row_bytes), 0xA5, dtype=torch.uint8, device=device)
    latent, rope = tokens(17, device)
    slots = torch.randperm(20 * page_size, generator=torch.Generator().manual_seed(page_size))[:15]
    slots[[0, 7, 14]] = torch.tensor([-1, 20 * page_size, 2**31 - 1])
    for index_dtype in (torch.int32, torch.int64):
        storage.fill_(0xA5)
        append_mla_kv(latent, rope, KVCache.from_latent(storage[..., :656]), slots.to(device, index_dtype))
        expected = torch.full_like(storage, 0xA5)
        # on CUDA torch multiplies by the reciprocal of 448
        rows = latent_cases.scaled_rows(torch.cat([latent, rope], -1).cpu()).to(device)
        for i, slot in enumerate(slots.tolist()):
            if 0 <= slot < 20 * page_size:
                expected[slot // page_size, slot % page_size, :656] = rows[i]
        assert torch.equal(storage, expected), "all else is as it was"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_whole_rows_with_one_scale(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, as_tensor: bool
) -> None:
    latent, rope = tokens(9, device, dtype)
    cache = torch.zeros(12, 4, 576, dtype=torch.uint8, device=device).view(kv_dtype)
    scale = torch.tensor([0.25], device=device) if as_tensor else 0.25
    slots = torch.tensor([40, 3, -1, 17, 5, 48, 0, 31, 8], device=device)
    append_mla_kv(latent, rope, KVCache.from_latent(cache, scale=scale), slots)
    largest = torch.finfo(kv_dtype).max
    expected = torch.zeros(48, 576, device=device)
    kept = [i for i in range(9) if i not in (2, 5)]
    expected[slots[kept]] = (torch.cat([latent, rope], -1)[kept].float() / 0.25).clamp(-largest, largest)
    assert torch.equal(cache.flatten(0, 1).float(), expected.to(kv_dtype).float())


@pytest.mark.parametrize("form", latent_cases.FORMATS)
def test_attention_reads_what_was_written(device: torch.device, form: str) -> None:
    """Also for the launch that follows the append."""
    kv_dtype = latent_cases.FORMATS[form]
    cache = torch.zeros(6, 16, 656 if form == "scaled" else 576, dtype=torch.uint8, device=device).view(
        kv_dtype
    )
    generator = torch.Generator().manual_seed(3)
    latent = torch.randn(70, LATENT, generator=generator).bfloat16().to(device)
    rope = torch.randn(70, ROPE, generator=generator).bfloat16().to(device)
    scale = None if form == "scaled" else 0.05
    kv = KVCache.from_latent(cache, scale=scale)
    table = torch.tensor([[4, 0, 5, 2, 1]], dtype=torch.int32, device=device)
    places = torch.arange(70, device=device)
    attention = Attention(
        16, 1, 576, head_dim_v=512, kv_dtype=kv_dtype, device=device, max_rows=1, max_batch=1
    )
    indptr = torch.tensor([0, 1], dtype=torch.int32, device=device)
    attention.plan(
        BSRView(
            indptr, PageTable.block_table(table, torch.tensor([70], dtype=torch.int32, device=device), 16)
        )
    )
    q = torch.randn(1, 16, 576, generator=generator).bfloat16().to(device)
    append_mla_kv(latent, rope, kv, table[0, places // 16].long() * 16 + places % 16)
    out = attention.run(q, kv, sm_scale=latent_cases.SM_SCALE, after_append=True)
    written = latent_cases.numbers_of(cache[table[0].long()].flatten(0, 1)[:70].cpu(), scale or 1.0).to(
        device
    )
    for keys, tolerance in (
        (written, latent_cases.FLOAT8_TOLERANCE),
        (torch.cat([latent, rope], -1).double(), 0.12 if form == "e5m2" else 0.06),
    ):
        wanted = torch.softmax(q[0].double() @ keys.T * latent_cases.SM_SCALE, -1) @ keys[:, :LATENT]
        assert (out[0].double() - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.slow
def test_in_a_compiled_function(device: torch.device) -> None:
    torch._dynamo.reset()
    latent, rope = tokens(3, device)
    slots = torch.tensor([5, -1, 11], device=device)
    for form in ("e4m3", "scaled"):
        width = 656 if form == "scaled" else 576
        caches = [
            torch.zeros(4, 4, width, dtype=torch.uint8, device=device).view(latent_cases.FORMATS[form])
            for _ in range(2)
        ]

        def layer(cache: torch.Tensor, form: str = form) -> None:
            k = cache.unsqueeze(2)
            scale = None if form == "scaled" else 0.5
            append_mla_kv(latent * 2, rope, KVCache.unchecked(k, k[..., :LATENT], scale, scale), slots)

        with torch.no_grad():
            layer(caches[0])
            torch.compile(layer, backend="aot_eager", fullgraph=True)(caches[1])
        assert torch.equal(*(cache.view(torch.uint8) for cache in caches))
        assert caches[0].view(torch.uint8).any()


def test_refuses(device: torch.device) -> None:
    latent, rope = tokens(3, device)
    slots = torch.zeros(3, dtype=torch.int32, device=device)
    scaled = KVCache.from_latent(torch.zeros(4, 4, 656, dtype=torch.uint8, device=device))
    float8 = KVCache.from_latent(
        torch.zeros(4, 4, 576, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn), scale=0.5
    )
    for argument, arguments in [
        ("latent", (latent.half(), rope.half(), scaled, slots)),
        ("latent", (latent[:, :256], rope, scaled, slots)),
        ("rope", (latent, latent, scaled, slots)),
        ("rope", (latent, rope.half(), scaled, slots)),
        ("rope", (latent, rope.half(), float8, slots)),
        ("latent", (latent.int(), rope.int(), float8, slots)),
        ("slots", (latent, rope, scaled, slots.float())),
    ]:
        with pytest.raises(ValueError, match=rf"^{argument}\b.* is .*, must be "):
            append_mla_kv(*arguments)
    with pytest.raises(ValueError, match=r"^latent\.shape\[0\] is 2, must be at least slots.shape\[0\] = 3"):
        append_mla_kv(latent[:2], rope, scaled, slots)
    assert not scaled.k.any()
