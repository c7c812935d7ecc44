"""Does the automatic cascade choose well between the levels of a tree?

Decode batches have `groups` groups of `requests` requests. All share `common` tokens, each group shares
`of_group` tokens after them, and each request has `own` tokens. They run with the levels that plan() finds,
and with hand-made levels: three (common, groups, own), two (groups, which each read the common tokens, and
own), or none. Regret: the automatic time ÷ the best hand-made time, minus 1.

python -m benchmarks.cascade_levels [--groups N ...] [--requests N ...] [--common N ...] [--of-group N ...]
[--own N ...]
    [--repeats N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

import torch

from attn_backend import Attention, Composition, PageTable
from benchmarks.batches import SharedBatch, make_cache, prepare
from benchmarks.cases import SharedCase
from benchmarks.report import number, save, table
from benchmarks.schedules import taken_prefixes
from benchmarks.timing import Timer, start

MAX_BATCH = 256
HAND_MADE = ("three levels", "two levels", "no levels")
WORST = 10  # lines that are listed


class Bench:
    """The Attention objects and the cache that all batches use."""

    def __init__(self, largest: SharedCase, timer: Timer) -> None:
        case = largest.case
        room: dict[str, Any] = {"max_rows": MAX_BATCH, "max_batch": MAX_BATCH}
        heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim)
        self.timer = timer
        self.cache = make_cache(case, largest.pages)
        self.of_levels = {
            levels: Attention(*heads, **room, max_levels=levels, cascade=False) for levels in (1, 2, 3)
        }
        self.automatic = Attention(*heads, **room, cascade=True)

    def measure(self, groups: int, requests: int, common: int, of_group: int, own: int) -> dict[str, Any]:
        """One batch; times in µs."""
        batch = SharedBatch.make(
            SharedCase("", ((1, common), (groups, of_group), (groups * requests, own))), self.cache
        )
        view = batch.grouped.view
        prepared = {
            "three levels": prepare(self.of_levels[3], batch.grouped, batch.levels),
            "two levels": prepare(self.of_levels[2], batch.grouped, two_levels(batch, common + of_group)),
            "no levels": prepare(self.of_levels[1], batch.grouped, view),
            "automatic": prepare(self.automatic, batch.grouped, view),
        }
        times = dict(zip(prepared, self.timer.together([of.run for of in prepared.values()]), strict=True))
        best = min(times[name] for name in HAND_MADE)
        shape = {"groups": groups, "requests": requests, "common": common, "of group": of_group, "own": own}
        return (
            shape
            | times
            | {
                "prefixes taken": taken_prefixes(self.automatic.schedule()),
                "regret": times["automatic"] / best - 1,
            }
        )


def two_levels(batch: SharedBatch, tokens: int) -> Composition:
    """The groups with all `tokens` shared tokens, and the requests' own tokens."""
    _, of_group, own = batch.levels.levels
    pages = torch.cat(
        [batch.page_tables[0].expand(len(batch.page_tables[1]), -1), batch.page_tables[1]], 1
    ).contiguous()
    kv_lens = torch.full((len(pages),), tokens, dtype=torch.int32, device="cuda")
    shared = PageTable.block_table(pages, kv_lens, batch.grouped.case.page_size)
    return Composition.cascade([of_group.qo_indptr, own.qo_indptr], [shared, own.table])


def report(lines: list[dict[str, Any]], header: str) -> str:
    """Markdown."""
    best = [min(line[name] for name in HAND_MADE) for line in lines]
    rules = [
        [
            name,
            f"{statistics.mean(line[name] / least - 1 for line, least in zip(lines, best, strict=True)):.1%}",
        ]
        for name in (*HAND_MADE, "automatic")
    ]
    worst = sorted(lines, key=lambda line: line["regret"], reverse=True)[:WORST]
    shape = ("groups", "requests", "common", "of group", "own")
    rows = []
    for line in worst:
        times = [number(line[name]) for name in (*HAND_MADE, "automatic")]
        rows.append(
            [
                *(str(line[name]) for name in shape),
                *times,
                str(line["prefixes taken"]),
                f"{line['regret']:.0%}",
            ]
        )
    listed = table([*shape, *HAND_MADE, "automatic", "prefixes taken", "regret"], rows)
    return (
        "\n\n".join(
            [
                header,
                table(["always", f"mean regret of {len(lines)} batches"], rules),
                "Where automatic levels do worst:",
                listed,
            ]
        )
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--groups",
        type=int,
        nargs="+",
        default=[2, 4, 8, 16],
        help=f"batches of more than {MAX_BATCH} requests are left out",
    )
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="in each group"
    )
    parser.add_argument(
        "--common", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096], help="tokens, multiples of 16"
    )
    parser.add_argument(
        "--of-group", type=int, nargs="+", default=[256, 1024, 4096], help="tokens, multiples of 16"
    )
    parser.add_argument("--own", type=int, nargs="+", default=[128, 1024], help="tokens")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    sizes = [
        (groups, requests)
        for groups in arguments.groups
        for requests in arguments.requests
        if groups * requests <= MAX_BATCH
    ]
    if not sizes:
        parser.error(f"--groups and --requests: no batch of at most {MAX_BATCH} requests")
    for option, lengths in (("--common", arguments.common), ("--of-group", arguments.of_group)):
        if any(tokens < 16 or tokens % 16 for tokens in lengths):
            parser.error(f"{option}: must be multiples of 16, the page")
    timer, machine = start(arguments.repeats)
    header = (
        f"{machine} Decode, bf16, 32/8 heads, head_dim 128, page 16, cold L2, CUDA-graph replay, median "
        f"of {arguments.repeats}; µs."
    )
    print(header, flush=True)
    most = (
        (1, max(arguments.common)),
        (max(arguments.groups), max(arguments.of_group)),
        (MAX_BATCH, max(arguments.own)),
    )
    bench = Bench(SharedCase("", most), timer)
    grid = itertools.product(sizes, arguments.common, arguments.of_group, arguments.own)
    lines = [bench.measure(groups, requests, *tokens) for (groups, requests), *tokens in grid]
    text = report(lines, header)
    print(text)
    save(arguments, text, {"header": header, "lines": lines})


if __name__ == "__main__":
    main()
