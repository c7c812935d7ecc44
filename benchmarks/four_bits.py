"""Attention over 4-bit caches: int4 with rotated rows, NVFP4, MX, and int8 K with NVFP4 V, next to our own
bf16 and e4m3, and the floor.

One process, one GPU, 32/8 heads, head_dim 128, page 16, cold L2, CUDA-graph replay, median. 4-bit pages have
one head after another, as the vLLM plugin has them. The floor: bytes of the int4 cache with its scales, Q
and O at the bandwidth of a device copy. Errors are relative to float64 on the bf16 cache: rounding to 4 bits
causes most of them.

python -m benchmarks.four_bits [--case TEXT ...] [--repeats N] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from attn_backend import BlockScales, KVCache, append_kv
from benchmarks.batches import LARGEST_ERROR, Batch, ours, reference, relative_error
from benchmarks.cases import Case
from benchmarks.fp8 import attends, quantised, widened
from benchmarks.fp8 import cases as cases_of_fp8
from benchmarks.lines import measure_lines
from benchmarks.peers import Run
from benchmarks.report import number, options, ratio, table
from benchmarks.timing import Machine, Timer, start

Format = Literal["int4", "nvfp4", "fp4_mx_block16", "int8_k_nvfp4_v"]
FORMATS: tuple[Format, ...] = get_args(Format)
COLUMNS = ("floor", "bf16", "fp8", *FORMATS)
LARGEST_FOUR_BIT_ERROR = 0.2
NVFP4_FACTOR = 1 / 256


def cases() -> list[Case]:
    return [case for case in cases_of_fp8() if case.head_dim == 128]


def floor_bytes(case: Case) -> int:
    """K and V with half a byte an element and a scale of four for a head, Q and O with two, once."""
    kv = sum(case.kv_lens) * case.num_kv_heads * (case.head_dim // 2 + 4)
    return 2 * (kv + sum(case.qo_lens) * case.num_qo_heads * case.head_dim * 2)


def empty_cache(name: str, pages: int, case: Case, device: torch.device) -> KVCache:
    """A cache of one of FORMATS, or of int8 with a scale for each token and head."""
    shape = (pages, 2, case.num_kv_heads, case.page_size)
    if name == "int8_k_nvfp4_v":
        of_k, of_v = (empty_cache(side, pages, case, device) for side in ("int8", "nvfp4"))
        return KVCache.from_pair(of_k.k, of_v.v, k_scale=of_k.k_scale, v_scale=of_v.v_scale)
    columns, dtype = (case.head_dim, torch.int8) if name == "int8" else (case.head_dim // 2, torch.uint8)
    rows = torch.zeros(*shape, columns, dtype=dtype, device=device).transpose(2, 3)
    if name in ("int4", "int8"):
        scales = torch.zeros(shape, device=device).transpose(2, 3)
        return KVCache.from_pair(rows[:, 0], rows[:, 1], k_scale=scales[:, 0], v_scale=scales[:, 1])
    scale_dtype, factor = (torch.float8_e4m3fn, NVFP4_FACTOR) if name == "nvfp4" else (torch.uint8, 1.0)
    blocks = torch.zeros(*shape, case.head_dim // 16, dtype=torch.uint8, device=device)
    k_scale, v_scale = (BlockScales(x, factor) for x in blocks.view(scale_dtype).transpose(2, 3).unbind(1))
    return KVCache.from_pair(rows[:, 0], rows[:, 1], k_scale=k_scale, v_scale=v_scale)


def in_four_bits(batch: Batch, name: Format) -> KVCache:
    """The batch's cache, appended to one of this format."""
    case, device, pages = batch.case, batch.cache.device, batch.cache.shape[0]
    kv = empty_cache(name, pages, case, device)
    for first in range(0, pages, 1024):
        some = batch.cache[first : first + 1024]
        slots = torch.arange(some.shape[0] * case.page_size, device=device) + first * case.page_size
        append_kv(some[:, 0].flatten(0, 1), some[:, 1].flatten(0, 1), kv, slots, rotation=name == "int4")
    return kv


def measure(case: Case, timer: Timer, machine: Machine) -> dict[str, Any]:
    """One line of the table; times in µs."""
    batch = Batch.make(case)
    cache, dequantized = quantised(batch)
    last = len(case.kv_lens) - 1
    expected: dict[str, torch.Tensor] = {"fp8": reference(dequantized, last)}
    del dequantized
    exact = reference(batch, last)
    expected |= dict.fromkeys(("bf16", *FORMATS), exact)
    first = int(batch.qo_indptr[last])
    runs: dict[str, Run] = {
        "bf16": ours(batch).run,
        "fp8": widened(batch, cache),
        **{
            name: attends(batch, in_four_bits(batch, name), kv_dtype=name, rotation=name == "int4")
            for name in FORMATS
        },
    }
    line: dict[str, Any] = {"case": case.name, "floor": floor_bytes(case) / machine.bandwidth * 1e6}
    for (name, run), time in zip(runs.items(), timer.together(list(runs.values())), strict=True):
        line[name], line[f"{name} error"] = time, relative_error(run()[first:], expected[name])
        if not line[f"{name} error"] <= (LARGEST_FOUR_BIT_ERROR if name in FORMATS else LARGEST_ERROR):
            print(f"{case.name}: {name}: WRONG, relative error {line[f'{name} error']:.1e}", flush=True)
    return line


RATIOS = [(name, other) for name in FORMATS for other in ("fp8", "bf16")]


def markdown(lines: list[dict[str, Any]], header: str) -> str:
    """Three tables: times, ratios of times, errors."""
    times = [[line["case"], *(number(line[column]) for column in COLUMNS)] for line in lines]
    ratios = [
        [line["case"], *(number(ratio(line[name], line[other]), 2) for name, other in RATIOS)]
        for line in lines
    ]
    errors = [[line["case"], *(f"{line[f'{name} error']:.1e}" for name in COLUMNS[1:])] for line in lines]
    parts = (
        table(["µs", *COLUMNS], times),
        table(["time divided by", *(f"{name} / {other}" for name, other in RATIOS)], ratios),
        table(["relative error", *COLUMNS[1:]], errors),
    )
    return "\n\n".join((header, *parts)) + "\n"


def main() -> None:
    arguments = options(__doc__).parse_args()
    timer, machine = start(arguments.repeats)
    header = f"{machine} Times in µs, cold L2, CUDA-graph replay, median of {arguments.repeats}."
    measure_lines(
        cases(),
        lambda case: measure(case, timer, machine),
        lambda lines: markdown(lines, header),
        header,
        arguments,
    )


if __name__ == "__main__":
    main()
