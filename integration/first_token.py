"""Time to the first token of one long prompt, with an engine's backends side by side on one GPU.

python -m integration.first_token --engine vllm --model llama-3.1-8b gemma-3-12b [--backend attn_backend
FLASH_ATTN] [--layers 6] [--length 8192 16384 32768] [--repeats 5]

Each pair of a model and a backend has its own process and engine, which computes chunks of 8192 tokens as
the server does. The backends of a model take turns, prompt by prompt, in two rounds. Prompts are
random tokens, and nothing is cached. Models have few layers, which keep the shape of attention and its
share of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration.engines.base import OURS
from integration.model import resolve_model

STOCK = {"vllm": "FLASH_ATTN", "sglang": "fa3"}
CHUNK = 8192
ROUNDS = 2


def start_vllm(options: argparse.Namespace) -> Callable[[list[int]], object]:
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        options.folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=options.max_length + 16,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=8 << 30,
        gpu_memory_utilization=0.05,
        hf_overrides={"num_hidden_layers": options.layers},
        attention_backend="CUSTOM" if options.backend == OURS else options.backend,
    )
    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    return lambda prompt: engine.generate(TokensPrompt(prompt_token_ids=prompt), one, use_tqdm=False)


def start_sglang(options: argparse.Namespace) -> Callable[[list[int]], object]:
    from sglang import Engine

    engine = Engine(
        model_path=options.folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        context_length=options.max_length + 16,
        max_running_requests=8,
        max_total_tokens=2 * options.max_length,
        chunked_prefill_size=CHUNK,
        mem_fraction_static=0.9,
        json_model_override_args=json.dumps({"num_hidden_layers": options.layers}),
        attention_backend=options.backend,
    )
    one = {"max_new_tokens": 1, "temperature": 0.0}
    return lambda prompt: engine.generate(input_ids=prompt, sampling_params=one)


ENGINES = {"vllm": start_vllm, "sglang": start_sglang}


def serve(options: argparse.Namespace) -> None:
    """Answers each line of the input, a prompt's length, with a time in ms."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines write to stdout, too
    generate = ENGINES[options.engine](options)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        prompt = [random.randrange(1000, 30000) for _ in range(int(line))]
        begin = time.perf_counter()
        generate(prompt)
        print(f"{(time.perf_counter() - begin) * 1e3:.2f}", file=answers, flush=True)


class Backend:
    """A process with an engine."""

    def __init__(self, options: argparse.Namespace, model: str, backend: str, log: Path) -> None:
        self.name = backend
        self._log = log
        command = [sys.executable, "-m", "integration.first_token", "--engine", options.engine]
        command += ["--serve", str(resolve_model(model, sys.executable).folder), "--backend", backend]
        command += ["--layers", str(options.layers), "--length", *map(str, options.length)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True
        )

    def answer(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line.strip()
        raise RuntimeError(f"{self.name} ended before its answer; see {self._log}")

    def milliseconds(self, tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{tokens}\n")
        self._process.stdin.flush()
        return float(self.answer())

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(backends: list[Backend], tokens: int, repeats: int) -> list[list[float]]:
    """Medians in ms: of each round, of each backend."""
    for backend in backends:
        backend.milliseconds(tokens)
    rounds = []
    for _ in range(ROUNDS):
        times = [[backend.milliseconds(tokens) for backend in backends] for _ in range(repeats)]
        rounds.append([statistics.median(of_backend) for of_backend in zip(*times, strict=True)])
    return rounds


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=sorted(STOCK), required=True)
    parser.add_argument("--model", nargs="+", default=["llama-3.1-8b"], help="folders in integration/models")
    parser.add_argument("--backend", nargs="+", help=f"default: {OURS}, and FLASH_ATTN or fa3")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--length", type=int, nargs="+", default=[8192, 16384, 32768], help="tokens of a prompt"
    )
    parser.add_argument("--repeats", type=int, default=5, help="prompts of a backend in a round")
    parser.add_argument("--logs", type=Path, default=Path("results/first_token"))
    parser.add_argument("--serve", dest="folder", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options: Any = parse(arguments)
    if options.folder is not None:
        options.max_length, options.backend = max(options.length), options.backend[0]
        return serve(options)
    options.backend = options.backend or [OURS, STOCK[options.engine]]
    options.logs.mkdir(parents=True, exist_ok=True)
    started = {
        model: [
            Backend(options, model, name, options.logs / f"{model}-{name}.log") for name in options.backend
        ]
        for model in options.model
    }
    print(
        f"| {options.engine}, model, prompt | "
        + " | ".join(f"{name}, ms" for name in options.backend)
        + " | ratio |"
    )
    print("|---|" + "---:|" * (len(options.backend) + 1))
    for model, backends in started.items():
        try:
            for backend in backends:
                backend.answer()
            for tokens in options.length:
                rounds = measure(backends, tokens, options.repeats)
                cells = [" ".join(f"{times[i]:.1f}" for times in rounds) for i in range(len(backends))]
                ratio = " ".join(f"{times[0] / min(times[1:] or times):.3f}" for times in rounds)
                print(f"| {model}, {tokens} | " + " | ".join(cells) + f" | {ratio} |", flush=True)
        except RuntimeError as error:
            print(f"| {model}: {error} |", flush=True)
    for backends in started.values():
        for backend in backends:
            backend.stop()


if __name__ == "__main__":
    main()
