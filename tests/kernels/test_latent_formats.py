"""MLA over 8-bit caches: whole rows with one scale, and rows with separate scales."""

from __future__ import annotations

import attention_kernels
import latent_cases
import pytest
import torch
from tiers import mostly_slow

from attn_backend import Attention, BSRView, KVCache, PageTable
from attn_backend.variants.builtin import causal

pytestmark = pytest.mark.usefixtures("kernel")

BATCHES = [
    ([1, 1, 1, 1], [90, 300, 0, 64]),
    ([1, 3, 40, 2], [700, 200, 64, 1]),
    ([70], [333]),
]


def make(batch: latent_cases.Batch, form: str, **options: object) -> Attention:
    rows, heads, _ = batch.q.shape
    options |= {
        "dtype": batch.q.dtype,
        "kv_dtype": latent_cases.FORMATS[form],
        "kernel": attention_kernels.kernel_of(batch.q.device),
    }
    return Attention(
        heads, 1, 576, head_dim_v=512, device=batch.q.device, max_rows=rows, max_batch=rows, **options
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("number", mostly_slow(range(6), fast=2))
@pytest.mark.parametrize("form", latent_cases.FORMATS)
def test_batches(device: torch.device, form: str, number: int) -> None:
    """Pages of 1 to 64 tokens, 3 to 128 heads, strided rows, scales."""
    qo_lens, kv_lens = BATCHES[number % 3]
    scale = None if form == "scaled" else [0.5, torch.tensor([0.7]), None][number % 3]
    batch = latent_cases.make_batch(
        form,
        qo_lens,
        kv_lens,
        heads=[16, 128, 3][number % 3],
        page_size=[64, 1, 16, 7][number % 4],
        scale=scale,
        causal=number % 2 == 0,
        device=device,
        dtype=torch.float16 if number == 3 and form != "scaled" else torch.bfloat16,
        seed=number,
        row_bytes=[0, 704][number // 3],
    )
    for options in ({}, {"batch_invariant": True}, {"num_ctas": 3}):
        attention = make(batch, form, **options)
        attention.plan(batch.view)
        batch.check(*attention.run(batch.q, batch.kv, sm_scale=latent_cases.SM_SCALE, return_lse=True))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("form", latent_cases.FORMATS)
def test_sparse(device: torch.device, form: str, heads: int) -> None:
    """Tokens that each row selects from the first request."""
    batch = latent_cases.make_batch(
        form, [6], [200], heads=heads, page_size=8, device=device, scale=None if form == "scaled" else 0.25
    )
    generator = torch.Generator().manual_seed(1)
    slots = torch.full((6, 64), -1, dtype=torch.int32, device=device)
    table = batch.view.table.indices
    assert table is not None
    chosen = []
    for row, count in enumerate((64, 40, 0, 1, 64, 7)):
        tokens = torch.randperm(200, generator=generator)[:count]
        chosen.append(batch.rows[0][tokens])
        slots[row, :count] = (table[0, (tokens // 8).to(device)].long() * 8 + (tokens % 8).to(device)).int()
    attention = make(batch, form)
    attention.plan(BSRView.selected(slots))
    sparse = latent_cases.Batch(batch.q, batch.kv.by_slot(), BSRView.selected(slots), chosen, causal=False)
    sparse.check(*attention.run(batch.q, sparse.kv, sm_scale=latent_cases.SM_SCALE, return_lse=True))


def test_shared_prefixes(device: torch.device) -> None:
    for form in latent_cases.FORMATS:
        for heads in (16, 128):
            batch = latent_cases.make_batch(
                form, [1] * 6, [150] * 6, heads=heads, page_size=16, device=device
            )
            batch.share(8)
            attention = make(batch, form, cascade="always")
            attention.plan(batch.view)
            batch.check(*attention.run(batch.q, batch.kv, sm_scale=latent_cases.SM_SCALE, return_lse=True))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [128, 256])
@pytest.mark.parametrize("form", latent_cases.FORMATS)
def test_pairs_of_ctas(form: str, heads: int) -> None:
    """CTAs that dequantize tokens for each other.

    A request has the same bits in any batch and on every run, also in a captured graph.
    """
    device = torch.device("cuda")
    lens = [1, 31, 32, 33, 63, 64, 65, 127, 129, 1000, 2001, 0]
    qo_lens = [1, 2, 1, 7, 1, 64, 1, 3, 1, 1, 5, 1]
    batch = latent_cases.make_batch(form, qo_lens, lens, heads=heads, page_size=16, device=device)
    attention = make(batch, form, batch_invariant=True)
    attention.plan(batch.view)
    out, lse = attention.run(batch.q, batch.kv, sm_scale=latent_cases.SM_SCALE, return_lse=True)
    batch.check(out, lse)

    replayed = torch.empty_like(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(batch.q, batch.kv, out=replayed, sm_scale=latent_cases.SM_SCALE)
    for _ in range(50):
        replayed.fill_(torch.nan)
        graph.replay()
        assert torch.equal(replayed, out)

    table, indptr = batch.view.table, batch.view.qo_indptr.tolist()
    assert table.indices is not None
    for i in range(len(lens)):
        alone = PageTable.block_table(table.indices[i : i + 1], table.kv_lens[i : i + 1], table.page_size)
        attention.plan(
            BSRView(torch.tensor([0, qo_lens[i]], dtype=torch.int32, device=device), alone, causal=True)
        )
        of_request = slice(indptr[i], indptr[i + 1])
        assert torch.equal(
            attention.run(batch.q[of_request], batch.kv, sm_scale=latent_cases.SM_SCALE), out[of_request]
        )


def test_refuses() -> None:
    rows = torch.zeros(4, 16, 656, dtype=torch.uint8)
    kv = KVCache.from_latent(rows)
    assert (kv.head_dim, kv.head_dim_v, kv.by_slot().num_pages) == (576, 512, 64)
    for argument, call in [
        ("latent", lambda: KVCache.from_latent(rows[..., :576])),
        ("head_dim_v", lambda: KVCache.from_latent(rows, 256)),
        ("k_scale", lambda: KVCache.from_latent(rows, scale=0.5)),
        ("k", lambda: KVCache.from_pair(rows[:, :, None], rows[:, :, None])),
        ("k_scale", lambda: KVCache.from_latent(rows[..., :576].view(torch.float8_e4m3fn), scale=-1.0)),
    ]:
        with pytest.raises(ValueError, match=rf"^{argument} is .*, must be "):
            call()
    with pytest.raises(ValueError, match=r"^variant is .*, must be None with kv_dtype = torch.uint8"):
        Attention(
            16,
            1,
            576,
            head_dim_v=512,
            device="cpu",
            max_rows=1,
            max_batch=1,
            kv_dtype=torch.uint8,
            variant=causal(),
        )
    for options in (
        {"head_dim": 128},
        {"head_dim": 576, "head_dim_v": 512, "dtype": torch.float16},
        {"head_dim": 512},
    ):
        with pytest.raises(
            ValueError,
            match=r"^kv_dtype is torch.uint8, must be another one: rows of DeepSeek V3.2's latents are for "
            r"head_dim = 576",
        ):
            Attention(16, 1, device="cpu", max_rows=1, max_batch=1, kv_dtype=torch.uint8, **options)  # type: ignore[arg-type]
