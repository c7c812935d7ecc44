"""vLLM's own option about cascades, which this package cannot tell from its default."""

from __future__ import annotations

import logging
import sys
from functools import cache

from attn_backend.adapters.options import use_cascade


def tell_of_cascade(logger: logging.Logger) -> None:
    """Called when vLLM starts; each process tells once. vLLM's option is its default, so only the command line, which vLLM's processes inherit, says whether a
    user gave it."""
    if use_cascade() and not {"--disable-cascade-attn", "--disable_cascade_attn"}.isdisjoint(sys.argv):
        _tell_once(logger)


@cache
def _tell_once(logger: logging.Logger) -> None:
    logger.info("--disable-cascade-attn is about vLLM's own backends: attn_backend still looks for shared prefixes. ATTN_BACKEND_CASCADE=0 turns that off.")
