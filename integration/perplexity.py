"""The quality cost of a KV cache format: perplexity of real conversations and agreement of greedy answers, on
the engine's server with one cache dtype after the other.

    python -m integration.perplexity --engine vllm
    python -m integration.perplexity --engine vllm --kv-cache-dtypes auto fp8_e4m3 fp8_e5m2 --num-tokens 20000
    python -m integration.perplexity --engine sglang --backend stock --results results/stock
    python -m integration.perplexity --engine sglang --against results/stock/perplexity.json

Perplexity: the logits of the preceding tokens score every token of a text except the first; the attention
kernel reads their K and V from the cache. The table has the increase with its standard error. Agreement: the
share of greedy tokens before an answer first differs from the reference's, and the share of equal answers.
Answers do not end at the end-of-text token. In 16 bits even equal formats differ at near-ties: name the
reference's dtype twice to see how often.

Every server gets the same tokens. The reference is the first of --kv-cache-dtypes. --against adds the results
of earlier runs with the same texts and prompts, and their first result is the reference. Exit status: 0 if no
perplexity exceeds the reference's by more than --largest-increase, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from integration.command_line import exit_with, new_parser, results_folder
from integration.compare_tokens import generate_all
from integration.engines import ENGINES, Engine, Launch
from integration.engines.base import OURS
from integration.model import resolve_model
from integration.server import free_port, running_server
from integration.sharegpt import conversation_texts, dataset_file, prompt_token_ids
from integration.text import tokenizer_of

CONCURRENCY = 4
ROOM = 32  # tokens of a context besides text and answer: SGLang reserves some
SAME_REQUESTS = ("model", "dataset", "num_tokens", "longest", "num_prompts", "max_tokens")  # of joined runs


@dataclass(frozen=True)
class Format:
    """Results of one server. logprobs: for each text; answers: token ids for each prompt."""

    backend: str
    kv_cache_dtype: str
    perplexity: float
    logprobs: list[list[float]]
    answers: list[list[int]]


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


def increase(reference: list[list[float]], logprobs: list[list[float]]) -> tuple[float, float]:
    """The relative increase of perplexity, and its standard error if tokens are independent."""
    differences = [
        a - b for pair in zip(reference, logprobs, strict=True) for a, b in zip(*pair, strict=True)
    ]
    return math.expm1(fmean(differences)), stdev(differences) / math.sqrt(len(differences))


def agreement(reference: list[list[int]], answers: list[list[int]]) -> tuple[float, float]:
    """The share of tokens before the first difference in each answer, and the share of equal answers."""
    pairs = list(zip(reference, answers, strict=True))
    same = [
        next((i for i, (one, other) in enumerate(zip(*pair, strict=True)) if one != other), len(pair[0]))
        for pair in pairs
    ]
    return sum(same) / sum(map(len, reference)), sum(a == b for a, b in pairs) / len(pairs)


def score(engine: Engine, url: str, texts: list[list[int]]) -> list[list[float]]:
    """The natural-log probability of every token except the first of each text.

    Raises RuntimeError if the server leaves tokens out.
    """
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        logprobs = list(pool.map(lambda text: engine.prompt_logprobs(url, text), texts))
    if [len(of_text) for of_text in logprobs] != [len(text) - 1 for text in texts]:
        raise RuntimeError(
            f"{engine.name}: the server did not score every token: {[len(of_text) for of_text in logprobs]}"
        )
    return logprobs


def earlier_formats(files: list[Path], settings: dict[str, str]) -> list[Format]:
    """The results in reports of this tool. Raises ValueError if their requests were others."""
    formats: list[Format] = []
    for file in files:
        report = json.loads(file.read_text(encoding="utf-8"))
        for name in SAME_REQUESTS:
            if report["settings"][name] != settings[name]:
                raise ValueError(
                    f"against: {file} has {name} {report['settings'][name]}, must be {settings[name]}"
                )
        formats += [Format(**found) for found in report["formats"]]
    return formats


def table(formats: list[Format]) -> str:
    """One line for each format, compared with the first."""
    lines = ["| backend | KV cache | perplexity | increase |", "|---|---|---:|---:|"]
    reference = formats[0]
    for one in formats:
        more, error = increase(reference.logprobs, one.logprobs)
        lines.append(
            f"| {one.backend} | {one.kv_cache_dtype} | {one.perplexity:.3f} | {more:+.2%} ± {error:.2%} |"
        )
    if reference.answers:
        lines[0] += " tokens before a difference | equal answers |"
        lines[1] += "---:|---:|"
        for i, one in enumerate(formats, 2):
            tokens, equal = agreement(reference.answers, one.answers)
            lines[i] += f" {tokens:.1%} | {equal:.1%} |"
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__, "perplexity-ENGINE")
    parser.add_argument(
        "--backend", default=OURS, help="attn_backend (the default), stock, or a name that the engine knows"
    )
    parser.add_argument(
        "--kv-cache-dtypes",
        nargs="+",
        default=["auto", "fp8_e4m3"],
        help="the engine's names; the first is the reference",
    )
    parser.add_argument(
        "--against", nargs="+", type=Path, default=[], metavar="FILE", help="perplexity.json of earlier runs"
    )
    parser.add_argument(
        "--num-tokens", type=int, default=2000, help="tokens that are scored; default: %(default)s"
    )
    parser.add_argument(
        "--longest",
        type=int,
        default=512,
        help="tokens of a text or prompt; longer texts are cut, longer prompts skipped; default: %(default)s",
    )
    parser.add_argument(
        "--num-prompts", type=int, default=200, help="for agreement; 0: none; default: %(default)s"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer; default: %(default)s")
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
    settings = {name: str(value) for name, value in vars(given).items()}
    formats = earlier_formats(given.against, settings)
    engine, model = ENGINES[given.engine], resolve_model(given.model, given.python)
    tokenizer, dataset = tokenizer_of(model.folder), dataset_file(given.dataset)
    texts = cut_texts(
        (tokenizer.encode(text[: given.longest * 16]).ids for text in conversation_texts(dataset)),
        given.num_tokens,
        given.longest,
    )
    prompts = (
        prompt_token_ids(model.folder, dataset, given.num_prompts, given.longest) if given.num_prompts else []
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
        given.longest + given.max_tokens + ROOM,
        CONCURRENCY,
        given.server_arguments,
    )
    for number, kv_dtype in enumerate(given.kv_cache_dtypes):
        with_dtype = replace(launch, port=free_port(), kv_cache_dtype=kv_dtype)
        log = results / f"server-{number}-{kv_dtype}.log"
        with running_server(engine, with_dtype, log, given.start_timeout_s) as url:
            begin = time.monotonic()
            logprobs = score(engine, url, texts)
            answers = generate_all(engine, url, prompts, given.max_tokens, CONCURRENCY)
            print(f"{kv_dtype}: {time.monotonic() - begin:.0f} s for all requests", flush=True)
        tokens = [[token.token_id for token in answer] for answer in answers]
        formats.append(Format(given.backend, kv_dtype, perplexity(logprobs), logprobs, tokens))
    print(
        f"\n{engine.name}, {model.name}, {given.dtype}: {given.num_tokens} tokens of {len(texts)} "
        f"conversations, {len(prompts)} answers of {given.max_tokens} tokens\n\n{table(formats)}"
    )
    file = results / "perplexity.json"
    report = {"settings": settings, "formats": [asdict(one) for one in formats]}
    file.write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(f"\nwritten: {file}")
    return all(one.perplexity <= formats[0].perplexity * (1 + given.largest_increase) for one in formats)


def main() -> None:
    exit_with(lambda: run(parse_arguments()))


if __name__ == "__main__":
    main()
