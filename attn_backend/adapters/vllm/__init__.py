"""vLLM plugin: `--attention-backend CUSTOM`. With ATTN_BACKEND_VLLM_CPU=1 it replaces vLLM's CPU backends.

vLLM finds `register` through the entry point group `vllm.general_plugins`.
"""

from attn_backend.adapters.vllm.plugin import register

__all__ = ["register"]
