"""Keys and values of different sizes without latents (MiMo V2: 192 and 128 columns).

Such a model picks one of vLLM's DIFFKV backends by its name in the registry, tells its class how wide values
are, and hands it to its layers, whatever --attention-backend says. So these names stand for ours where the
user has chosen it (choice.py).
"""

from __future__ import annotations

from typing import Any, ClassVar

from attn_backend.adapters.vllm.backend import AttnBackend
from attn_backend.adapters.vllm.cpu import CpuAttnBackend
from attn_backend.adapters.vllm.impl import AttnImpl, CpuAttnImpl


class DiffKvImpl(AttnImpl):
    """A layer whose values are as wide as its model has just told the backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.head_size_v = DiffKvBackend.head_size_v
        super().__init__(*args, **kwargs)


class DiffKvBackend(AttnBackend):
    """The KV cache of a layer is as AttnBackend's, with V of head_size_v columns."""

    head_size_v: ClassVar[int] = 128

    @staticmethod
    def set_head_size_v(head_size_v: int) -> None:
        """The model calls this before it makes a layer."""
        DiffKvBackend.head_size_v = head_size_v

    @classmethod
    def is_supported_on_current_device(cls, *args: Any, **kwargs: Any) -> bool:
        """What is not supported is refused when a layer is made: here vLLM would silently take another
        backend.
        """
        return True

    @staticmethod
    def get_impl_cls() -> type[AttnImpl]:
        return DiffKvImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *args: Any, **kwargs: Any
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, head_size + DiffKvBackend.head_size_v)


class CpuDiffKvImpl(DiffKvImpl, CpuAttnImpl):
    """A layer on a CPU."""


class CpuDiffKvBackend(DiffKvBackend, CpuAttnBackend):
    """The same on a CPU, where vLLM has no such backend."""

    @staticmethod
    def get_impl_cls() -> type[CpuAttnImpl]:
        return CpuDiffKvImpl
