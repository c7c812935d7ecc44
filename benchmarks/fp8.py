"""Attention over 8-bit caches: e4m3 with one scale, with bf16 and 8-bit queries, and e4m3 and int8 with a
scale for each token and head. Compared with our own bf16, FA3 over e4m3 (8-bit Q), FlashInfer with both kinds
of queries, vLLM's Triton kernel over scales for each token, and the floor.

One process, one GPU, 32/8 heads, head_dim 128 (prompts also with 32/8 heads of 64, and 16/4 of 256), page
16, cold L2, CUDA-graph replay, median. The floor: bytes
of the 8-bit cache, Q and O at the bandwidth of a device copy. Errors are relative to float64 on the
dequantized cache.

python -m benchmarks.fp8 [--case TEXT ...] [--peer NAME ...] [--repeats N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from attn_backend import Attention, KVCache
from attn_backend.jit.manifest import SHIPPED_TOKEN_HEAD_DIMS, HeadDims
from benchmarks.batches import LARGEST_ERROR, Batch, ours, reference, relative_error
from benchmarks.cases import Case
from benchmarks.lines import measure_lines
from benchmarks.peers import Kernels, Run, fastest, page_table, workspace
from benchmarks.report import asked_peers, number, options, ratio, table
from benchmarks.timing import Machine, Timer, start

HEADS = {128: (32, 8), 64: (32, 8), 256: (16, 4)}
FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = torch.finfo(FLOAT8).max
K_SCALE, V_SCALE = 0.02, 0.01
TOKEN_SCALED = {"fp8, token scales": FLOAT8, "int8, token scales": torch.int8}  # and their elements
PEERS = {  # and their columns
    "FA3": ("FA3 fp8",),
    "FlashInfer": ("FlashInfer fp8", "FlashInfer fp8 Q"),
    "Triton": tuple(f"Triton {column}" for column in TOKEN_SCALED),
}
PEER_COLUMNS = [column for columns in PEERS.values() for column in columns]
COLUMNS = ("floor", "bf16", "fp8", "fp8, scales of heads", *TOKEN_SCALED, "fp8 Q", *PEER_COLUMNS)
LARGEST_FLOAT8_Q_ERROR = 6e-2  # 8-bit probabilities and Q


def cases() -> list[Case]:
    decodes = (
        ("decode bs1 8k", 1, 8192),
        ("decode bs16 1k", 16, 1024),
        ("decode bs64 4k", 64, 4096),
        ("decode bs1 128k", 1, 131072),
    )
    heads = HEADS[128]
    made = [Case(name, (1,) * batch, (tokens,) * batch, *heads) for name, batch, tokens in decodes]
    made.append(Case("verify bs64 4k, 4 tokens each", (4,) * 64, (4096,) * 64, *heads))
    prefills = (("prefill 16 x 1k", 16, 1024), ("prefill 4 x 4k", 4, 4096), ("prefill 1 x 16k", 1, 16384))
    for head_dim, heads in HEADS.items():
        suffix = "" if head_dim == 128 else f" d{head_dim}"
        made += [
            Case(name + suffix, (tokens,) * batch, (tokens,) * batch, *heads, head_dim=head_dim)
            for name, batch, tokens in prefills
        ]
    return made


def floor_bytes(case: Case) -> int:
    """K and V with one byte an element, Q and O with two, once."""
    kv = sum(case.kv_lens) * case.num_kv_heads * case.head_dim
    return 2 * (kv + sum(case.qo_lens) * case.num_qo_heads * case.head_dim * 2)


def quantised(batch: Batch) -> tuple[torch.Tensor, Batch]:
    """The cache in 8 bits, as `Batch.cache`, and the batch with the values that it represents."""
    scales = torch.tensor([K_SCALE, V_SCALE], device=batch.cache.device).view(1, 2, 1, 1, 1)
    cache = torch.empty_like(batch.cache, dtype=FLOAT8)
    wide = torch.empty_like(batch.cache)
    for pages, to, back in zip(batch.cache.split(1024), cache.split(1024), wide.split(1024), strict=True):
        # a larger number would become a NaN
        to.copy_((pages.float() / scales).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8))
        back.copy_(to.float() * scales)
    return cache, replace(batch, cache=wide)


def quantised_by_token(batch: Batch, dtype: torch.dtype) -> tuple[KVCache, Batch]:
    """The cache with a scale for each token and head, and the batch with the values that it represents. The
    scales of a page are [num_kv_heads, page_size] in memory.
    """
    cache = torch.empty_like(batch.cache, dtype=dtype)
    wide = torch.empty_like(batch.cache)
    scales = torch.empty(*(batch.cache.shape[i] for i in (0, 1, 3, 2)), device=batch.cache.device).transpose(
        2, 3
    )
    largest = LARGEST_FLOAT8 if dtype == FLOAT8 else 127.0
    for pages, to, back, scale in zip(
        *(tensor.split(1024) for tensor in (batch.cache, cache, wide, scales)), strict=True
    ):
        scale.copy_(pages.float().abs().amax(-1) / largest)
        elements = pages.float() / scale[..., None]
        to.copy_(elements.round() if dtype == torch.int8 else elements)
        back.copy_(to.float() * scale[..., None])
    return KVCache.from_tensor(cache, k_scale=scales[:, 0], v_scale=scales[:, 1]), replace(batch, cache=wide)


def quantised_q(batch: Batch) -> tuple[torch.Tensor, float]:
    """Q in 8 bits, and its scale."""
    scale = float(batch.q.abs().max()) / LARGEST_FLOAT8
    return (batch.q.float() / scale).to(FLOAT8), scale


def widened(batch: Batch, cache: torch.Tensor, of_heads: bool = False, float8_q: bool = False) -> Run:
    """Ours over the 8-bit cache. of_heads: scales are device tensors, one for each KV head. float8_q: Q is
    quantized beforehand.
    """
    case = batch.case
    k_scale, v_scale = (
        torch.full((case.num_kv_heads,), scale, device=cache.device) if of_heads else scale
        for scale in (K_SCALE, V_SCALE)
    )
    return attends(batch, KVCache.from_tensor(cache, k_scale=k_scale, v_scale=v_scale), float8_q)


def attends(batch: Batch, kv: KVCache, float8_q: bool = False, **options: Any) -> Run:
    """Ours over `kv`. options: others of Attention."""
    case = batch.case
    room: dict[str, Any] = {"device": kv.device, "max_rows": len(batch.q), "max_batch": len(case.kv_lens)}
    attention = Attention(
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        q_dtype=FLOAT8 if float8_q else None,
        token_scales=kv.has_token_scales,
        **({"kv_dtype": kv.dtype} | room | options),
    )
    attention.plan(batch.view)
    out = torch.empty_like(batch.q)
    q, q_scale = quantised_q(batch) if float8_q else (batch.q, None)
    return lambda: attention.run(q, kv, out=out, q_scale=q_scale)


def flash_attention_3(batch: Batch, cache: torch.Tensor) -> Run:
    """FlashAttention-3 as vLLM builds and calls it with an 8-bit cache: Q is quantized beforehand."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    case = batch.case
    requests = len(case.kv_lens)
    q, q_scale = quantised_q(batch)
    out = torch.empty_like(batch.q)
    longest_q, longest_kv = max(case.qo_lens), max(case.kv_lens)
    descales = {
        name: torch.full((requests, case.num_kv_heads), scale, device=q.device)
        for name, scale in (("q_descale", q_scale), ("k_descale", K_SCALE), ("v_descale", V_SCALE))
    }
    metadata = get_scheduler_metadata(
        batch_size=requests,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_kv,
        num_heads_q=case.num_qo_heads,
        num_heads_kv=case.num_kv_heads,
        headdim=case.head_dim,
        cache_seqlens=batch.kv_lens,
        qkv_dtype=FLOAT8,
        cu_seqlens_q=batch.qo_indptr,
        page_size=case.page_size,
        causal=True,
    )

    def run() -> torch.Tensor:
        flash_attn_varlen_func(
            q=q,
            k=cache[:, 0],
            v=cache[:, 1],
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
            **descales,
        )
        return out

    return run


