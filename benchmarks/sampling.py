"""Samplers compared: one token for each row, directly from float32 logits.

Times in µs of replayed CUDA graphs with a cold L2, launches included. The floor is one read of the logits at
the rate of a device copy, plus a one-element launch. Peers also start from logits: FlashInfer with the
fastest combination of its functions, vLLM's Triton kernels (minus the copy that they work in), torch with a
sort. Peaked logits are randn * 4, flat ones randn, at temperature 0.6.

--batch and --vocab select sizes. --add takes lines that an earlier run saved with --json, so a board can be
measured in parts.

python -m benchmarks.sampling [--batch N ...] [--vocab N ...] [--case TEXT ...] [--peer NAME ...] [--repeats
N] [--add FILE ...] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from attn_backend import sample, sampling_workspace
from benchmarks.report import asked_peers, brief, fastest_of, number, options, ratio, save, table, wanted
from benchmarks.sampling_peers import Filters, Requests, copy_time, flashinfer, torch_sort, vllm
from benchmarks.timing import Launch, Machine, Timer, start

BATCHES = (1, 8, 32, 128, 256, 512)
VOCABS = (32000, 128256, 151936, 262144)
FILTERS = (
    Filters("temperature"),
    Filters("top-k 50", top_k=50),
    Filters("top-p 0.9", top_p=0.9),
    Filters("min-p 0.1", min_p=0.1),
    Filters("top-k 50 + top-p 0.9", top_k=50, top_p=0.9),
    Filters("all three", top_k=50, top_p=0.9, min_p=0.1),
    Filters("greedy", temperature=0.0),
)
SCALES = {"flat": 1.0, "peaked": 4.0}
PEERS: dict[str, Callable[[Requests], list[Launch]]] = {
    "FlashInfer": flashinfer,
    "vLLM": vllm,
    "torch sort": torch_sort,
}
COLUMNS = ["case", "floor", "ours", *PEERS, "ours / best peer", "ours / FlashInfer", "ours / floor"]
SORT_REPEATS = 3  # a sort takes milliseconds, so few repeats are enough


def ours(requests: Requests) -> Launch:
    f = requests.filters
    batch = requests.logits.shape[0]
    out = torch.empty(batch, dtype=torch.int32, device="cuda")
    seed = torch.arange(batch, device="cuda")
    workspace = sampling_workspace("cuda")
    temperature, top_p, min_p = requests.each(f.temperature), requests.each(f.top_p), requests.each(f.min_p)
    top_k = requests.each(f.top_k, torch.int32)
    assert temperature is not None
    return lambda: sample(
        requests.logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        position=seed,
        out=out,
        workspace=workspace,
    )


def time_of_peer(name: str, case: str, requests: Requests, timer: Timer) -> float | None:
    """µs of a peer's fastest launch; None if it has none, is not installed, or fails, which is printed."""
    try:
        launches = PEERS[name](requests)
        if name == "torch sort" and requests.filters.temperature:
            timer = Timer(min(timer.repeats, SORT_REPEATS), timer.flush)
        times = [timer(launch) for launch in launches]
        copied = (
            timer(copy_time(requests))
            if name == "vLLM" and requests.filters.temperature and requests.filters != FILTERS[0]
            else 0.0
        )
        return min(times) - copied if times else None
    except Exception as problem:  # a peer may raise anything
        print(f"{case}: {name}: {type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
        return None


def measure(
    case: str, requests: Requests, machine: Machine, timer: Timer, peers: Collection[str]
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "case": case,
        "floor": requests.logits.nbytes / (machine.bandwidth * 1e-6) + machine.launch,
        "ours": timer(ours(requests)),
    }
    for name in PEERS:
        line[name] = time_of_peer(name, case, requests, timer) if name in peers else None
    line["ours / best peer"] = ratio(line["ours"], fastest_of(line, PEERS))
    line["ours / FlashInfer"] = ratio(line["ours"], line["FlashInfer"])
    line["ours / floor"] = line["ours"] / line["floor"]
    return line


def board(lines: list[dict[str, Any]], value: str, digits: int) -> str:
    """A table of sizes by filters: `value` of the lines, flat / peaked."""
    of_case = {line["case"]: line.get(value) for line in lines}
    sizes = list(dict.fromkeys(line["case"].split(" flat")[0].split(" peaked")[0] for line in lines))
    rows = [
        [
            size,
            *(
                " / ".join(number(of_case.get(f"{size} {shape}: {filters.name}"), digits) for shape in SCALES)
                for filters in FILTERS
            ),
        ]
        for size in sorted(sizes, key=lambda size: [int(n) for n in reversed(size.split(" x "))])
    ]
    return table(["batch x vocab", *(filters.name for filters in FILTERS)], rows)


def report(header: str, lines: list[dict[str, Any]]) -> str:
    rows = [
        [line["case"], *(number(line[name], 2 if "/" in name else 1) for name in COLUMNS[1:])]
        for line in lines
    ]
    boards = [
        f"{name}, flat / peaked\n\n{board(lines, name, 2 if '/' in name else 1)}"
        for name in ("ours", "ours / best peer", "ours / floor")
    ]
    return "\n\n".join([header, *boards, table(COLUMNS, rows)]) + "\n"


def main() -> None:
    parser = options(__doc__, repeats=20, peers=PEERS)
    parser.add_argument("--batch", type=int, action="append", help="repeatable; default: all")
    parser.add_argument("--vocab", type=int, action="append", help="repeatable; default: all")
    parser.add_argument(
        "--add", type=Path, action="append", default=[], help="lines of an earlier run's --json; repeatable"
    )
    arguments = parser.parse_args()
    timer, machine = start(arguments.repeats)
    header = f"{machine}\n\nTimes in µs, float32 logits, median of {arguments.repeats}."
    print(header, flush=True)
    lines: list[dict[str, Any]] = []
    for earlier in (json.loads(path.read_text()) for path in arguments.add):
        lines += earlier["lines"]
        header += f"\n\nBefore: {earlier['header']}"
    for vocab in arguments.vocab or VOCABS:
        normal = torch.randn(max(BATCHES), vocab, device="cuda")
        for batch in arguments.batch or BATCHES:
            for shape, scale in SCALES.items():
                logits = normal[:batch] * scale
                for filters in FILTERS:
                    case = f"{batch} x {vocab} {shape}: {filters.name}"
                    if not wanted(case, arguments):
                        continue
                    line = measure(
                        case, Requests(logits, filters), machine, timer, asked_peers(PEERS, arguments)
                    )
                    lines.append(line)
                    print(brief(line), flush=True)
                save(arguments, report(header, lines), {"header": header, "lines": lines})
    print(report(header, lines))


if __name__ == "__main__":
    main()
