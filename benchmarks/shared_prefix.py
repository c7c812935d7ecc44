"""Decode of requests that share prefixes: levels that plan() finds, hand-made levels, no levels, and the
peers. Also the cost if nothing is shared.

One process, one GPU, bf16, 32/8 heads, head_dim 128, page 16, cold L2, CUDA-graph replay, median. If ours
looks for prefixes by itself, the requests are in random order; hand-made levels and the peers get the
requests of a prefix consecutively.

python -m benchmarks.shared_prefix [--case TEXT ...] [--peer NAME ...] [--rounds N] [--repeats N] [--json
FILE] [--markdown FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from benchmarks.batches import LARGEST_ERROR, Batch, SharedBatch, hand_made, ours, reference, relative_error
from benchmarks.cases import Case, SharedCase, shared_cases, unshared_cases
from benchmarks.peers import Run, flash_attention_3, flashinfer_cascade, flashinfer_decode, time_of
from benchmarks.report import asked_peers, brief, fastest_of, number, options, ratio, save, table, wanted
from benchmarks.schedules import balance, taken_prefixes
from benchmarks.timing import Machine, Timer, start

PEERS: dict[str, dict[str, Callable[[SharedBatch], Run]]] = {  # and their columns
    "FlashInfer": {
        "FI decode": lambda batch: flashinfer_decode(batch.grouped),
        "FI cascade": flashinfer_cascade,
        "FI cascade, fa2": lambda batch: flashinfer_cascade(batch, "fa2"),
    },
    "FA3": {"FA3": lambda batch: flash_attention_3(batch.grouped)},
}
PEER_COLUMNS = [column for columns in PEERS.values() for column in columns]
OURS = ("hand-made", "automatic", "off")
LAYERS = 32  # layers of a model that share one plan in a step


def measure_shared(
    shared: SharedCase, timer: Timer, machine: Machine, peers: Collection[str]
) -> dict[str, Any]:
    """One line of the table of shared prefixes; times in µs. peers: the measured ones."""
    batch = SharedBatch.make(shared)
    expected = torch.cat([reference(batch.grouped, request) for request in range(shared.batch)])
    prepared = dict(
        zip(
            OURS,
            (hand_made(batch), ours(batch.interleaved, cascade=True), ours(batch.interleaved, cascade=False)),
            strict=True,
        )
    )
    times = timer.together([of.run for of in prepared.values()])
    plans = timer.together([of.plan for of in prepared.values()])
    line: dict[str, Any] = {"case": shared.name, "floor": shared.bytes / machine.bandwidth * 1e6}
    for (name, of), time, plan in zip(prepared.items(), times, plans, strict=True):
        schedule = of.attention.schedule()
        line[name], line[f"{name} plan"] = time, plan
        line[f"{name} balance"], line[f"{name} row groups"] = (
            balance(schedule, shared.num_kv_heads),
            len(schedule.groups),
        )
        line[f"{name} error"] = relative_error(
            of.run(), expected if name == "hand-made" else expected[batch.order]
        )
    line["prefixes taken"] = taken_prefixes(prepared["automatic"].attention.schedule())
    line |= dict.fromkeys((*PEER_COLUMNS, *(f"{name} error" for name in PEER_COLUMNS)))
    for name, make in (column for peer in peers for column in PEERS[peer].items()):
        line[name], out = time_of(name, shared.name, partial(make, batch), timer)
        line[f"{name} error"] = None if out is None else relative_error(out, expected)
    for name in (*OURS, *PEER_COLUMNS):
        error = line[f"{name} error"]
        if error is not None and not error <= LARGEST_ERROR:
            print(f"{shared.name}: {name}: WRONG, relative error {error:.1e}", flush=True)
            if name in PEER_COLUMNS:
                line[name] = None  # not a time to compare with
    return line


def measure_unshared(case: Case, timer: Timer, rounds: int) -> dict[str, Any]:
    """One line of the table without sharing.

    Differences are small: each round captures both again, in new workspaces, and alternates between them.
    """
    batch = Batch.make(case)
    of_rounds: list[dict[str, float]] = []
    for i in range(rounds):
        order = (False, True) if i % 2 == 0 else (True, False)
        prepared = {cascade: ours(batch, cascade=cascade) for cascade in order}
        times = dict(zip(order, timer.together([prepared[cascade].run for cascade in order]), strict=True))
        plans = dict(zip(order, timer.together([prepared[cascade].plan for cascade in order]), strict=True))
        step = {cascade: plans[cascade] + LAYERS * times[cascade] for cascade in order}
        of_rounds.append(
            {
                "off": times[False],
                "on": times[True],
                "on / off": times[True] / times[False],
                "off plan": plans[False],
                "on plan": plans[True],
                "step on / off": step[True] / step[False],
            }
        )
    line: dict[str, Any] = {"case": case.name}
    line |= {name: statistics.median(of_round[name] for of_round in of_rounds) for name in of_rounds[0]}
    line["smallest"], line["largest"] = (
        pick(of_round["on / off"] for of_round in of_rounds) for pick in (min, max)
    )
    return line


def shared_table(lines: list[dict[str, Any]]) -> str:
    """Markdown."""
    columns = [
        "prefix + suffix",
        "floor",
        *OURS,
        *PEER_COLUMNS,
        *(f"plan {name}" for name in OURS),
        "balance hand-made",
        "balance automatic",
    ]
    columns += ["automatic / hand-made", "best peer / automatic", "error"]
    rows = []
    for line in lines:
        rows.append(
            [
                line["case"],
                *(number(line[name]) for name in ("floor", *OURS, *PEER_COLUMNS)),
                *(number(line[f"{name} plan"]) for name in OURS),
                *(number(line[f"{name} balance"], 2) for name in ("hand-made", "automatic")),
                number(line["automatic"] / line["hand-made"], 2),
                number(ratio(fastest_of(line, PEER_COLUMNS), line["automatic"]), 2),
                f"{max(line[f'{name} error'] for name in OURS):.1e}",
            ]
        )
    return table(columns, rows)


def unshared_table(lines: list[dict[str, Any]]) -> str:
    """Markdown."""
    columns = [
        "nothing shared",
        "off",
        "on",
        "on / off",
        "smallest and largest",
        "plan off",
        "plan on",
        f"step of {LAYERS} layers, on / off",
    ]
    rows = [
        [
            line["case"],
            number(line["off"]),
            number(line["on"]),
            number(line["on / off"], 3),
            f"{line['smallest']:.3f} to {line['largest']:.3f}",
            number(line["off plan"]),
            number(line["on plan"]),
            number(line["step on / off"], 3),
        ]
        for line in lines
    ]
    return table(columns, rows)


def main() -> None:
    parser = options(__doc__, peers=PEERS)
    parser.add_argument("--rounds", type=int, default=5, help="of every line without sharing")
    arguments = parser.parse_args()
    timer, machine = start(arguments.repeats)
    header = (
        f"{machine} Times in µs: decode, bf16, 32/8 heads, head_dim 128, page 16, cold L2, CUDA-graph "
        f"replay, median of {arguments.repeats}. "
        "Balance: the CTA with most work ÷ the mean, in the schedule's costs. Error: the largest of ours "
        "against float64, relative, over all requests."
    )
    print(header, flush=True)
    shared: list[dict[str, Any]] = []
    unshared: list[dict[str, Any]] = []
    text = ""
    cases: list[SharedCase | Case] = [*shared_cases(), *unshared_cases()]
    for case in cases:
        if not wanted(case.name, arguments):
            continue
        if isinstance(case, SharedCase):
            shared.append(measure_shared(case, timer, machine, asked_peers(PEERS, arguments)))
        else:
            unshared.append(measure_unshared(case, timer, arguments.rounds))
        print(brief((unshared or shared)[-1]), flush=True)
        text = (
            "\n\n".join(
                [
                    header,
                    *([shared_table(shared)] if shared else []),
                    *([unshared_table(unshared)] if unshared else []),
                ]
            )
            + "\n"
        )
        save(arguments, text, {"header": header, "shared": shared, "unshared": unshared})
    print(text)


if __name__ == "__main__":
    main()
