"""flashinfer.triton: merging of attention states, which Triton computes there."""

from __future__ import annotations

from . import cascade

__all__ = ["cascade"]
