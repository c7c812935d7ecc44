"""What lies between a layer's projection and its attention: norm of the heads of Q and K, rotary embedding, append; `append_qkv` beside the peers' kernels.

Peers: vLLM's (fused_qk_norm_rope or rotary_embedding, then reshape_and_cache_flash), where it is installed. One process, one GPU, CUDA-graph replay, median,
with a cold L2: the projection's output is usually still there in an engine, for the peers' second kernel as well.

python -m benchmarks.append [--case TEXT ...] [--repeats N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from attn_backend import KVCache, Rotary, append_kv, append_qkv
from benchmarks.report import brief, number, options, save, table, wanted
from benchmarks.timing import Machine, Timer

PAGE_SIZE, HEAD_DIM, KV_HEADS = 16, 128, 8
POSITIONS = 1 << 16
COLUMNS = ["case", "floor", "ours", "vLLM", "ours / vLLM", "of copy bandwidth", "append alone"]


@dataclass(frozen=True)
class Line:
    tokens: int
    norm: bool
    qo_heads: int = 32

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, {'norm, ' if self.norm else ''}rope, append"


class Projected:
    """Random outputs of a projection, with the cache that they go to."""

    def __init__(self, line: Line) -> None:
        device, bf16 = torch.device("cuda"), torch.bfloat16
        heads = line.qo_heads + 2 * KV_HEADS
        self.line = line
        self.qkv = torch.randn(line.tokens, heads, HEAD_DIM, dtype=bf16, device=device)
        self.q, self.k, self.v = self.qkv.split([line.qo_heads, KV_HEADS, KV_HEADS], dim=1)
        pages = -(-line.tokens // PAGE_SIZE) + 1
        self.cache = torch.zeros(pages, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=bf16, device=device)
        self.kv = KVCache.from_tensor(self.cache)
        self.slots = torch.randperm(pages * PAGE_SIZE, device=device)[: line.tokens]
        self.positions = torch.randint(POSITIONS, (line.tokens,), device=device)
        angles = torch.arange(POSITIONS, device=device)[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
        self.table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(bf16)
        self.weight = torch.randn(HEAD_DIM, dtype=bf16, device=device) if line.norm else None

    @property
    def moved_bytes(self) -> int:
        """Read and written: Q, K, V, and their rows of cosines and sines."""
        return 2 * self.qkv.numel() * 2 + self.line.tokens * HEAD_DIM * 2

    def ours(self) -> Callable[[], object]:
        rotary = Rotary(self.table)
        return lambda: append_qkv(self.q, self.k, self.v, self.kv, self.slots, rotary=rotary, positions=self.positions, q_norm=self.weight, k_norm=self.weight)

    def append_alone(self) -> Callable[[], object]:
        return lambda: append_kv(self.k, self.v, self.kv, self.slots)

    def vllm(self) -> Callable[[], object]:
        kernels = import_module("vllm._custom_ops")
        one = torch.ones(1, device=self.q.device)
        flat = self.qkv.view(self.line.tokens, -1)
        q, k = flat[:, : self.line.qo_heads * HEAD_DIM], flat[:, self.line.qo_heads * HEAD_DIM : (self.line.qo_heads + KV_HEADS) * HEAD_DIM]
        weight = self.weight
        k_cache, v_cache = self.cache[:, 0], self.cache[:, 1]

        def run() -> None:
            if weight is None:
                kernels.rotary_embedding(self.positions, q, k, HEAD_DIM, self.table, True)
            else:
                heads = (self.line.qo_heads, KV_HEADS, KV_HEADS)
                kernels.fused_qk_norm_rope(flat, *heads, HEAD_DIM, 1e-6, weight, weight, self.table, True, self.positions)
            kernels.reshape_and_cache_flash(self.k, self.v, k_cache, v_cache, self.slots, "auto", one, one)

        return run

    def check_vllm(self) -> float:
        """Largest difference between ours and vLLM's in Q and in the cache, as parts of the largest element."""
        before = self.qkv.clone()
        results = []
        for run in (self.ours(), self.vllm()):
            self.qkv.copy_(before)
            self.cache.zero_()
            run()
            results.append(torch.cat([self.q.flatten(), self.cache.flatten()]).float())
        self.qkv.copy_(before)
        return float((results[0] - results[1]).abs().max() / results[0].abs().max())


def measure(line: Line, timer: Timer, machine: Machine) -> dict[str, Any]:
    projected = Projected(line)
    result: dict[str, Any] = {"case": line.name, "floor": projected.moved_bytes / machine.bandwidth * 1e6, "vLLM": None}
    runs = {"ours": projected.ours(), "append alone": projected.append_alone()}
    try:
        error = projected.check_vllm()
        if error > 2e-2:
            print(f"{line.name}: vLLM computes something else, difference {error:.1e}", flush=True)
        else:
            runs["vLLM"] = projected.vllm()
    except Exception as problem:  # a peer may raise anything
        print(f"{line.name}: vLLM: {type(problem).__name__}: {problem}", flush=True)
    return result | dict(zip(runs, timer.together(list(runs.values())), strict=True))


def markdown(lines: list[dict[str, Any]]) -> str:
    rows = [
        [
            line["case"],
            *(number(line[name]) for name in ("floor", "ours", "vLLM")),
            number(line["ours"] / line["vLLM"] if line["vLLM"] else None, 2),
            number(line["floor"] / line["ours"], 2),
            number(line["append alone"]),
        ]
        for line in lines
    ]
    return table(COLUMNS, rows)


def main() -> None:
    arguments = options(__doc__).parse_args()
    torch.manual_seed(0)
    timer = Timer(arguments.repeats)
    machine = Machine.measure(timer)
    header = f"{machine} Times in µs: bf16, 32/{KV_HEADS} heads of {HEAD_DIM}, page {PAGE_SIZE}, cold L2, CUDA-graph replay, median of {arguments.repeats}."
    print(header, flush=True)
    lines: list[dict[str, Any]] = []
    text = ""
    for tokens in (1, 64, 512, 2048, 8192, 32768):
        for norm in (False, True):
            line = Line(tokens, norm)
            if not wanted(line.name, arguments):
                continue
            lines.append(measure(line, timer, machine))
            print(brief(lines[-1]), flush=True)
            text = f"{header}\n\n{markdown(lines)}\n"
            save(arguments, text, {"header": header, "lines": lines})
    print(text)


if __name__ == "__main__":
    main()
