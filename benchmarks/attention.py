"""Attention, ours beside the peers that import: one process, one GPU, cold L2, CUDA-graph replay, median.

python -m benchmarks.attention [--case TEXT ...] [--repeats N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.backends import Batch, flash_attention_3, ours, reference
from benchmarks.cases import Case, all_cases

PEERS = {"FA3": flash_attention_3}


class Timer:
    """Median time of a captured launch with a cold L2."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def __call__(self, launch: Callable[[], object]) -> float:
        """µs of one call."""
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        times = []
        for i in range(self.repeats + 3):
            self.flush.random_(0, 255) if i == 0 else self.flush.bitwise_not_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times[3:])


def ceilings() -> tuple[float, float]:
    """(bytes/s of a device copy counting read and written, FLOP/s of an 8192³ bf16 product)."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def rate(work: float, launch: Callable[[], object]) -> float:
        times = []
        for _ in range(12):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            launch()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        return work / statistics.median(times[2:])

    return rate(2 * source.numel(), lambda: target.copy_(source)), rate(2 * 8192**3, lambda: a @ b)


def error_of(out: torch.Tensor, batch: Batch) -> float:
    """‖o − ref‖ / ‖ref‖ over the shortest and the longest request (at most 4096 queries, for memory)."""
    lens = batch.case.kv_lens
    affordable = [i for i, (q, kv) in enumerate(zip(batch.case.qo_lens, lens, strict=True)) if q * kv <= 4096 * 8192]
    chosen = {min(affordable, key=lens.__getitem__), max(affordable, key=lens.__getitem__)} if affordable else set()
    difference = norm = 0.0
    for request in chosen:
        expected = reference(batch, request)
        first = int(batch.qo_indptr[request])
        difference += float((out[first : first + len(expected)].double() - expected).square().sum())
        norm += float(expected.square().sum())
    return (difference / norm) ** 0.5 if norm else float("nan")


def measure(case: Case, timer: Timer, bandwidth: float, rate: float) -> dict[str, Any]:
    """One line of the table; times in µs."""
    batch = Batch.make(case)
    run, plan = ours(batch)
    floor = max(case.bytes / bandwidth, case.flops / rate) * 1e6
    line: dict[str, Any] = {"case": case.name, "floor": floor, "ours": timer(run), "plan": timer(plan), "error": error_of(run(), batch)}
    for name, peer in PEERS.items():
        try:
            line[name] = timer(peer(batch))
        except (ImportError, RuntimeError) as problem:
            line[name] = None
            line.setdefault("problems", []).append(f"{name}: {problem}")
    return line


def markdown(lines: list[dict[str, Any]], header: str) -> str:
    """The table with its header."""
    names = list(PEERS)
    text = [header, "", f"| case | floor | ours | plan | {' | '.join(names)} | ours / best peer | ours / floor | error |", "|---" * (7 + len(names)) + "|"]
    for line in lines:
        peers = [line[name] for name in names if line[name] is not None]
        ratio = f"{line['ours'] / min(peers):.2f}" if peers else "-"
        cells = [f"{line[name]:.1f}" if line[name] is not None else "-" for name in names]
        error = "not checked" if math.isnan(line["error"]) else f"{line['error']:.1e}"
        times = f"{line['floor']:.1f} | {line['ours']:.1f} | {line['plan']:.1f} | {' | '.join(cells)}"
        text.append(f"| {line['case']} | {times} | {ratio} | {line['ours'] / line['floor']:.2f} | {error} |")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", default=[], help="only lines whose name contains this; repeatable")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth, rate = ceilings()
    timer = Timer(arguments.repeats)
    empty = torch.zeros(1, device="cuda")
    launch = timer(lambda: empty.add_(1))
    header = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: device copy {bandwidth / 1e9:.0f} GB/s, bf16 8192³ product {rate / 1e12:.0f} TFLOP/s, "
        f"a one-element kernel in the same harness {launch:.1f} µs. Times in µs: bf16, causal, cold L2, CUDA-graph replay, median of {arguments.repeats}."
    )
    print(header, flush=True)
    lines = []
    for case in all_cases():
        if arguments.case and not any(text in case.name for text in arguments.case):
            continue
        lines.append(measure(case, timer, bandwidth, rate))
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in lines[-1].items()}, flush=True)
    table = markdown(lines, header)
    print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"header": header, "lines": lines}, indent=1))
    if arguments.markdown:
        arguments.markdown.write_text(table)


if __name__ == "__main__":
    main()
