"""8-bit layers, caches and builders, as vLLM makes them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.v1", reason="needs vLLM")
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend
from vllm_layer import (
    NUM_PAGES,
    PAGE,
    Batch,
    make_builder,
    make_cache,
    make_spec,
)

from attn_backend.adapters.vllm.attention import AttnImpl
from attn_backend.adapters.vllm.backend import AttnBackend
from attn_backend.adapters.vllm.metadata import AttnMetadata, AttnMetadataBuilder
from attn_backend.adapters.vllm.rules import FLOAT8_CACHES


def layer_of(k_scale: float | list[float] = 1.0, v_scale: float | list[float] = 1.0) -> torch.nn.Module:
    """The part of vLLM's `Attention` that has scales.

    A list has one scale for each KV head, as in compressed-tensors.
    """
    layer = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    for name, value in (("_k_scale", k_scale), ("_v_scale", v_scale)):
        if isinstance(value, list):
            layer.register_buffer(name, torch.tensor(value))
        else:
            getattr(layer, name).fill_(value)
    return layer


def cache_of(kv_cache_dtype: str, memory: str = "NHD", num_kv_heads: int = 2, head_size: int = 64) -> Tensor:
    """As vLLM passes it: uint8. Full of NaN."""
    return make_cache(memory, num_kv_heads, head_size, FLOAT8_CACHES[kv_cache_dtype]).view(torch.uint8)


def builder_of(impls: list[AttnImpl], dtype: torch.dtype = torch.float32, **spec: Any) -> AttnMetadataBuilder:
    model = SimpleNamespace(dtype=dtype, get_num_attention_heads=lambda config: 6)
    return make_builder(list(impls), make_spec(dtype=torch.uint8, **spec), model_config=model)


def held(x: Tensor, scale: Tensor, kv_cache_dtype: str) -> Tensor:
    """In float64: K or V [tokens, heads, head_size] as the cache stores it."""
    dtype = FLOAT8_CACHES[kv_cache_dtype]
    largest, factor = torch.finfo(dtype).max, scale.reshape(-1, 1)
    return (x.float() / factor).clamp(-largest, largest).to(dtype).double() * factor.double()


def fill(
    impl: AttnImpl, layer: torch.nn.Module, cache: Tensor, batch: Batch, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Writes random K and V of all tokens of the batch as vLLM does.

    Returns the stored values by slot.
    """
    k, v = torch.randn(2, NUM_PAGES * PAGE, impl.num_kv_heads, impl.head_size).to(dtype)
    for slots in (
        torch.cat([slots[: len(slots) - n] for n, slots in zip(batch.query_lens, batch.slots, strict=True)]),
        batch.metadata.slot_mapping,
    ):
        impl.do_kv_cache_update(layer, k[slots], v[slots], cache, slots)
    return held(k, layer._k_scale, impl.kv_cache_dtype), held(v, layer._v_scale, impl.kv_cache_dtype)


def attend_once(
    impl: AttnImpl,
    layer: torch.nn.Module,
    cache: Tensor,
    metadata: AttnMetadata,
    batch: Batch,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    query = torch.randn(sum(batch.query_lens), impl.num_heads, impl.head_size).to(dtype)
    output = torch.full_like(query, torch.nan)
    impl.forward(layer, query, None, None, cache, metadata, output)
    return query, output


def reasons(**changes: Any) -> list[str]:
    """Why vLLM would refuse the backend for a layer like this."""
    asked = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "fp8",
        "block_size": 16,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
    }
    known = inspect.signature(AttentionBackend.validate_configuration).parameters
    return AttnBackend.validate_configuration(
        **{name: value for name, value in {**asked, **changes}.items() if name in known}
    )
