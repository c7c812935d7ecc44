"""Decode and prefill of every head shape, including 512 over an 8-bit cache. MLA: decode, two tokens a
request, a shared prefix, 8-bit latents, selected tokens. Compared with the installed peers; one process, one
GPU, cold L2, CUDA-graph replay, median.

python -m benchmarks.head_shapes [--case TEXT ...] [--peer NAME ...] [--q-parts] [--repeats N] [--json FILE]
[--markdown FILE]

Kernels that are not in the package are compiled when their line begins. If requests share a prefix, ours
finds it by itself; peers read it for every request.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from attn_backend import Attention
from benchmarks.batches import LARGEST_ERROR
from benchmarks.head_shape_cases import KV_DTYPES, MLA, ShapeCase, Tensors, all_cases
from benchmarks.head_shape_peers import peers_of
from benchmarks.lines import measure_lines
from benchmarks.peers import Run, fastest
from benchmarks.report import asked_peers, fastest_of, number, options, ratio, table
from benchmarks.timing import Machine, Timer, start

PEERS = ("FA3", "FlashMLA", "FlashInfer")
KERNELS = ("hopper", "generic")


def parts_of_q(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As MLA layers make them: the latent's columns come from a product for each head, and the RoPE columns
    follow the columns that this product consumes.
    """
    latent = q[..., : MLA[1]].transpose(0, 1).contiguous().transpose(0, 1)
    projected = q.new_empty(*q.shape[:2], 192)
    projected[..., 128:] = q[..., MLA[1] :]
    return latent, projected[..., 128:]


def ours(tensors: Tensors, q_parts: bool = False, **changes: Any) -> tuple[Callable[[], None], Run]:
    """The functions that plan and run. q_parts: MLA's Q is two tensors. changes: to arguments of
    Attention."""
    case, view, kv = tensors.case, tensors.view, tensors.kv
    room: dict[str, Any] = {
        "max_rows": len(tensors.q),
        "max_batch": len(case.kv_lens),
        "device": tensors.q.device,
        "kv_dtype": KV_DTYPES[case.kv],
    }
    attention = Attention(
        case.num_qo_heads, case.num_kv_heads, case.head_dim, head_dim_v=case.head_dim_v, **(room | changes)
    )
    out = tensors.q.new_empty(*tensors.q.shape[:2], case.head_dim_v)
    attention.plan(view)
    q, q_rope = parts_of_q(tensors.q) if q_parts and case.v_in_k else (tensors.q, None)
    return lambda: attention.plan(view), lambda: attention.run(
        q, kv, q_rope=q_rope, out=out, sm_scale=case.sm_scale
    )


def measure(case: ShapeCase, timer: Timer, machine: Machine, arguments: argparse.Namespace) -> dict[str, Any]:
    """One line of the table; times in µs."""
    begin = time.monotonic()
    tensors = Tensors.make(case)
    floors = {"bytes": case.bytes / machine.bandwidth * 1e6, "flops": case.flops / machine.rate * 1e6}
    line: dict[str, Any] = {
        "case": case.name,
        "floor": max(floors.values()),
        "bytes": case.bytes,
        "flops": case.flops,
    } | dict.fromkeys(PEERS)
    plan, run = ours(tensors, arguments.q_parts, kernel=arguments.kernel)
    line |= {"ours": timer(run), "plan": timer(plan), "error": tensors.error(run())}
    if not line["error"] <= LARGEST_ERROR:
        print(f"{case.name}: ours: WRONG, relative error {line['error']:.1e}", flush=True)
    peers = peers_of(tensors)
    for peer in asked_peers(peers, arguments):
        line |= fastest(peer, case.name, peers[peer], timer, tensors.error, LARGEST_ERROR)
    line["seconds"] = time.monotonic() - begin
    return line


def markdown(lines: list[dict[str, Any]]) -> str:
    columns = [
        "case",
        "floor",
        "ours",
        *PEERS,
        "ours / best peer",
        "floor / ours",
        "GB/s",
        "TFLOP/s",
        "plan",
        "error",
    ]
    rows = []
    for line in lines:
        rates = [
            number(line["floor"] / line["ours"], 2),
            number(line["bytes"] / line["ours"] / 1e3, 0),
            number(line["flops"] / line["ours"] / 1e6, 0),
        ]
        times = [number(line[column]) for column in ("floor", "ours", *PEERS)]
        to_best = number(ratio(line["ours"], fastest_of(line, PEERS)), 2)
        error = f"{line['error']:.1e}" + ("" if line["error"] <= LARGEST_ERROR else " WRONG")
        rows.append([line["case"], *times, to_best, *rates, number(line["plan"]), error])
    return table(columns, rows)


def main() -> None:
    parser = options(__doc__, peers=PEERS)
    parser.add_argument("--kernel", choices=KERNELS, help="of ours; default: the GPU's")
    parser.add_argument(
        "--q-parts", action="store_true", help="ours of MLA: Q is two tensors, as the engines' layers make it"
    )
    arguments = parser.parse_args()
    timer, machine = start(arguments.repeats)
    header = (
        f"{machine} Times in µs: bf16, causal, cold L2, CUDA-graph replay, median of "
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
