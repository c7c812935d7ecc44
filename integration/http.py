"""The two HTTP calls that a benchmark makes itself: the measured load is the engines' own clients' business."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

# servers under test are on this machine: a proxy set for the outside must not get in between
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post_json(url: str, body: dict[str, Any], timeout_s: float = 600) -> Any:
    """POST `body`, return the parsed answer. Raises RuntimeError with the server's words when it refuses."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with OPENER.open(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: HTTP {error.code}: {error.read().decode(errors='replace')[:2000]}") from error


def is_ready(url: str) -> bool:
    """Whether a GET answers with success within a few seconds."""
    try:
        with OPENER.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
