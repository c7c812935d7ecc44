"""The same backend in the place of vLLM's CPU_ATTN."""

from __future__ import annotations

from typing import ClassVar

import torch

from attn_backend.adapters.vllm.backend import AttnBackend
from attn_backend.adapters.vllm.impl import CpuAttnImpl


class CpuAttnBackend(AttnBackend):
    """vLLM takes whatever is registered as CPU_ATTN without asking what it supports: what cannot be served is
    refused when a layer is built (impl.py).
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CpuAttnImpl]:
        return CpuAttnImpl
