"""Compares this version with another one in one process: attention, plans and samplers in turns on one GPU,
and the host cost of calls.

    git worktree add /tmp/before COMMIT       # with its lib/ and cubins/ in its attn_backend/, as installed
    python -m benchmarks.versions --before /tmp/before [--case TEXT ...] [--repeats N] [--markdown FILE]

Device times are µs of replayed CUDA graphs with a cold L2: the smaller of two medians, with each version
going first once. Plans: 20 in one graph. Layers: append and attention after a product, as in
benchmarks.layer. Host times are µs of a call, medians of 60 rounds that take turns.
"""

from __future__ import annotations

import importlib
import itertools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import attn_backend
from benchmarks.cases import SharedCase, shared_cases
from benchmarks.layer import LAYERS, PRODUCT, PRODUCT_ROWS, layers, new_slots
from benchmarks.report import number, options, save, table, wanted
from benchmarks.timing import Launch, Timer

Make = Callable[[ModuleType], Launch]
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
SKEWED = [128, 4000, 300, 900, 16000, 64, 2000, 700] * 2
PLANS = 20  # in one graph
NUM_GROUPS = 8  # in a two-level tree
# batch, vocab
DRAWS = (
    [(batch, 32000) for batch in (1, 8, 32, 128, 256)]
    + [(batch, 128256) for batch in (1, 8, 32, 128, 512)]
    + [(1, 4096), (1, 262144)]
)
HOST_CALLS, HOST_ROUNDS = 60, 60


def load_before(folder: Path) -> ModuleType:
    """The package of another checkout, under a separate name."""
    place = Path(tempfile.mkdtemp())
    shutil.copytree(folder / "attn_backend", place / "attn_backend_before")
    sys.path.insert(0, str(place))
    return importlib.import_module("attn_backend_before")


def block_table_of(pages: list[int], shared: int, of_group: int, device: torch.device | str) -> torch.Tensor:
    """int32 [batch, most pages]: shuffled pages.

    All requests share the first `shared` pages; the requests of a group share the next `of_group`.
    """
    ids = torch.randperm(
        sum(pages), device=device, generator=torch.Generator(device).manual_seed(1), dtype=torch.int32
    )
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
    for row, own in zip(table, ids.split(pages), strict=True):
        row[: len(own)] = own
    table[:, :shared] = table[0, :shared].clone()
    for i in range(len(pages)):
        table[i, shared : shared + of_group] = table[i % NUM_GROUPS, shared : shared + of_group].clone()
    return table


