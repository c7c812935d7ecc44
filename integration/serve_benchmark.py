"""Serve a model through an engine with one attention backend after another, and measure each with the
engine's own client.

    python -m integration.serve_benchmark --engine vllm --backends attn_backend stock --model smollm2 \\
        --dataset sharegpt --num-prompts 32 --output-len 64
    python -m integration.serve_benchmark --engine vllm --backends attn_backend FLASH_ATTN TRITON_ATTN \\
        --model llama-3.1-8b --request-rate 16 --num-prompts 256
    python -m integration.serve_benchmark --engine sglang --backends attn_backend triton \\
        --model llama-3.1-8b --dataset sharegpt prefix:4096+256 --num-prompts 300 128 \\
        --output-len recorded 128 --request-rate 16 40
    python -m integration.serve_benchmark --engine vllm --model llama-3.1-8b \\
        --backends attn_backend attn_backend-no-cascade FLASH_ATTN TRITON_ATTN \\
        --dataset prefix:4096+256 sharegpt sharegpt --num-prompts 128 96 24 \\
        --output-len 128 recorded recorded --request-rate 40 8 2 --samples 1 4 16
    python -m integration.serve_benchmark --engine vllm --backends attn_backend attn_backend-stock-sampler \\
        --model llama-3.1-8b --request-rate 16 --num-prompts 256 \\
        --sampling temperature=0.8,top_p=0.95,top_k=40
    NCCL_NVLS_ENABLE=0 python -m integration.serve_benchmark --engine vllm --model llama-3.1-70b \\
        --backends attn_backend FLASH_ATTN FLASHINFER TRITON_ATTN --tensor-parallel-size 4 \\
        --dataset sharegpt uniform:512-2048 prefix:4096+256 --num-prompts 256 128 128 --request-rate 4 2 16
    python -m integration.serve_benchmark --engine sglang --backends attn_backend triton \\
        --model llama-3.1-8b --server-args='--speculative-algorithm STANDALONE \\
        --speculative-draft-model-path integration/models/llama-3.2-1b \\
        --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16'
    python -m integration.serve_benchmark --engine vllm --backends attn_backend FLASH_ATTN \\
        --model llama-3.1-8b --max-model-len 32768 --num-prompts 64 32 256 --output-len 128 128 recorded \\
        --dataset agents:4x24000+100-400 documents:8000-24000+64x4 \\
        trace:benchmarks/traces/mooncake_synthetic.jsonl --request-rate inf 1 recorded

Each server gets several data sets one after another. Before the measurement, every server answers a few
requests of every load (integration/warm_up.py). With --samples N each prompt is answered N times, like
parallel sampling (`n`); the client sends it N times for that, see integration/workload.py. With --n-best it
sends one request with `n`. --num-prompts and --request-rate count prompts, not answers.

With --side-by-side all servers start at once, on one device, and each load goes to one server after another
before the next load starts. Starting engines is most of a run, and an interrupted run has compared everything
that it has measured. Use --server-args to limit each server to its share of the memory; waiting servers are
idle. Each load, and each of its --repeats, begins with the next backend, so none is always first or last.

`attn_backend` is our backend in both engines. `attn_backend-no-cascade` sets ATTN_BACKEND_CASCADE=0, so every
request's pages are read separately. `attn_backend-stock-sampler` sets ATTN_BACKEND_SAMPLER=0, which leaves
sampling to the engine. `stock` is the engine's default; the engine gets any other name unchanged.
FLASHINFER-on-attn_backend (SGLang: flashinfer-on-attn_backend) is the engine's backend of that name, with the
package of flashinfer_alias/ replacing FlashInfer. NAME@fp8_e4m3 is a backend with that --kv-cache-dtype.
Prefix caching is on in both engines, which is their default. With vLLM, `{backend}` in --server-args is
vLLM's name of the backend. To run a draft model on it, use `"attention_backend": "{backend}"` in
--speculative-config.

Answers are greedy, or sampled with --sampling; then every request has a different seed. --check-seeds, with
--side-by-side, also requests a few answers from each server: one at a time, again, all at once and with other
seeds. It prints how many are equal (integration/compare_sampling.py), and needs --server-args that turn
prefix caching off. All inputs may be local paths, so it runs offline. It ends with a table. The same results
as JSON and as a plot, and all logs, are in --results. `python -m integration.merge_reports` merges several
runs into one report.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attn_backend.settings import refusal
from integration import datasets
from integration.benchmark import Load, Settings, benchmark, note_on
from integration.command_line import exit_with, new_parser, results_folder
from integration.datasets import RECORDED
from integration.report import format_table
from integration.serving_options import (
    add_serving_options,
    check_serving_options,
    rate_argument,
    serving_settings,
)
from integration.side_by_side import benchmark_side_by_side

SIDE_BY_SIDE_ONLY = {
    "--time-limit": "time_limit_s",
    "--check-seeds": "check_seeds",
    "--turn": "turn",
    "--leave-out": "leave_out",
}


def parse_loads(
    names: list[str],
    num_prompts: list[int],
    output_lens: list[str],
    request_rates: list[float | None],
    samples: list[int],
) -> list[Load]:
    """One load for each data set; a single option applies to all of them.

    Raises ValueError when the numbers do not match.
    """
    options: dict[str, list[Any]] = {
        "num-prompts": num_prompts,
        "output-len": output_lens,
        "request-rate": request_rates,
        "samples": samples,
    }
    for name, values in options.items():
        if len(values) not in (1, len(names)):
            raise ValueError(
                f"{name}: {len(values)} values, must be 1 or one for each of the {len(names)} data sets"
            )
    columns = [values * len(names) if len(values) == 1 else values for values in options.values()]
    loads = []
    for dataset, number, length, rate, answers in zip(names, *columns, strict=True):
        output_len = None if length == RECORDED else length
        loads.append(
            Load(
                dataset=dataset, num_prompts=number, output_len=output_len, request_rate=rate, samples=answers
            )
        )
    return loads


def parse_left_out(texts: list[str], backends: list[str], num_loads: int) -> tuple[tuple[str, int], ...]:
    """(backend, index of a load) of each BACKEND:N, where N counts from 1. Raises ValueError."""
    parsed = []
    for text in texts:
        backend, _, number = text.rpartition(":")
        if backend not in backends or not number.isdigit() or not 1 <= int(number) <= num_loads:
            raise ValueError(
                f"leave-out: {text!r}, must be BACKEND:N with one of the backends and N in 1 to {num_loads}"
            )
        parsed.append((backend, int(number) - 1))
    return tuple(parsed)


def parse_arguments(arguments: list[str] | None = None) -> Settings:
    parser = new_parser(f"{__doc__}\n{datasets.__doc__}", "ENGINE")
    parser.add_argument(
        "--backends",
        nargs="+",
        required=True,
        help="attn_backend (ours), its variants (see above), stock, or the engine's names",
    )
    parser.add_argument(
        "--dataset",
        nargs="+",
        default=["sharegpt"],
        help="see above; default: sharegpt",
    )
    parser.add_argument(
        "--num-prompts",
        nargs="+",
        type=int,
        default=[32],
        help="one number, or one for each data set; default: 32",
    )
    parser.add_argument(
        "--output-len",
        nargs="+",
        default=[RECORDED],
        help=f"tokens to generate, alike: N, LOW-HIGH, or {RECORDED} (the default): what the data set says",
    )
    parser.add_argument(
        "--request-rate",
        nargs="+",
        type=rate_argument,
        default=[float("inf")],
        help=f"prompts per second, Poisson, alike; {RECORDED}: as a trace's requests arrived; default: all "
        "at once",
    )
    parser.add_argument(
        "--samples", nargs="+", type=int, default=[1], help="answers to each prompt, alike; default: 1"
    )
    add_serving_options(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="runs of the client for each server; the table shows medians; default: %(default)s",
    )
    parser.add_argument(
        "--side-by-side",
        action="store_true",
        help="start all servers at once, then load after load, see above",
    )
    parser.add_argument(
        "--time-limit",
        dest="time_limit_s",
        type=float,
        help="side by side: begin no load when so many seconds have passed",
    )
    parser.add_argument("--check-seeds", action="store_true", help="side by side, with --sampling: see above")
    parser.add_argument(
        "--turn",
        type=Path,
        metavar="FOLDER",
        help="side by side: when all are warm leave FOLDER/ready, and begin when FOLDER/go is there",
    )
    parser.add_argument(
        "--leave-out",
        nargs="+",
        default=[],
        metavar="BACKEND:N",
        help="side by side: do not send load number N, from 1, to this backend",
    )
    given = parser.parse_args(arguments)
    for option, name in SIDE_BY_SIDE_ONLY.items():
        if getattr(given, name) and not given.side_by_side:
            parser.error(f"{option} is only known with --side-by-side")
    check_serving_options(parser, given)
    if given.check_seeds and not given.sampling:
        parser.error("--check-seeds needs --sampling: greedy answers have no seeds")
    try:
        return settings_of(given)
    except ValidationError as error:
        parser.error(refusal(error))


def settings_of(given: argparse.Namespace) -> Settings:
    loads = parse_loads(given.dataset, given.num_prompts, given.output_len, given.request_rate, given.samples)
    left_out = parse_left_out(given.leave_out, given.backends, len(given.dataset))
    return serving_settings(given, loads, results_folder(given, given.engine), left_out=left_out)


def run() -> bool:
    settings = parse_arguments()
    rows = benchmark_side_by_side(settings) if settings.side_by_side else benchmark(settings)
    print("\n" + "\n\n".join(filter(None, [note_on(settings), format_table(rows)])))
    return True


def main() -> None:
    exit_with(run)


if __name__ == "__main__":
    main()
