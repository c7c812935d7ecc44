"""A group of attention layers as vLLM's model runners drive it, on CPU tensors, without the engine."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from attn_backend.adapters.vllm.attention import CpuAttnImpl
from attn_backend.adapters.vllm.backend import AttnBackend
from attn_backend.adapters.vllm.metadata import AttnMetadataBuilder

PAGE = 16
NUM_PAGES = 64


class Layer(AttentionLayerBase):
    """The attributes of a layer that a builder reads."""

    def __init__(self, impl: Any, backend: type = AttnBackend) -> None:
        self.impl, self._backend = impl, backend

    def get_attn_backend(self) -> Any:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...


def make_config(layers: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    """The parts of VllmConfig that are read; `changes` replaces whole parts."""
    parts = {
        "scheduler_config": SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
        "compilation_config": SimpleNamespace(
            max_cudagraph_capture_size=None,
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            static_forward_context=layers or {},
        ),
        "model_config": SimpleNamespace(get_num_attention_heads=lambda parallel_config: 6),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        "speculative_config": None,
    }
    return SimpleNamespace(**{**parts, **changes})


def make_spec(
    num_kv_heads: int = 2, head_size: int = 64, dtype: torch.dtype = torch.float32, **fields: Any
) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=PAGE, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype, **fields
    )


def make_impl(
    num_heads: int = 6, head_size: int = 64, num_kv_heads: int = 2, **arguments: Any
) -> CpuAttnImpl:
    return CpuAttnImpl(num_heads, head_size, head_size**-0.5, num_kv_heads, **arguments)


def make_builder(
    impls: list[Any], spec: FullAttentionSpec | None = None, device: str = "cpu", **changes: Any
) -> AttnMetadataBuilder:
    layers = {f"layer.{i}": Layer(impl) for i, impl in enumerate(impls)}
    return AttnMetadataBuilder(
        spec or make_spec(), list(layers), make_config(layers, **changes), torch.device(device)
    )


def make_cache(
    memory: str, num_kv_heads: int = 2, head_size: int = 64, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A KV cache [pages, num_kv_heads, PAGE, 2 * head_size] full of NaN.

    Args:
        memory: NHD, HND, `padded` (HND, with a gap after each page) or `interleaved` (NHD, one layer of two
            that share each page).
    """
    content = 2 * head_size
    if memory == "HND":
        cache = torch.empty(NUM_PAGES, num_kv_heads, PAGE, content, dtype=dtype)
    elif memory == "NHD":
        cache = torch.empty(NUM_PAGES, PAGE, num_kv_heads, content, dtype=dtype).transpose(1, 2)
    elif memory == "padded":
        page = num_kv_heads * PAGE * content
        cache = torch.empty(NUM_PAGES, page + 64, dtype=dtype)[:, :page].view(
            NUM_PAGES, num_kv_heads, PAGE, content
        )
    else:
        assert memory == "interleaved"
        cache = torch.empty(NUM_PAGES, 2, PAGE, num_kv_heads, content, dtype=dtype)[:, 1].transpose(1, 2)
    return cache.fill_(torch.nan)


@dataclass
class Batch:
    """Requests with query_lens new tokens of kv_lens, on shuffled pages."""

    query_lens: list[int]
    kv_lens: list[int]
    slots: list[Tensor]
    metadata: CommonAttentionMetadata

    @property
    def new_slots(self) -> Tensor:
        """int64 [tokens], as vLLM's slot mapping without padding."""
        return torch.cat(
            [
                torch.empty(0, dtype=torch.int64),
                *(slots[len(slots) - n :] for n, slots in zip(self.query_lens, self.slots, strict=True)),
            ]
        )


def make_batch(
    query_lens: list[int],
    kv_lens: list[int],
    *,
    shared_pages: int = 0,
    padding: int = 0,
    table_width: int = 12,
    causal: bool = True,
    seed: int = 0,
) -> Batch:
    """
    Args:
        shared_pages: leading pages that are the same for all requests.
        padding: number of padding requests and padding tokens, as in a full CUDA graph.
        table_width: columns of the block table; entries beyond a request's pages point outside the cache.
    """
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(NUM_PAGES, generator=generator)
    table = torch.full((len(kv_lens) + padding, table_width), 1 << 20, dtype=torch.int32)
    table[len(kv_lens) :] = 0
    slots, used = [], shared_pages
    for i, kv_len in enumerate(kv_lens):
        count = -(-kv_len // PAGE)
        of_request = torch.cat([pages[:shared_pages], pages[used : used + count - shared_pages]])
        used += count - shared_pages
        table[i, :count] = of_request.int()
        slots.append((of_request[:, None] * PAGE + torch.arange(PAGE)).flatten()[:kv_len])
    starts = torch.tensor([0, *query_lens, *[0] * padding], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tokens = sum(query_lens)
    batch = Batch(query_lens, kv_lens, slots, None)
    mapping = torch.cat([batch.new_slots, torch.full((padding,), -1)])
    batch.metadata = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([*kv_lens, *[0] * padding], dtype=torch.int32),
        num_reqs=len(kv_lens) + padding,
        num_actual_tokens=tokens + padding,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(kv_lens, default=0),
        block_table_tensor=table,
        slot_mapping=mapping,
        causal=causal,
    )
    return batch