class Problem:
    """A planned batch over a paged cache.

    `common`: tokens that all requests share; `of_group`: tokens after them that each of NUM_GROUPS groups
    shares.
    """

    def __init__(
        self,
        library: ModuleType,
        qo_lens: list[int],
        kv_lens: list[int],
        page_size: int = PAGE_SIZE,
        common: int = 0,
        of_group: int = 0,
        head_dim: int = HEAD_DIM,
        window: int = -1,
        soft_cap: float = 0.0,
        **made_with: Any,
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(1)
        pages = [-(-length // page_size) for length in kv_lens]
        block_table = block_table_of(pages, common // page_size, of_group // page_size, "cuda")
        rows = sum(qo_lens)
        qo_indptr = torch.tensor(
            list(itertools.accumulate(qo_lens, initial=0)), dtype=torch.int32, device="cuda"
        )
        table = library.PageTable.block_table(
            block_table, torch.tensor(kv_lens, dtype=torch.int32, device="cuda"), page_size
        )
        self.view = library.BSRView(qo_indptr, table, window_left=window)
        self.attention = library.Attention(
            NUM_QO_HEADS,
            NUM_KV_HEADS,
            head_dim,
            max_rows=max(rows, 512),
            max_batch=max(len(pages), 64),
            **made_with,
        )
        self.kv = library.KVCache.from_tensor(
            torch.randn(
                sum(pages), 2, page_size, NUM_KV_HEADS, head_dim, device="cuda", generator=generator
            ).bfloat16()
        )
        self.q = torch.randn(rows, NUM_QO_HEADS, head_dim, device="cuda", generator=generator).bfloat16()
        self.out = torch.empty_like(self.q)
        self.soft_cap = soft_cap
        self.new_slots = new_slots(block_table, qo_lens, kv_lens, page_size)
        self.attention.plan(self.view)

    def run(self) -> None:
        self.attention.run(self.q, self.kv, out=self.out, logits_soft_cap=self.soft_cap)

    def plan(self) -> None:
        self.attention.plan(self.view)

    def plans(self) -> None:
        for _ in range(PLANS):
            self.attention.plan(self.view)


def attention(qo_lens: list[int], kv_lens: list[int], **options: Any) -> Make:
    return lambda library: Problem(library, qo_lens, kv_lens, **options).run


def plans(batch: int, **shared: int) -> Make:
    return lambda library: Problem(library, [1] * batch, [4096] * batch, **shared).plans


def draws(batch: int, vocab: int, scale: float = 1.0, **filters: float) -> Make:
    def make(library: ModuleType) -> Launch:
        logits = (
            torch.randn(batch, vocab, device="cuda", generator=torch.Generator("cuda").manual_seed(2)) * scale
        )
        seed, out = torch.arange(batch, device="cuda"), torch.empty(batch, dtype=torch.int32, device="cuda")
        workspace = library.sampling_workspace("cuda")
        dtypes = {"top_k": torch.int32}
        tensors = {
            name: torch.full((batch,), value, dtype=dtypes.get(name, torch.float32), device="cuda")
            for name, value in filters.items()
        }
        return lambda: library.sample(
            logits, seed=seed, position=seed, workspace=workspace, out=out, **tensors
        )

    return make


def product(rows: int) -> Launch:
    """The product before append and attention in a layer."""
    x, weight = (
        torch.randn(rows, PRODUCT[0], device="cuda").bfloat16(),
        torch.randn(PRODUCT, device="cuda").bfloat16(),
    )
    return lambda: torch.matmul(x, weight)


def in_layers(qo_lens: list[int], kv_lens: list[int], **options: Any) -> Make:
    """Layers in one graph: product, append and attention."""

    def make(library: ModuleType) -> Launch:
        problem = Problem(library, qo_lens, kv_lens, **options)
        k, v = (
            problem.q[:, :NUM_KV_HEADS].contiguous(),
            problem.q[:, NUM_KV_HEADS : 2 * NUM_KV_HEADS].contiguous(),
        )
        before = product(PRODUCT_ROWS[max(qo_lens) == 1])

        def attend() -> None:
            library.append_kv(k, v, problem.kv, problem.new_slots)
            problem.attention.run(problem.q, problem.kv, out=problem.out, after_append=True)

        return lambda: layers(before, attend)

    return make


def appends(library: ModuleType) -> Launch:
    problem = Problem(library, [1] * 16, [64] * 16)
    k, slots = problem.q[:, :NUM_KV_HEADS].contiguous(), torch.arange(16, device="cuda")
    return lambda: library.append_kv(k, k, problem.kv, slots)


def problem_of(case: SharedCase) -> dict[str, Any]:
    """Arguments of Problem."""
    (_, common), *of_groups, (batch, own) = case.levels
    of_group = sum(tokens for _, tokens in of_groups)
    return {
        "qo_lens": [1] * batch,
        "kv_lens": [common + of_group + own] * batch,
        "common": common,
        "of_group": of_group,
    }


SHARED: dict[str, dict[str, Any]] = {f"decode {case.name}": problem_of(case) for case in shared_cases()}
IN_LAYERS: dict[str, dict[str, Any]] = {
    "decode 1 x 8192": {"qo_lens": [1], "kv_lens": [8192]},
    "decode 8 x 1200": {"qo_lens": [1] * 8, "kv_lens": [1200] * 8},
    "decode 16 x 1024": {"qo_lens": [1] * 16, "kv_lens": [1024] * 16},
    "decode 24 x 400": {"qo_lens": [1] * 24, "kv_lens": [400] * 24},
    "decode 64 x 4096": {"qo_lens": [1] * 64, "kv_lens": [4096] * 64},
    **SHARED,
    "prompt 220": {"qo_lens": [220], "kv_lens": [220]},
    "prompt 2048": {"qo_lens": [2048], "kv_lens": [2048]},
}
DEVICE: dict[str, Make] = {
    "decode 1 x 8192": attention([1], [8192]),
    "decode 8 x 1200": attention([1] * 8, [1200] * 8),
    "decode 16 x 1024": attention([1] * 16, [1024] * 16),
    "decode 16 x 1024, pages of 1": attention([1] * 16, [1024] * 16, page_size=1),
    "decode 64 x 400": attention([1] * 64, [400] * 64),
    "decode 64 x 4096": attention([1] * 64, [4096] * 64),
    "decode 16 skewed": attention([1] * 16, SKEWED),
    "decode 16 x 1024, generic": attention([1] * 16, [1024] * 16, kernel="generic"),
    "decode 16 x 3000, batch invariant": attention([1] * 16, [3000] * 16, batch_invariant=True),
    **{name: attention(**problem) for name, problem in SHARED.items()},
    "prompt 220": attention([220], [220]),
    "prompts 8 x 700": attention([700] * 8, [700] * 8),
    "prompts 4 x 2048": attention([2048] * 4, [2048] * 4),
    "prompts 4 x 2048, generic": attention([2048] * 4, [2048] * 4, kernel="generic"),
    "prompts 4 x 4096": attention([4096] * 4, [4096] * 4),
    "prompts 4 x 4096, soft cap": attention([4096] * 4, [4096] * 4, soft_cap=30.0),
    "prompts 4 x 4096, window 128": attention([4096] * 4, [4096] * 4, window=128),
    "prompts 4 x 4096, heads of 64": attention([4096] * 4, [4096] * 4, head_dim=64),
    "prompts 4 x 4096, heads of 64, window 128": attention([4096] * 4, [4096] * 4, head_dim=64, window=128),
    "prompts 4 x 4096, heads of 256": attention([4096] * 4, [4096] * 4, head_dim=256),
    "prompt 16384": attention([16384], [16384]),
    "prompt 8192, heads of 256": attention([8192], [8192], head_dim=256),
    "prompt 16384, heads of 256": attention([16384], [16384], head_dim=256),
    "chunk 512 at 4096, 31 decodes": attention([512] + [1] * 31, [4608] + [2048] * 31),
    "chunk 2048 at 30720": attention([2048], [32768]),
    **{
        f"{PLANS} plans of {batch}: {name}": plans(batch, **shared)
        for batch in (16, 64, 256, 512)
        for name, shared in (
            ("nothing shared", {}),
            ("one prefix", {"common": 2048}),
            ("tree", {"common": 1024, "of_group": 1024}),
        )
    },
    **{
        f"draw {batch} x {vocab}, {name}, {kind}": draws(batch, vocab, scale, **filters)
        for batch, vocab in DRAWS
        for kind, scale in (("flat", 1.0), ("peaked", 4.0))
        for name, filters in (
            ("temperature", {"temperature": 0.6}),
            ("greedy", {"temperature": 0.0}),
            ("top-k", {"temperature": 0.6, "top_k": 50}),
            ("top-p", {"temperature": 0.6, "top_p": 0.9}),
            ("min-p", {"temperature": 0.6, "min_p": 0.1}),
            ("top-k, top-p", {"temperature": 0.6, "top_k": 50, "top_p": 0.9}),
            ("all three", {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.1}),
        )
    },
}
HOST: dict[str, Make] = {
    "run": lambda library: Problem(library, [1] * 16, [64] * 16).run,
    "plan": lambda library: Problem(library, [1] * 16, [64] * 16).plan,
    "append_kv": appends,
    "sample": draws(8, 1000),
}


def device_times(make: Make, before: ModuleType, timer: Timer) -> tuple[float, float]:
    launches = [make(before), make(attn_backend)]
    forth, back = timer.together(launches), timer.together(launches[::-1])[::-1]
    return min(forth[0], back[0]), min(forth[1], back[1])


def layer_times(problem: dict[str, Any], before: ModuleType, timer: Timer) -> tuple[float, float]:
    """The times of append and attention in one layer."""
    make, rows = in_layers(**problem), PRODUCT_ROWS[max(problem["qo_lens"]) == 1]
    alone = product(rows)
    launches = [make(before), make(attn_backend), lambda: layers(alone)]
    forth, back = timer.together(launches), timer.together(launches[::-1])[::-1]
    old, new, products = (min(times) for times in zip(forth, back, strict=True))
    return (old - products) / LAYERS, (new - products) / LAYERS


def host_times(make: Make, before: ModuleType) -> tuple[float, float]:
    calls = [make(before), make(attn_backend)]
    times: list[list[float]] = [[], []]
    for turn in range(HOST_ROUNDS):
        for n in (0, 1) if turn % 2 else (1, 0):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                calls[n]()
            times[n].append((time.perf_counter() - begin) / HOST_CALLS * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--before", type=Path, required=True, help="folder of the other version, with attn_backend/ in it"
    )
    arguments = parser.parse_args()
    before = load_before(arguments.before)
    timer = Timer(arguments.repeats)
    header = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; median of {arguments.repeats}. "
        f"Times in µs."
    )
    print(header, flush=True)
    lines: list[dict[str, Any]] = []
    cases: dict[str, Callable[[], tuple[float, float]]] = {
        name: partial(device_times, make, before, timer) for name, make in DEVICE.items()
    }
    cases |= {
        f"in a layer: {name}": partial(layer_times, problem, before, timer)
        for name, problem in IN_LAYERS.items()
    }
    cases |= {f"host: {name}": partial(host_times, make, before) for name, make in HOST.items()}
    for name, measure in cases.items():
        if not wanted(name, arguments):
            continue
        old, new = measure()
        lines.append({"case": name, "before": old, "now": new, "now / before": new / old})
        print(f"{name:50} {old:9.2f} {new:9.2f} {new / old:6.3f}", flush=True)
    columns = ["case", "before", "now", "now / before"]
    text = table(
        columns,
        [
            [line["case"], number(line["before"]), number(line["now"]), f"{line['now / before']:.3f}"]
            for line in lines
        ],
    )
    save(arguments, f"{header}\n\n{text}\n", {"header": header, "lines": lines})


if __name__ == "__main__":
    main()
