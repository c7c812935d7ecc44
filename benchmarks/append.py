"""The work between a layer's projection and its attention: norm of the heads of Q and K, rotary embedding,
append. Caches: bf16, e4m3, int8 with a scale for each token and head, int4 (with rotated heads) and NVFP4.
Compares `append_qkv` with the peers' kernels.

Peers, if installed: vLLM (fused_qk_norm_rope or rotary_embedding, then reshape_and_cache_flash), and
FlashInfer (rope_quantize_fp8_append_paged_kv_cache), which has no norm and also rounds Q to 8 bits. One
process, one GPU, CUDA-graph replay, median, with a cold L2. In an engine, the projection's output is usually
still in the L2, also for vLLM's second kernel.

python -m benchmarks.append [--case TEXT ...] [--peer NAME ...] [--repeats N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from attn_backend import KVCache, Rotary, append_kv, append_qkv
from benchmarks.cases import Case
from benchmarks.four_bits import empty_cache
from benchmarks.lines import measure_lines
from benchmarks.peers import vllm_append, vllm_rotate
from benchmarks.report import asked_peers, number, options, ratio, table
from benchmarks.timing import Machine, Timer, start

PAGE_SIZE, HEAD_DIM, KV_HEADS = 16, 128, 8
POSITIONS = 1 << 16
SCALE = 0.1  # for K and V of the 8-bit cache
# relative difference of a peer's output from ours; most of the second comes from rounding to 8 bits
LARGEST_DIFFERENCE = {torch.bfloat16: 2e-2, torch.float8_e4m3fn: 5e-2}
PEERS = ("vLLM", "FlashInfer")
COLUMNS = (
    "case",
    "floor",
    "ours",
    *PEERS,
    "ours / vLLM",
    "ours / FlashInfer",
    "of copy bandwidth",
    "append alone",
)

SCALED_HEAD_BYTES = {"int8": 128 + 4, "int4": 64 + 4, "nvfp4": 64 + 8}  # bytes of a head, without a peer

Rows = Callable[[], torch.Tensor]  # launches and returns Q, [tokens, heads, head_dim]


@dataclass(frozen=True)
class Line:
    tokens: int
    norm: bool
    cache: torch.dtype = torch.bfloat16
    form: str = ""  # of SCALED_HEAD_BYTES, instead of `cache`
    qo_heads: int = 32

    @property
    def name(self) -> str:
        return (
            f"{self.tokens} tokens, {'norm, ' if self.norm else ''}rope, "
            f"{'' if self.cache == torch.bfloat16 else 'quantize, '}append{self.form and f' to {self.form}'}"
        )

    @property
    def head_bytes(self) -> int:
        """Bytes of a head of K or V in the cache."""
        return SCALED_HEAD_BYTES[self.form] if self.form else HEAD_DIM * self.cache.itemsize


def cos_sin_table(positions: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """bf16 [positions, head_dim]: the cosines of a position's angles, then their sines."""
    angles = torch.arange(positions, device=device)[:, None] * 10000.0 ** (
        -torch.arange(0, head_dim, 2, device=device) / head_dim
    )
    return torch.cat([angles.cos(), angles.sin()], dim=-1).bfloat16()