def flashinfer(batch: Batch, cache: torch.Tensor, kernel: str) -> Run:
    """FlashInfer with bf16 queries: "tensor cores" or "CUDA cores" of its decode, "fa2" of its prefill. It
    multiplies the output by V's scale afterwards.
    """
    library, case = import_module("flashinfer"), batch.case
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
    dtypes = {"q_data_type": batch.q.dtype, "kv_data_type": FLOAT8}
    out = torch.empty_like(batch.q)
    if kernel == "fa2":
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace(cache.device), "NHD", backend="fa2")
        wrapper.plan(batch.qo_indptr, *page_table(batch), *heads, causal=True, **dtypes)
    else:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace(cache.device), "NHD", use_tensor_cores=kernel == "tensor cores"
        )
        wrapper.plan(*page_table(batch), *heads, **dtypes)
    return lambda: wrapper.run(batch.q, cache, k_scale=K_SCALE, v_scale=V_SCALE, out=out)


def flashinfer_float8_q(batch: Batch, cache: torch.Tensor) -> Run:
    """FlashInfer's prefill for Hopper, which takes 8-bit queries with scales per head; FlashInfer also uses
    this kernel for such decodes.
    """
    case = batch.case
    q, q_scale = quantised_q(batch)
    wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
        workspace(q.device), "NHD", backend="fa3"
    )
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
    dtypes = {"q_data_type": FLOAT8, "kv_data_type": FLOAT8, "o_data_type": batch.q.dtype}
    wrapper.plan(batch.qo_indptr, *page_table(batch), *heads, causal=True, **dtypes)
    heads_and_scales = (
        (case.num_qo_heads, q_scale),
        (case.num_kv_heads, K_SCALE),
        (case.num_kv_heads, V_SCALE),
    )
    scales = [
        torch.full((count,), scale, dtype=torch.float32, device=q.device) for count, scale in heads_and_scales
    ]
    out = torch.empty_like(batch.q)
    return lambda: wrapper.run(q, cache, *scales, out=out)


