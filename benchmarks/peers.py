"""The installed peers: each is a function that launches attention of a prepared batch, or a step before it.
Raises ImportError if the peer is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import torch

from benchmarks.batches import Batch, SharedBatch
from benchmarks.timing import Launch, Timer

Run = Callable[[], torch.Tensor]
RunInParts = Callable[[], tuple[torch.Tensor, ...]]  # the outputs of the first rows, of the next rows, ...
Kernels = dict[str, Callable[[], Run | RunInParts]]  # by name

FLASHINFER_WORKSPACE = 512 << 20  # bytes; the recommended 128 MB are too little for some large batches


class PageSize(Protocol):
    @property
    def page_size(self) -> int: ...


class Paged(Protocol):
    """The inputs of a page table. block_table: int32 [batch, pages]; kv_lens: int32 [batch]."""

    @property
    def case(self) -> PageSize: ...
    @property
    def block_table(self) -> torch.Tensor: ...
    @property
    def kv_lens(self) -> torch.Tensor: ...


def time_of(
    name: str, case: str, make: Callable[[], Run | RunInParts], timer: Timer
) -> tuple[float | None, torch.Tensor | None]:
    """(µs, output) of a peer, or (None, None): a peer that fails prints the reason and stops nothing."""
    try:
        run = make()
        time, out = timer(run), run()
        return time, out if isinstance(out, torch.Tensor) else torch.cat(out)
    except Exception as problem:  # a peer may raise anything
        print(f"{case}: {name}: {type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
        return None, None


def fastest(
    peer: str,
    case: str,
    kernels: Kernels,
    timer: Timer,
    error: Callable[[torch.Tensor], float | None],
    largest: float,
) -> dict[str, Any]:
    """A peer's entry in a line: µs of its fastest correct kernel, that kernel's name and error; None if no
    kernel was correct.

    error: of an output; None: there is no reference, and the output counts as correct.
    """
    line: dict[str, Any] = {peer: None}
    for backend, make in kernels.items():
        name = peer if backend == peer else f"{peer}, {backend}"
        measured, out = time_of(name, case, make, timer)
        if measured is None or out is None:
            continue
        of_output = error(out)
        if of_output is not None and not of_output <= largest:
            print(f"{case}: {name}: WRONG, relative error {of_output:.1e}", flush=True)
        elif line[peer] is None or measured < line[peer]:
            line = {peer: measured, f"{peer} backend": backend, f"{peer} error": of_output}
    return line


def flash_attention_3(
    batch: Batch, window_left: int = -1, soft_cap: float = 0.0, sinks: torch.Tensor | None = None
) -> Run:
    """FlashAttention-3 as vLLM builds it: over pages with precomputed scheduler metadata, ragged without, as
    vLLM calls it. sinks: [num_qo_heads].
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    case = batch.case
    out = torch.empty_like(batch.q)
    longest_q, longest_kv = max(case.qo_lens), max(case.kv_lens)
    arguments = {
        "q": batch.q,
        "out": out,
        "cu_seqlens_q": batch.qo_indptr,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_kv,
        "softmax_scale": case.head_dim**-0.5,
        "causal": case.causal,
        "fa_version": 3,
    }
    window = {"window_size": [window_left, 0]} if window_left >= 0 else {}
    arguments |= (
        window
        | ({"softcap": soft_cap} if soft_cap else {})
        | ({} if sinks is None else {"s_aux": sinks.bfloat16()})
    )
    if case.ragged:
        arguments |= {"k": batch.cache[0], "v": batch.cache[1], "cu_seqlens_k": batch.kv_indptr}
    else:
        arguments |= {
            "k": batch.cache[:, 0],
            "v": batch.cache[:, 1],
            "seqused_k": batch.kv_lens,
            "block_table": batch.block_table,
        }
        arguments["scheduler_metadata"] = get_scheduler_metadata(
            batch_size=len(case.kv_lens),
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_kv,
            num_heads_q=case.num_qo_heads,
            num_heads_kv=case.num_kv_heads,
            headdim=case.head_dim,
            cache_seqlens=batch.kv_lens,
            cu_seqlens_q=batch.qo_indptr,
            page_size=case.page_size,
            causal=case.causal,
            **window,
            **({"has_softcap": True} if soft_cap else {}),
        )

    def run() -> torch.Tensor:
        flash_attn_varlen_func(**arguments)
        return out

    return run


