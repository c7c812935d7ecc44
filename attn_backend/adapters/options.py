"""What a user sets for the engines, through the environment of the server."""

from __future__ import annotations

from attn_backend.settings import Settings

CASCADE_SWITCH = "ATTN_BACKEND_CASCADE"
SAMPLER_SWITCH = "ATTN_BACKEND_SAMPLER"


def use_cascade() -> bool:
    """Whether plans look for prefixes that the requests of a batch share: yes, unless ATTN_BACKEND_CASCADE is
    0.
    """
    return Settings.read().cascade


def use_fp8_queries() -> bool:
    """Whether queries of prompts may get the cache's 8 bits in SGLang: yes, unless
    ATTN_BACKEND_SGLANG_FP8_QUERIES is 0. vLLM rounds queries itself.
    """
    return Settings.read().sglang_fp8_queries


def use_sampler() -> bool:
    """Whether this package may sample: yes, unless ATTN_BACKEND_SAMPLER is 0."""
    return Settings.read().sampler is not False


def insist_on_sampler() -> bool:
    """Whether this package samples also where SGLang insists on its own sampler: no, unless
    ATTN_BACKEND_SAMPLER is 1.
    """
    return Settings.read().sampler is True
