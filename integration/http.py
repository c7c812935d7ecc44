"""The two HTTP calls that a benchmark makes itself; the engines' own clients send the measured load."""

from __future__ import annotations

from typing import Any

import httpx

# servers under test are on this machine: a proxy set for the outside must not get in between
CLIENT = httpx.Client(trust_env=False, limits=httpx.Limits(max_connections=None))


def post_json(url: str, body: dict[str, Any], timeout_s: float = 600) -> Any:
    """POST `body`, return the parsed answer. Raises RuntimeError with the server's words when it refuses, or with what is wrong with the connection."""
    try:
        answer = CLIENT.post(url, json=body, timeout=timeout_s)
    except httpx.HTTPError as error:
        raise RuntimeError(f"{url}: {type(error).__name__}: {error}") from error
    if not answer.is_success:
        raise RuntimeError(f"{url}: HTTP {answer.status_code}: {answer.text[:2000]}")
    return answer.json()


def is_ready(url: str) -> bool:
    """Whether a GET answers with success within a few seconds."""
    try:
        return CLIENT.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False
