"""The peers of the head shapes' benchmark. Raises ImportError if a peer is not installed."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from benchmarks.head_shape_cases import Tensors
from benchmarks.peers import Kernels, Run, page_table, workspace

# Columns of K and V that FlashInfer builds in advance or dispatches to. Others would compile for minutes, and
# then fail or give wrong results.
FLASHINFER_HEADS = {
    "fa2": ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512)),
    "fa3": ((64, 64), (128, 128), (192, 128), (256, 256)),
}


def flash_attention_3(tensors: Tensors) -> Run:
    """FlashAttention-3 as vLLM builds it; over pages with precomputed scheduler metadata.

    MLA: the RoPE part is K, the latent is V and q_v's keys.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    case = tensors.case
    longest_q, longest_kv = max(case.qo_lens), max(case.kv_lens)
    arguments: dict[str, Any] = {"q": tensors.q, "k": tensors.k, "v": tensors.v}
    head_dim = case.head_dim
    if case.v_in_k:
        latent = case.head_dim_v
        head_dim -= latent
        arguments = {
            "q": tensors.q[..., latent:].contiguous(),
            "q_v": tensors.q[..., :latent].contiguous(),
            "k": tensors.k[..., latent:],
            "v": tensors.v,
        }
    arguments |= {"cu_seqlens_q": tensors.qo_indptr, "max_seqlen_q": longest_q, "max_seqlen_k": longest_kv}
    arguments |= {"softmax_scale": case.sm_scale, "causal": True, "fa_version": 3}
    if case.ragged:
        arguments["cu_seqlens_k"] = tensors.kv_indptr
    else:
        arguments |= {"seqused_k": tensors.kv_lens, "block_table": tensors.block_table}
        arguments["scheduler_metadata"] = get_scheduler_metadata(
            batch_size=len(case.kv_lens),
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_kv,
            num_heads_q=case.num_qo_heads,
            num_heads_kv=case.num_kv_heads,
            headdim=head_dim,
            headdim_v=case.head_dim_v,
            cache_seqlens=tensors.kv_lens,
            cu_seqlens_q=tensors.qo_indptr,
            page_size=case.page_size,
            causal=True,
        )
    return lambda: flash_attn_varlen_func(**arguments)


def flash_mla(tensors: Tensors) -> Run:
    """FlashMLA as vLLM builds it; its first call computes the scheduler metadata."""
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    case = tensors.case
    rows = tensors.q.view(len(case.kv_lens), -1, case.num_qo_heads, case.head_dim)
    metadata = get_mla_metadata(tensors.kv_lens, rows.shape[1] * case.num_qo_heads, 1)
    arguments = {
        "q": rows,
        "k_cache": tensors.k,
        "block_table": tensors.block_table,
        "cache_seqlens": tensors.kv_lens,
        "head_dim_v": case.head_dim_v,
    }
    arguments |= {"tile_scheduler_metadata": metadata[0], "softmax_scale": case.sm_scale, "causal": True}
    if metadata[1] is not None:
        arguments["num_splits"] = metadata[1]
    return lambda: flash_mla_with_kvcache(**arguments)[0].flatten(0, 1)


def flash_mla_sparse(tensors: Tensors) -> Run:
    """FlashMLA's attention to selected tokens, as vLLM builds it: the decode kernel over rows of 656 bytes,
    the prefill kernel over bf16.
    """
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

    case, slots = tensors.case, tensors.block_table.unsqueeze(1)
    if case.kv == "bf16":
        rows = tensors.k.squeeze(2)
        return lambda: flash_mla_sparse_fwd(tensors.q, rows, slots, case.sm_scale)[0]
    pages = tensors.k.view(-1, 64, 1, tensors.k.shape[-1])
    arguments: dict[str, Any] = {
        "q": tensors.q.unsqueeze(1),
        "k_cache": pages,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": case.head_dim_v,
    }
    arguments |= {
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "softmax_scale": case.sm_scale,
        "is_fp8_kvcache": True,
        "indices": slots,
    }
    return lambda: flash_mla_with_kvcache(**arguments)[0].flatten(0, 1)


def flashinfer_decode(tensors: Tensors, use_tensor_cores: bool) -> Run:
    """FlashInfer's decode. Its plan copies lengths to the host and is not timed."""
    case, q = tensors.case, tensors.q
    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        workspace(q.device), "NHD", use_tensor_cores=use_tensor_cores
    )
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim)
    wrapper.plan(
        *page_table(tensors), *heads, case.page_size, q_data_type=q.dtype, kv_data_type=tensors.k.dtype
    )
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, (tensors.k, tensors.v), out=out)


