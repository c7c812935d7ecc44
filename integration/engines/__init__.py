"""The differences between the serving engines: command lines, environment variables, endpoints and result
files.
"""

from __future__ import annotations

from integration.engines.base import Client, Drafts, Engine, Launch, Metrics, Sampling, Token
from integration.engines.sglang import SGLang
from integration.engines.vllm import VLLM

ENGINES: dict[str, Engine] = {"vllm": VLLM(), "sglang": SGLang()}

__all__ = ["ENGINES", "Client", "Drafts", "Engine", "Launch", "Metrics", "Sampling", "Token"]
