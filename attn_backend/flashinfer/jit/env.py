"""flashinfer.jit.env: folders. vLLM names one of its folders after FlashInfer's."""

from __future__ import annotations

from ...jit.kernel_cache import cache_dir

__all__ = ["FLASHINFER_WORKSPACE_DIR"]

FLASHINFER_WORKSPACE_DIR = cache_dir() / "flashinfer"
