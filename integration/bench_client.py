"""An engine's own benchmark client, with features that neither engine's client has: a seed for each request,
a start on demand, and given arrivals. The answers of a request with `n` are measured one by one. For SGLang's
also requests in order and a few sampling parameters.

Run by the engine's interpreter, by path: python bench_client.py MODULE OPTIONS ARGUMENT...
OPTIONS is JSON:
    keep_order   true: do not shuffle the requests
    sampling     null: greedy; otherwise each request gets these parameters, named as in the server's API, and
                 its own seed
    seed         of the first request
    wait_for     null, or a file: the client prepares its requests, which can take longer than the load
                 itself, then waits for this file before it connects
    arrivals     if there: a JSON file that says when each request is sent, in seconds after the first
    answers      if there: so many copies of a prompt, neighbors, become one request with `n`
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import runpy
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

POLL_S = 0.002
LONGEST_EVENT = 10 * 1024**2  # bytes; SGLang repeats the whole text in each


class AddSampling:
    """Puts the parameters, and the next seed, into every completion request that aiohttp sends."""

    def __init__(self, sampling: dict[str, Any], first_seed: int) -> None:
        import aiohttp

        self.sampling, self.seeds, self.requests = sampling, itertools.count(first_seed), 0
        original = aiohttp.ClientSession.post

        def post(session: Any, url: Any, **options: Any) -> Any:
            if isinstance(options.get("json"), dict):
                options["json"] = self.add_to(options["json"])
            return original(session, url, **options)

        aiohttp.ClientSession.post = post  # type: ignore[method-assign,assignment]

    def add_to(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body of a completion request with the parameters and the next seed; other bodies unchanged."""
        if "sampling_params" in body:  # SGLang's API
            added = {
                "sampling_params": body["sampling_params"]
                | self.sampling
                | {"sampling_seed": next(self.seeds)}
            }
        elif "prompt" in body:  # OpenAI's
            added = self.sampling | {"seed": next(self.seeds)}
        else:
            return body
        self.requests += 1
        return body | added


class FollowArrivals:
    """Gives the clients these gaps where they draw some: vLLM's from a gamma distribution, before the first
    request; SGLang's from an exponential one, after each request.
    """

    def __init__(self, arrivals: list[float]) -> None:
        import numpy

        self.arrivals, self.drawn, self.begin = arrivals, 0, 0.0
        numpy.random.gamma = self.next_gap  # type: ignore[assignment]
        numpy.random.exponential = self.time_until_next  # type: ignore[assignment]

    @property
    def was_asked(self) -> bool:
        return self.drawn >= len(self.arrivals) - 1

    def next_gap(self, shape: float, scale: float) -> float:
        place, self.drawn = self.drawn, self.drawn + 1
        if place >= len(self.arrivals):  # there is no next one
            return 0.0
        return self.arrivals[place] - (self.arrivals[place - 1] if place else 0.0)

    def time_until_next(self, scale: float) -> float:
        if self.drawn == 0:
            self.begin = time.monotonic()
        self.drawn += 1
        if self.drawn >= len(self.arrivals):  # there is no next one
            return 0.0
        return max(self.begin + self.arrivals[self.drawn] - time.monotonic(), 0.0)


class ShareRequests:
    """Sends one request with `n` for the copies of a prompt. Each copy gets the events of one answer, as if
    it had been sent.

    The first request is the client's test of the server, and stays as it is. Arrivals count from its answer,
    so a client that waits (`wait_for`) must have it.
    """

    def __init__(self, num_answers: int) -> None:
        import aiohttp

        self.num_answers, self.requests, self.has_tested = num_answers, 0, False
        self.incomplete: dict[str, SharedRequest] = {}  # by prompt
        original = aiohttp.ClientSession.post

        def post(session: Any, url: Any, **options: Any) -> Any:
            body = options.get("json")
            if not isinstance(body, dict) or not {"prompt", "text", "input_ids"} & body.keys():
                return original(session, url, **options)
            if not self.has_tested:
                self.has_tested = True
                return original(session, url, **options)
            return self.join(original, url, options)

        aiohttp.ClientSession.post = post  # type: ignore[method-assign,assignment]

    def join(self, post: Callable[..., Any], url: Any, options: dict[str, Any]) -> OneAnswer:
        body = options["json"]
        prompt = json.dumps([body.get(name) for name in ("prompt", "text", "input_ids")])
        request = self.incomplete.get(prompt)
        if request is None:
            self.requests += 1
            options = options | {"json": self.add_to(body)}
            request = self.incomplete[prompt] = SharedRequest(post, url, options, self.num_answers)
        answer = request.next_answer()
        if request.taken == self.num_answers:
            del self.incomplete[prompt]
        return answer

    def add_to(self, body: dict[str, Any]) -> dict[str, Any]:
        if "sampling_params" in body:
            return body | {"sampling_params": body["sampling_params"] | {"n": self.num_answers}}
        return body | {"n": self.num_answers}


