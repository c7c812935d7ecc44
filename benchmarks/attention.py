"""Attention, ours beside the peers that import: one process, one GPU, cold L2, CUDA-graph replay, median.

python -m benchmarks.attention [--case TEXT ...] [--batch-invariant] [--repeats N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks.backends import Batch, ours, reference
from benchmarks.cases import Case, all_cases
from benchmarks.peers import flash_attention_3, flashinfer_backends, time_of
from benchmarks.report import brief, number, options, save, table, wanted
from benchmarks.timing import Machine, Timer

PEERS = ("FA3", "FlashInfer")


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


def measure(case: Case, timer: Timer, machine: Machine, batch_invariant: bool) -> dict[str, Any]:
    """One line of the table; times in µs."""
    batch = Batch.make(case)
    default = ours(batch)
    floor = max(case.bytes / machine.bandwidth, case.flops / machine.rate) * 1e6
    line: dict[str, Any] = {"case": case.name, "floor": floor}
    if batch_invariant:
        invariant = ours(batch, batch_invariant=True)
        line["ours"], line["batch invariant"] = timer.together([default.run, invariant.run])
        line["batch invariant error"] = error_of(invariant.run(), batch)
        line["batch invariant plan"] = timer(invariant.plan)
    else:
        line["ours"] = timer(default.run)
    line |= {"plan": timer(default.plan), "error": error_of(default.run(), batch)}
    line["FA3"], _ = time_of("FA3", case.name, lambda: flash_attention_3(batch), timer)
    line["FlashInfer"] = None
    for backend, make in flashinfer_backends(batch).items():
        time, _ = time_of(f"FlashInfer, {backend}", case.name, lambda make=make: make(batch), timer)     # type: ignore[misc]
        if time is not None and (line["FlashInfer"] is None or time < line["FlashInfer"]):
            line["FlashInfer"], line["FlashInfer backend"] = time, backend
    return line


def markdown(lines: list[dict[str, Any]], header: str, batch_invariant: bool) -> str:
    """The table with its header."""
    invariant_columns = ["ours, batch-invariant", "batch-invariant / ours"] if batch_invariant else []
    columns = ["case", "floor", "ours", "plan", *PEERS, "ours / best peer", "ours / floor", *invariant_columns, "error"]
    rows = []
    for line in lines:
        peers = [line[name] for name in PEERS if line[name] is not None]
        errors = [line["error"], *([line["batch invariant error"]] if batch_invariant else [])]
        rows.append(
            [
                line["case"],
                *(number(line[name]) for name in ("floor", "ours", "plan", *PEERS)),
                number(line["ours"] / min(peers) if peers else None, 2),
                number(line["ours"] / line["floor"], 2),
                *([number(line["batch invariant"]), number(line["batch invariant"] / line["ours"], 2)] if batch_invariant else []),
                "not checked" if math.isnan(errors[0]) else f"{max(errors):.1e}",
            ]
        )
    return f"{header}\n\n{table(columns, rows)}\n"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--batch-invariant", action="store_true", help="also Attention(batch_invariant=True), beside the default")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    timer = Timer(arguments.repeats)
    machine = Machine.measure(timer)
    header = f"{machine} Times in µs: bf16, causal, cold L2, CUDA-graph replay, median of {arguments.repeats}."
    print(header, flush=True)
    lines: list[dict[str, Any]] = []
    text = ""
    for case in all_cases():
        if wanted(case.name, arguments):
            lines.append(measure(case, timer, machine, arguments.batch_invariant))
            print(brief(lines[-1]), flush=True)
            text = markdown(lines, header, arguments.batch_invariant)
            save(arguments, text, {"header": header, "lines": lines})
    print(text)


if __name__ == "__main__":
    main()
