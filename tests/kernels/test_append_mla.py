"""append_mla_kv: latents and RoPE parts into any pages, and the attention over them."""

from __future__ import annotations

import pytest
import torch

from attn_backend import Attention, BSRView, KVCache, PageTable, append_mla_kv

LATENT, ROPE = 512, 64


def latent_cache(
    pages: int, page_size: int, form: str, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """[pages, page_size, 576] of NaN, and the larger tensor that contains it."""
    shape = {
        "dense": (pages + 1, page_size, 576),
        "wide rows": (pages + 1, page_size, 640),
        "layers": (pages + 1, 3, page_size, 576),
    }[form]
    storage = torch.full(shape, torch.nan, dtype=dtype, device=device)
    if form == "layers":
        return storage[:pages, 1], storage
    return storage[:pages] if form == "dense" else storage[:pages, :, 64:], storage


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("form", ["dense", "wide rows", "layers"])
def test_every_form(device: torch.device, form: str, page_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(page_size)
    cache, storage = latent_cache(40, page_size, form, dtype, device)
    tokens = 25
    slots = torch.randperm(40 * page_size, generator=generator)[:tokens]
    slots[[0, 7, 24]] = torch.tensor([-1, 40 * page_size, 2**31 - 1])
    latent = torch.randn(tokens + 2, LATENT, generator=generator).to(dtype).to(device)
    # the RoPE part is a slice of it
    projection = torch.randn(tokens + 1, ROPE + 24, generator=generator).to(dtype).to(device)
    rope = projection[:, 24:]
    for index_dtype in (torch.int32, torch.int64):
        storage.fill_(torch.nan)
        append_mla_kv(latent, rope, KVCache.from_latent(cache), slots.to(device, index_dtype))
        kept = [i for i in range(tokens) if i not in (0, 7, 24)]
        for i in kept:
            page, place = divmod(int(slots[i]), page_size)
            assert torch.equal(cache[page, place], torch.cat([latent[i], rope[i]]))
        assert int((~storage.isnan()).sum()) == len(kept) * 576, "all else is as it was"


def test_attention_reads_what_was_written(device: torch.device) -> None:
    heads, page_size, kv_lens = 16, 4, [5, 9]
    cache = torch.randn(6, page_size, 576, device=device).bfloat16()
    kv = KVCache.from_latent(cache)
    assert (kv.head_dim, kv.head_dim_v, kv.num_kv_heads, kv.v.data_ptr()) == (576, 512, 1, cache.data_ptr())
    table = torch.tensor([[3, 1, 0], [5, 2, 4]], dtype=torch.int32, device=device)
    new = torch.randn(2, 576, device=device).bfloat16()
    append_mla_kv(
        new[:, :LATENT], new[:, LATENT:], kv, torch.tensor([1 * page_size, 4 * page_size], device=device)
    )
    attn = Attention(heads, 1, 576, head_dim_v=512, device=device, max_rows=2, max_batch=2)
    indptr = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    attn.plan(
        BSRView(
            indptr,
            PageTable.block_table(table, torch.tensor(kv_lens, dtype=torch.int32, device=device), page_size),
        )
    )
    q = torch.randn(2, heads, 576, device=device).bfloat16()
    out = attn.run(q, kv, sm_scale=192**-0.5, after_append=True)
    for request, length in enumerate(kv_lens):
        keys = cache[table[request].long()].flatten(0, 1)[:length].double()
        assert torch.equal(keys[-1].bfloat16(), new[request])
        wanted = torch.softmax(q[request].double() @ keys.T * 192**-0.5, dim=-1) @ keys[:, :512]
        assert (out[request].double() - wanted).abs().max() <= 5e-3 * max(1, wanted.abs().max())


def test_refuses(device: torch.device) -> None:
    cache, storage = latent_cache(4, 4, "dense", torch.bfloat16, device)
    kv = KVCache.from_latent(cache)
    latent = torch.zeros(3, LATENT, dtype=torch.bfloat16, device=device)
    rope = torch.zeros(3, ROPE, dtype=torch.bfloat16, device=device)
    slots = torch.zeros(3, dtype=torch.int32, device=device)
    apart = KVCache(kv.k, torch.zeros(4, 4, 1, LATENT, dtype=torch.bfloat16, device=device))
    two_heads = torch.zeros(4, 4, 2, 576, dtype=torch.bfloat16, device=device)
    for argument, arguments in [
        ("latent", (latent.float(), rope.float(), kv, slots)),
        ("rope", (latent.half(), rope, kv, slots)),
        ("latent", (latent[:, :256], rope, kv, slots)),
        ("latent", (latent[:, None], rope, kv, slots)),
        ("latent", (None, rope, kv, slots)),
        ("latent", (latent.t().contiguous().t(), rope, kv, slots)),
        ("rope", (latent, rope.half(), kv, slots)),
        ("rope", (latent, latent, kv, slots)),
        ("rope", (latent, rope[:, None], kv, slots)),
        ("rope", (latent, [0.0], kv, slots)),
        ("kv", (latent, rope, cache, slots)),
        ("kv", (latent, rope, apart, slots)),
        ("kv", (latent, rope, KVCache(two_heads, two_heads[..., :LATENT]), slots)),
        ("slots", (latent, rope, kv, slots.float())),
        ("slots", (latent, rope, kv, [0, 1, 2])),
    ]:
        with pytest.raises(ValueError, match=rf"^{argument}\b.* is .*, must be "):
            append_mla_kv(*arguments)  # type: ignore[arg-type]
    for argument, few in (("latent", (latent[:2], rope)), ("rope", (latent, rope[:2]))):
        with pytest.raises(
            ValueError, match=rf"^{argument}\.shape\[0\] is 2, must be at least slots.shape\[0\] = 3"
        ):
            append_mla_kv(*few, kv, slots)
    for argument, arguments in (
        ("latent", (cache[0],)),
        ("head_dim_v", (cache, 577)),
        ("head_dim_v", (cache, 0)),
    ):
        with pytest.raises(ValueError, match=rf"^{argument} is .*, must be "):
            KVCache.from_latent(*arguments)
    assert storage.isnan().all()
