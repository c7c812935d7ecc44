"""Does a server with this backend survive long use? A mixed load for a while: changing shared prefixes,
sampled answers with seeds, JSON by a schema, and clients that hang up. The KV cache is so small that requests
are preempted and prefixes evicted.

    python -m integration.soak --engine vllm --minutes 20 --concurrency 64 --cache-tokens 6144
    python -m integration.soak --engine vllm --minutes 3 --concurrency 64 --batch-invariant

Requirements:

- no request fails, every answer has its full length, and JSON matches its schema;
- the memory (of the GPU, or of the server's processes) does not grow after the first minute;
- every 50th request, repeated by itself after the load, gets the same text if the logits are the same: in
  float32, or with --batch-invariant. Otherwise the report counts differing answers, with the gap between
  their two most probable tokens;
- requests were aborted, preempted and guided; a soak without these proves nothing about them. If one of these
  is missing after --minutes, or four samples of the memory, as on a slow machine, the load continues, up to
  four times as long.

--batch-invariant is the engine's own mode. Logits there depend on how many tokens of a request are computed
at once. A preempted request, or a request after a cached prefix, computes tokens at once that came one by one
before. So the same text is required only of requests that began without a cached prefix (the answer reports
the cached part of its prompt) and ran while none was preempted. Answers do not report preemption, but both
engines count it. A quarter of the concurrent requests come in bursts of 15 seconds each minute. The cache is
too small for all and large enough for the others, so preemption also comes in bursts. Requests after a cached
prefix are repeated after the same one. The report counts these, and the requests that ran during a
preemption.

Exit status: 0 if all checks pass, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from integration.command_line import exit_with, new_parser, results_folder
from integration.engines import ENGINES, Engine, Launch
from integration.engines.base import OURS
from integration.memory import growth, memory_of, sampled
from integration.model import resolve_model
from integration.server import free_port, ready_server
from integration.soak_load import LONGEST, Kept, Outcome, Request, Requests, ask, run_load
from integration.text import TextMaker

SHOWN_ERRORS = 10
# Cache tokens under batch invariance for each concurrent request: too few in a burst, enough for three
# quarters of them. vLLM's requests share prefixes, SGLang's do not.
TOKENS_OF_A_REQUEST = {"vllm": 96, "sglang": 128}


@dataclass(frozen=True)
class Replay:
    """A request that was repeated by itself.

    `smallest_gap`: between the two most probable tokens at their closest (natural log), for greedy requests.
    `cached_again`: as Kept.cached, for the second answer.
    """

    number: int
    kind: str
    is_same: bool
    smallest_gap: float | None
    cached: int = 0
    cached_again: int = 0
    preempted: int = 0

    @property
    def group(self) -> str:
        """Of GROUPS."""
        if self.preempted or self.cached != self.cached_again:
            return OTHERS
        return AFTER_PREFIX if self.cached else UNDISTURBED


UNDISTURBED = "that began without a cached prefix, while none was preempted"
AFTER_PREFIX = "that began after a cached prefix, while none was preempted; asked again after the same one"
OTHERS = "others"
GROUPS = (UNDISTURBED, AFTER_PREFIX, OTHERS)


def replay(engine: Engine, url: str, outcome: Outcome) -> list[Replay]:
    """One at a time. Failures are added to the errors."""
    replays = []
    for kept in outcome.kept:
        number, kind = kept.request.number, kept.request.kind
        try:
            text, cached = ask_alone(url, kept)
            is_same = text == kept.text
            gap = None if is_same or kind != "greedy" else smallest_gap(engine, url, kept.request)
        except (RuntimeError, ValueError) as error:
            outcome.errors.append(f"request {number}, asked again alone: {error}")
            continue
        replays.append(Replay(number, kind, is_same, gap, kept.cached, cached, kept.preempted))
    return replays


def ask_alone(url: str, kept: Kept) -> tuple[str, int]:
    """The text, and the number of cached prompt tokens: the same as the first time if possible, since nothing
    else is read from the cache.
    """
    request = replace(kept.request, salt=f"alone {kept.request.number}")
    if kept.cached:
        ask(url, replace(request, kind="greedy", prompt=request.prompt[: kept.cached], max_tokens=1))
    text, _, cached = ask(url, request)
    return text, cached


def smallest_gap(engine: Engine, url: str, request: Request) -> float:
    """The smallest gap between the two most probable tokens in a greedy answer."""
    tokens = engine.generate(url, request.prompt, request.max_tokens, alternatives=2)
    pairs = [sorted(token.alternatives.values(), reverse=True)[:2] for token in tokens]
    return min(first - second for first, second in (pair for pair in pairs if len(pair) == 2))


def judge(
    given: argparse.Namespace,
    outcome: Outcome,
    replays: list[Replay],
    preempted: int,
    grown: float | None,
    tracebacks: int,
) -> list[str]:
    """The failed checks."""
    exact = [
        played
        for played in replays
        if given.dtype == "float32" or (given.batch_invariant and played.group == UNDISTURBED)
    ]
    wrong = []
    if outcome.errors:
        wrong.append(f"{len(outcome.errors)} requests failed")
    if tracebacks:
        wrong.append(f"{tracebacks} tracebacks in the server's log")
    if grown is None:
        wrong.append(f"the memory was sampled fewer than 4 times after the first {given.warm_up:g} s")
    elif grown > given.memory_growth:
        wrong.append(f"the memory grew by {grown:.0f} MiB after the first {given.warm_up:g} s")
    if differing := [played for played in exact if not played.is_same]:
        wrong.append(f"{len(differing)} of {len(exact)} requests have another text when asked again alone")
    return wrong + [f"no request was {what}" for what in not_seen(given, outcome, preempted)]


def not_seen(given: argparse.Namespace, outcome: Outcome, preempted: int) -> list[str]:
    """The required events that did not occur for any request."""
    counts = {
        **outcome.finished,
        "guided to the end": outcome.complete_json,
        "asked again": len(outcome.kept),
        "preempted": preempted,
    }
    if given.batch_invariant:
        counts["kept without a cached prefix while none was preempted"] = sum(
            not kept.cached and not kept.preempted for kept in outcome.kept
        )
    return [what for what, count in counts.items() if not count]


def run(given: argparse.Namespace) -> bool:
    engine, results = ENGINES[given.engine], results_folder(given, f"soak-{given.engine}")
    given.dtype = given.dtype or ("float32" if given.device == "cpu" else "bfloat16")
    given.memory_growth = (
        (64 if given.device == "cuda" else 256) if given.memory_growth is None else given.memory_growth
    )
    given.cache_tokens = given.cache_tokens or (
        given.concurrency * TOKENS_OF_A_REQUEST[given.engine] if given.batch_invariant else 640
    )
    if given.cache_tokens < LONGEST + 64:
        raise ValueError(
            f"cache-tokens: {given.cache_tokens}, must be {LONGEST + 64} or more: a request takes up to "
            f"{LONGEST}"
        )
    model = resolve_model(given.model, given.python)
    arguments, environment = engine.soak_settings(given.cache_tokens, given.device)
    launch = Launch(
        given.python,
        model,
        given.backend,
        given.device,
        free_port(),
        given.dtype,
        given.cuda_graphs,
        LONGEST + 32,
        given.concurrency,
        [*arguments, *given.server_arguments],
        batch_invariant=given.batch_invariant,
        environment=environment,
    )
    log = results / f"server-{given.backend}.log"
    texts = TextMaker(model.folder, given.seed)
    if not texts.reads_text:
        raise ValueError(
            f"model: {given.model!r} has a tokenizer of made-up words, must be one whose tokenizer can spell "
            f"JSON, such as smollm2"
        )
    requests, known = Requests(texts, given.seed), 0

    def preemptions() -> int:
        """The number so far; if a server no longer answers, its last reply."""
        nonlocal known
        with suppress(RuntimeError):
            known = engine.preemptions(server.url)
        return known

    with ready_server(engine, launch, log, given.start_timeout_s) as server:
        before = server_tracebacks(log)
        with sampled(lambda: memory_of(server.process.pid, given.device), given.sample_every) as samples:
            outcome = run_load(
                server.url,
                requests,
                60 * given.minutes,
                given.concurrency,
                given.replay_every,
                is_enough=lambda outcome: (
                    growth(samples, given.warm_up) is not None
                    and not not_seen(given, outcome, 1)
                    and not not_seen(given, outcome, preemptions())
                ),
                preemptions=preemptions,
                resting=given.concurrency // 4 if given.batch_invariant else 0,
            )
        preempted = preemptions()
        print(
            f"load done: {outcome.finished}, {len(outcome.errors)} errors, {preempted} preemptions; asking "
            f"{len(outcome.kept)} again",
            flush=True,
        )
        replays = replay(engine, server.url, outcome)
        tracebacks = server_tracebacks(log) - before
    for error in outcome.errors[:SHOWN_ERRORS]:
        print(f"error: {error}")
    grown = growth(samples, given.warm_up)
    wrong = judge(given, outcome, replays, preempted, grown, tracebacks)
    report(
        given,
        results,
        outcome,
        replays,
        samples,
        {"preempted": preempted, "memory_growth_mib": grown, "wrong": wrong},
    )
    return not wrong


def server_tracebacks(log: Path) -> int:
    return log.read_text(errors="replace").count("Traceback (most recent call last)")


def report(
    given: argparse.Namespace,
    results: Path,
    outcome: Outcome,
    replays: list[Replay],
    samples: list[tuple[float, float]],
    found: dict[str, Any],
) -> None:
    differing = [played for played in replays if not played.is_same]
    print(
        f"\n{sum(outcome.finished.values())} requests in {samples[-1][0] / 60:.1f} minutes: "
        f"{outcome.finished}, {found['preempted']} preemptions"
    )
    print(
        f"{len(outcome.errors)} errors; {outcome.complete_json} answers of complete JSON, all of the schema"
    )
    held = [value for _, value in samples]
    grown = found["memory_growth_mib"]
    print(
        f"memory {min(held):.0f} to {max(held):.0f} MiB in {len(held)} samples, growth after "
        f"{given.warm_up:g} s: {'not known' if grown is None else f'{grown:.0f} MiB'}"
    )
    print(
        f"{len(replays) - len(differing)} of {len(replays)} requests have the same text when asked again "
        f"alone"
    )
    for group in GROUPS:
        of_group = [played.is_same for played in replays if played.group == group]
        print(f"  {sum(of_group)} of {len(of_group)} {group}")
    for played in differing:
        gap = (
            ""
            if played.smallest_gap is None
            else f", its closest alternatives {played.smallest_gap:.4f} apart"
        )
        print(f"  request {played.number} ({played.kind}) differs{gap}; {played.group}")
    print("\n".join(f"does not hold: {what}" for what in found["wrong"]) or "all holds")
    settings = {name: str(value) for name, value in vars(given).items()}
    written = {
        "settings": settings,
        **vars(outcome),
        **found,
        "replays": [vars(played) for played in replays],
        "memory_mib": samples,
    }
    written["kept"] = [{**vars(kept), "request": vars(kept.request)} for kept in outcome.kept]
    path = results / "soak.json"
    path.write_text(json.dumps(written) + "\n", encoding="utf-8")
    print(f"written: {path}")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__, "soak-ENGINE")
    parser.add_argument(
        "--backend", default=OURS, help="attn_backend (the default), stock, or a name that the engine knows"
    )
    parser.add_argument("--minutes", type=float, default=20, help="of load, at least; default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time; default: %(default)s")
    parser.add_argument(
        "--cache-tokens",
        type=int,
        help="of the KV cache; default: 640, too few for all requests; with --batch-invariant for bursts",
    )
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="have the engine compute the same logits in every batch",
    )
    parser.add_argument(
        "--replay-every",
        type=int,
        default=50,
        help="repeat every N-th request by itself and compare the answers; default: %(default)s",
    )
    parser.add_argument(
        "--sample-every",
        type=float,
        default=3,
        help="seconds between two looks at the memory; default: %(default)s",
    )
    parser.add_argument(
        "--warm-up", type=float, default=60, help="seconds in which the memory may grow; default: %(default)s"
    )
    parser.add_argument(
        "--memory-growth",
        type=float,
        help="MiB that count as none; default: 64 on a GPU, 256 on a CPU (allocators keep what they had)",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    exit_with(lambda: run(parse_arguments()))


if __name__ == "__main__":
    main()
