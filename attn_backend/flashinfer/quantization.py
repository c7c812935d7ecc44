"""flashinfer.quantization: bits of custom masks."""

from __future__ import annotations

from ..variants import packbits, segment_packbits

__all__ = ["packbits", "segment_packbits"]
