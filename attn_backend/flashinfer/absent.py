"""Modules of FlashInfer's that engines import from when they start, for products, mixtures of experts,
communication: their names are there and refuse calls.

A module or name that engines treat as optional is left out, so that they work without it.
"""

from __future__ import annotations

from typing import Any

from .features import missing

# module -> what engines import of it, unconditionally, where flashinfer is installed (vLLM 0.26 to 0.33,
# SGLang 0.5.17 to 0.5.23)
NAMES = {
    "comm.mnnvl": ("CommBackend",),
    "fp4_quantization": ("block_scale_interleave",),
    "fused_moe": (
        "convert_to_block_layout",
        "trtllm_fp4_block_scale_moe",
        "trtllm_fp4_block_scale_routed_moe",
        "trtllm_mxint4_block_scale_moe",
    ),
    "fused_moe.core": ("_maybe_get_cached_w3_w1_permute_indices", "get_w2_permute_indices_with_cache"),
    "gemm": ("fp8_blockscale_gemm_sm90", "gemm_fp8_nt_groupwise"),
}


def names_of(module: str) -> dict[str, Any]:
    """What the alias's module `flashinfer.<module>` has."""
    return {name: missing(f"{module}.{name}") for name in NAMES[module]}
