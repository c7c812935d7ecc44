"""`attn-backend bench`: measures attention on this machine's GPU or CPU, next to the installed peers."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..jit.progress import tracked
from .console import explained, print_table

if TYPE_CHECKING:
    import torch

EPILOG = """examples:
  attn-backend bench                                 # a table, in less than two minutes
  attn-backend bench --case decode --svg bench.svg   # some cases, and a picture (needs matplotlib)
  attn-backend bench --json bench.json
  attn-backend bench --sweep --svg sweep.svg         # decodes: GB/s over batch, length and cache format
  attn-backend bench --device cpu                    # small sizes: that it works, not how fast it is

Times are medians in µs, of attention only. The plan of a step serves all layers and has its own column.
On a GPU, launches are replayed from CUDA graphs with a cold L2, in turns. Peers that are not installed
are left out: FlashAttention-3 (of vLLM), FlashInfer. docs/benchmarks.md has many more cases.
A sweep counts the bytes of Q, K, V with their scales, and the output. `share` is their rate as a fraction
of the rate of a large copy. int8 and int4 caches are vLLM's int8_per_token_head and int4_per_token_head.
"""

Launch = Callable[[], Any]
PAGE_SIZE = 16


@dataclass(frozen=True)
class Case:
    """shared_pages: leading pages that all requests share. cache: its dtype in torch, or int4; None: Q's."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int, int] = (32, 8, 128)
    shared_pages: int = 0
    cache: str | None = None


ON_GPU = (
    Case("decode 64 x 4096", (1,) * 64, (4096,) * 64),
    Case("decode 8 x 32768", (1,) * 8, (32768,) * 8),
    Case("decode 32 x 512..32768", (1,) * 32, tuple(512 << (i % 7) for i in range(32))),
    Case("prefill 8 x 2048", (2048,) * 8, (2048,) * 8),
    Case("chunk 2048 at 8192, 63 decodes", (2048, *(1,) * 63), (8192, *(4096,) * 63)),
    Case("decode 64 x 8192, shared", (1,) * 64, (8192 + 256,) * 64, shared_pages=8192 // PAGE_SIZE),
)
ON_CPU = (
    Case("decode 4 x 512", (1,) * 4, (512,) * 4, (8, 2, 64)),
    Case("prefill 2 x 128", (128,) * 2, (128,) * 2, (8, 2, 64)),
    Case("chunk 64 at 256, 3 decodes", (64, 1, 1, 1), (256, 512, 512, 512), (8, 2, 64)),
    Case("decode 8 x 1024, shared", (1,) * 8, (1024 + 32,) * 8, (8, 2, 64), shared_pages=1024 // PAGE_SIZE),
)

# Batch sizes, lengths, the most KV tokens of a batch, and heads.
SWEPT: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, int, int]]] = {
    "cuda": ((1, 4, 16, 64, 256), (512, 2048, 8192, 32768, 131072), 2**20, (32, 8, 128)),
    "cpu": ((1, 4, 16), (128, 512, 2048), 2**13, (8, 2, 64)),
}
SWEPT_CACHES = {
    "cuda": ("bfloat16", "float8_e4m3fn", "int8", "int4"),
    "cpu": ("float32", "float8_e4m3fn", "int8", "int4"),
}


def swept(device: str) -> list[Case]:
    """The cases of a sweep: decodes of batch x length, with each cache format."""
    batches, lengths, max_tokens, heads = SWEPT[device]
    return [
        Case(f"{batch} x {length} {cache}", (1,) * batch, (length,) * batch, heads, cache=cache)
        for cache in SWEPT_CACHES[device]
        for batch in batches
        for length in lengths
        if batch * length <= max_tokens
    ]