def triton(batch: Batch, kv: KVCache) -> Run:
    """vLLM's Triton kernel, as vLLM calls it over a cache with a scale for each token and head."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    case, device = batch.case, kv.device
    segments, most_requests = 16, 128 // case.num_kv_heads  # as in v1/attention/backends/triton_attn.py
    parts = torch.empty(most_requests, case.num_qo_heads, segments, case.head_dim, device=device)
    out = torch.empty_like(batch.q)
    dtype = "INT8" if kv.dtype == torch.int8 else "FP8"
    arguments = {
        "q": batch.q,
        "k": kv.k,
        "v": kv.v,
        "out": out,
        "cu_seqlens_q": batch.qo_indptr,
        "max_seqlen_q": max(case.qo_lens),
        "seqused_k": batch.kv_lens,
        "max_seqlen_k": max(case.kv_lens),
        "softmax_scale": case.head_dim**-0.5,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": batch.block_table,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "seq_threshold_3D": most_requests,
        "num_par_softmax_segments": segments,
        "softmax_segm_output": parts,
        "softmax_segm_max": torch.empty_like(parts[..., 0]),
        "softmax_segm_expsum": torch.empty_like(parts[..., 0]),
        "kv_quant_mode": KVQuantMode[f"{dtype}_PER_TOKEN_HEAD"],
        "k_scale_cache": kv.k_scale,
        "v_scale_cache": kv.v_scale,
    }

    def run() -> torch.Tensor:
        unified_attention(**arguments)
        return out

    return run


def peers_of(batch: Batch, cache: torch.Tensor, token_scaled: dict[str, KVCache]) -> dict[str, Kernels]:
    """The kernels of each column of a peer, by name; the fastest counts."""
    bf16_q = ("tensor cores", "CUDA cores") if max(batch.case.qo_lens) == 1 else ("fa2",)
    kernels: dict[str, Kernels] = {
        "FA3 fp8": {"FA3 fp8": partial(flash_attention_3, batch, cache)},
        "FlashInfer fp8": {kernel: partial(flashinfer, batch, cache, kernel) for kernel in bf16_q},
        "FlashInfer fp8 Q": {"fa3": partial(flashinfer_float8_q, batch, cache)},
    }
    for name, kv in token_scaled.items():
        kernels[f"Triton {name}"] = {f"Triton {name}": partial(triton, batch, kv)}
    return kernels


def measure(
    case: Case, timer: Timer, machine: Machine, peers: Collection[str] = tuple(PEERS)
) -> dict[str, Any]:
    """One line of the table; times in µs. peers: the measured ones."""
    original = Batch.make(case)
    cache, batch = quantised(original)
    last = len(case.kv_lens) - 1
    expected = dict.fromkeys(COLUMNS, reference(batch, last))
    first = int(batch.qo_indptr[last])
    token_scaled = {}
    for name, dtype in TOKEN_SCALED.items():
        token_scaled[name], dequantized = quantised_by_token(original, dtype)
        expected[name] = expected[f"Triton {name}"] = reference(dequantized, last)
        del dequantized
    runs = {
        "bf16": ours(batch).run,
        "fp8": widened(batch, cache),
        "fp8, scales of heads": widened(batch, cache, of_heads=True),
        **{name: attends(batch, kv) for name, kv in token_scaled.items()},
        "fp8 Q": widened(batch, cache, float8_q=True),
    }
    if HeadDims(case.head_dim, case.head_dim) not in SHIPPED_TOKEN_HEAD_DIMS:  # their kernels spill
        for name in TOKEN_SCALED:
            del runs[name], token_scaled[name]
    times = timer.together(list(runs.values()))
    line: dict[str, Any] = {
        "case": case.name,
        "floor": floor_bytes(case) / machine.bandwidth * 1e6,
    } | dict.fromkeys(COLUMNS[1:])
    for (name, run), time in zip(runs.items(), times, strict=True):
        line[name], line[f"{name} error"] = time, relative_error(run()[first:], expected[name])
        if not line[f"{name} error"] <= (LARGEST_FLOAT8_Q_ERROR if name == "fp8 Q" else LARGEST_ERROR):
            print(f"{case.name}: {name}: WRONG, relative error {line[f'{name} error']:.1e}", flush=True)
    kernels = peers_of(batch, cache, token_scaled)
    for column in (column for peer in peers for column in PEERS[peer] if column in kernels):
        largest = LARGEST_FLOAT8_Q_ERROR if column in ("FA3 fp8", "FlashInfer fp8 Q") else LARGEST_ERROR
        line |= fastest(
            column,
            case.name,
            kernels[column],
            timer,
            partial(error_of_last, first, expected[column]),
            largest,
        )
    return line


def error_of_last(first: int, expected: torch.Tensor, out: torch.Tensor) -> float:
    """Of the rows from `first` on, which are the last request's."""
    return relative_error(out[first:], expected)


