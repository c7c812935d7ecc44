"""flashinfer.jit.core: the logger, whose level SGLang sets."""

from __future__ import annotations

import logging

__all__ = ["logger"]

logger = logging.getLogger("attn_backend.flashinfer")
