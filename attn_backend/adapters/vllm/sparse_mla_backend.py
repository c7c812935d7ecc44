"""What this package tells vLLM that it can do with sparse attention over latents (DeepSeek V3.2, GLM 5)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attn_backend.adapters.vllm import compat
from attn_backend.adapters.vllm.layer_cache import SCALED_LATENTS
from attn_backend.adapters.vllm.mla_backend import MlaBackend
from attn_backend.adapters.vllm.sparse_mla_impl import SparseMlaImpl
from attn_backend.adapters.vllm.sparse_mla_metadata import SparseMlaMetadataBuilder
from attn_backend.metadata.kv_cache import SCALED_LATENT_BYTES


class SparseMlaBackend(MlaBackend):
    """The backend behind `--attention-backend CUSTOM` where an indexer selects the tokens that a row attends
    to. The KV cache of a layer is that of MlaBackend, or uint8 [blocks, page, 656] (fp8_ds_mla).
    """

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*MlaBackend.supported_kv_cache_dtypes, SCALED_LATENTS]

    @staticmethod
    def get_impl_cls() -> type[SparseMlaImpl]:
        return SparseMlaImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMlaMetadataBuilder]:
        return SparseMlaMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Shape of a layer's KV cache (compat.py says which releases ask)."""
        return (
            num_blocks,
            block_size,
            SCALED_LATENT_BYTES if cache_dtype_str == SCALED_LATENTS else head_size,
        )

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return compat.with_whole_rows_between_blocks(spec)

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        if kv_cache_dtype != SCALED_LATENTS:
            return super().supports_combination(head_size, dtype, kv_cache_dtype, *args, **kwargs)
        return (
            None
            if dtype == torch.bfloat16
            else f"kv_cache_dtype {SCALED_LATENTS} not supported with a model of {dtype}: pass --dtype "
            f"bfloat16"
        )
