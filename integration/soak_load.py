"""The load of a soak: many concurrent requests of several kinds, with changing prefixes, and some clients
that hang up; and the requirements for each answer.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from integration.engines.vllm import SERVED_NAME
from integration.http import post_json, read_and_leave
from integration.text import TextMaker

KINDS = ("greedy", "sampled", "guided", "aborted")
WEIGHTS = (3, 4, 2, 2)
NUM_PREFIXES = 4  # at a time
PREFIX_LASTS = 60  # requests, before the prefixes change and the cache must evict
SHORTEST, LONGEST_PREFIX, LONGEST_END = 4, 96, 64
LONGEST_ANSWER = 128
PATIENCE = 4
MOST_ERRORS = 1000  # a dead server refuses each request at once
BURST_EVERY_S, BURST_S = 60, 15  # period and length of bursts, in which resting workers also send
LONGEST = LONGEST_PREFIX + LONGEST_END + LONGEST_ANSWER
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "milk"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Request:
    """One request. `leaves_after`: lines of the stream that the client reads before it hangs up."""

    number: int
    kind: str
    prompt: list[int]
    max_tokens: int
    seed: int
    leaves_after: int
    salt: str | None = None  # it shares prefixes only with requests that have the same salt, or None

    def body(self) -> dict[str, Any]:
        """As both engines' /v1/completions take it."""
        body: dict[str, Any] = {
            "model": SERVED_NAME,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        if self.kind in ("sampled", "aborted"):
            body |= {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": self.seed}
        if self.kind == "guided":
            body |= {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "person", "schema": SCHEMA},
                }
            }
        return (
            body
            | ({"stream": True} if self.kind == "aborted" else {})
            | ({} if self.salt is None else {"cache_salt": self.salt})
        )


@dataclass(frozen=True)
class Kept:
    """A request to be repeated by itself, with its text.

    `cached`: tokens of its prompt that the server had cached. `preempted`: number of preemptions while it
    ran. It may be one of them, unless that is 0.
    """

    request: Request
    text: str
    cached: int
    preempted: int


@dataclass
class Outcome:
    """The outcome of a load."""

    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    errors: list[str] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    complete_json: int = 0  # guided answers that were not cut by max_tokens


class Requests:
    """Requests by number: the same seed gives the same ones, regardless of the order of calls."""

    def __init__(self, texts: TextMaker, seed: int) -> None:
        self._texts, self._seed = texts, seed
        self._lock = threading.Lock()

    def make(self, number: int) -> Request:
        draw = random.Random(f"{self._seed} {number}")
        prefix = f"{self._seed} {number // PREFIX_LASTS} {draw.randrange(NUM_PREFIXES)}"
        prompt = self._tokens(prefix, SHORTEST, LONGEST_PREFIX) + self._tokens(
            f"{self._seed} end {number}", SHORTEST, LONGEST_END
        )
        kind = draw.choices(KINDS, WEIGHTS)[0]
        max_tokens = LONGEST_ANSWER if kind == "guided" else draw.randint(8, LONGEST_ANSWER)
        return Request(number, kind, prompt, max_tokens, draw.getrandbits(31), draw.randint(1, 12))

    def _tokens(self, name: str, shortest: int, longest: int) -> list[int]:
        """Random tokens, the same for the same name."""
        with self._lock:
            self._texts.random.seed(name)
            text = self._texts.text(self._texts.random.randint(shortest, longest))
        ids: list[int] = self._texts.tokenizer.encode(text, add_special_tokens=False).ids
        return ids[:longest]


def ask(url: str, request: Request) -> tuple[str, bool, int]:
    """The text of an answer, whether it ended by itself, and the number of cached prompt tokens.

    Raises RuntimeError or ValueError if the answer is invalid.
    """
    answer = post_json(f"{url}/v1/completions", request.body())
    choice = answer["choices"][0]
    text, reason = str(choice["text"]), choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise ValueError(f"its answer ended with {reason!r}")
    if answer["usage"]["completion_tokens"] > request.max_tokens:
        raise ValueError(
            f"its answer has {answer['usage']['completion_tokens']} tokens, asked for were "
            f"{request.max_tokens}"
        )
    if request.kind == "guided" and reason == "stop":
        check_json(text)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return text, reason == "stop", details.get("cached_tokens") or 0


def check_json(text: str) -> None:
    """Raises ValueError unless a text is JSON that matches SCHEMA."""
    try:
        person = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"its answer is not JSON ({error}): {text!r}") from None
    fits = isinstance(person, dict) and sorted(person) == ["age", "likes", "name"]
    fits = (
        fits
        and isinstance(person["name"], str)
        and len(person["name"]) <= 12
        and isinstance(person["age"], int)
        and 0 <= person["age"] <= 120
    )
    if not (
        fits
        and isinstance(person["likes"], list)
        and len(person["likes"]) <= 3
        and set(person["likes"]) <= {"tea", "coffee", "milk"}
    ):
        raise ValueError(f"its answer is not of the schema: {text!r}")


def run_load(
    url: str,
    requests: Requests,
    seconds: float,
    concurrency: int,
    keep_every: int,
    is_enough: Callable[[Outcome], bool],
    preemptions: Callable[[], int],
    resting: int = 0,
) -> Outcome:
    """Sends requests for this time, and up to `PATIENCE` times as long until `is_enough`; `concurrency` at a
    time. Keeps every `keep_every`th that is not aborted. Prints a line each minute, so that an interrupted
    load has reported its results.

    Args:
        preemptions: returns their number so far.
        resting: this number of workers only sends requests in bursts. A cache that is too small for all of
            them then also preempts requests in bursts.
    """
    outcome, lock, numbers = Outcome(), threading.Lock(), itertools.count()
    start = time.monotonic()
    waited_for, minutes_told = itertools.count(1), 0

    def goes_on() -> bool:
        elapsed = time.monotonic() - start
        if len(outcome.errors) > MOST_ERRORS:
            return False
        return elapsed < seconds or (elapsed < PATIENCE * seconds and not is_enough(outcome))

    def tell() -> None:
        nonlocal minutes_told
        minute = int(time.monotonic() - start) // 60
        if minute > minutes_told:
            minutes_told = minute
            print(
                f"{minute} min: {sum(outcome.finished.values())} requests, {len(outcome.errors)} errors",
                flush=True,
            )

    def work(worker: int) -> None:
        while goes_on():
            if worker < resting and (time.monotonic() - start) % BURST_EVERY_S >= BURST_S:
                time.sleep(0.2)
                continue
            with lock:
                tell()
                request = requests.make(next(numbers))
                is_kept = request.kind != "aborted" and next(waited_for) % keep_every == 0
            try:
                before = preemptions() if is_kept else 0
                if request.kind == "aborted":
                    read_and_leave(f"{url}/v1/completions", request.body(), request.leaves_after)
                    text, ended, cached = "", False, 0
                else:
                    text, ended, cached = ask(url, request)
                preempted = preemptions() - before if is_kept else 0
            except (RuntimeError, ValueError, KeyError) as error:
                with lock:
                    outcome.errors.append(
                        f"request {request.number} ({request.kind}, {len(request.prompt)} tokens): {error}"
                    )
                continue
            with lock:
                outcome.finished[request.kind] += 1
                outcome.complete_json += request.kind == "guided" and ended
                if is_kept:
                    outcome.kept.append(Kept(request, text, cached, preempted))

    with ThreadPoolExecutor(concurrency) as pool:
        for one in [pool.submit(work, worker) for worker in range(concurrency)]:
            one.result()
    return outcome
