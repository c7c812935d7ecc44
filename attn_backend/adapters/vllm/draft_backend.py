"""A draft model may run on another backend: vLLM's first model runner chooses one for it by itself, and so does the second one for DFLASH."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from attn_backend.adapters.vllm import compat


def tell_of_drafts(logger: logging.Logger, vllm_config: Any) -> None:
    """Called when vLLM starts; each process tells once."""
    if getattr(vllm_config, "speculative_config", None) is not None and (others := compat.other_backends(vllm_config)):
        _tell_once(logger, ", ".join(others))


@cache
def _tell_once(logger: logging.Logger, others: str) -> None:
    logger.info('vLLM runs the draft model on %s. "attention_backend": "CUSTOM" in --speculative-config runs it on attn_backend.', others)
