"""vLLM plugin: `--attention-backend CUSTOM` on a GPU. ATTN_BACKEND_VLLM_CPU=1 also replaces vLLM's CPU backends.

vLLM finds `register` through the entry point group `vllm.general_plugins`.
"""

from attn_backend.adapters.vllm.plugin import register

__all__ = ["register"]
