"""The backends of models without latents, and the features that they claim to support.

vLLM asks these classes while it starts. `mla.py` and `sparse_mla.py` have the backends of models with
latents.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from attn_backend.jit.manifest import HeadDims

from . import compat
from .attention import AttnImpl, CpuAttnImpl, elements_of_row
from .metadata import AttnMetadataBuilder
from .rules import BYTE_CACHES, OTHER_CACHE, TOKEN_SCALED_CACHES, unsupported_cache
from .support import with_ways_out


class OwnBackend(AttentionBackend):
    """The common part of the backends."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        return compat.backend_name()

    @staticmethod
    def get_supported_kernel_block_sizes(*args: Any, **kwargs: Any) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        return with_ways_out(super().validate_configuration(*args, **kwargs))

    @classmethod
    def supports_dcp(cls) -> bool:
        return cls.get_impl_cls().supports_dcp

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_pcp(cls) -> bool:
        return False


class AttnBackend(OwnBackend):
    """The backend behind `--attention-backend CUSTOM`.

    The KV cache of a layer is one tensor [blocks, kv_heads, page, 2 * head_dim], K before V in the last
    dimension, in any memory layout whose last dimension is contiguous: NHD, HND, padded blocks and blocks
    that interleave layers are all the same to the kernels.

    With scales for each token and head, the last dimension has their bytes, too (bytes_of_row), and our own
    order within the same bytes (token_scaled_view).
    """

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *BYTE_CACHES]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_impl_cls() -> type[AttnImpl]:
        return AttnImpl

    @staticmethod
    def get_builder_cls() -> type[AttnMetadataBuilder]:
        return AttnMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
        **kwargs: Any,
    ) -> tuple[int, ...]:
        """Shape of a layer's KV cache (compat.py says which releases ask)."""
        return (num_blocks, num_kv_heads, block_size, elements_of_row(2 * head_size, cache_dtype_str))

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return compat.with_bytes_of_scales(spec)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return compat.kv_cache_stride_order(include_num_layers_dimension)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return AttnImpl.head_sizes

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in AttnImpl.attn_types

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *args: Any, **kwargs: Any
    ) -> str | None:
        if kv_cache_dtype not in TOKEN_SCALED_CACHES:
            return None  # validate_configuration() checks other dtypes
        unsupported = unsupported_cache(HeadDims.of(head_size), kv_cache_dtype, "cuda")
        return unsupported and f"{unsupported}: {OTHER_CACHE}"

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return True  # plans read the lengths on the device, and none on the host

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True


class CpuAttnBackend(AttnBackend):
    """Replaces vLLM's CPU_ATTN.

    vLLM takes this class without asking for its features: the constructor of a layer refuses unsupported ones
    (attention.py).
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CpuAttnImpl]:
        return CpuAttnImpl


class DiffKvImpl(AttnImpl):
    """A layer with values of head_size_v columns, which its model has just set on the backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.head_size_v = DiffKvBackend.head_size_v
        super().__init__(*args, **kwargs)


class DiffKvBackend(AttnBackend):
    """Keys and values of different sizes without latents (MiMo V2: 192 and 128 columns).

    Such a model picks one of vLLM's DIFFKV backends by its name in the registry, whatever --attention-backend
    says. It sets the width of values on that class, and hands the class to its layers. So these names stand
    for ours if the user has chosen it (plugin.py). The KV cache has AttnBackend's shape, with V of
    head_size_v columns.
    """

    head_size_v: ClassVar[int] = 128

    @staticmethod
    def set_head_size_v(head_size_v: int) -> None:
        """The model calls this before it makes a layer."""
        DiffKvBackend.head_size_v = head_size_v

    @classmethod
    def is_supported_on_current_device(cls, *args: Any, **kwargs: Any) -> bool:
        """Always True, since vLLM would silently take another backend: the constructor of a layer refuses
        unsupported features.
        """
        return True

    @staticmethod
    def get_impl_cls() -> type[AttnImpl]:
        return DiffKvImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
        **kwargs: Any,
    ) -> tuple[int, ...]:
        columns = head_size + DiffKvBackend.head_size_v
        return (num_blocks, num_kv_heads, block_size, elements_of_row(columns, cache_dtype_str))


class CpuDiffKvImpl(DiffKvImpl, CpuAttnImpl):
    """A layer on a CPU."""


class CpuDiffKvBackend(DiffKvBackend, CpuAttnBackend):
    """The same on a CPU, where vLLM has no such backend."""

    @staticmethod
    def get_impl_cls() -> type[CpuAttnImpl]:
        return CpuDiffKvImpl
