"""The host cost of calls: the wrappers of attn_backend.flashinfer compared with FlashInfer's own, and run,
plan, append_kv and sample themselves. Batch 256.

    python -m benchmarks.host [--case TEXT ...] [--peer NAME ...] [--repeats N] \\
        [--json FILE] [--markdown FILE]
    python -m benchmarks.host --device cpu                    # without a GPU: Python's part alone

On a GPU a call is timed as a whole, launches included; the batch is so short that the device keeps up. On a
CPU an empty function replaces the functions of the host library, so only Python's part is timed. Times are µs
of a call, the smallest of all rounds, since other processes on the machine only add time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import attn_backend
import attn_backend.flashinfer as drop_in
from attn_backend import BSRView, KVCache, PageTable
from attn_backend.kernels.native import library
from benchmarks.report import asked_peers, number, options, save, table, wanted

BATCH, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 256, 32, 8, 128, 16
LATENT, ROTATED = 512, 64  # columns of MLA
CALLS = 50  # per round
PEERS = ("FlashInfer",)  # on a GPU
# replaced on a CPU
LIBRARY = ("plan_level", "run", "set_variant_params", "append_kv", "append_qkv", "sample")

Call = Callable[[], object]
Make = Callable[[Any, "Batch"], Call]


class Batch:
    """Decodes of one page each, in every form of K and V that wrappers take."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator(device).manual_seed(1)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator, dtype=torch.bfloat16)

        self.device = device
        self.q = randn(BATCH, NUM_QO_HEADS, HEAD_DIM)
        self.out, self.lse = torch.empty_like(self.q), torch.empty(BATCH, NUM_QO_HEADS, device=device)
        self.nhd, self.hnd = (
            randn(BATCH, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM),
            randn(BATCH, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM),
        )
        self.nhd_pair, self.hnd_pair = self.nhd.unbind(1), self.hnd.unbind(1)
        self.float8, self.float8_pair = (
            self.nhd.to(torch.float8_e4m3fn),
            tuple(self.hnd.to(torch.float8_e4m3fn).unbind(1)),
        )
        self.k, self.v = randn(BATCH, NUM_KV_HEADS, HEAD_DIM), randn(BATCH, NUM_KV_HEADS, HEAD_DIM)
        self.latents, self.q_latent = (
            randn(BATCH, PAGE_SIZE, LATENT + ROTATED),
            randn(BATCH, NUM_QO_HEADS, LATENT + ROTATED),
        )
        self.indptr_on_host = torch.arange(BATCH + 1, dtype=torch.int32)
        self.indptr, self.indices = (
            self.indptr_on_host.to(device),
            torch.arange(BATCH, dtype=torch.int32, device=device),
        )
        self.lengths = torch.full((BATCH,), PAGE_SIZE, dtype=torch.int32, device=device)
        self.of_heads, self.of_requests = (
            torch.ones(NUM_KV_HEADS, device=device),
            torch.ones(BATCH, device=device),
        )
        self.sinks = torch.zeros(NUM_QO_HEADS, device=device)
        self.workspace = torch.empty(128 << 20 if device == "cuda" else 1, dtype=torch.uint8, device=device)
        self.logits, self.tokens = (
            torch.randn(BATCH, 1000, device=device),
            torch.empty(BATCH, dtype=torch.int32, device=device),
        )

    def named(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options whose values may be names of this batch's tensors."""
        return {
            name: getattr(self, value, value) if isinstance(value, str) else value
            for name, value in options.items()
        }


HEADS = (NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM)
BF16 = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
FLOAT8 = {"q_data_type": torch.bfloat16, "kv_data_type": torch.float8_e4m3fn}


def decode_plan(
    api: Any, batch: Batch, layout: str = "NHD", on_host: bool = False, **planned: Any
) -> tuple[Any, Call]:
    wrapper = api.BatchDecodeWithPagedKVCacheWrapper(batch.workspace, layout, use_tensor_cores=True)
    indptr = batch.indptr_on_host if on_host else batch.indptr
    plan = partial(wrapper.plan, indptr, batch.indices, batch.lengths, *HEADS, PAGE_SIZE, **(BF16 | planned))
    plan()
    return wrapper, plan


def graph_plan(api: Any, batch: Batch, is_fast: bool = False) -> Call:
    """A plan into CUDA graph buffers; the fast plan finds them filled."""
    buffers = (
        torch.empty_like(batch.indptr),
        torch.empty_like(batch.indices),
        torch.empty_like(batch.lengths),
    )
    wrapper = api.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(batch.workspace, *buffers, "NHD", True)
    plan = partial(wrapper.plan, batch.indptr, batch.indices, batch.lengths, *HEADS, PAGE_SIZE, **BF16)
    plan()
    if not is_fast:
        return plan
    on_host = {"global_override_indptr_cpu": batch.indptr_on_host}
    return partial(
        api.fast_decode_plan,
        wrapper,
        batch.indptr,
        batch.indices,
        batch.lengths,
        *HEADS,
        PAGE_SIZE,
        **BF16,
        **on_host,
    )


def prefill_plan(
    api: Any, batch: Batch, layout: str = "NHD", on_host: bool = False, **planned: Any
) -> tuple[Any, Call]:
    wrapper = api.BatchPrefillWithPagedKVCacheWrapper(batch.workspace, layout)
    indptr = batch.indptr_on_host if on_host else batch.indptr
    plan = partial(
        wrapper.plan,
        indptr,
        indptr,
        batch.indices,
        batch.lengths,
        *HEADS,
        PAGE_SIZE,
        causal=True,
        **(BF16 | planned),
    )
    plan()
    return wrapper, plan


def ragged_plan(api: Any, batch: Batch, on_host: bool = False) -> tuple[Any, Call]:
    wrapper = api.BatchPrefillWithRaggedKVCacheWrapper(batch.workspace, "NHD")
    indptr = batch.indptr_on_host if on_host else batch.indptr
    plan = partial(wrapper.plan, indptr, indptr, *HEADS, causal=True, **BF16)
    plan()
    return wrapper, plan


def cascade_plan(api: Any, batch: Batch) -> tuple[Any, Call]:
    wrapper = api.MultiLevelCascadeAttentionWrapper(2, batch.workspace, "NHD")
    of_all = (
        torch.tensor([0, BATCH], dtype=torch.int32, device=batch.device),
        torch.tensor([0, 1], dtype=torch.int32, device=batch.device),
    )
    tables = (
        [of_all[0], batch.indptr],
        [of_all[1], batch.indptr],
        [batch.indices[:1], batch.indices],
        [batch.lengths[:1], batch.lengths],
    )
    plan = partial(wrapper.plan, *tables, *HEADS, PAGE_SIZE, q_data_type=torch.bfloat16)
    plan()
    return wrapper, plan


def mla_plan(api: Any, batch: Batch) -> tuple[Any, Call]:
    wrapper = import_module(f"{api.__name__}.mla").BatchMLAPagedAttentionWrapper(batch.workspace)
    tables = (batch.indptr, batch.indptr, batch.indices, batch.lengths)
    plan = partial(
        wrapper.plan,
        *tables,
        NUM_QO_HEADS,
        LATENT,
        ROTATED,
        PAGE_SIZE,
        False,
        0.1,
        torch.bfloat16,
        torch.bfloat16,
    )
    plan()
    return wrapper, plan


def decode_run(form: str, layout: str = "NHD", planned: dict[str, Any] | None = None, **given: Any) -> Make:
    """form: the batch's attribute with K and V. given: arguments of run; tensors by their names in Batch."""

    def make(api: Any, batch: Batch) -> Call:
        wrapper, _ = decode_plan(api, batch, layout, **batch.named(planned or {}))
        return partial(wrapper.run, batch.q, getattr(batch, form), **batch.named(given))

    return make


def prefill_run(form: str, layout: str = "NHD", planned: dict[str, Any] | None = None, **given: Any) -> Make:
    def make(api: Any, batch: Batch) -> Call:
        wrapper, _ = prefill_plan(api, batch, layout, **batch.named(planned or {}))
        return partial(wrapper.run, batch.q, getattr(batch, form), **batch.named(given))

    return make


def mla_run(api: Any, batch: Batch, **given: Any) -> Call:
    wrapper, _ = mla_plan(api, batch)
    parts = (*batch.q_latent.split((LATENT, ROTATED), -1), *batch.latents.split((LATENT, ROTATED), -1))
    return partial(wrapper.run, *parts, **given)


def masked(batch: Batch) -> dict[str, Any]:
    return {"custom_mask": torch.ones(BATCH * PAGE_SIZE, dtype=torch.bool, device=batch.device)}


NUMBERS: dict[str, Any] = {"q_scale": 0.5, "k_scale": 0.5, "v_scale": 0.5}
TENSORS: dict[str, Any] = {"k_scale": "of_heads", "v_scale": "of_heads"}
WRAPPERS: dict[str, Make] = {
    "decode run: one tensor, NHD": decode_run("nhd"),
    "decode run: one tensor, HND": decode_run("hnd", "HND"),
    "decode run: (k, v), NHD": decode_run("nhd_pair"),
    "decode run: (k, v), HND": decode_run("hnd_pair", "HND"),
    "decode run: (k, v), HND, out": decode_run("hnd_pair", "HND", out="out"),
    "decode run: one tensor, out": decode_run("nhd", out="out"),
    "decode run: one tensor, return_lse": decode_run("nhd", return_lse=True),
    "decode run: one tensor, return_lse, out, lse": decode_run("nhd", return_lse=True, out="out", lse="lse"),
    "decode run: one tensor, soft cap": decode_run("nhd", planned={"logits_soft_cap": 30.0}),
    "decode run: one tensor, window": decode_run("nhd", planned={"window_left": 8}),
    "decode run: one tensor, sinks": decode_run("nhd", sinks="sinks"),
    "decode run: one tensor, ALiBi": decode_run("nhd", planned={"pos_encoding_mode": "ALIBI"}),
    "decode run: one tensor, sm_scale of requests": decode_run("nhd", planned={"sm_scale": "of_requests"}),
    "decode run: one tensor, q_scale, k_scale as numbers": decode_run("nhd", q_scale=0.5, k_scale=0.5),
    "decode run: one tensor, q_scale, k_scale, v_scale as numbers": decode_run("nhd", **NUMBERS),
    "decode run: one tensor, float8, scales as numbers": decode_run("float8", planned=FLOAT8, **NUMBERS),
    "decode run: one tensor, float8, scales of heads": decode_run("float8", planned=FLOAT8, **TENSORS),
    "decode run: (k, v), HND, float8, scales as numbers": decode_run(
        "float8_pair", "HND", planned=FLOAT8, **NUMBERS
    ),
    "decode run: (k, v), HND, float8, scales of heads": decode_run(
        "float8_pair", "HND", planned=FLOAT8, **TENSORS
    ),
    "prefill run: one tensor, NHD": prefill_run("nhd"),
    "prefill run: (k, v), HND": prefill_run("hnd_pair", "HND"),
    "prefill run: one tensor, out, return_lse, lse": prefill_run(
        "nhd", return_lse=True, out="out", lse="lse"
    ),
    "prefill run: one tensor, float8, scales as numbers": prefill_run("float8", planned=FLOAT8, **NUMBERS),
    "prefill run: one tensor, float8, scales of heads": prefill_run("float8", planned=FLOAT8, **TENSORS),
    "prefill run: one tensor, custom mask": lambda api, batch: partial(
        prefill_plan(api, batch, **masked(batch))[0].run, batch.q, batch.nhd
    ),
    "ragged run: NHD": lambda api, batch: partial(ragged_plan(api, batch)[0].run, batch.q, batch.k, batch.v),
    "ragged run: NHD, out, return_lse, lse": lambda api, batch: partial(
        ragged_plan(api, batch)[0].run,
        batch.q,
        batch.k,
        batch.v,
        out=batch.out,
        lse=batch.lse,
        return_lse=True,
    ),
    "cascade run: two levels": lambda api, batch: partial(
        cascade_plan(api, batch)[0].run, batch.q, batch.nhd
    ),
    "MLA run": mla_run,
    "MLA run: return_lse": partial(mla_run, return_lse=True),
    "decode plan: tables on the device": lambda api, batch: decode_plan(api, batch)[1],
    "decode plan: indptr on the host": lambda api, batch: decode_plan(api, batch, on_host=True)[1],
    "decode plan: buffers of CUDA graphs": graph_plan,
    "fast_decode_plan: buffers of CUDA graphs": partial(graph_plan, is_fast=True),
    "prefill plan: tables on the device": lambda api, batch: prefill_plan(api, batch)[1],
    "prefill plan: indptrs on the host": lambda api, batch: prefill_plan(api, batch, on_host=True)[1],
    "prefill plan: custom mask": lambda api, batch: prefill_plan(api, batch, **masked(batch))[1],
    "ragged plan: indptrs on the device": lambda api, batch: ragged_plan(api, batch)[1],
    "ragged plan: indptrs on the host": lambda api, batch: ragged_plan(api, batch, on_host=True)[1],
    "cascade plan: two levels": lambda api, batch: cascade_plan(api, batch)[1],
    "MLA plan": lambda api, batch: mla_plan(api, batch)[1],
}


def own(batch: Batch) -> dict[str, Call]:
    """This package's calls that the wrappers use, and the related ones."""
    attention = attn_backend.Attention(*HEADS, device=batch.device, max_rows=1024, max_batch=BATCH)
    pages = PageTable.csr(batch.indptr, batch.indices, batch.lengths, PAGE_SIZE)
    view, kv = BSRView(batch.indptr, pages), KVCache.from_tensor(batch.nhd)
    attention.plan(view)
    slots, seed = torch.arange(BATCH, device=batch.device), torch.arange(BATCH, device=batch.device)
    workspace, rotary = (
        attn_backend.sampling_workspace(batch.device),
        attn_backend.Rotary(torch.ones(HEAD_DIM // 2, device=batch.device)),
    )
    draw = partial(attn_backend.sample, batch.logits, workspace=workspace, out=batch.tokens)
    return {
        "Attention.run": partial(attention.run, batch.q, kv),
        "Attention.run: out": partial(attention.run, batch.q, kv, out=batch.out),
        "Attention.run: return_lse": partial(attention.run, batch.q, kv, return_lse=True),
        "Attention.plan": partial(attention.plan, view),
        "Attention.plan: PageTable and BSRView made": lambda: attention.plan(
            BSRView(batch.indptr, PageTable.csr(batch.indptr, batch.indices, batch.lengths, PAGE_SIZE))
        ),
        "append_kv": partial(attn_backend.append_kv, batch.k, batch.v, kv, slots),
        "append_qkv: rotary embedding": partial(
            attn_backend.append_qkv,
            batch.q,
            batch.k,
            batch.v,
            kv,
            slots,
            rotary=rotary,
            positions=slots,
            out=batch.out,
        ),
        "sample: seeds of requests": partial(draw, seed=seed, position=seed),
        "sample: top_k, top_p and seeds of requests": partial(
            draw, seed=seed, position=seed, top_k=seed, top_p=batch.of_requests
        ),
        "sample: numbers": partial(draw, seed=1, position=2, temperature=0.6, top_k=50, top_p=0.9),
    }


def time_of(call: Call, repeats: int) -> float:
    """µs of a call: the fastest of the rounds."""
    times = []
    for _ in range(1 + repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return min(times[1:])


def time_of_flashinfer(make: Make, batch: Batch, repeats: int) -> float | None:
    """None if it is not installed or refuses the case."""
    try:
        return time_of(make(import_module("flashinfer"), batch), repeats)
    except Exception as problem:  # a peer may raise anything
        print(f"FlashInfer: {type(problem).__name__}: {problem}", flush=True)
        return None


def main() -> None:
    parser = options(__doc__, peers=PEERS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    has_peer = on_gpu and bool(asked_peers(PEERS, arguments))
    if not on_gpu:
        for name in LIBRARY:
            setattr(library(), name, lambda *_: 0)
    batch = Batch(arguments.device)
    if on_gpu:
        header = (
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}: µs of a call on the host, "
            f"launches included"
        )
    else:
        header = f"torch {torch.__version__}: µs of Python's part of a call; the host library does nothing"
    header += f"; batch {BATCH}, smallest of {arguments.repeats} rounds of {CALLS}."
    print(header, flush=True)
    with torch.no_grad():
        makes = {name: partial(make, drop_in, batch) for name, make in WRAPPERS.items()}
        calls = own(batch)
        lines: list[dict[str, Any]] = []
        for name in (*makes, *calls):
            if not wanted(name, arguments):
                continue
            line: dict[str, Any] = {
                "case": name,
                "µs": time_of(makes[name]() if name in makes else calls[name], arguments.repeats),
            }
            line["FlashInfer"] = (
                time_of_flashinfer(WRAPPERS[name], batch, arguments.repeats)
                if has_peer and name in WRAPPERS
                else None
            )
            lines.append(line)
            print(f"{name:65} {line['µs']:8.2f} {number(line['FlashInfer']):>8}", flush=True)
    text = table(
        ["case", "µs", "FlashInfer"],
        [[line["case"], number(line["µs"]), number(line["FlashInfer"])] for line in lines],
    )
    save(arguments, f"{header}\n\n{text}\n", {"header": header, "lines": lines})


if __name__ == "__main__":
    main()
