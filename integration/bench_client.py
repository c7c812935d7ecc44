"""An engine's own benchmark client, with features that neither engine's client has: a seed for each request
and a start on demand. For SGLang's also requests in order and a few sampling parameters.

Run by the engine's interpreter, by path: python bench_client.py MODULE OPTIONS ARGUMENT...
OPTIONS is JSON:
    keep_order   true: do not shuffle the requests
    sampling     null: greedy; otherwise each request gets these parameters, named as in the server's API, and
                 its own seed
    seed         of the first request
    wait_for     null, or a file: the client prepares its requests, which can take longer than the load
                 itself, then waits for this file before it connects
"""

from __future__ import annotations

import itertools
import json
import os
import random
import runpy
import socket
import sys
import time
from typing import Any

POLL_S = 0.002


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
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    if added and added.requests == 0:
        sys.exit(f"{module} sent no request that sampling parameters could be added to")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the result is written; the engine's exit handlers can take longer than the load


if __name__ == "__main__":
    main()
