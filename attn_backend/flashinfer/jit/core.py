"""flashinfer.jit.core: the logger, for SGLang, which sets its level."""

from __future__ import annotations

import logging

__all__ = ["logger"]

logger = logging.getLogger("attn_backend.flashinfer")