RATIOS = {  # a column's time / another's, by name
    "fp8 / bf16": ("fp8", "bf16"),
    "fp8 / FA3": ("fp8", "FA3 fp8"),
    "fp8 / FlashInfer": ("fp8", "FlashInfer fp8"),
    "fp8 Q / bf16": ("fp8 Q", "bf16"),
    "fp8 Q / FA3": ("fp8 Q", "FA3 fp8"),
    "fp8 Q / FlashInfer": ("fp8 Q", "FlashInfer fp8 Q"),
    **{f"{name} / fp8": (name, "fp8") for name in TOKEN_SCALED},
    **{f"{name} / Triton": (name, f"Triton {name}") for name in TOKEN_SCALED},
}


def markdown(lines: list[dict[str, Any]], header: str) -> str:
    """Three tables: times, our times divided by others', errors."""
    ratios = [
        [line["case"], *(number(ratio(line[ours_], line[other]), 2) for ours_, other in RATIOS.values())]
        for line in lines
    ]
    with_errors = [column for column in COLUMNS if any(f"{column} error" in line for line in lines)]
    errors = [
        [
            line["case"],
            *(
                "-" if (error := line.get(f"{column} error")) is None else f"{error:.1e}"
                for column in with_errors
            ),
        ]
        for line in lines
    ]
    times = [[line["case"], *(number(line[column]) for column in COLUMNS)] for line in lines]
    parts = (
        table(["µs", *COLUMNS], times),
        table(["time divided by", *RATIOS], ratios),
        table(["relative error", *with_errors], errors),
    )
    return "\n\n".join((header, *parts)) + "\n"


def main() -> None:
    arguments = options(__doc__, peers=PEERS).parse_args()
    peers = asked_peers(PEERS, arguments)
    timer, machine = start(arguments.repeats)
    header = f"{machine} Times in µs, cold L2, CUDA-graph replay, median of {arguments.repeats}."
    measure_lines(
        cases(),
        lambda case: measure(case, timer, machine, peers),
        lambda lines: markdown(lines, header),
        header,
        arguments,
    )


if __name__ == "__main__":
    main()
