"""Caches of more than 2**32 elements: page offsets do not fit in 32 bits."""

from __future__ import annotations

import math

import attention_kernels
import pytest
import torch

from attn_backend import Attention, BSRView, KVCache, PageTable, append_kv, append_mla_kv

pytestmark = pytest.mark.usefixtures("kernel")

PAGE_SIZE, TOKENS = 64, 150
SIZE = 2**32


def attend(attention: Attention, q: torch.Tensor, kv: KVCache, pages: list[int]) -> torch.Tensor:
    indptr = torch.tensor([0, 1], dtype=torch.int32, device=q.device)
    table = PageTable.block_table(
        torch.tensor([pages], dtype=torch.int32, device=q.device),
        torch.tensor([TOKENS], dtype=torch.int32, device=q.device),
        PAGE_SIZE,
    )
    attention.plan(BSRView(indptr, table))
    return attention.run(q, kv)


def last_pages(num_pages: int, device: torch.device) -> tuple[list[int], torch.Tensor]:
    """Three pages in reverse order, and the slots of their tokens."""
    pages = [num_pages - 1, num_pages - 3, num_pages - 2]
    places = torch.arange(TOKENS)
    return pages, (torch.tensor(pages)[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE).to(device)


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latents"])
def test_the_last_pages(device: torch.device, latent: bool) -> None:
    """Appends and attention there give the same bits as a cache of three pages.

    On a CPU, memory that is never written is not allocated.
    """
    generator = torch.Generator().manual_seed(7)
    num_kv_heads, head_dim = (1, 576) if latent else (2, 128)
    shape = (PAGE_SIZE, 576) if latent else (2, PAGE_SIZE, num_kv_heads, head_dim)
    numbers = math.prod(shape)
    k, v = torch.randn(2, TOKENS, num_kv_heads, head_dim, generator=generator).bfloat16().to(device)
    q = torch.randn(1, 16, head_dim, generator=generator).bfloat16().to(device)
    options = {
        "head_dim_v": 512 if latent else None,
        "kv_dtype": torch.float8_e4m3fn,
        "kernel": attention_kernels.kernel_of(device),
    }
    attention = Attention(16, num_kv_heads, head_dim, device=device, max_rows=1, max_batch=1, **options)  # type: ignore[arg-type]
    results = []
    for num_pages in (3, SIZE // numbers + 4):
        storage = torch.empty(num_pages, *shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        pages, slots = last_pages(num_pages, device)
        kv = KVCache.from_latent(storage) if latent else KVCache.from_tensor(storage)
        if latent:
            append_mla_kv(k[:, 0, :512].contiguous(), k[:, 0, 512:].contiguous(), kv, slots)
        else:
            append_kv(k, v, kv, slots)
        results.append(attend(attention, q, kv, pages))
    assert storage.numel() > SIZE
    keys = k.float().to(torch.float8_e4m3fn).double().repeat_interleave(16 // num_kv_heads, 1)
    values = (
        keys[..., :512]
        if latent
        else v.float().to(torch.float8_e4m3fn).double().repeat_interleave(16 // num_kv_heads, 1)
    )
    weights = torch.softmax(torch.einsum("hd,thd->ht", q[0].double(), keys) * head_dim**-0.5, -1)
    wanted = torch.einsum("ht,thd->hd", weights, values)
    assert (results[0][0].double() - wanted).norm() <= 2e-2 * wanted.norm()
    assert torch.equal(results[0], results[1])
