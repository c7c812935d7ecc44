"""Does a request with a seed get the same tokens, regardless of the server's other work? Sampled answers to
ShareGPT prompts, each with a different seed.

    python -m integration.compare_sampling --engine vllm --num-prompts 32 --max-tokens 64
    python -m integration.compare_sampling --engine sglang --model llama-3.1-8b --batch-invariant

One server gets the same requests

- one at a time, and once more one at a time: the answers must be equal;
- all at once, in another order, every other one with log-probabilities: must be equal if the logits are
  equal, that is in float32 or with --batch-invariant (the engine's own mode). Otherwise matrix products round
  differently in batches of different sizes, and one logit can change a token;
- one at a time with other seeds: nearly all answers must differ, or the seeds would have no effect.

Prefix caching is off, since a prompt computed from the cache is computed in other shapes.

Exit status: 0 if all required checks pass, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from integration.command_line import Comparison, comparison_parser, exit_with, sampling_argument
from integration.engines import ENGINES, Engine, Launch, Sampling
from integration.server import running_server

DIFFERENT_SEEDS_DIFFER = 0.9  # minimum share of the answers
CHECKED_TOKENS = 32  # per answer that a benchmark checks
ANSWERS = ("one_at_a_time", "again", "at_once", "other_seeds")  # names of the four sets in reports
Answers = list[list[int]]


@dataclass(frozen=True)
class Request:
    """One prompt (token ids) with its seed."""

    prompt: list[int]
    seed: int


def make_requests(prompts: list[list[int]], round_number: int) -> list[Request]:
    """Seeds of all sizes: small seeds, and seeds that need 63 bits."""
    draw = random.Random(round_number)
    return [
        Request(prompt, draw.getrandbits(63) if index % 2 else index + 1000 * round_number)
        for index, prompt in enumerate(prompts)
    ]


def one_at_a_time(
    engine: Engine, url: str, requests: list[Request], max_tokens: int, sampling: Sampling
) -> Answers:
    return [
        engine.sample(url, request.prompt, max_tokens, sampling, request.seed, logprobs=False)
        for request in requests
    ]


def all_at_once(
    engine: Engine, url: str, requests: list[Request], max_tokens: int, sampling: Sampling, concurrency: int
) -> Answers:
    """Sent in another order, so that requests run together with others and in other rows; returned in the
    order of `requests`.
    """
    order = list(range(len(requests)))
    random.Random(0).shuffle(order)
    answers: Answers = [[] for _ in requests]

    def ask(index: int) -> None:
        request = requests[index]
        answers[index] = engine.sample(
            url, request.prompt, max_tokens, sampling, request.seed, logprobs=index % 2 == 1
        )

    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(ask, order))
    return answers


@dataclass(frozen=True)
class Outcome:
    """The number of answers equal to those from one-at-a-time requests."""

    prompts: int
    again: int
    at_once: int
    other_seeds: int

    def holds(self, same_logits: bool) -> bool:
        differ = self.prompts - self.other_seeds
        return (
            self.again == self.prompts
            and (self.at_once == self.prompts or not same_logits)
            and differ >= DIFFERENT_SEEDS_DIFFER * self.prompts
        )

    def __str__(self) -> str:
        counts = (
            f"{self.again} of {self.prompts} answers are equal when asked for again, {self.at_once} "
            f"when asked for all at once"
        )
        return f"{counts}, {self.other_seeds} with another seed"


def compare_answers(reference: Answers, again: Answers, at_once: Answers, other_seeds: Answers) -> Outcome:
    same = [
        sum(one == other for one, other in zip(reference, answers, strict=True))
        for answers in (again, at_once, other_seeds)
    ]
    return Outcome(len(reference), *same)


def ask_four_times(
    engine: Engine, url: str, prompts: list[list[int]], max_tokens: int, sampling: Sampling, concurrency: int
) -> list[Answers]:
    """The four sets of answers that `compare_answers` takes, from a running server."""
    requests, others = make_requests(prompts, 0), make_requests(prompts, 1)
    reference = one_at_a_time(engine, url, requests, max_tokens, sampling)
    again = one_at_a_time(engine, url, requests, max_tokens, sampling)
    at_once = all_at_once(engine, url, requests, max_tokens, sampling, concurrency)
    return [reference, again, at_once, one_at_a_time(engine, url, others, max_tokens, sampling)]


def serve_and_sample(
    engine: Engine,
    launch: Launch,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: Sampling,
    log: Path,
    timeout_s: float = 900,
) -> list[Answers]:
    """Start the server, query it four times, stop it."""
    with running_server(engine, launch, log, timeout_s) as url:
        begin = time.monotonic()
        answers = ask_four_times(engine, url, prompts, max_tokens, sampling, launch.max_num_seqs)
        print(
            f"{engine.name} with {launch.backend}: {4 * len(prompts)} answers in "
            f"{time.monotonic() - begin:.0f} s",
            flush=True,
        )
    return answers


def check_seeds(
    engine: Engine, backend: str, url: str, prompts: list[list[int]], sampling: Sampling, results: Path
) -> None:
    """For a benchmark with a running server: reports the number of equal answers, and writes them to
    seeds-BACKEND.json.
    """
    answers = ask_four_times(engine, url, prompts, CHECKED_TOKENS, sampling, len(prompts))
    outcome = compare_answers(*answers)
    print(f"{engine.name} with {backend}: {outcome}", flush=True)
    report = vars(outcome) | dict(zip(ANSWERS, answers, strict=True))
    (results / f"seeds-{backend}.json").write_text(json.dumps(report) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = comparison_parser(__doc__, "sampling", num_prompts=32, longest_prompt=512)
    parser.add_argument(
        "--sampling",
        type=sampling_argument,
        default=Sampling(),
        help="default: temperature=0.8,top_p=0.95,top_k=40",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="have the engine compute the same logits in every batch",
    )
    return parser.parse_args()


def run(given: argparse.Namespace) -> bool:
    setup = Comparison.make(given, "sampling")
    launch = replace(setup.launch, prefix_caching=False, batch_invariant=given.batch_invariant)
    log = setup.results / f"server-{given.engine}-{given.backend}.log"
    answers = serve_and_sample(
        ENGINES[given.engine],
        launch,
        setup.prompts,
        given.max_tokens,
        given.sampling,
        log,
        given.start_timeout_s,
    )
    outcome = compare_answers(*answers)
    print(f"\n{outcome}")
    holds = outcome.holds(same_logits=launch.dtype == "float32" or given.batch_invariant)
    setup.write({"holds": holds, **vars(outcome), **dict(zip(ANSWERS, answers, strict=True))})
    return holds


def main() -> None:
    exit_with(lambda: run(parse_arguments()))


if __name__ == "__main__":
    main()
