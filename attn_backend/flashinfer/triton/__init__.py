"""flashinfer.triton: merging of attention states, which FlashInfer does in Triton."""

from __future__ import annotations

from . import cascade

__all__ = ["cascade"]
