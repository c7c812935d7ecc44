"""A draft model may run on another backend: for most of them vLLM chooses one by itself where
--speculative-config names none.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from attn_backend.adapters.vllm import compat


def tell_of_drafts(logger: logging.Logger, vllm_config: Any) -> None:
    """Called when vLLM starts; each process tells once."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if (
        speculative is not None
        and speculative.attention_backend is None
        and (others := compat.other_backends(vllm_config))
    ):
        _tell_once(logger, ", ".join(others))


@cache
def _tell_once(logger: logging.Logger, others: str) -> None:
    advice = (
        '"attention_backend": "CUSTOM" in --speculative-config puts them on attn_backend, unless draft '
        "or target alone has MLA"
    )
    logger.info("vLLM chose %s for some attention layers. If they are the draft model's, %s.", others, advice)
