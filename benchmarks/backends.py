"""What is timed: ours and the peers that import, each as a function that launches attention of a prepared batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attn_backend import Attention, BSRView, KVCache, PageTable
from benchmarks.cases import Case


@dataclass(frozen=True, eq=False)
class Batch:
    """Random tensors of a case, pages shuffled. cache: [pages, 2, page_size, num_kv_heads, head_dim] bf16."""

    case: Case
    q: torch.Tensor
    cache: torch.Tensor
    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def make(cls, case: Case, seed: int = 0) -> Batch:
        generator = torch.Generator("cuda").manual_seed(seed)
        pages = [-(-length // case.page_size) for length in case.kv_lens]
        order = torch.randperm(sum(pages), device="cuda", generator=generator).int()
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device="cuda")
        start = 0
        for row, count in enumerate(pages):
            table[row, :count] = order[start : start + count]
            start += count
        qo_indptr = torch.zeros(len(pages) + 1, dtype=torch.int32)
        qo_indptr[1:] = torch.tensor(case.qo_lens).cumsum(0)
        return cls(
            case,
            torch.randn(sum(case.qo_lens), case.num_qo_heads, case.head_dim, dtype=torch.bfloat16, device="cuda", generator=generator),
            torch.randn(sum(pages), 2, case.page_size, case.num_kv_heads, case.head_dim, dtype=torch.bfloat16, device="cuda", generator=generator),
            qo_indptr.cuda(),
            torch.tensor(case.kv_lens, dtype=torch.int32, device="cuda"),
            table,
        )


def ours(batch: Batch) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """(run, plan) of this package."""
    case = batch.case
    attention = Attention(case.num_qo_heads, case.num_kv_heads, case.head_dim, max_rows=len(batch.q), max_batch=len(case.kv_lens))
    view = BSRView(batch.qo_indptr, PageTable.block_table(batch.block_table, batch.kv_lens, case.page_size))
    kv = KVCache.from_tensor(batch.cache)
    out = torch.empty_like(batch.q)
    attention.plan(view)
    return lambda: attention.run(batch.q, kv, out=out), lambda: attention.plan(view)


def flash_attention_3(batch: Batch) -> Callable[[], torch.Tensor]:
    """FlashAttention-3 as vLLM builds it, scheduler metadata computed beforehand. Raises ImportError without vLLM."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    case = batch.case
    k, v = batch.cache[:, 0], batch.cache[:, 1]
    out = torch.empty_like(batch.q)
    longest_q, longest_kv = max(case.qo_lens), max(case.kv_lens)
    metadata = get_scheduler_metadata(
        batch_size=len(case.kv_lens),
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_kv,
        num_heads_q=case.num_qo_heads,
        num_heads_kv=case.num_kv_heads,
        headdim=case.head_dim,
        cache_seqlens=batch.kv_lens,
        cu_seqlens_q=batch.qo_indptr,
        page_size=case.page_size,
        causal=True,
    )

    def run() -> torch.Tensor:
        flash_attn_varlen_func(
            q=batch.q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=batch.qo_indptr,
            max_seqlen_q=longest_q,
            seqused_k=batch.kv_lens,
            max_seqlen_k=longest_kv,
            softmax_scale=case.head_dim**-0.5,
            causal=True,
            block_table=batch.block_table,
            scheduler_metadata=metadata,
            fa_version=3,
        )
        return out

    return run


def reference(batch: Batch, request: int) -> torch.Tensor:
    """Attention of one request in float64: [qo_len, num_qo_heads, head_dim]."""
    case = batch.case
    qo_len, kv_len = case.qo_lens[request], case.kv_lens[request]
    first = int(batch.qo_indptr[request])
    pages = batch.block_table[request, : -(-kv_len // case.page_size)].long()
    k, v = (batch.cache[pages, i].reshape(-1, case.num_kv_heads, case.head_dim)[:kv_len].double() for i in (0, 1))
    q = batch.q[first : first + qo_len].double()
    group = case.num_qo_heads // case.num_kv_heads
    position = torch.arange(kv_len - qo_len, kv_len, device="cuda")
    hidden = torch.arange(kv_len, device="cuda")[None] > position[:, None]
    out = torch.empty_like(q)
    for head in range(case.num_qo_heads):
        logits = q[:, head] @ k[:, head // group].T * case.head_dim**-0.5
        out[:, head] = logits.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, head // group]
    return out