def flash_attention_4(batch: Batch) -> Run:
    """FlashAttention-4's CuTe kernels, from their own package or from vLLM; ragged."""
    case = batch.case
    for package in ("flash_attn.cute", "vllm.vllm_flash_attn.cute"):
        try:
            attend = import_module(f"{package}.interface").flash_attn_varlen_func
            break
        except ImportError as error:
            missing = error
    else:
        raise missing

    def run() -> torch.Tensor:
        result = attend(
            batch.q,
            *batch.cache,
            cu_seqlens_q=batch.qo_indptr,
            cu_seqlens_k=batch.kv_indptr,
            max_seqlen_q=max(case.qo_lens),
            max_seqlen_k=max(case.kv_lens),
            softmax_scale=case.head_dim**-0.5,
            causal=case.causal,
        )
        return result[0] if isinstance(result, tuple) else result

    return run


def cudnn(batch: Batch) -> Run:
    """cuDNN through torch's scaled_dot_product_attention: prompts of one length, as a dense batch.

    On a CPU, where tests run it, torch's own kernel.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case, requests = batch.case, len(batch.case.kv_lens)
    q, k, v = (
        tensor.unflatten(0, (requests, -1)).transpose(1, 2).contiguous() for tensor in (batch.q, *batch.cache)
    )
    backend = SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=True
            )
        return out.transpose(1, 2).flatten(0, 1)

    return run


def flex_attention(batch: Batch) -> Run:
    """torch's flex_attention, compiled for this shape: the requests as documents of one sequence.

    For ragged prefill: every query has its own K and V.
    """
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as attend

    case = batch.case
    tokens = sum(case.kv_lens)
    document = torch.arange(len(case.kv_lens), device="cuda").repeat_interleave(batch.kv_lens)

    def visible(
        _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        same = document[query] == document[key]
        return same & (query >= key) if case.causal else same

    mask = create_block_mask(visible, None, None, tokens, tokens, device="cuda")
    torch._dynamo.reset()  # otherwise the limit on recompilations would stop it after some shapes
    compiled = torch.compile(attend, dynamic=False)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (batch.q, *batch.cache))
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def flashinfer_decode(batch: Batch, use_tensor_cores: bool = True) -> Run:
    """FlashInfer's decode; every request reads all of its pages.

    Its plan copies lengths to the host and is not timed.
    """
    flashinfer = import_module("flashinfer")
    case = batch.case
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(batch.q.device), "NHD", use_tensor_cores=use_tensor_cores
    )
    wrapper.plan(
        *page_table(batch),
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
    """FlashInfer's prefill, "fa2" or "fa3". Its plan copies lengths to the host and is not timed."""
    flashinfer = import_module("flashinfer")
    case = batch.case
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim)
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    out = torch.empty_like(batch.q)
    if case.ragged:
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace(batch.q.device), "NHD", backend=backend
        )
        ragged.plan(batch.qo_indptr, batch.kv_indptr, *heads, causal=case.causal, **dtypes)
        return lambda: ragged.run(batch.q, *batch.cache, out=out)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(batch.q.device), "NHD", backend=backend
    )
    wrapper.plan(batch.qo_indptr, *page_table(batch), *heads, case.page_size, causal=case.causal, **dtypes)
    return lambda: wrapper.run(batch.q, batch.cache, out=out)


def flashinfer_persistent(batch: Batch) -> Run:
    """FlashInfer's BatchAttention: decodes and prefills in one persistent launch.

    Its plan copies lengths to the host and is not timed.
    """
    flashinfer = import_module("flashinfer")
    case = batch.case
    wrapper = flashinfer.BatchAttention("NHD")
    indptr, indices, _ = page_table(batch)
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.head_dim)
    wrapper.plan(batch.qo_indptr, indptr, indices, batch.kv_lens, *heads, case.page_size, causal=case.causal)
    out = torch.empty_like(batch.q)
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)

    def run() -> torch.Tensor:
        wrapper.run(batch.q, batch.cache, out=out, lse=lse)
        return out

    return run


