"""Folders. vLLM names one of its folders after FlashInfer's."""

from attn_backend.jit.kernel_cache import cache_dir

FLASHINFER_WORKSPACE_DIR = cache_dir() / "flashinfer"
