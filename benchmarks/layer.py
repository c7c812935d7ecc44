"""The cost of attention in a layer of a model: new K and V into the cache, then attention, behind a product that takes what caches hold, as a layer's own do.

One CUDA graph holds several layers (product, append, attention); from its time that of a graph of the products alone is taken. Peers write to the cache with
vLLM's kernel. With an 8-bit cache (e4m3, beside bf16) append rounds K and V.

python -m benchmarks.layer [--case TEXT ...] [--repeats N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from attn_backend import Attention, KVCache, append_kv
from benchmarks.batches import Batch, ours, reference, relative_error
from benchmarks.cases import Case, lengths
from benchmarks.fp8 import K_SCALE, V_SCALE, quantised
from benchmarks.lines import measure_lines
from benchmarks.peers import flash_attention_3, flashinfer_backends
from benchmarks.report import number, options, table
from benchmarks.timing import Launch, Machine, Timer

LAYERS = 8  # of one graph
PRODUCT = (4096, 14336)  # of a layer of 8B parameters
PRODUCT_ROWS = {True: 16, False: 512}  # decodes, prompts


def layer_cases() -> list[Case]:
    """Decodes of equal and of random lengths, and single prompts."""
    cases = [Case(f"decode {n} x {tokens} p{page_size}", (1,) * n, (tokens,) * n, 32, 8, page_size=page_size) for n, tokens, page_size in _DECODES]
    for n, page_size in ((8, 16), (16, 16), (32, 16), (8, 1), (16, 1), (32, 1)):
        lens = lengths("zipf", n, 400, seed=n)
        cases.append(Case(f"decode {n} of mean 400 (Zipf) p{page_size}", (1,) * n, lens, 32, 8, page_size=page_size))
    return cases + [Case(f"prompt of {tokens} p16", (tokens,), (tokens,), 32, 8) for tokens in (220, 700, 2048)]


_DECODES = ((1, 8192, 16), (8, 1200, 16), (8, 1200, 1), (16, 1024, 16), (24, 400, 16), (24, 400, 1), (64, 400, 16), (64, 4096, 16))


def new_slots(block_table: torch.Tensor, qo_lens: Sequence[int], kv_lens: Sequence[int], page_size: int) -> torch.Tensor:
    """int64 [rows]: where K and V of the rows of Q lie."""
    slots = []
    for pages, qo_len, kv_len in zip(block_table, qo_lens, kv_lens, strict=True):
        token = torch.arange(kv_len - qo_len, kv_len, device=block_table.device)
        slots.append(pages[token // page_size].long() * page_size + token % page_size)
    return torch.cat(slots)


def layers(*launches: Launch) -> None:
    for _ in range(LAYERS):
        for launch in launches:
            launch()


def measure(case: Case, timer: Timer, machine: Machine) -> dict[str, Any]:
    """One line of the table; µs a layer."""
    batch = Batch.make(case)
    slots = new_slots(batch.block_table, case.qo_lens, case.kv_lens, case.page_size)
    weight = torch.randn(PRODUCT, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(PRODUCT_ROWS[len(batch.q) == len(case.qo_lens)], PRODUCT[0], dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, len(batch.q), case.num_kv_heads, case.head_dim, dtype=torch.bfloat16, device="cuda")
    prepared = ours(batch)
    out = torch.empty_like(batch.q)

    cache, _ = quantised(batch)
    float8 = ours(batch, kv_dtype=cache.dtype)
    float8_kv = KVCache.from_tensor(cache, k_scale=K_SCALE, v_scale=V_SCALE)

    def attend(attention: Attention = prepared.attention, kv: KVCache = batch.kv) -> None:
        append_kv(k, v, kv, slots)
        attention.run(batch.q, kv, out=out, after_append=True)

    product: Launch = partial(torch.matmul, x, weight)
    runs: dict[str, Launch] = {"product": partial(layers, product)}
    runs |= {"8-bit cache": partial(layers, product, partial(attend, float8.attention, float8_kv)), "ours": partial(layers, product, attend)}
    runs |= {name: partial(layers, product, launch) for name, launch in of_peers(batch, k, v, slots).items()}
    times = dict(zip(runs, timer.together(list(runs.values())), strict=True))
    line: dict[str, Any] = {"case": case.name, "floor": max(case.bytes / machine.bandwidth, case.flops / machine.rate) * 1e6}
    attend()
    line["error"] = relative_error(out[: case.qo_lens[0]], reference(batch, 0))
    return line | {name: (time - times["product"]) / LAYERS for name, time in times.items() if name != "product"}


def of_peers(batch: Batch, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> dict[str, Launch]:
    """Append and attention of the peers that import."""
    one = torch.ones((), device="cuda")
    makes: dict[str, Callable[[], Launch]] = {"FA3": partial(flash_attention_3, batch)}
    makes |= {f"FlashInfer, {name}": make for name, make in flashinfer_backends(batch).items()}
    launches: dict[str, Launch] = {}
    for name, make in makes.items():
        try:
            write = import_module("vllm._custom_ops").reshape_and_cache_flash
            attend = make()
            attend()
            torch.cuda.synchronize()
        except Exception as problem:  # a peer may raise anything
            print(f"{batch.case.name}: {name}: {type(problem).__name__}: {problem}", flush=True)
            continue

        def launch(attend: Launch = attend, write: Callable[..., None] = write) -> None:
            write(k, v, batch.cache[:, 0], batch.cache[:, 1], slots, "auto", one, one)
            attend()

        launches[name] = launch
    return launches


def markdown(lines: list[dict[str, Any]]) -> str:
    """A table; what counts for FlashInfer is its fastest backend."""
    rows = []
    for line in lines:
        flashinfer = min((time for name, time in line.items() if name.startswith("FlashInfer")), default=None)
        peers = [time for time in (line.get("FA3"), flashinfer) if time is not None]
        ratio = line["ours"] / min(peers) if peers else None
        times = [number(time) for time in (line["floor"], line["ours"], line["8-bit cache"], line.get("FA3"), flashinfer)]
        rows.append([line["case"], *times, number(ratio, 2), f"{line['error']:.1e}"])
    return table(["append + attention", "floor", "ours", "8-bit cache", "FA3", "FlashInfer", "ours / best peer", "error"], rows)


def main() -> None:
    arguments = options(__doc__, repeats=21).parse_args()
    torch.manual_seed(0)
    timer = Timer(arguments.repeats)
    machine = Machine.measure(timer)
    header = (
        f"{machine} µs a layer, append and attention behind a product of {PRODUCT_ROWS[True]} (prompts: {PRODUCT_ROWS[False]}) x {PRODUCT[0]} x {PRODUCT[1]}, "
        f"{LAYERS} layers in a CUDA graph less the products alone, median of {arguments.repeats}; bf16, 32/8 heads, head_dim 128. "
        "Error: one request against float64, relative."
    )
    measure_lines(layer_cases(), lambda case: measure(case, timer, machine), lambda lines: f"{header}\n\n{markdown(lines)}\n", header, arguments)


if __name__ == "__main__":
    main()
