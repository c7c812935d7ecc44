"""The peers that import: each a function that launches attention of a prepared batch. Raises ImportError where the peer is not installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

import torch

from benchmarks.backends import Batch, SharedBatch
from benchmarks.timing import Timer

Run = Callable[[], torch.Tensor]

FLASHINFER_WORKSPACE = 512 << 20     # bytes; 128 MB are recommended, too little for some large batches


def time_of(name: str, case: str, make: Callable[[], Run], timer: Timer) -> tuple[float | None, torch.Tensor | None]:
    """(µs, output) of a peer, or (None, None): a peer that fails says why and stops nothing."""
    try:
        run = make()
        return timer(run), run()
    except Exception as problem:     # whatever a peer raises
        print(f"{case}: {name}: {type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
        return None, None


def flash_attention_3(batch: Batch) -> Run:
    """FlashAttention-3 as vLLM builds it, scheduler metadata computed beforehand."""
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


def flashinfer_decode(batch: Batch, use_tensor_cores: bool = True) -> Run:
    """FlashInfer's decode; every request reads all of its pages. Its plan copies lengths to the host and is not timed."""
    flashinfer = import_module("flashinfer")
    case = batch.case
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=use_tensor_cores)
    wrapper.plan(
        *_page_table(batch),
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        case.page_size,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    out = torch.empty_like(batch.q)
    return lambda: wrapper.run(batch.q, batch.cache, out=out)


def flashinfer_prefill(batch: Batch, backend: str) -> Run:
    """FlashInfer's prefill over pages, "fa2" or "fa3". Its plan copies lengths to the host and is not timed."""
    flashinfer = import_module("flashinfer")
    case = batch.case
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=backend)
    wrapper.plan(
        batch.qo_indptr,
        *_page_table(batch),
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        case.page_size,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    out = torch.empty_like(batch.q)
    return lambda: wrapper.run(batch.q, batch.cache, out=out)


def flashinfer_backends(batch: Batch) -> dict[str, Callable[[Batch], Run]]:
    """Those of FlashInfer's kernels that may be its best for a batch."""
    if all(length == 1 for length in batch.case.qo_lens):
        return {"tensor cores": flashinfer_decode, "CUDA cores": lambda b: flashinfer_decode(b, False)}
    return {"fa2": lambda b: flashinfer_prefill(b, "fa2"), "fa3": lambda b: flashinfer_prefill(b, "fa3")}


def flashinfer_cascade(batch: SharedBatch, backend: str = "auto") -> Run:
    """FlashInfer's MultiLevelCascadeAttentionWrapper. On Hopper "auto" becomes fa3, which splits no KV; "fa2" does, but only the inner wrappers can be told."""
    flashinfer = import_module("flashinfer")
    case = batch.grouped.case
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(batch.page_tables), _workspace(), "NHD")
    for level in wrapper._batch_prefill_wrappers:
        level._backend = backend
    wrapper.plan(
        batch.qo_indptrs,
        [torch.arange(len(table) + 1, dtype=torch.int32, device="cuda") * table.shape[1] for table in batch.page_tables],
        [table.flatten() for table in batch.page_tables],
        [torch.full((nodes,), (tokens - 1) % case.page_size + 1, dtype=torch.int32, device="cuda") for nodes, tokens in batch.shared.levels],
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        case.page_size,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return lambda: wrapper.run(batch.grouped.q, batch.grouped.cache)


def _page_table(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """kv_indptr, kv_indices, kv_last_page_len."""
    page_size = batch.case.page_size
    pages = (batch.kv_lens + page_size - 1) // page_size
    used = torch.arange(batch.block_table.shape[1], device="cuda")[None] < pages[:, None]
    return torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)]), batch.block_table[used], (batch.kv_lens - 1) % page_size + 1


def _workspace() -> torch.Tensor:
    return torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device="cuda")
