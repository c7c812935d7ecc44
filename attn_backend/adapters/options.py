"""What a user sets for both engines, through the environment of the server."""

from __future__ import annotations

import os


def use_cascade() -> bool:
    """Whether plans look for prefixes that the requests of a batch share: yes, unless ATTN_BACKEND_CASCADE is 0."""
    return os.environ.get("ATTN_BACKEND_CASCADE", "1") not in ("", "0")
