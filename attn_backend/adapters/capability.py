"""GPUs that have compiled kernels but were never tested: they are served, with a warning."""

from __future__ import annotations

import logging
from functools import cache

import torch


def untried(capability: tuple[int, int]) -> str | None:
    """The warning for a GPU of this compute capability; None where these kernels have run."""
    if capability == (9, 0):
        return None
    build = "the sm_80 build" if capability[0] == 8 else "the PTX of the sm_80 build"
    return (
        f"attn_backend has never been run on a GPU of compute capability {capability[0]}.{capability[1]}: "
        f"{build} serves there, check some answers"
    )


def warn_if_untried(device: torch.device, logger: logging.Logger) -> None:
    """Called when an engine starts; each process warns once."""
    message = untried(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None
    if message is not None:
        warn_once(message, logger)


@cache
def warn_once(message: str, logger: logging.Logger) -> None:
    logger.warning(message)