def flashinfer_prefill(tensors: Tensors, backend: str) -> Run:
    """FlashInfer's prefill, "fa2" or "fa3". Its plan copies lengths to the host and is not timed."""
    flashinfer, case, q = import_module("flashinfer"), tensors.case, tensors.q
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim)
    options = {
        "head_dim_vo": case.head_dim_v,
        "causal": True,
        "q_data_type": q.dtype,
        "kv_data_type": tensors.k.dtype,
    }
    out = q.new_empty(*q.shape[:2], case.head_dim_v)
    if case.ragged:
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(q.device), "NHD", backend=backend)
        ragged.plan(tensors.qo_indptr, tensors.kv_indptr, *heads, **options)
        return lambda: ragged.run(q, tensors.k, tensors.v, out=out)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(q.device), "NHD", backend=backend)
    wrapper.plan(tensors.qo_indptr, *page_table(tensors), *heads, case.page_size, **options)
    return lambda: wrapper.run(q, (tensors.k, tensors.v), out=out)


def flashinfer_mla(tensors: Tensors) -> Run:
    """FlashInfer's attention over latents, with its default backend on Hopper.

    Its plan copies lengths to the host and is not timed.
    """
    case, latent = tensors.case, tensors.case.head_dim_v
    wrapper = import_module("flashinfer").BatchMLAPagedAttentionWrapper(
        workspace(tensors.q.device), backend="fa3"
    )
    kv_indptr, kv_indices, _ = page_table(tensors)
    wrapper.plan(
        qo_indptr=tensors.qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_len_arr=tensors.kv_lens,
        num_heads=case.num_qo_heads,
        head_dim_ckv=latent,
        head_dim_kpe=case.head_dim - latent,
        page_size=case.page_size,
        causal=max(case.qo_lens) > 1,
        sm_scale=case.sm_scale,
        q_data_type=tensors.q.dtype,
        kv_data_type=tensors.k.dtype,
    )
    rows = tensors.k.squeeze(2)
    arguments: dict[str, Any] = {
        "q_nope": tensors.q[..., :latent].contiguous(),
        "q_pe": tensors.q[..., latent:].contiguous(),
    }
    arguments |= {
        "ckv_cache": rows[..., :latent],
        "kpe_cache": rows[..., latent:],
        "out": tensors.q.new_empty(*tensors.q.shape[:2], latent),
    }
    if case.kv == "e4m3":
        arguments |= {"ckv_scale": 1.0, "kpe_scale": 1.0}
    return lambda: wrapper.run(**arguments)


def flashinfer_kernels(tensors: Tensors) -> Kernels:
    """Candidates for FlashInfer's best kernel on a line; for 8-bit caches, the kernels that take 16-bit Q."""
    case = tensors.case
    if case.v_in_k:
        return {"fa3": partial(flashinfer_mla, tensors)}
    if (
        max(case.qo_lens) == 1
        and case.head_dim == case.head_dim_v
        and (case.head_dim,) * 2 in FLASHINFER_HEADS["fa2"]
    ):
        return {
            "tensor cores": partial(flashinfer_decode, tensors, True),
            "CUDA cores": partial(flashinfer_decode, tensors, False),
        }
    backends = [
        name
        for name in ("fa2", "fa3")
        if (case.head_dim, case.head_dim_v) in FLASHINFER_HEADS[name] and (name == "fa2" or case.kv == "bf16")
    ]
    return {name: partial(flashinfer_prefill, tensors, name) for name in backends}


def peers_of(tensors: Tensors) -> dict[str, Kernels]:
    """The applicable kernels of each peer, by name; a peer's fastest counts."""
    case = tensors.case
    if case.selects_from:
        return {} if case.kv == "e4m3" else {"FlashMLA": {"FlashMLA": partial(flash_mla_sparse, tensors)}}
    if case.kv == "latent":
        return {}
    peers: dict[str, Kernels] = {"FlashInfer": flashinfer_kernels(tensors)}
    if case.kv == "bf16":
        peers |= {"FA3": {"FA3": partial(flash_attention_3, tensors)}}
        peers |= {"FlashMLA": {"FlashMLA": partial(flash_mla, tensors)}} if case.v_in_k else {}
    return peers
