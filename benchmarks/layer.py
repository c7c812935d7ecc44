"""The cost of attention in a model's layer: new K and V into the cache, then attention, after a product that
evicts caches as a layer's own products do.

One CUDA graph holds several layers (product, append, attention). The time of a graph with only the products
is subtracted. Peers write to the cache with vLLM's kernel. With an 8-bit cache (e4m3, next to bf16) append
rounds K and V. With --rope Q and K are rotated first: by our append launch, and for peers by vLLM's kernel.

python -m benchmarks.layer [--rope] [--case TEXT ...] [--peer NAME ...] [--repeats N] [--json FILE]
[--markdown FILE]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attn_backend import Attention, KVCache, Rotary, append_kv, append_qkv
from benchmarks.append import cos_sin_table
from benchmarks.batches import Batch, ours, reference, relative_error
from benchmarks.cases import Case, lengths
from benchmarks.fp8 import K_SCALE, V_SCALE, quantised
from benchmarks.lines import measure_lines
from benchmarks.peers import flash_attention_3, flashinfer_backends, vllm_append, vllm_rotate
from benchmarks.report import asked_peers, fastest_of, number, options, ratio, table
from benchmarks.timing import Launch, Machine, Timer, start

PEERS = ("FA3", "FlashInfer")
LAYERS = 8  # in one graph
PRODUCT = (4096, 14336)  # for a layer of 8B parameters
PRODUCT_ROWS = {True: 16, False: 512}  # decodes, prompts


def layer_cases() -> list[Case]:
    """Decodes of equal and of random lengths, and single prompts."""
    cases = [
        Case(f"decode {n} x {tokens} p{page_size}", (1,) * n, (tokens,) * n, 32, 8, page_size=page_size)
        for n, tokens, page_size in _DECODES
    ]
    for n, page_size in ((8, 16), (16, 16), (32, 16), (8, 1), (16, 1), (32, 1)):
        lens = lengths("zipf", n, 400, seed=n)
        cases.append(
            Case(f"decode {n} of mean 400 (Zipf) p{page_size}", (1,) * n, lens, 32, 8, page_size=page_size)
        )
    return cases + [
        Case(f"prompt of {tokens} p16", (tokens,), (tokens,), 32, 8) for tokens in (220, 700, 2048)
    ]


_DECODES = (
    (1, 8192, 16),
    (8, 1200, 16),
    (8, 1200, 1),
    (16, 1024, 16),
    (24, 400, 16),
    (24, 400, 1),
    (64, 400, 16),
    (64, 4096, 16),
)


def new_positions(qo_lens: Sequence[int], kv_lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [rows]: the positions of Q's rows in their requests."""
    return torch.cat(
        [
            torch.arange(kv_len - qo_len, kv_len, device=device)
            for qo_len, kv_len in zip(qo_lens, kv_lens, strict=True)
        ]
    )


