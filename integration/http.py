"""The HTTP calls of the tools themselves; the engines' own clients send measured loads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from attn_backend.cli.demo import Connections

ANSWER_TIMEOUT_S = 600


CONNECTIONS = Connections()  # for all requests of this module


def _watch(request: httpx.Request) -> None:
    def note(event: str, details: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            CONNECTIONS.add(details["return_value"].get_extra_info("socket"))

    request.extensions["trace"] = note


# servers under test are on this machine: a proxy set for the outside must not get in between
CLIENT = httpx.Client(
    trust_env=False, limits=httpx.Limits(max_connections=None), event_hooks={"request": [_watch]}
)


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Raises RuntimeError that describes a connection problem."""
    try:
        yield
    except httpx.HTTPError as error:
        raise RuntimeError(f"{url}: {type(error).__name__}: {error}") from error


def post_json(url: str, body: dict[str, Any]) -> Any:
    """POST `body`, return the parsed answer.

    Raises RuntimeError with the server's message if it refuses, or with the connection problem.
    """
    with _named(url):
        answer = CLIENT.post(url, json=body, timeout=ANSWER_TIMEOUT_S)
    if not answer.is_success:
        raise RuntimeError(f"{url}: HTTP {answer.status_code}: {answer.text[:2000]}")
    return answer.json()


def command(url: str) -> str | None:
    """POST without a body. Returns the answer's text, or None if the server refuses.

    Raises RuntimeError for a connection problem, and if the server does not know the address.
    """
    with _named(url):
        answer = CLIENT.post(url, timeout=ANSWER_TIMEOUT_S)
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise RuntimeError(f"{url}: HTTP 404: the server has no such address")
    return answer.text if answer.is_success else None


def get_text(url: str) -> str:
    """GET. Raises RuntimeError."""
    with _named(url):
        return CLIENT.get(url, timeout=60).raise_for_status().text


def counter(base_url: str, name: str, label: str = "") -> int:
    """A counter of a server's /metrics, over all labels, or with the given label (`cache_source="host"`); 0
    if it is missing. Raises RuntimeError.
    """
    lines = get_text(f"{base_url}/metrics").splitlines()
    return round(
        sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if re.match(rf"{re.escape(name)}[{{ ]", line) and label in line
        )
    )


def read_and_leave(url: str, body: dict[str, Any], num_lines: int) -> int:
    """POST `body`, which requests a stream, and hang up after this many lines.

    Returns the number of received lines. Raises RuntimeError.
    """
    came = 0
    with _named(url), CLIENT.stream("POST", url, json=body, timeout=ANSWER_TIMEOUT_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            came += bool(line)
            if came == num_lines:
                break
    return came


def is_ready(url: str) -> bool:
    """Whether a GET answers with success within a few seconds."""
    try:
        return CLIENT.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False
