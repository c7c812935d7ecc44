"""The cost of a plan: µs on the host (the call) and on the device, for decode batches with cascade off and
on.

Device times are from replayed CUDA graphs, launch included: one with 20 plans, divided by 20, and one with a
single plan, with a warm and with a cold L2. Only plan runs: the pages need no cache.

python -m benchmarks.plan [--case TEXT ...] [--repeats N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from attn_backend import Attention, BSRView, PageTable
from benchmarks.lines import measure_lines
from benchmarks.report import number, options, table
from benchmarks.schedules import taken_prefixes
from benchmarks.timing import Launch, Timer, capture, device_time

PAGE_SIZE = 16
MAX_ROWS = 8192
MAX_BATCH = 512
NUM_GROUPS = 8  # in a two-level tree
PLANS_IN_GRAPH = 20
COLUMNS = [
    "case",
    "host",
    f"{PLANS_IN_GRAPH} plans / {PLANS_IN_GRAPH}",
    "one plan",
    "one plan, cold L2",
    "prefixes taken",
]


@dataclass(frozen=True)
class Line:
    """A decode batch of `batch` requests of kv_len tokens. All share `common` tokens; each of NUM_GROUPS
    groups shares the `of_group` tokens after them.
    """

    sharing: str
    cascade: bool
    batch: int
    kv_len: int = 4096
    common: int = 0
    of_group: int = 0
    table_tokens: int = 4096  # capacity of a row of the block table

    @property
    def name(self) -> str:
        wide = f", table of {self.table_tokens} tokens" if self.table_tokens > 4096 else ""
        return f"{self.batch} x {self.kv_len}{wide}: {self.sharing}"

    def block_table(self) -> torch.Tensor:
        """int32 [batch, table_tokens / page]: page ids in random order, request i in group i % NUM_GROUPS;
        zeros after the last page.
        """
        pages = self.kv_len // PAGE_SIZE
        request = torch.arange(self.batch, device="cuda")[:, None]
        page = torch.arange(pages, device="cuda")
        # Tokens that share a page share an owner: a request, its group, or all.
        owner = torch.where(
            page < (self.common + self.of_group) // PAGE_SIZE, self.batch + request % NUM_GROUPS, request
        )
        owner = torch.where(page < self.common // PAGE_SIZE, self.batch + NUM_GROUPS, owner)
        ids = torch.randperm((self.batch + NUM_GROUPS + 1) * pages, device="cuda", dtype=torch.int32)
        result = torch.zeros(self.batch, self.table_tokens // PAGE_SIZE, dtype=torch.int32, device="cuda")
        result[:, :pages] = ids[owner * pages + page]
        return result


def lines() -> list[Line]:
    """Every line, in the order of the table."""
    short = (
        ("cascade off", False, 0, 0),
        ("nothing shared", True, 0, 0),
        ("one shared prefix", True, 3072, 0),
        ("two-level tree", True, 1024, 2048),
    )
    result = [
        Line(sharing, cascade, batch, 4096, common, of_group)
        for batch in (1, 16, 64, 256, 512)
        for sharing, cascade, common, of_group in short
    ]
    result += [
        Line(sharing, cascade, 512, 4096, common, of_group, 131072)
        for sharing, cascade, common, of_group in short
    ]
    long = (
        ("cascade off", False, 0),
        ("nothing shared", True, 0),
        ("102400 tokens shared by all", True, 102400),
    )
    return result + [
        Line(sharing, cascade, 512, 131072, common, 0, 131072) for sharing, cascade, common in long
    ]


def host_time(plan: Launch, repeats: int) -> float:
    """Median µs until plan() returns; the device keeps up."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        plan()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def time_in_graph(plan: Launch, plans: int, repeats: int) -> float:
    """Median µs of one plan of a replayed graph that holds `plans` of them; the L2 is warm."""
    graph = capture(lambda: [plan() for _ in range(plans)])
    return statistics.median(device_time(graph.replay) for _ in range(repeats)) / plans


def measure(line: Line, timer: Timer) -> dict[str, Any]:
    """Times in µs."""
    attention = Attention(32, 8, 128, max_rows=MAX_ROWS, max_batch=MAX_BATCH, cascade=line.cascade)
    kv_lens = torch.full((line.batch,), line.kv_len, dtype=torch.int32, device="cuda")
    view = BSRView(
        torch.arange(line.batch + 1, dtype=torch.int32, device="cuda"),
        PageTable.block_table(line.block_table(), kv_lens, PAGE_SIZE),
    )

    def plan() -> None:
        attention.plan(view)

    plan()
    times = (
        host_time(plan, timer.repeats),
        time_in_graph(plan, PLANS_IN_GRAPH, timer.repeats),
        time_in_graph(plan, 1, timer.repeats),
        timer(plan),
    )
    return {
        "case": line.name,
        **dict(zip(COLUMNS[1:-1], times, strict=True)),
        "prefixes taken": taken_prefixes(attention.schedule()),
    }


def main() -> None:
    arguments = options(__doc__, repeats=200).parse_args()
    torch.manual_seed(0)
    timer = Timer(arguments.repeats)
    header = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: µs of a plan, decode, 32/8 heads, "
        f"head_dim 128, page {PAGE_SIZE}, "
        f"max_rows {MAX_ROWS}, max_batch {MAX_BATCH}; median of {arguments.repeats}."
    )

    def text(measured: list[dict[str, Any]]) -> str:
        rows = [
            [line["case"], *(number(line[name]) for name in COLUMNS[1:-1]), str(line["prefixes taken"])]
            for line in measured
        ]
        return f"{header}\n\n{table(COLUMNS, rows)}\n"

    measure_lines(lines(), lambda line: measure(line, timer), text, header, arguments)


if __name__ == "__main__":
    main()
