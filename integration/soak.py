"""Does a server with this backend hold out? Mixed load for a while: shared prefixes that change, sampled answers with seeds, JSON by a schema, clients that
hang up, and a KV cache so small that requests are preempted and prefixes evicted.

    python -m integration.soak --engine vllm --minutes 20 --concurrency 64 --cache-tokens 6144
    python -m integration.soak --engine vllm --minutes 3 --concurrency 64 --batch-invariant

What must hold:

- no request fails, every answer is as long as it may be, and JSON is of its schema;
- the memory (of the GPU, or of the server's processes) does not grow after the first minute;
- every 50th request, asked again alone after the load, gets the same text where the logits are the same: in float32, or with --batch-invariant. Elsewhere
  differing answers are counted, with how close the two most probable tokens came in them;
- requests were aborted, preempted and guided: a soak in which they were not says nothing of them. Where one of these is still to come after --minutes, as on a
  slow machine, the load goes on, up to four times as long.

--batch-invariant is the engine's own mode. Logits there depend on how many tokens of a request are computed at once, and those of a preempted request, or after
a cached prefix, are computed at once where they came one by one before. So the cache then has room for all requests, and prefixes are not kept.

Exit status: 0 when all that holds, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.command_line import exit_with, new_parser, results_folder
from integration.engines import ENGINES, Engine, Launch
from integration.engines.base import OURS
from integration.memory import growth, memory_of, sampled
from integration.model import resolve_model
from integration.server import free_port, ready_server
from integration.soak_load import LONGEST, Outcome, Request, Requests, ask, run_load
from integration.text import TextMaker

SHOWN_ERRORS = 10


@dataclass(frozen=True)
class Replay:
    """A request that was asked again alone. `smallest_gap`: natural log, between the two most probable tokens where they are closest; of greedy ones."""

    number: int
    kind: str
    is_same: bool
    smallest_gap: float | None


def replay(engine: Engine, url: str, outcome: Outcome) -> list[Replay]:
    """One at a time. What fails joins the errors."""
    replays = []
    for request, text in outcome.kept:
        try:
            is_same = ask(url, request)[0] == text
            gap = None if is_same or request.kind != "greedy" else smallest_gap(engine, url, request)
        except (RuntimeError, ValueError) as error:
            outcome.errors.append(f"request {request.number}, asked again alone: {error}")
            continue
        replays.append(Replay(request.number, request.kind, is_same, gap))
    return replays


def smallest_gap(engine: Engine, url: str, request: Request) -> float:
    """How close the two most probable tokens come in a greedy answer."""
    tokens = engine.generate(url, request.prompt, request.max_tokens, alternatives=2)
    pairs = [sorted(token.alternatives.values(), reverse=True)[:2] for token in tokens]
    return min(first - second for first, second in (pair for pair in pairs if len(pair) == 2))


def judge(given: argparse.Namespace, outcome: Outcome, replays: list[Replay], preempted: int, grown: float, tracebacks: int) -> list[str]:
    """What does not hold."""
    differing = [played for played in replays if not played.is_same]
    exact = given.dtype == "float32" or (given.batch_invariant and not preempted)
    wrong = []
    if outcome.errors:
        wrong.append(f"{len(outcome.errors)} requests failed")
    if tracebacks:
        wrong.append(f"{tracebacks} tracebacks in the server's log")
    if grown > given.memory_growth:
        wrong.append(f"the memory grew by {grown:.0f} MiB after the first {given.warm_up:.0f} s")
    if differing and exact:
        wrong.append(f"{len(differing)} of {len(replays)} requests have another text when asked again alone")
    if given.batch_invariant and preempted:
        wrong.append(f"{preempted} requests were preempted under batch invariance: --cache-tokens must be larger")
    return wrong + [f"no request was {what}" for what in not_seen(given, outcome, preempted)]


def not_seen(given: argparse.Namespace, outcome: Outcome, preempted: int) -> list[str]:
    """What no request has gone through, but must have."""
    counts = {**outcome.finished, "guided to the end": outcome.complete_json, "asked again": len(outcome.kept)}
    counts |= {} if given.batch_invariant else {"preempted": preempted}
    return [what for what, count in counts.items() if not count]


def run(given: argparse.Namespace) -> bool:
    engine, results = ENGINES[given.engine], results_folder(given, f"soak-{given.engine}")
    given.dtype = given.dtype or ("float32" if given.device == "cpu" else "bfloat16")
    given.memory_growth = (64 if given.device == "cuda" else 256) if given.memory_growth is None else given.memory_growth
    given.cache_tokens = given.cache_tokens or (given.concurrency * (LONGEST + 64) if given.batch_invariant else 640)
    if given.cache_tokens < LONGEST + 64:
        raise ValueError(f"cache-tokens: {given.cache_tokens}, must be {LONGEST + 64} or more: a request takes up to {LONGEST}")
    model = resolve_model(given.model, given.python)
    arguments, environment = engine.soak_settings(given.cache_tokens, given.device, given.batch_invariant)
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
        raise ValueError(f"model: {given.model!r} has a tokenizer of made-up words, must be one whose tokenizer can spell JSON, such as smollm2")
    requests = Requests(texts, given.seed)
    with ready_server(engine, launch, log, given.start_timeout_s) as server:
        before = server_tracebacks(log)
        with sampled(lambda: memory_of(server.process.pid, given.device), given.sample_every) as samples:
            outcome = run_load(
                server.url,
                requests,
                60 * given.minutes,
                given.concurrency,
                given.replay_every,
                # Preemptions last: SGLang's are counted in its log, which grows.
                is_enough=lambda outcome: not not_seen(given, outcome, 1) and not not_seen(given, outcome, engine.preemptions(server.url, log)),
            )
        preempted = engine.preemptions(server.url, log)
        print(f"load done: {outcome.finished}, {len(outcome.errors)} errors, {preempted} preemptions; asking {len(outcome.kept)} again", flush=True)
        replays = replay(engine, server.url, outcome)
        tracebacks = server_tracebacks(log) - before
    for error in outcome.errors[:SHOWN_ERRORS]:
        print(f"error: {error}")
    grown = growth(samples, given.warm_up)
    wrong = judge(given, outcome, replays, preempted, grown, tracebacks)
    report(given, results, outcome, replays, samples, {"preempted": preempted, "memory_growth_mib": grown, "wrong": wrong})
    return not wrong


def server_tracebacks(log: Path) -> int:
    return log.read_text(errors="replace").count("Traceback (most recent call last)")


def report(
    given: argparse.Namespace, results: Path, outcome: Outcome, replays: list[Replay], samples: list[tuple[float, float]], found: dict[str, Any]
) -> None:
    differing = [played for played in replays if not played.is_same]
    print(f"\n{sum(outcome.finished.values())} requests in {samples[-1][0] / 60:.1f} minutes: {outcome.finished}, {found['preempted']} preemptions")
    print(f"{len(outcome.errors)} errors; {outcome.complete_json} answers of complete JSON, all of the schema")
    held = [value for _, value in samples]
    print(f"memory {min(held):.0f} to {max(held):.0f} MiB in {len(held)} samples, growth after {given.warm_up:g} s: {found['memory_growth_mib']:.0f} MiB")
    print(f"{len(replays) - len(differing)} of {len(replays)} requests have the same text when asked again alone")
    for played in differing:
        gap = "" if played.smallest_gap is None else f", its closest alternatives {played.smallest_gap:.4f} apart"
        print(f"  request {played.number} ({played.kind}) differs{gap}")
    print("\n".join(f"does not hold: {what}" for what in found["wrong"]) or "all holds")
    settings = {name: str(value) for name, value in vars(given).items()}
    written = {"settings": settings, **vars(outcome), **found, "replays": [vars(played) for played in replays], "memory_mib": samples}
    written["kept"] = [{**vars(request), "text": text} for request, text in outcome.kept]
    path = results / "soak.json"
    path.write_text(json.dumps(written) + "\n", encoding="utf-8")
    print(f"written: {path}")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__, "soak-ENGINE")
    parser.add_argument("--backend", default=OURS, help="attn_backend (the default), stock, or a name that the engine knows")
    parser.add_argument("--minutes", type=float, default=20, help="of load, at least; default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time; default: %(default)s")
    parser.add_argument("--cache-tokens", type=int, help="of the KV cache; default: 640, too few for all requests; with --batch-invariant enough")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--batch-invariant", action="store_true", help="have the engine compute the same logits in every batch")
    parser.add_argument("--replay-every", type=int, default=50, help="every so many requests, one is asked again alone; default: %(default)s")
    parser.add_argument("--sample-every", type=float, default=3, help="seconds between two looks at the memory; default: %(default)s")
    parser.add_argument("--warm-up", type=float, default=60, help="seconds in which the memory may grow; default: %(default)s")
    parser.add_argument("--memory-growth", type=float, help="MiB that count as none; default: 64 on a GPU, 256 on a CPU (allocators keep what they had)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    exit_with(lambda: run(parse_arguments()))


if __name__ == "__main__":
    main()