def flashinfer_pod(batch: Batch) -> RunInParts:
    """FlashInfer's POD-Attention: one prefill over contiguous K and V, and decodes over pages.

    The K and V of the prefill, the batch's first request, are made contiguous beforehand. Its plan copies
    lengths to the host and is not timed.
    """
    flashinfer = import_module("flashinfer")
    case = batch.case
    rows = case.qo_lens[0]
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(batch.q.device), "NHD")
    pages = -(-case.kv_lens[0] // case.page_size)
    indptr, indices, last = page_table(batch)
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(indptr[1:] - pages, indices[pages:], last[1:], *heads, **dtypes)
    k, v = (tokens.contiguous() for tokens in batch.tokens(0))
    decodes = batch.q[rows:].contiguous()

    return lambda: wrapper.run(batch.q[:rows], k, v, decodes, batch.cache, causal_p=case.causal)


def flashinfer_backends(batch: Batch) -> Kernels:
    """Candidates for FlashInfer's best kernel for a batch."""
    backends: Kernels = {name: partial(flashinfer_prefill, batch, name) for name in ("fa2", "fa3")}
    if batch.case.ragged:
        return backends
    if all(length == 1 for length in batch.case.qo_lens):
        backends = {
            "tensor cores": partial(flashinfer_decode, batch),
            "CUDA cores": partial(flashinfer_decode, batch, False),
        }
    elif all(length == 1 for length in batch.case.qo_lens[1:]) and len(batch.case.qo_lens) > 1:
        backends["POD"] = partial(flashinfer_pod, batch)
    return backends | {"persistent": partial(flashinfer_persistent, batch)}


def peers_of(batch: Batch) -> dict[str, Kernels]:
    """The applicable kernels of each peer, by name; a peer's fastest counts."""
    peers: dict[str, Kernels] = {
        "FA3": {"FA3": partial(flash_attention_3, batch)},
        "FlashInfer": flashinfer_backends(batch),
    }
    if batch.case.ragged:
        peers["flex_attention"] = {"compiled": partial(flex_attention, batch)}
        peers["FA4"] = {"FA4": partial(flash_attention_4, batch)}
        if len(set(batch.case.qo_lens)) == 1 and batch.case.qo_lens == batch.case.kv_lens:
            peers["cuDNN"] = {"cuDNN": partial(cudnn, batch)}
    return peers


def peers_of_shared(batch: SharedBatch) -> dict[str, Kernels]:
    """The same for requests that share prefixes. The peers get the requests of a prefix consecutively."""
    peers = peers_of(batch.grouped)
    peers["FlashInfer"] |= {
        "cascade": partial(flashinfer_cascade, batch),
        "cascade, fa2": partial(flashinfer_cascade, batch, "fa2"),
    }
    return peers


def flashinfer_cascade(batch: SharedBatch, backend: str = "auto") -> Run:
    """FlashInfer's MultiLevelCascadeAttentionWrapper.

    On Hopper "auto" becomes fa3, which splits no KV. "fa2" does, but only the inner wrappers accept it.
    """
    flashinfer = import_module("flashinfer")
    case = batch.grouped.case
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(batch.page_tables), workspace(), "NHD")
    for level in wrapper._batch_prefill_wrappers:
        level._backend = backend
    wrapper.plan(
        batch.qo_indptrs,
        [
            torch.arange(len(table) + 1, dtype=torch.int32, device="cuda") * table.shape[1]
            for table in batch.page_tables
        ],
        [table.flatten() for table in batch.page_tables],
        [
            torch.full((nodes,), (tokens - 1) % case.page_size + 1, dtype=torch.int32, device="cuda")
            for nodes, tokens in batch.shared.levels
        ],
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        case.page_size,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return lambda: wrapper.run(batch.grouped.q, batch.grouped.cache)


def vllm_rotate(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> Launch:
    """vLLM's rotary embedding, which rotates q and k [tokens, heads, head_dim] in place, in halves; their
    heads are contiguous.
    """
    kernels = import_module("vllm._custom_ops")
    arguments = (positions, q.flatten(1), k.flatten(1), q.shape[2], table, True)
    return lambda: kernels.rotary_embedding(*arguments)


def vllm_append(
    k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float = 1.0
) -> Launch:
    """vLLM's kernel that writes K and V to a cache [pages, 2, page_size, num_kv_heads, head_dim], of their
    dtype or e4m3, which vLLM sees as bytes.
    """
    kernels = import_module("vllm._custom_ops")
    kind, pages = ("auto", cache) if cache.dtype == k.dtype else ("fp8", cache.view(torch.uint8))
    scales = torch.full((1,), scale, dtype=torch.float32, device=k.device)
    arguments = (k, v, *pages.unbind(1), slots, kind, scales, scales)
    return lambda: kernels.reshape_and_cache_flash(*arguments)


def page_table(batch: Paged) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """kv_indptr, kv_indices, kv_last_page_len."""
    page_size = batch.case.page_size
    pages = (batch.kv_lens + page_size - 1) // page_size
    used = torch.arange(batch.block_table.shape[1], device=pages.device)[None] < pages[:, None]
    return (
        torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)]),
        batch.block_table[used],
        (batch.kv_lens - 1) % page_size + 1,
    )


def workspace(device: torch.device | str = "cuda") -> torch.Tensor:
    return torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
