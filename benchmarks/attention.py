"""Attention compared with the installed peers: one process, one GPU, cold L2, CUDA-graph replay, median.

python -m benchmarks.attention [--case TEXT ...] [--part K/N] [--peer NAME ...] [--batch-invariant] [--repeats
N] [--json FILE] [--markdown FILE]

The lines can be measured in parts, by name (--case), or every N-th line from the K-th (--part K/N). `python
-m benchmarks.board` merges the parts' JSON files into one table and a plot.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

import torch

from benchmarks.batches import LARGEST_ERROR, Batch, SharedBatch, ours, reference
from benchmarks.board import PEERS, markdown
from benchmarks.cases import Case, SharedCase, all_cases
from benchmarks.lines import measure_lines
from benchmarks.peers import fastest, peers_of, peers_of_shared
from benchmarks.report import asked_peers, options, wanted
from benchmarks.timing import Machine, Timer, start


class Expected:
    """float64 outputs of the shortest and the longest request (of at most 4096 queries over 8192 tokens, for
    memory).
    """

    def __init__(self, batch: Batch) -> None:
        lens = batch.case.kv_lens
        affordable = [
            i for i, (q, kv) in enumerate(zip(batch.case.qo_lens, lens, strict=True)) if q * kv <= 4096 * 8192
        ]
        chosen = (
            {min(affordable, key=lens.__getitem__), max(affordable, key=lens.__getitem__)}
            if affordable
            else set()
        )
        self.outputs = [(int(batch.qo_indptr[request]), reference(batch, request)) for request in chosen]

    def error(self, out: torch.Tensor) -> float:
        """‖o − ref‖ / ‖ref‖; nan if no request was affordable."""
        difference = norm = 0.0
        for first, expected in self.outputs:
            difference += float((out[first : first + len(expected)].double() - expected).square().sum())
            norm += float(expected.square().sum())
        return (difference / norm) ** 0.5 if norm else math.nan


def measure(
    case: Case | SharedCase, timer: Timer, machine: Machine, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One line of the table; times in µs."""
    begin = time.monotonic()
    line: dict[str, Any] = {"case": case.name}
    if isinstance(case, SharedCase):
        shared = SharedBatch.make(case)
        batch, grouped, peers = shared.interleaved, shared.grouped, peers_of_shared(shared)
        line["floor"] = case.bytes / machine.bandwidth * 1e6
    else:
        batch = grouped = Batch.make(case)
        peers = peers_of(batch)
        line |= {
            "floor": max(case.bytes / machine.bandwidth, case.flops / machine.rate) * 1e6,
            "shape": case.shape,
            "ragged": case.ragged,
            "flops": case.flops,
        }
    expected = Expected(batch)
    default = ours(batch)
    runs, empty = {"ours": default.run}, torch.zeros(1, device="cuda")
    if arguments.batch_invariant:
        invariant = ours(batch, batch_invariant=True)
        runs["batch invariant"] = invariant.run
        line |= {
            "batch invariant error": expected.error(invariant.run()),
            "batch invariant plan": timer(invariant.plan),
        }
    times = timer.times([*runs.values(), lambda: empty.add_(1)])
    line |= dict(zip([*runs, "launch"], map(statistics.median, times), strict=True))
    first, _, third = statistics.quantiles(times[0], n=4)
    line["ours quartiles"] = [first, third]
    line |= {"plan": timer(default.plan), "error": expected.error(default.run())}
    of_peers = expected if grouped is batch else Expected(grouped)
    asked = asked_peers(PEERS, arguments)
    for peer in PEERS:
        kernels = peers.get(peer, {}) if peer in asked else {}
        line |= fastest(
            peer,
            case.name,
            kernels,
            timer,
            lambda out: of_peers.error(out) if of_peers.outputs else None,
            LARGEST_ERROR,
        )
    line["seconds"] = time.monotonic() - begin
    return line


def main() -> None:
    parser = options(__doc__, peers=PEERS)
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="also measure Attention(batch_invariant=True)",
    )
    parser.add_argument("--part", default="1/1", help="K/N: of the lines every N-th, beginning with the K-th")
    arguments = parser.parse_args()
    part, _, parts = arguments.part.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        parser.error(f"--part is {arguments.part!r}, must be K/N with 1 <= K <= N")
    timer, machine = start(arguments.repeats)
    header = (
        f"{machine} Times in µs: bf16, causal except `full`, cold L2, CUDA-graph replay, median of "
        f"{arguments.repeats}."
    )
    cases = [case for case in all_cases() if wanted(case.name, arguments)][int(part) - 1 :: int(parts)]
    measure_lines(
        cases,
        lambda case: measure(case, timer, machine, arguments),
        lambda lines: markdown(lines, [header]),
        header,
        arguments,
    )


if __name__ == "__main__":
    main()
