"""What a user sets for the engines, through the environment of the server."""

from __future__ import annotations

import logging
import sys
from functools import cache

from attn_backend.settings import Settings

SAMPLER_SWITCH = "ATTN_BACKEND_SAMPLER"


def use_cascade() -> bool:
    """Whether plans look for prefixes that the requests of a batch share: yes, unless ATTN_BACKEND_CASCADE is 0."""
    return Settings.read().cascade


def tell_of_vllms_cascade(logger: logging.Logger) -> None:
    """Called when vLLM starts; each process tells once. vLLM's option is its default, so only the command line, which vLLM's processes inherit, says whether a
    user gave it."""
    if use_cascade() and not {"--disable-cascade-attn", "--disable_cascade_attn"}.isdisjoint(sys.argv):
        _tell_once(logger)


@cache
def _tell_once(logger: logging.Logger) -> None:
    logger.info("--disable-cascade-attn is about vLLM's own backends: attn_backend still looks for shared prefixes. ATTN_BACKEND_CASCADE=0 turns that off.")


def use_fp8_queries() -> bool:
    """Whether queries of prompts may get the cache's 8 bits in SGLang: yes, unless ATTN_BACKEND_SGLANG_FP8_QUERIES is 0. vLLM rounds queries itself."""
    return Settings.read().sglang_fp8_queries


def use_sampler() -> bool:
    """Whether this package may sample: yes, unless ATTN_BACKEND_SAMPLER is 0."""
    return Settings.read().sampler is not False


def insist_on_sampler() -> bool:
    """Whether this package samples also where SGLang insists on its own sampler: no, unless ATTN_BACKEND_SAMPLER is 1."""
    return Settings.read().sampler is True
