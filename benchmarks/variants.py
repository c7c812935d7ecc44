"""Variants of attention compared with the installed peers: one process, one GPU, cold L2, CUDA-graph replay,
median.

python -m benchmarks.variants [--case TEXT ...] [--peer NAME ...] [--repeats N] [--json FILE] [--markdown
FILE]

Peers' plans and flex_attention's block masks are made beforehand and not timed; neither is our plan, which
has a separate column.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.batches import LARGEST_ERROR, Batch
from benchmarks.lines import measure_lines
from benchmarks.peers import fastest
from benchmarks.report import asked_peers, fastest_of, number, options, ratio, table
from benchmarks.timing import Machine, Timer, start
from benchmarks.variant_cases import MEANINGS, Expected, VariantCase, all_cases, ours, work
from benchmarks.variant_peers import peers_of

PEERS = ("FA3", "FlashInfer", "flex_attention")


def measure(
    line_of: VariantCase, timer: Timer, machine: Machine, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One line of the table; times in µs."""
    begin = time.monotonic()
    case, name = line_of.case, line_of.name
    batch = Batch.make(case)
    meaning = MEANINGS[line_of.variant](case, batch.q.device)
    moved, flops = work(meaning, case, batch.q.device)
    line: dict[str, Any] = {"case": name, "floor": max(moved / machine.bandwidth, flops / machine.rate) * 1e6}
    expected = Expected(batch, meaning)
    prepared = ours(batch, meaning)
    runs = {"ours": prepared.run}
    if line_of.variant != "causal":
        runs["causal"] = ours(batch, MEANINGS["causal"](case, batch.q.device)).run
    line |= dict(zip(runs, timer.together(list(runs.values())), strict=True))
    line.setdefault("causal", line["ours"])
    line |= {"plan": timer(prepared.plan), "error": expected.error(prepared.run())}
    if line["error"] > LARGEST_ERROR:
        print(f"{name}: ours: WRONG, relative error {line['error']:.1e}", flush=True)
    line |= dict.fromkeys(PEERS)
    peers = peers_of(batch, meaning)
    for peer in asked_peers(peers, arguments):
        line |= fastest(peer, name, peers[peer], timer, expected.error, LARGEST_ERROR)
    line["seconds"] = time.monotonic() - begin
    return line


def markdown(lines: list[dict[str, Any]]) -> str:
    columns = ["case", "floor", "ours", "plan", *PEERS, "ours / best peer", "ours / our causal", "error"]
    rows = []
    for line in lines:
        ratios = (
            number(ratio(line["ours"], fastest_of(line, PEERS)), 2),
            number(line["ours"] / line["causal"], 2),
        )
        times = [number(line.get(column)) for column in columns[1:7]]
        rows.append(
            [
                line["case"],
                *times,
                *ratios,
                f"{line['error']:.1e}" + (" WRONG" if line["error"] > LARGEST_ERROR else ""),
            ]
        )
    return table(columns, rows)


def main() -> None:
    arguments = options(__doc__, peers=PEERS).parse_args()
    timer, machine = start(arguments.repeats)
    header = (
        f"{machine} Times in µs: bf16, 8 KV heads, cold L2, CUDA-graph replay, median of "
        f"{arguments.repeats}. Error: some rows against float64, relative."
    )
    measure_lines(
        all_cases(),
        lambda case: measure(case, timer, machine, arguments),
        lambda lines: f"{header}\n\n{markdown(lines)}\n",
        header,
        arguments,
    )


if __name__ == "__main__":
    main()
