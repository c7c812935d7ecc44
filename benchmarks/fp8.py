"""Attention over an 8-bit cache (e4m3), with bf16 and 8-bit queries, compared with four baselines. These are
our own bf16, FA3 over the same cache (8-bit Q), FlashInfer with both kinds of queries, and the floor.

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
PEERS = {"FA3": ("FA3 fp8",), "FlashInfer": ("FlashInfer fp8", "FlashInfer fp8 Q")}  # and their columns
PEER_COLUMNS = [column for columns in PEERS.values() for column in columns]
COLUMNS = ("floor", "bf16", "fp8", "fp8, scales of heads", "fp8 Q", *PEER_COLUMNS)
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
    kv = KVCache.from_tensor(cache, k_scale=k_scale, v_scale=v_scale)
    room: dict[str, Any] = {"device": cache.device, "max_rows": len(batch.q), "max_batch": len(case.kv_lens)}
    attention = Attention(
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        kv_dtype=FLOAT8,
        q_dtype=FLOAT8 if float8_q else None,
        **room,
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


def peers_of(batch: Batch, cache: torch.Tensor) -> dict[str, Kernels]:
    """The kernels of each column of a peer, by name; the fastest counts."""
    bf16_q = ("tensor cores", "CUDA cores") if max(batch.case.qo_lens) == 1 else ("fa2",)
    return {
        "FA3 fp8": {"FA3 fp8": partial(flash_attention_3, batch, cache)},
        "FlashInfer fp8": {kernel: partial(flashinfer, batch, cache, kernel) for kernel in bf16_q},
        "FlashInfer fp8 Q": {"fa3": partial(flashinfer_float8_q, batch, cache)},
    }


def measure(
    case: Case, timer: Timer, machine: Machine, peers: Collection[str] = tuple(PEERS)
) -> dict[str, Any]:
    """One line of the table; times in µs. peers: the measured ones."""
    cache, batch = quantised(Batch.make(case))
    last = len(case.kv_lens) - 1
    expected = reference(batch, last)
    first = int(batch.qo_indptr[last])
    runs = {
        "bf16": ours(batch).run,
        "fp8": widened(batch, cache),
        "fp8, scales of heads": widened(batch, cache, of_heads=True),
    }
    runs["fp8 Q"] = widened(batch, cache, float8_q=True)
    times = timer.together(list(runs.values()))
    line: dict[str, Any] = {
        "case": case.name,
        "floor": floor_bytes(case) / machine.bandwidth * 1e6,
    } | dict.fromkeys(PEER_COLUMNS)
    for (name, run), time in zip(runs.items(), times, strict=True):
        line[name], line[f"{name} error"] = time, relative_error(run()[first:], expected)
        if not line[f"{name} error"] <= (LARGEST_FLOAT8_Q_ERROR if name == "fp8 Q" else LARGEST_ERROR):
            print(f"{case.name}: {name}: WRONG, relative error {line[f'{name} error']:.1e}", flush=True)
    kernels = peers_of(batch, cache)
    for column in (column for peer in peers for column in PEERS[peer]):
        largest = LARGEST_ERROR if column == "FlashInfer fp8" else LARGEST_FLOAT8_Q_ERROR
        line |= fastest(
            column,
            case.name,
            kernels[column],
            timer,
            lambda out: relative_error(out[first:], expected),
            largest,
        )
    return line


def markdown(lines: list[dict[str, Any]], header: str) -> str:
    """A table of all lines. Ratios compare ours, with 16-bit and 8-bit queries, with the bf16 cache, the
    floor, and peers that do at least the same work.
    """
    rows = []
    for line in lines:
        pairs = [("bf16", "fp8"), ("floor", "fp8"), ("fp8", "FA3 fp8"), ("fp8", "FlashInfer fp8")]
        pairs += [("bf16", "fp8 Q"), ("fp8 Q", "FA3 fp8"), ("fp8 Q", "FlashInfer fp8 Q")]
        errors = [line.get(f"{name} error") for name in ("fp8", "fp8 Q", *PEER_COLUMNS)]
        shown_errors = ["" if error is None else f"{error:.1e}" for error in errors]
        ratios = [number(ratio(line[dividend], line[divisor]), 2) for dividend, divisor in pairs]
        rows.append([line["case"], *(number(line[column]) for column in COLUMNS), *ratios, *shown_errors])
    names = [
        "bf16 / fp8",
        "floor / fp8",
        "fp8 / FA3",
        "fp8 / FlashInfer",
        "bf16 / fp8 Q",
        "fp8 Q / FA3",
        "fp8 Q / FlashInfer",
    ]
    names += ["fp8 error", "fp8 Q error", "FA3 error", "FlashInfer error", "FlashInfer Q error"]
    return f"{header}\n\n{table(['case', *COLUMNS, *names], rows)}\n"


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
