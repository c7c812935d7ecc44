"""Quest (arXiv 2406.10774): decode reads only the pages that matter to the query.

Each KV head of each request chooses its own.

    # error and time next to full attention; 32768 tokens on a GPU, 4096 on a CPU
    python examples/page_selection.py

For each page and head, the example keeps the smallest and the largest value of every channel of K. They bound
the score of a query against any key of the page, and attention reads the pages with the highest bounds. Page
tables that differ between heads need nothing from the kernels. Seen through strides, KV head h of page p is
page p * num_kv_heads + h of a cache with one head, and (request, KV head) is a request.
"""

from __future__ import annotations

import argparse

import decode_step
import llama
import torch
from torch import Tensor

from attn_backend import Attention, BSRView, KVCache, PageTable

PAGE_SIZE = 16
BATCH, NUM_KV_HEADS, GROUP, HEAD_DIM = 4, 8, 4, 128


def tokens_that_matter_to_few(length: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys whose subjects come and go, and queries about one of them.

    Returns q [BATCH, KV heads, GROUP, dim], kv [pages, 2, KV heads, PAGE_SIZE, dim] and the block table,
    int32 [BATCH, pages of each].
    """
    generator = torch.Generator().manual_seed(0)
    pages = BATCH * length // PAGE_SIZE
    kv = torch.randn(pages, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, generator=generator)
    subjects = torch.randn(64, NUM_KV_HEADS, HEAD_DIM, generator=generator)  # of a run of 4 pages
    of_page = torch.randint(64, (pages // 4,), generator=generator).repeat_interleave(4)
    kv[:, 0] += 1.5 * subjects[of_page][:, :, None]
    block_table = torch.randperm(pages, generator=generator).int().view(BATCH, -1)
    place = torch.randint(block_table.shape[1], (BATCH, NUM_KV_HEADS), generator=generator)
    asked = of_page[block_table.gather(1, place).long()]
    q = 0.6 * subjects[asked, torch.arange(NUM_KV_HEADS)][:, :, None] + 0.5 * torch.randn(
        BATCH, NUM_KV_HEADS, GROUP, HEAD_DIM, generator=generator
    )
    return q.to(device, dtype), kv.to(device, dtype), block_table.to(device)


def view_of(pages: Tensor) -> BSRView:
    """One query for each (request, KV head); pages: int32 [batch * KV heads, chosen], all full."""
    batch, chosen = pages.shape
    kv_lens = torch.full((batch,), chosen * PAGE_SIZE, dtype=torch.int32, device=pages.device)
    return BSRView(
        torch.arange(batch + 1, dtype=torch.int32, device=pages.device),
        PageTable.block_table(pages, kv_lens, PAGE_SIZE),
        causal=False,
    )


def bounds(keys: Tensor) -> Tensor:
    """[pages, KV heads, 2, dim]: the smallest and the largest of each channel of keys [pages, KV heads,
    PAGE_SIZE, dim]. An engine keeps them up to date.
    """
    return torch.stack([keys.amin(2), keys.amax(2)], 2)


def select(q: Tensor, page_bounds: Tensor, block_table: Tensor, count: int) -> Tensor:
    """int32 [batch * KV heads, count]: pages of the one-headed cache, in order, with the largest bounds of
    the group's queries; always includes the last page.
    """
    of_request = page_bounds[block_table.long()]  # [batch, pages, KV heads, 2, dim]
    scores = torch.einsum("bhgd,bphd->bhgp", q.clamp(max=0), of_request[:, :, :, 0]) + torch.einsum(
        "bhgd,bphd->bhgp", q.clamp(min=0), of_request[:, :, :, 1]
    )
    best = scores.amax(2)  # of the queries that share a KV head
    best[..., -1] = torch.inf
    chosen = best.topk(count).indices.sort().values  # [batch, KV heads, count], places in the block table
    head = torch.arange(NUM_KV_HEADS, device=q.device).view(1, -1, 1)
    pages = block_table.long().unsqueeze(1).expand(-1, NUM_KV_HEADS, -1).gather(2, chosen)
    return (pages * NUM_KV_HEADS + head).int().flatten(0, 1).contiguous()


def main(argv: list[str] | None = None) -> list[tuple[int, float, float]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--tokens", type=int, help="tokens of each request (32768; on a CPU 4096)")
    arguments = parser.parse_args(argv)
    device = llama.pick_device(arguments.device)
    on_gpu = device.startswith("cuda")
    length, dtype = (
        arguments.tokens or (32768 if on_gpu else 4096),
        torch.bfloat16 if on_gpu else torch.float32,
    )
    pages_each = length // PAGE_SIZE
    q, kv, block_table = tokens_that_matter_to_few(length, device, dtype)
    keys, values = (part.reshape(-1, PAGE_SIZE, 1, HEAD_DIM) for part in kv.unbind(1))
    one_headed = KVCache.from_pair(keys, values)
    page_bounds = bounds(kv[:, 0])
    requests = BATCH * NUM_KV_HEADS
    # [requests, GROUP, dim]: the queries of a group are the query heads of the one KV head
    rows = q.flatten(0, 1)

    def attention() -> Attention:
        return Attention(
            GROUP, 1, HEAD_DIM, dtype=dtype, device=device, max_rows=requests, max_batch=requests
        )

    whole = attention()
    head = torch.arange(NUM_KV_HEADS, device=device).view(1, -1, 1)
    everything = (block_table.unsqueeze(1) * NUM_KV_HEADS + head).int().flatten(0, 1).contiguous()
    whole.plan(view_of(everything))
    exact = whole.run(rows, one_headed)

    print(
        f"{BATCH} requests of {length} tokens, {NUM_KV_HEADS} KV heads, pages of {PAGE_SIZE}; times in ms, "
        f"of one layer; errors are relative to attention over all pages"
    )
    print(
        f"{'pages':>6} {'tokens':>8} {'relative error':>15} {'select, plan, run':>18} {'full attention':>15}"
    )
    results = []
    for count in sorted({pages_each // 64, pages_each // 16, pages_each // 4}):
        some = attention()

        def sparse(some: Attention = some, count: int = count) -> Tensor:
            # in every layer: each has its own pages
            some.plan(view_of(select(q, page_bounds, block_table, count)))
            return some.run(rows, one_headed)

        error = float((sparse().float() - exact.float()).norm() / exact.float().norm())
        time, full_time = decode_step.measure([sparse, lambda: whole.run(rows, one_headed)], device)
        results.append((count, error, time))
        print(f"{count:6} {count * PAGE_SIZE:8} {error:15.4f} {time:18.3f} {full_time:15.3f}")
    return results


if __name__ == "__main__":
    main()
