"""What a user sets for both engines, through the environment of the server."""

from __future__ import annotations

import os

SAMPLER_SWITCH = "ATTN_BACKEND_SAMPLER"


def use_cascade() -> bool:
    """Whether plans look for prefixes that the requests of a batch share: yes, unless ATTN_BACKEND_CASCADE is 0."""
    return os.environ.get("ATTN_BACKEND_CASCADE", "1") not in ("", "0")


def use_sampler() -> bool:
    """Whether this package may sample: yes, unless ATTN_BACKEND_SAMPLER is 0."""
    return os.environ.get(SAMPLER_SWITCH, "1") not in ("", "0")


def insist_on_sampler() -> bool:
    """Whether this package samples also where SGLang insists on its own sampler: no, unless ATTN_BACKEND_SAMPLER is 1."""
    return os.environ.get(SAMPLER_SWITCH) == "1"