class CaseTensors:
    """The tensors of a case: bfloat16 on a GPU, float32 on a CPU. Pages are in random order in the cache."""

    def __init__(self, case: Case, device: str) -> None:
        import torch

        self.case, self.device = case, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        num_qo_heads, num_kv_heads, head_dim = case.heads
        pages = [-(-length // PAGE_SIZE) for length in case.kv_lens]
        num_pages = case.shared_pages + sum(count - case.shared_pages for count in pages)
        places = torch.randperm(num_pages, dtype=torch.int32)
        table, used = torch.zeros(len(pages), max(pages), dtype=torch.int32), case.shared_pages
        for row, count in zip(table, pages, strict=True):
            row[: case.shared_pages] = places[: case.shared_pages]
            own = count - case.shared_pages
            row[case.shared_pages : count] = places[used : used + own]
            used += own
        self.block_table = table.to(device)
        self.kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
        self.qo_indptr = torch.tensor([0, *case.q_lens], device=device).cumsum(0, dtype=torch.int32)
        self.q = torch.randn(sum(case.q_lens), num_qo_heads, head_dim, dtype=self.dtype, device=device)
        self.layout = "NHD"
        self.scales: torch.Tensor | None = None  # of K and V, for tokens and heads
        if case.cache in ("int8", "int4"):  # as vLLM's: the tokens of a head lie together
            self.layout = "HND"
            rows = (num_pages, 2, num_kv_heads, PAGE_SIZE)
            columns = head_dim // 2 if case.cache == "int4" else head_dim
            numbers = torch.randint(0, 256, (*rows, columns), dtype=torch.uint8, device=device)
            self.kv = numbers if case.cache == "int4" else numbers.view(torch.int8)
            self.scales = torch.full(rows, 0.01, device=device).transpose(2, 3)
        else:
            self.kv = torch.randn(
                num_pages, 2, PAGE_SIZE, num_kv_heads, head_dim, dtype=self.dtype, device=device
            ).to(getattr(torch, case.cache) if case.cache else self.dtype)

    @property
    def num_bytes(self) -> int:
        """What attention must read and write: Q, K, V and their scales for each request, and the output."""
        row = self.kv.shape[-1] * self.kv.itemsize + (0 if self.scales is None else self.scales.itemsize)
        return sum(self.case.kv_lens) * 2 * self.case.heads[1] * row + 2 * self.q.nbytes


def ours(batch: CaseTensors) -> tuple[Launch, Launch]:
    """(plan, run)."""
    from attn_backend import Attention, BSRView, KVCache, PageTable

    attention = Attention(
        *batch.case.heads,
        dtype=batch.dtype,
        kv_dtype="int4" if batch.case.cache == "int4" else batch.kv.dtype,
        token_scales=batch.scales is not None,
        rotation=batch.case.cache == "int4",
        device=batch.device,
        max_rows=batch.q.shape[0],
        max_batch=len(batch.case.q_lens),
    )
    view = BSRView(
        batch.qo_indptr, PageTable.block_table(batch.block_table, batch.kv_lens, PAGE_SIZE), causal=True
    )
    k_scale, v_scale = (None, None) if batch.scales is None else batch.scales.unbind(1)
    cache = KVCache.from_tensor(batch.kv, batch.layout, k_scale=k_scale, v_scale=v_scale)
    attention.plan(view)
    return lambda: attention.plan(view), lambda: attention.run(batch.q, cache)


def flash_attention_3(batch: CaseTensors) -> Launch:
    """With vLLM's build. Its scheduler metadata is computed beforehand."""
    from ..adapters.vllm.compat import flash_attention_3 as launch

    return launch(
        batch.q,
        batch.kv,
        batch.qo_indptr,
        batch.kv_lens,
        batch.block_table,
        max(batch.case.q_lens),
        max(batch.case.kv_lens),
    )


def flashinfer(batch: CaseTensors) -> Launch:
    """Its plan reads lengths on the host and is not timed."""
    import torch

    package = import_module("flashinfer")
    if package.BatchDecodeWithPagedKVCacheWrapper.__module__.startswith("attn_backend."):
        raise ImportError("flashinfer is an alias of this package")
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=batch.device)
    pages = (batch.kv_lens + PAGE_SIZE - 1) // PAGE_SIZE
    used = torch.arange(batch.block_table.shape[1], device=batch.device)[None] < pages[:, None]
    table = (
        torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)]),
        batch.block_table[used],
        (batch.kv_lens - 1) % PAGE_SIZE + 1,
    )
    types = {"q_data_type": batch.dtype, "kv_data_type": batch.dtype}
    if max(batch.case.q_lens) == 1:
        decode = package.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        decode.plan(*table, *batch.case.heads, PAGE_SIZE, **types)
        return lambda: decode.run(batch.q, batch.kv)
    prefill = package.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    prefill.plan(batch.qo_indptr, *table, *batch.case.heads, PAGE_SIZE, causal=True, **types)
    return lambda: prefill.run(batch.q, batch.kv)