class SharedRequest:
    """One request, and a queue of events for each of its answers; None ends a queue."""

    def __init__(self, post: Callable[..., Any], url: Any, options: dict[str, Any], num_answers: int) -> None:
        self.post, self.url, self.options = post, url, options
        self.queues: list[asyncio.Queue[bytes | BaseException | None]] = [
            asyncio.Queue() for _ in range(num_answers)
        ]
        self.begun: asyncio.Future[tuple[int, str, str]] = asyncio.get_running_loop().create_future()
        self.taken = 0
        self.reader = asyncio.ensure_future(self.read())

    def next_answer(self) -> OneAnswer:
        self.taken += 1
        return OneAnswer(self, self.queues[self.taken - 1])

    async def read(self) -> None:
        import aiohttp

        end: BaseException | None = None
        # not the session of a copy, which closes it when the copy's answer has ended
        own = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), read_bufsize=LONGEST_EVENT, trust_env=True
        )
        try:
            async with own, self.post(own, self.url, **self.options) as response:
                refusal = "" if response.status == 200 else await response.text()
                self.begun.set_result((response.status, response.reason or "", refusal))
                if not refusal:
                    async for line in response.content:
                        if line.startswith(b"data:"):
                            self.hand_out(line.strip())
        except Exception as error:
            end = error
            if not self.begun.done():
                self.begun.set_exception(error)
        for queue in self.queues:
            queue.put_nowait(end)

    def hand_out(self, event: bytes) -> None:
        text = event.removeprefix(b"data:").strip()
        data = {} if text == b"[DONE]" else json.loads(text)
        if "index" in data:  # SGLang's
            self.queues[data["index"]].put_nowait(event)
        elif data.get("choices"):  # OpenAI's
            for choice in data["choices"]:
                self.put(choice["index"], data | {"choices": [choice]})
        elif usage := data.get("usage"):
            # all have one length: clients ignore the end
            each = usage["completion_tokens"] // len(self.queues)
            for place in range(len(self.queues)):
                self.put(place, data | {"usage": usage | {"completion_tokens": each}})
        else:
            for queue in self.queues:
                queue.put_nowait(event)

    def put(self, place: int, data: dict[str, Any]) -> None:
        self.queues[place].put_nowait(b"data: " + json.dumps(data).encode())


class OneAnswer:
    """A response, as a client sees one, with the events of one answer."""

    def __init__(self, request: SharedRequest, queue: asyncio.Queue[bytes | BaseException | None]) -> None:
        self.request, self.queue = request, queue
        self.status, self.reason, self.message = 0, "", ""

    async def __aenter__(self) -> OneAnswer:
        self.status, self.reason, self.message = await asyncio.shield(self.request.begun)
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    @property
    def content(self) -> OneAnswer:
        return self

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (event := await self.queue.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event + b"\n\n"

    def iter_any(self) -> AsyncIterator[bytes]:
        return self.__aiter__()

    async def text(self) -> str:
        return self.message


def wait_before_connecting(path: str) -> None:
    """Holds back the first network connection until the file `path` exists."""
    original = socket.socket.connect

    def connect(connection: socket.socket, address: Any) -> None:
        if connection.family != socket.AF_UNIX:
            while not os.path.exists(path):
                time.sleep(POLL_S)
            socket.socket.connect = original  # type: ignore[method-assign]
        original(connection, address)

    socket.socket.connect = connect  # type: ignore[method-assign,assignment]


def read_arrivals(path: str) -> list[float]:
    with open(path, encoding="utf-8") as file:
        arrivals: list[float] = json.load(file)
    return arrivals


def main() -> None:
    # modules here have the same names as standard library modules
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    module, options = sys.argv[1], json.loads(sys.argv[2])
    sys.argv = [module, *sys.argv[3:]]
    if options["keep_order"]:
        random.shuffle = lambda requests: None  # type: ignore[assignment]
    if options["wait_for"]:
        wait_before_connecting(options["wait_for"])
    added = AddSampling(options["sampling"], options["seed"]) if options["sampling"] is not None else None
    shared = ShareRequests(options["answers"]) if "answers" in options else None
    followed = FollowArrivals(read_arrivals(options["arrivals"])) if "arrivals" in options else None
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    if added and added.requests == 0:
        sys.exit(f"{module} sent no request that sampling parameters could be added to")
    if shared and (shared.requests == 0 or shared.incomplete):
        sys.exit(f"{module} did not send the copies of each prompt")
    if followed and not followed.was_asked:
        sys.exit(f"{module} did not draw the times of its requests where the given ones are put in")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the result is written; the engine's exit handlers can take longer than the load


if __name__ == "__main__":
    main()
