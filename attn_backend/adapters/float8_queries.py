"""Which layers gain from queries of the cache's 8 bits."""

from __future__ import annotations

import torch

from attn_backend.jit.manifest import MULTIPLIED_FLOAT8_HEAD_DIMS, HeadDims, default_design
from attn_backend.kernels.native import arch_on


def multiplies_float8(float8: torch.dtype | None, head_size: int, device: torch.device) -> bool:
    """Whether kernels multiply 8-bit queries as they are.

    Others would widen them: queries that were rounded would lose precision without any gain.

    Args:
        float8: the cache's dtype if it has 8 bits.
    """
    heads = HeadDims.of(head_size)
    has_kernel = float8 == torch.float8_e4m3fn and heads in MULTIPLIED_FLOAT8_HEAD_DIMS
    return has_kernel and device.type == "cuda" and default_design(arch_on(device), heads).multiplies_float8
