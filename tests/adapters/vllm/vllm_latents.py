"""A layer of vLLM's multi-head latent attention, with its builder and its cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.v1", reason="needs vLLM")
from mla_layer import (
    HEADS,
    LATENT,
    NOPE,
    ROPE,
    SCALE,
    Chosen,
    Projection,
    V,
    impl_arguments,
    make_layer,
    make_mla_config,
)
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm_layer import NUM_PAGES, PAGE, Batch

from attn_backend.adapters.vllm.mla import (
    MlaImpl,
    MlaMetadataBuilder,
)


def make_impl(kv_b_proj: Any, **changes: Any) -> MlaImpl:
    return MlaImpl(
        num_heads=HEADS,
        head_size=LATENT + ROPE,
        scale=SCALE,
        num_kv_heads=1,
        **impl_arguments(kv_b_proj) | changes,
    )


class Problem:
    """A layer of vLLM, its builder, and its cache of NaN.

    Args:
        threshold: the most new tokens of a request that attends to its latents.
        prefill: the class of the layer's prefill backend, which vLLM has made.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        threshold: int = 4,
        chosen: Any = None,
        cache_dtype: str = "auto",
        prefill: type[MLAPrefillBackend] = Chosen,
        **changes: Any,
    ) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config

        torch.manual_seed(0)
        self.projection = Projection(dtype)
        with set_current_vllm_config(VllmConfig()):
            self.impl = make_impl(self.projection, kv_cache_dtype=cache_dtype)
        of_layer: Any = make_layer(self.impl, self.projection, dtype, cache_dtype, None)
        self.layer = of_layer
        config = make_mla_config(self.layer, dtype, cache_dtype, chosen, **changes)
        of_layer.prefill_backend = prefill(
            num_heads=HEADS,
            scale=SCALE,
            kv_lora_rank=LATENT,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=V,
            vllm_config=config,
        )
        stored = dtype if cache_dtype == "auto" else torch.uint8
        spec = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=LATENT + ROPE, dtype=stored)
        builder = type("Builder", (MlaMetadataBuilder,), {"reorder_batch_threshold": threshold})
        self.builder = builder(spec, ["layer"], config, torch.device("cpu"))
        self.cache = torch.full((NUM_PAGES, PAGE, LATENT + ROPE), torch.nan, dtype=dtype)
        if stored == torch.uint8:
            self.cache = torch.full((NUM_PAGES, PAGE, LATENT + ROPE), 0x7F, dtype=torch.uint8)  # NaN
        self.dtype, self.cache_dtype = dtype, cache_dtype

    def run(self, batch: Batch, padding: int = 0) -> tuple[Tensor, Tensor]:
        """One layer over a batch; its older tokens are already in the cache. Returns its output and the
        float64 output.
        """
        latents = torch.full((NUM_PAGES * PAGE, LATENT + ROPE), torch.nan, dtype=self.dtype)
        for query_len, slots in zip(batch.query_lens, batch.slots, strict=True):
            latents[slots] = torch.randn(len(slots), LATENT + ROPE).to(self.dtype)
            old = slots[: len(slots) - query_len]
            # the values that 8-bit latents represent; new ones as they will be stored
            if self.cache.dtype == torch.uint8:
                rounded = (latents[slots].float() / self.layer._k_scale).to(torch.float8_e4m3fn)
                latents[slots] = (rounded.float() * self.layer._k_scale).to(self.dtype)
                self.cache[old // PAGE, old % PAGE] = rounded.view(torch.uint8)[: len(old)]
            else:
                self.cache[old // PAGE, old % PAGE] = latents[old]
        new = torch.cat([latents[batch.new_slots], torch.zeros(padding, LATENT + ROPE, dtype=self.dtype)])
        q = torch.randn(len(new), HEADS, NOPE + ROPE).to(self.dtype)
        batch.metadata.seq_lens_cpu_upper_bound = batch.metadata.seq_lens
        metadata = self.builder.build(0, batch.metadata)
        self.metadata = metadata
        kv_c, k_pe = new.split([LATENT, ROPE], -1)
        self.impl.do_kv_cache_update(
            kv_c,
            k_pe.unsqueeze(1),
            self.cache,
            batch.metadata.slot_mapping,
            self.cache_dtype,
            self.layer._k_scale,
        )
        output = torch.full((len(new), HEADS * V), torch.nan, dtype=self.dtype)
        MLAAttention.forward_impl(self.layer, q, kv_c, k_pe.unsqueeze(1), self.cache, metadata, output=output)
        return output, self.expected(batch, q, latents)

    def expected(self, batch: Batch, q: Tensor, latents: Tensor) -> Tensor:
        w_uk, w_uv = self.projection.parts(torch.float64)
        outputs, row = [], 0
        for query_len, slots in zip(batch.query_lens, batch.slots, strict=True):
            latent, rotated = latents[slots].double().split([LATENT, ROPE], -1)
            k = torch.cat([torch.einsum("tl,hnl->htn", latent, w_uk), rotated.expand(HEADS, -1, -1)], -1)
            v = torch.einsum("tl,hvl->htv", latent, w_uv)
            scores = torch.einsum("qhd,htd->hqt", q[row : row + query_len].double(), k) * SCALE
            hidden = torch.arange(len(slots)) > torch.arange(len(slots) - query_len, len(slots))[:, None]
            probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqt,htv->qhv", probabilities, v).flatten(1))
            row += query_len
        return torch.cat(outputs)
