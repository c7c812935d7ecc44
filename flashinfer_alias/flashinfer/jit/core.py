"""The logger, for SGLang, which sets its level."""

import logging

logger = logging.getLogger("attn_backend.flashinfer")
