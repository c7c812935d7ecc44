"""vLLM's own option about cascades.

It is vLLM's default, so only the command line says whether a user gave it.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache

from attn_backend.adapters.options import CASCADE_SWITCH, use_cascade


def obey_cascade_option() -> None:
    """Called when vLLM loads its plugins, which it does before it starts processes: they inherit the
    variable.
    """
    if _is_given():
        os.environ.setdefault(CASCADE_SWITCH, "0")


def tell_of_cascade(logger: logging.Logger) -> None:
    """Called when vLLM starts; each process tells once. vLLM's processes inherit the command line."""
    if _is_given():
        _tell_once(logger)


def _is_given() -> bool:
    return not {"--disable-cascade-attn", "--disable_cascade_attn"}.isdisjoint(sys.argv)


@cache
def _tell_once(logger: logging.Logger) -> None:
    if use_cascade():
        logger.info(
            "%s=1 overrules --disable-cascade-attn: attn_backend looks for shared prefixes", CASCADE_SWITCH
        )
    else:
        logger.info(
            "attn_backend does not look for shared prefixes: --disable-cascade-attn was given. %s=1 "
            "overrules that.",
            CASCADE_SWITCH,
        )
