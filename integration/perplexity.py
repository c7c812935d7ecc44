"""The quality cost of an 8-bit KV cache: the perplexity of real conversations, scored by the engine's server
with one cache dtype after the other.

    python -m integration.perplexity --engine vllm
    python -m integration.perplexity --engine vllm --kv-cache-dtypes auto fp8_e4m3 fp8_e5m2 --num-tokens 20000
    python -m integration.perplexity --engine sglang --backend stock

The logits of the preceding tokens score every token of a text except the first; the attention kernel reads
their K and V from the cache. Every server gets the same tokens. Exit status: 0 if no perplexity exceeds the
first by more than --largest-increase, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from integration.command_line import exit_with, new_parser, results_folder
from integration.engines import ENGINES, Engine, Launch
from integration.engines.base import OURS
from integration.model import resolve_model
from integration.server import free_port, running_server
from integration.sharegpt import conversation_texts, dataset_file
from integration.text import tokenizer_of

CONCURRENCY = 4
ROOM = 32  # tokens of a context after the text: one is generated, and SGLang reserves some


def cut_texts(texts: Iterable[list[int]], num_tokens: int, longest: int) -> list[list[int]]:
    """The beginnings of texts (token ids), each of at most `longest` tokens. Together `num_tokens` tokens are
    scored: all except the first of each.

    Raises ValueError if there are fewer.
    """
    cut: list[list[int]] = []
    left = num_tokens
    for text in texts:
        part = text[: min(longest, left + 1)]
        if len(part) > 1:
            cut.append(part)
            left -= len(part) - 1
        if left == 0:
            return cut
    raise ValueError(f"num-tokens: {num_tokens}, but the texts hold {num_tokens - left} that can be scored")


def perplexity(logprobs: list[list[float]]) -> float:
    """exp of the mean negative log-probability (natural) of all tokens."""
    count = sum(len(of_text) for of_text in logprobs)
    return math.exp(-sum(sum(of_text) for of_text in logprobs) / count)


def score(
    engine: Engine, launch: Launch, texts: list[list[int]], log: Path, timeout_s: float
) -> list[list[float]]:
    """The natural-log probability of every token except the first of each text; starts a server for it."""
    with running_server(engine, launch, log, timeout_s) as url:
        begin = time.monotonic()
        with ThreadPoolExecutor(launch.max_num_seqs) as pool:
            logprobs = list(pool.map(lambda text: engine.prompt_logprobs(url, text), texts))
        print(f"{len(texts)} texts scored in {time.monotonic() - begin:.0f} s", flush=True)
    return logprobs


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__, "perplexity-ENGINE")
    parser.add_argument(
        "--backend", default=OURS, help="attn_backend (the default), stock, or a name that the engine knows"
    )
    parser.add_argument(
        "--kv-cache-dtypes",
        nargs="+",
        default=["auto", "fp8_e4m3"],
        help="the engine's names; the first is what others are compared with",
    )
    parser.add_argument(
        "--num-tokens", type=int, default=2000, help="tokens that are scored; default: %(default)s"
    )
    parser.add_argument(
        "--longest", type=int, default=512, help="tokens of a text; longer ones are cut; default: %(default)s"
    )
    parser.add_argument("--dataset", default="sharegpt", help="sharegpt, or FILE.json in its form")
    parser.add_argument("--dtype", default="bfloat16", help="of the model; default: %(default)s")
    parser.add_argument(
        "--largest-increase",
        type=float,
        default=0.05,
        help="of the perplexity, relative; default: %(default)s",
    )
    return parser.parse_args(arguments)


def run(given: argparse.Namespace) -> bool:
    engine, model = ENGINES[given.engine], resolve_model(given.model, given.python)
    tokenizer = tokenizer_of(model.folder)
    conversations = conversation_texts(dataset_file(given.dataset))
    texts = cut_texts(
        (tokenizer.encode(text[: given.longest * 16]).ids for text in conversations),
        given.num_tokens,
        given.longest,
    )
    results = results_folder(given, f"perplexity-{given.engine}")
    launch = Launch(
        given.python,
        model,
        given.backend,
        given.device,
        0,
        given.dtype,
        given.cuda_graphs,
        given.longest + ROOM,
        CONCURRENCY,
        given.server_arguments,
    )
    found: dict[str, float] = {}
    for kv_dtype in given.kv_cache_dtypes:
        with_dtype = replace(launch, port=free_port(), kv_cache_dtype=kv_dtype)
        logprobs = score(engine, with_dtype, texts, results / f"server-{kv_dtype}.log", given.start_timeout_s)
        if [len(of_text) for of_text in logprobs] != [len(text) - 1 for text in texts]:
            raise RuntimeError(
                f"{engine.name}: the server did not score every token: "
                f"{[len(of_text) for of_text in logprobs]}"
            )
        found[kv_dtype] = perplexity(logprobs)
    reference = found[given.kv_cache_dtypes[0]]
    print(
        f"\n{engine.name} with {given.backend}: {given.num_tokens} tokens of {len(texts)} conversations, "
        f"{given.dtype} model\n"
    )
    print("| KV cache | perplexity | increase |\n|---|---|---|")
    for kv_dtype, value in found.items():
        print(f"| {kv_dtype} | {value:.3f} | {value / reference - 1:+.2%} |")
    report = {"settings": {name: str(value) for name, value in vars(given).items()}, "perplexity": found}
    (results / "perplexity.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(f"\nwritten: {results / 'perplexity.json'}")
    return all(value <= reference * (1 + given.largest_increase) for value in found.values())


def main() -> None:
    exit_with(lambda: run(parse_arguments()))


if __name__ == "__main__":
    main()
