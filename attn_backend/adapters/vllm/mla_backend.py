"""What this package tells vLLM that it can do with models of multi-head latent attention (DeepSeek, Kimi,
GLM).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import MultipleOf

from attn_backend.adapters.vllm.layer_cache import FLOAT8_LATENTS, PLAIN_CACHES
from attn_backend.adapters.vllm.mla_impl import MlaImpl
from attn_backend.adapters.vllm.mla_metadata import MlaMetadataBuilder
from attn_backend.adapters.vllm.refusal import OTHER_CACHE, with_ways_out


class MlaBackend(MLACommonBackend):
    """The backend behind `--attention-backend CUSTOM` where the model has latents.

    The KV cache of a layer is [blocks, page, latent and rotated part].
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FLOAT8_LATENTS]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[MlaImpl]:
        return MlaImpl

    @staticmethod
    def get_builder_cls() -> type[MlaMetadataBuilder]:
        return MlaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*args: Any, **kwargs: Any) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return 64  # the Hopper kernel loads a KV tile of 64 tokens by one box

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        return with_ways_out(super().validate_configuration(*args, **kwargs))

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        if kv_cache_dtype in PLAIN_CACHES and PLAIN_CACHES[kv_cache_dtype] != dtype:
            return (
                f"kv_cache_dtype {kv_cache_dtype} is not the model's dtype {dtype}, which latents must "
                f"have: {OTHER_CACHE}"
            )
        return None

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_dcp(cls) -> bool:
        return cls.get_impl_cls().supports_dcp

    @classmethod
    def supports_pcp(cls) -> bool:
        return False


class CpuMlaBackend(MlaBackend):
    """vLLM takes whatever is registered as CPU_MLA without asking what it supports: what cannot be served is
    refused when a layer is built (mla_impl.py).
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"


class AmxMlaBackend(CpuMlaBackend):
    """The same in the place of AMX_MLA, which vLLM takes on CPUs with AMX."""

    @staticmethod
    def get_name() -> str:
        return "AMX_MLA"