class Projected:
    """Random outputs of a projection, with their destination cache."""

    def __init__(self, line: Line, device: torch.device) -> None:
        bf16 = torch.bfloat16
        heads = line.qo_heads + 2 * KV_HEADS
        self.line = line
        self.qkv = torch.randn(line.tokens, heads, HEAD_DIM, dtype=bf16, device=device)
        self.q, self.k, self.v = self.qkv.split([line.qo_heads, KV_HEADS, KV_HEADS], dim=1)
        self.pages = -(-line.tokens // PAGE_SIZE) + 1
        self.scale = 1.0 if line.cache == bf16 else SCALE
        if line.form:
            case = Case(line.form, (), (), line.qo_heads, KV_HEADS, HEAD_DIM, PAGE_SIZE)
            self.kv = empty_cache(line.form, self.pages, case, device)
        else:
            shape = (self.pages, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
            self.cache = torch.zeros(shape, dtype=line.cache, device=device)
            scale = None if line.cache == bf16 else SCALE
            self.kv = KVCache.from_tensor(self.cache, k_scale=scale, v_scale=scale)
        self.rotation = line.form == "int4"
        self.slots = torch.randperm(self.pages * PAGE_SIZE, device=device)[: line.tokens]
        self.positions = torch.randint(POSITIONS, (line.tokens,), device=device)
        self.table = cos_sin_table(POSITIONS, HEAD_DIM, device)
        self.weight = torch.randn(HEAD_DIM, dtype=bf16, device=device) if line.norm else None

    @property
    def moved_bytes(self) -> int:
        """Reads and writes: Q, K, V, and their rows of cosines and sines."""
        of_kv = 2 * KV_HEADS * (2 * HEAD_DIM + self.line.head_bytes)
        return 4 * self.q.numel() + self.line.tokens * (of_kv + HEAD_DIM * 2)

    def ours(self) -> Rows:
        rotary = Rotary(self.table)
        return lambda: append_qkv(
            self.q,
            self.k,
            self.v,
            self.kv,
            self.slots,
            rotary=rotary,
            positions=self.positions,
            q_norm=self.weight,
            k_norm=self.weight,
            rotation=self.rotation,
        )

    def append_alone(self) -> Callable[[], None]:
        return lambda: append_kv(self.k, self.v, self.kv, self.slots, rotation=self.rotation)

    def vllm(self) -> Rows:
        rotate, append = (
            vllm_rotate(self.q, self.k, self.table, self.positions),
            vllm_append(self.k, self.v, self.cache, self.slots, self.scale),
        )
        kernels, weight, flat = import_module("vllm._custom_ops"), self.weight, self.qkv.flatten(1)
        heads = (self.line.qo_heads, KV_HEADS, KV_HEADS, HEAD_DIM)

        def run() -> torch.Tensor:
            if weight is None:
                rotate()
            else:
                kernels.fused_qk_norm_rope(
                    flat, *heads, 1e-6, weight, weight, self.table, True, self.positions
                )
            append()
            return self.q

        return run

    def flashinfer(self) -> Rows:
        """All tokens are one request, with the cache's pages in order, so a token's position in it is its
        slot.
        """
        device = self.q.device
        indptr = torch.tensor([0, self.pages], dtype=torch.int32, device=device)
        arguments: dict[str, Any] = {
            "q_rope": self.q,
            "k_rope": self.k,
            "q_nope": None,
            "k_nope": None,
            "v": self.v,
            "page_size": PAGE_SIZE,
        }
        arguments |= {
            "cos_sin_cache": self.table.float(),
            "pos_ids": self.positions.int(),
            "paged_kv_cache": self.cache.unbind(1),
        }
        arguments |= {
            "kv_indices": torch.arange(self.pages, dtype=torch.int32, device=device),
            "kv_indptr": indptr,
        }
        arguments |= {
            "batch_indices": torch.zeros_like(self.slots, dtype=torch.int32),
            "positions": self.slots.int(),
        }
        arguments |= {
            "quant_scale_q": 1 / self.scale,
            "quant_scale_kv": 1 / self.scale,
            "q_rope_out": torch.empty_like(self.q, dtype=self.line.cache),
        }
        append = import_module("flashinfer.rope").rope_quantize_fp8_append_paged_kv_cache
        return lambda: append(**arguments)[0]

    def peers(self) -> dict[str, Callable[[], Rows]]:
        if self.line.form:
            return {}
        quantizes_without_norm = self.line.cache != torch.bfloat16 and not self.line.norm
        return {"vLLM": self.vllm} | ({"FlashInfer": self.flashinfer} if quantizes_without_norm else {})

    def written(self, run: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of a call for Q and an empty cache, as numbers. Restores the projection's output."""
        before = self.qkv.clone()
        self.cache.zero_()
        q = run()
        numbers = (
            q.float() * (1.0 if q.dtype == torch.bfloat16 else self.scale),
            self.cache.float() * self.scale,
        )
        self.qkv.copy_(before)
        return numbers

    def difference(self, run: Rows) -> float:
        """The relative difference of a peer's Q or cache from ours, the larger of the two."""
        pairs = zip(self.written(run), self.written(self.ours()), strict=True)
        return max(float((of_peer - ours).norm() / ours.norm()) for of_peer, ours in pairs)


def measure(
    line: Line, timer: Timer, machine: Machine, device: str = "cuda", peers: Collection[str] = PEERS
) -> dict[str, Any]:
    """One line of the table; times in µs. peers: the measured ones."""
    projected = Projected(line, torch.device(device))
    result: dict[str, Any] = {
        "case": line.name,
        "floor": projected.moved_bytes / machine.bandwidth * 1e6,
    } | dict.fromkeys(PEERS)
    runs: dict[str, Callable[[], object]] = {
        "ours": projected.ours(),
        "append alone": projected.append_alone(),
    }
    for peer, make in projected.peers().items():
        if peer not in peers:
            continue
        try:
            run = make()
            difference = projected.difference(run)
            timer(run)  # fails here if it cannot be captured
        except Exception as problem:  # a peer may raise anything
            print(f"{line.name}: {peer}: {type(problem).__name__}: {problem}", flush=True)
            continue
        if difference <= LARGEST_DIFFERENCE[line.cache]:
            runs[peer] = run
        else:
            print(f"{line.name}: {peer} computes something else, difference {difference:.1e}", flush=True)
    return result | dict(zip(runs, timer.together(list(runs.values())), strict=True))


def markdown(lines: list[dict[str, Any]], header: str) -> str:
    rows = []
    for line in lines:
        ratios = [number(ratio(line["ours"], line[peer]), 2) for peer in PEERS]
        times = [number(line[name]) for name in ("floor", "ours", *PEERS)]
        rows.append(
            [
                line["case"],
                *times,
                *ratios,
                number(line["floor"] / line["ours"], 2),
                number(line["append alone"]),
            ]
        )
    return f"{header}\n\n{table(COLUMNS, rows)}\n"


def all_lines() -> list[Line]:
    caches = [
        (torch.bfloat16, ""),
        (torch.float8_e4m3fn, ""),
        *((torch.uint8, form) for form in SCALED_HEAD_BYTES),
    ]
    return [
        Line(tokens, norm, dtype, form)
        for dtype, form in caches
        for tokens in (1, 64, 512, 2048, 8192, 32768)
        for norm in (False, True)
    ]


def main() -> None:
    arguments = options(__doc__, peers=PEERS).parse_args()
    peers = asked_peers(PEERS, arguments)
    timer, machine = start(arguments.repeats)
    header = (
        f"{machine} Times in µs: bf16, 32/{KV_HEADS} heads of {HEAD_DIM}, page {PAGE_SIZE}, cold L2, "
        f"CUDA-graph replay, median of {arguments.repeats}."
    )
    measure_lines(
        all_lines(),
        lambda line: measure(line, timer, machine, peers=peers),
        lambda lines: markdown(lines, header),
        header,
        arguments,
    )


if __name__ == "__main__":
    main()
