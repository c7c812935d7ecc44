"""Heads and element types of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..kernels.attention_config import KV_DTYPE_NAMES
from ..kernels.head_dims import CPU_HEAD_DIMS_TEXT, CUDA_HEAD_DIMS_TEXT, HeadDims
from ..metadata.kv_cache import SCALED_DTYPES
from .arguments import DType, element_types
from .features import not_supported


@dataclass(frozen=True)
class Heads:
    """What an Attention is made for."""

    num_qo_heads: int
    num_kv_heads: int
    head_dims: HeadDims
    dtype: torch.dtype  # this and what follows: ElementTypes
    kv_dtype: torch.dtype | None = None
    float8_q: bool = False
    float8_out: bool = False

    @property
    def q_dtype(self) -> torch.dtype:
        return self.kv_dtype if self.float8_q and self.kv_dtype is not None else self.dtype

    @property
    def o_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.float8_out else self.dtype

    @property
    def is_over_float8(self) -> bool:
        """Whether K and V have scales."""
        return self.kv_dtype in SCALED_DTYPES

    @cached_property
    def default_scale(self) -> float:
        """sm_scale where none is given."""
        return float(self.head_dims.qk**-0.5)


@lru_cache(maxsize=256)
def heads_of(
    device: torch.device,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int | None,
    q_data_type: DType,
    kv_data_type: DType | None = None,
    o_data_type: DType | None = None,
) -> Heads:
    """What a plan says of heads. Kept: plans say the same from step to step.

    Raises:
        ValueError: an argument that is wrong. NotImplementedError: there are no kernels for them.
    """
    dims, types = (
        check_head_dims(head_dim_qk, head_dim_vo, device),
        element_types(q_data_type, kv_data_type, o_data_type),
    )
    if (
        types.kv_dtype is not None
        and types.float8_q
        and device.type == "cuda"
        and not dims.runs_over(KV_DTYPE_NAMES[types.kv_dtype], types.float8_q)
    ):
        not_supported(f"q_data_type = {types.kv_dtype} with head_dim = {dims} on CUDA")
    return Heads(num_qo_heads, num_kv_heads, dims, *types)


def check_head_dims(head_dim_qk: int, head_dim_vo: int | None, device: torch.device) -> HeadDims:
    """Columns of K and of V, which are those of K if head_dim_vo is None.

    Raises:
        NotImplementedError: there are no kernels for them.
    """
    dims = HeadDims(head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo)
    if device.type == "cuda" and not dims.runs_on_cuda:
        not_supported(f"head_dim = {dims} on CUDA, where it is {CUDA_HEAD_DIMS_TEXT}")
    if device.type != "cuda" and not dims.runs_on_cpu:
        not_supported(f"head_dim = {dims} on a CPU, must be {CPU_HEAD_DIMS_TEXT}")
    return dims