def torch_sdpa(batch: CaseTensors) -> Launch:
    """One request after another, over K and V gathered beforehand."""
    import torch

    requests = []
    for i, (q_len, kv_len) in enumerate(zip(batch.case.q_lens, batch.case.kv_lens, strict=True)):
        pages = batch.block_table[i, : -(-kv_len // PAGE_SIZE)].long()
        k, v = (
            part.flatten(0, 1)[:kv_len].transpose(0, 1)[None].contiguous()
            for part in batch.kv[pages].unbind(1)
        )
        q = batch.q[batch.qo_indptr[i] : batch.qo_indptr[i + 1]].transpose(0, 1)[None]
        mask = (
            torch.arange(kv_len, device=q.device)
            <= torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None]
        )
        requests.append((q, k, v, mask))

    def run() -> torch.Tensor:
        parts = [
            torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            for q, k, v, mask in requests
        ]
        return torch.cat([part[0].transpose(0, 1) for part in parts])

    return run


PEERS: dict[str, dict[str, Callable[[CaseTensors], Launch]]] = {
    "cuda": {"FA3": flash_attention_3, "FlashInfer": flashinfer},
    "cpu": {"torch SDPA": torch_sdpa},
}


def times(launches: list[Launch], device: str, repeats: int) -> list[float]:
    """Median µs of each launch; launches take turns."""
    import torch

    clear: torch.Tensor | None = None
    if device == "cuda":
        clear = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        launches = [_replay_of(launch) for launch in launches]
    measured: list[list[float]] = [[] for _ in launches]
    for repeat in range(2 + repeats):  # two warm up
        for launch, of_launch in zip(launches, measured, strict=True):
            if clear is None:
                start = time.perf_counter()
                launch()
                elapsed = (time.perf_counter() - start) * 1e6
            else:
                clear.zero_()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                launch()
                end.record()
                torch.cuda.synchronize()
                elapsed = begin.elapsed_time(end) * 1e3
            if repeat >= 2:
                of_launch.append(elapsed)
    return [statistics.median(of_launch) for of_launch in measured]


def _replay_of(launch: Launch) -> Launch:
    import torch

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def measure(case: Case, device: str, repeats: int) -> dict[str, Any]:
    """A row of the table: name, µs of the plan, of this package and of each installed peer. Also checks the
    largest difference from a peer.
    """
    batch = CaseTensors(case, device)
    plan, run = ours(batch)
    out = run().float().clone()
    launches: dict[str, Launch] = {"plan": plan, "ours": run}
    for name, make in PEERS[device].items():
        try:
            launch = make(batch)
            difference = float((launch().float().view_as(out) - out).abs().max())
        except ImportError:
            continue
        except Exception as error:  # a peer may raise anything; the others are still measured
            print(f"{case.name}: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if not difference < 0.05:
            print(f"{case.name}: {name} differs from ours by {difference:.3f}", file=sys.stderr)
        launches[name] = launch
    line: dict[str, Any] = {"case": case.name}
    return line | dict(zip(launches, times(list(launches.values()), device, repeats), strict=True))


def copy_rate(device: str, repeats: int) -> float:
    """Bytes per µs that a copy of a large tensor reads and writes."""
    import torch

    source = torch.ones(1 << 30 if device == "cuda" else 1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / times([lambda: target.copy_(source)], device, repeats)[0]


def measure_swept(case: Case, device: str, repeats: int, copied: float) -> dict[str, Any]:
    """A point of the sweep. copied: from copy_rate()."""
    batch = CaseTensors(case, device)
    (elapsed,) = times([ours(batch)[1]], device, repeats)
    rate = batch.num_bytes / elapsed
    return {
        "case": case.name,
        "batch": len(case.kv_lens),
        "kv_len": case.kv_lens[0],
        "cache": case.cache,
        "us": elapsed,
        "gb_per_s": rate / 1e3,
        "share_of_copy": rate / copied,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch sees a GPU")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="decodes of batch x length x cache format: GB/s, and the share of a copy's rate",
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="TEXT",
        help="only cases whose names contain this; repeatable",
    )
    parser.add_argument("--repeats", type=int, default=30, help="timed rounds (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; returns the exit status."""
    try:
        import torch

        from .plan import check_matplotlib

        if arguments.svg:
            check_matplotlib("--svg")
        device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "--device is cuda, must be cpu where torch sees no GPU; attn-backend doctor says more"
            )
        known = swept(device) if arguments.sweep else ON_GPU if device == "cuda" else ON_CPU
        cases = [
            case for case in known if not arguments.case or any(text in case.name for text in arguments.case)
        ]
        if not cases:
            raise ValueError(
                f"--case is {' '.join(arguments.case)}, must be a part of a name: "
                f"{'; '.join(case.name for case in known)}"
            )
        if arguments.repeats < 1:
            raise ValueError(f"--repeats is {arguments.repeats}, must be at least 1")
        torch.manual_seed(0)
        threads = torch.get_num_threads()
        on_cpu = f"CPU, {threads} thread" + ("s" if threads > 1 else "")
        where = torch.cuda.get_device_name() if device == "cuda" else on_cpu
        show = show_sweep if arguments.sweep else show_cases
        show(cases, device, where, arguments)
        if arguments.svg:
            print(f"\nwrote {arguments.svg}")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"attn-backend bench: {explained(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def heading(unit: str, where: str, device: str) -> str:
    small = (
        "Small sizes, to see that it works. These times say nothing about a GPU.\n"
        "The CPU path is for tests and small models; torch's own attention can be several times faster.\n"
        "On a busy machine set OMP_NUM_THREADS=1: threads that wait for each other distort the times."
    )
    return f"{unit} on {where}" + (f". {small}" if device == "cpu" else "")


def show_cases(cases: list[Case], device: str, where: str, arguments: argparse.Namespace) -> None:
    """Times next to the installed peers."""
    lines = [measure(case, device, arguments.repeats) for case in tracked(cases, "measuring")]
    columns = ["plan", "ours", *(name for name in PEERS[device] if any(name in line for line in lines))]
    rows = [
        [line["case"], *(f"{line[name]:.1f}" if name in line else "-" for name in columns)] for line in lines
    ]
    print(heading("µs", where, device))
    print_table(rows, ["case", *columns], right=range(1, len(columns) + 1))
    absent = [name for name in PEERS[device] if name not in columns]
    if absent:
        print(f"\nnot measured, since not installed or without such a kernel: {', '.join(absent)}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": where, "unit": "us", "lines": lines}, indent=1))
    if arguments.svg:
        draw(lines, columns[1:], where, arguments.svg)


def show_sweep(cases: list[Case], device: str, where: str, arguments: argparse.Namespace) -> None:
    """The bandwidth of decodes, next to a copy's."""
    copied = copy_rate(device, arguments.repeats)
    lines = [measure_swept(case, device, arguments.repeats, copied) for case in tracked(cases, "measuring")]
    print(heading("Decodes", where, device))
    print(f"A copy reads and writes {copied / 1e3:,.0f} GB/s; share: of that rate")
    rows = [
        [line["case"], f"{line['us']:.1f}", f"{line['gb_per_s']:,.1f}", f"{line['share_of_copy']:.0%}"]
        for line in lines
    ]
    print_table(rows, ["batch x length, cache", "µs", "GB/s", "share"], right=range(1, 4))
    if arguments.json:
        result = {"device": where, "copy_gb_per_s": copied / 1e3, "lines": lines}
        arguments.json.write_text(json.dumps(result, indent=1))
    if arguments.svg:
        draw_sweep(lines, where, arguments.svg)


def draw_sweep(lines: list[dict[str, Any]], where: str, path: Path) -> None:
    """Draws the share of a copy's rate over the length. A panel is a cache format, a line a batch size."""
    from .picture import new_figure, write

    caches = list(dict.fromkeys(line["cache"] for line in lines))
    rows = -(-len(caches) // 2)
    figure = new_figure(820, 60 + 280 * rows)
    figure.set_layout_engine("constrained")
    grid = figure.subplots(rows, 2, squeeze=False, sharex=True, sharey=True)
    panels = grid.flatten()
    for unused in panels[len(caches) :]:
        unused.set_axis_off()
    batches, lengths = (sorted({line[name] for line in lines}) for name in ("batch", "kv_len"))
    for axes, cache in zip(panels, caches, strict=False):
        for number, batch in enumerate(batches):
            points = [
                (line["kv_len"], 100 * line["share_of_copy"])
                for line in lines
                if (line["cache"], line["batch"]) == (cache, batch)
            ]
            places, shares = [length for length, _ in points], [share for _, share in points]
            axes.plot(places, shares, color=f"C{number}", marker="o", label=f"batch {batch}")
        axes.axhline(100, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{cache} cache", fontsize=9)
        axes.set_xlabel("KV tokens of a request", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel(f"% of a copy's rate ({where})", fontsize=8)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(batches), frameon=False)
    write(figure, path, "svg")


def draw(lines: list[dict[str, Any]], columns: list[str], where: str, path: Path) -> None:
    """Draws bars of each peer's speed relative to this package, which is 1."""
    from .picture import new_figure, write

    figure = new_figure(760, 120 + 26 * len(lines) * len(columns))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    height = 0.8 / len(columns)
    for number, name in enumerate(columns):
        points = [
            (place + number * height, line["ours"] / line[name])
            for place, line in enumerate(lines)
            if name in line
        ]
        axes.barh(
            [place for place, _ in points],
            [value for _, value in points],
            height,
            label=name,
            color="C3" if name == "ours" else f"C{number + 6}",
        )
    axes.set_yticks(
        [place + 0.4 - height / 2 for place in range(len(lines))],
        [line["case"] for line in lines],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel(f"speed; ours is 1 ({where})", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(columns), frameon=False)
    write(figure, path, "svg")