def new_slots(
    block_table: torch.Tensor, qo_lens: Sequence[int], kv_lens: Sequence[int], page_size: int
) -> torch.Tensor:
    """int64 [rows]: the slots of K and V of Q's rows."""
    positions = new_positions(qo_lens, kv_lens, block_table.device).split(list(qo_lens))
    slots = [
        pages[token // page_size].long() * page_size + token % page_size
        for pages, token in zip(block_table, positions, strict=True)
    ]
    return torch.cat(slots)


def layers(*launches: Launch) -> None:
    for _ in range(LAYERS):
        for launch in launches:
            launch()


@dataclass(frozen=True, eq=False)
class NewTokens:
    """K and V [rows, num_kv_heads, head_dim] of Q's rows, and their destination.

    slots, positions: int64 [rows]. table: cosines and sines that rotate Q and K; None: no rotation.
    """

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor | None

    @classmethod
    def make(cls, batch: Batch, rope: bool) -> NewTokens:
        case, device = batch.case, batch.q.device
        k, v = torch.randn(
            2, len(batch.q), case.num_kv_heads, case.head_dim, dtype=torch.bfloat16, device=device
        )
        slots = new_slots(batch.block_table, case.qo_lens, case.kv_lens, case.page_size)
        table = cos_sin_table(max(case.kv_lens), case.head_dim, device) if rope else None
        return cls(k, v, slots, new_positions(case.qo_lens, case.kv_lens, device), table)

    def append(self, q: torch.Tensor, kv: KVCache) -> Launch:
        """Ours, one launch. q is rotated in place."""
        if self.table is None:
            return partial(append_kv, self.k, self.v, kv, self.slots)
        return partial(
            append_qkv, q, self.k, self.v, kv, self.slots, rotary=Rotary(self.table), positions=self.positions
        )

    def append_by_vllm(self, q: torch.Tensor, cache: torch.Tensor) -> list[Launch]:
        """One launch or two. q and k are rotated in place."""
        append = vllm_append(self.k, self.v, cache, self.slots)
        return (
            [append] if self.table is None else [vllm_rotate(q, self.k, self.table, self.positions), append]
        )


def measure(
    case: Case, timer: Timer, machine: Machine, rope: bool = False, peers: Collection[str] = PEERS
) -> dict[str, Any]:
    """One line of the table; µs a layer. peers: the measured ones."""
    batch = Batch.make(case)
    device = batch.q.device
    new = NewTokens.make(batch, rope)
    weight = torch.randn(PRODUCT, dtype=torch.bfloat16, device=device)
    x = torch.randn(
        PRODUCT_ROWS[len(batch.q) == len(case.qo_lens)], PRODUCT[0], dtype=torch.bfloat16, device=device
    )
    out = torch.empty_like(batch.q)
    cache, _ = quantised(batch)
    float8_kv = KVCache.from_tensor(cache, k_scale=K_SCALE, v_scale=V_SCALE)

    def attend(attention: Attention, kv: KVCache) -> list[Launch]:
        return [new.append(batch.q, kv), partial(attention.run, batch.q, kv, out=out, after_append=True)]

    product: Launch = partial(torch.matmul, x, weight)
    prepared, float8 = ours(batch), ours(batch, kv_dtype=cache.dtype)
    of_ours = attend(prepared.attention, batch.kv)
    launches: dict[str, list[Launch]] = {
        "product": [],
        "8-bit cache": attend(float8.attention, float8_kv),
        "ours": of_ours,
    } | of_peers(batch, new, peers)
    runs: list[Launch] = [partial(layers, product, *following) for following in launches.values()]
    times = dict(zip(launches, timer.together(runs), strict=True))
    line: dict[str, Any] = {
        "case": case.name,
        "floor": max(case.bytes / machine.bandwidth, case.flops / machine.rate) * 1e6,
    }
    for launch in of_ours:
        launch()
    line["error"] = relative_error(out[: case.qo_lens[0]], reference(batch, 0))
    return line | {
        name: (time - times["product"]) / LAYERS for name, time in times.items() if name != "product"
    }


def of_peers(batch: Batch, new: NewTokens, peers: Collection[str]) -> dict[str, list[Launch]]:
    """Append and attention of the installed peers."""
    makes: dict[str, Callable[[], Launch]] = {"FA3": partial(flash_attention_3, batch)}
    makes |= {f"FlashInfer, {name}": make for name, make in flashinfer_backends(batch).items()}
    launches: dict[str, list[Launch]] = {}
    for name, make in makes.items():
        if name.partition(",")[0] not in peers:
            continue
        try:
            of_layer = [*new.append_by_vllm(batch.q, batch.cache), make()]
            for launch in of_layer:
                launch()
            torch.cuda.synchronize()
        except Exception as problem:  # a peer may raise anything
            print(f"{batch.case.name}: {name}: {type(problem).__name__}: {problem}", flush=True)
        else:
            launches[name] = of_layer
    return launches


def markdown(lines: list[dict[str, Any]], rope: bool = False) -> str:
    """A table; FlashInfer's fastest backend counts."""
    rows = []
    for line in lines:
        flashinfer = fastest_of(line, [name for name in line if name.startswith("FlashInfer")])
        best = fastest_of({"FA3": line.get("FA3"), "FlashInfer": flashinfer}, PEERS)
        times = [
            number(time)
            for time in (line["floor"], line["ours"], line["8-bit cache"], line.get("FA3"), flashinfer)
        ]
        rows.append([line["case"], *times, number(ratio(line["ours"], best), 2), f"{line['error']:.1e}"])
    return table(
        [
            "rope + append + attention" if rope else "append + attention",
            "floor",
            "ours",
            "8-bit cache",
            "FA3",
            "FlashInfer",
            "ours / best peer",
            "error",
        ],
        rows,
    )


def main() -> None:
    parser = options(__doc__, repeats=21, peers=PEERS)
    parser.add_argument("--rope", action="store_true", help="with the rotary embedding of Q and K")
    arguments = parser.parse_args()
    peers = asked_peers(PEERS, arguments)
    timer, machine = start(arguments.repeats)
    header = (
        f"{machine} µs a layer, {'rotary embedding, ' if arguments.rope else ''}append and attention after a "
        f"product of {PRODUCT_ROWS[True]} "
        f"(prompts: {PRODUCT_ROWS[False]}) x {PRODUCT[0]} x {PRODUCT[1]}, {LAYERS} layers in a CUDA graph "
        f"minus the products by themselves, median of "
        f"{arguments.repeats}; bf16, 32/8 heads, head_dim 128. Error: one request against float64, relative."
    )

    def text(lines: list[dict[str, Any]]) -> str:
        return f"{header}\n\n{markdown(lines, arguments.rope)}\n"

    measure_lines(
        layer_cases(),
        lambda case: measure(case, timer, machine, arguments.rope, peers),
        text,
        header,
        arguments,
    )


if __name__ == "__main__":
    main()
