"""Decode context parallelism of MLA: vLLM's layers, builders, gathers and merges of all ranks around our
builder and implementation, compared with float64.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.v1", reason="needs vLLM")
pytest.importorskip("vllm.v1.attention.ops.dcp", reason="needs vLLM 0.29 or later")

from dcp_ranks import Ranks, lay_out, make_ranks
from mla_layer import (
    HEADS,
    LATENT,
    NOPE,
    ROPE,
    SCALE,
    WIDTHS,
    Chosen,
    Projection,
    V,
    make_layer,
    make_mla_config,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.ops.dcp import MLADCPManager
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm_layer import NUM_PAGES, PAGE

from attn_backend.adapters.vllm import support
from attn_backend.adapters.vllm.mla import MlaImpl, MlaMetadataBuilder
from attn_backend.adapters.vllm.sparse_mla import SparseMlaBackend

# decodes come first; the others are prefills, some after a cached prefix
MIXED = ([1, 1, 1, 3, 9, 40, 7], [33, 64, 1, 40, 100, 40, 60])
DECODES = ([1, 1, 1, 1], [3, 100, 17, 64])
SPECULATION = ([3, 4, 3], [50, 60, 3])


def gather(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    batch_size: int,
    seq_starts: Tensor,
) -> None:
    """vLLM's kernel that gathers a rank's part of cached prefixes, and more if another rank's is longer."""
    for i in range(batch_size):
        begin, end = cu_seq_lens[i : i + 2].tolist()
        tokens = torch.arange(end - begin) + seq_starts[i]
        pages = block_table[i].long().clamp_max(NUM_PAGES - 1)
        dst[begin:end] = src_cache[pages[tokens // PAGE], tokens % PAGE]


class Deployment:
    """A layer of MLA on each rank, with its heads, its builder and its part of the cache."""

    def __init__(self, ranks: Ranks, interleave: int, cache_dtype: str = "auto", comm: str = "ag_rs") -> None:
        self.ranks, self.size, self.interleave, self.cache_dtype = (
            ranks,
            ranks.world_size,
            interleave,
            cache_dtype,
        )
        torch.manual_seed(0)
        config = VllmConfig()
        config.parallel_config.decode_context_parallel_size = self.size
        self.projections = [Projection(torch.float32) for _ in range(self.size)]
        stored = torch.float32 if cache_dtype == "auto" else torch.uint8

        def make(rank: int) -> tuple[Any, Any, Any, Tensor]:
            named = {
                "alibi_slopes": None,
                "sliding_window": None,
                "kv_cache_dtype": cache_dtype,
                "logits_soft_cap": None,
                "attn_type": "decoder",
            }
            named |= {
                "kv_sharing_target_layer_name": None,
                "qk_head_dim": NOPE + ROPE,
                "kv_b_proj": self.projections[rank],
                "indexer": None,
            }
            impl = MlaImpl(
                num_heads=HEADS, head_size=LATENT + ROPE, scale=SCALE, num_kv_heads=1, **named, **WIDTHS
            )
            layer = make_layer(
                impl,
                self.projections[rank],
                torch.float32,
                cache_dtype,
                Chosen(HEADS, SCALE, LATENT, NOPE, ROPE, V, None),
            )
            of_config = make_mla_config(
                layer,
                torch.float32,
                cache_dtype,
                kernel_config=SimpleNamespace(enable_jit_warmup=False),
                num_speculative_tokens=0,
            )
            vars(of_config.parallel_config).update(
                decode_context_parallel_size=self.size, cp_kv_cache_interleave_size=interleave
            )
            vars(of_config.parallel_config).update(dcp_comm_backend=comm, num_ubatches=1)
            of_config.model_config.use_mla = True
            layer.dcp_manager = MLADCPManager(
                vllm_config=of_config,
                device=torch.device("cpu"),
                num_heads=HEADS,
                query_head_dim=LATENT + ROPE,
                output_head_dim=LATENT,
                query_dtype=torch.float32,
                output_dtype=torch.float32,
                padded_num_heads=None,
                is_lse_base_on_e=impl.lse_base_on_e,
                use_pcp=False,
            )
            spec = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=LATENT + ROPE, dtype=stored)
            builder = MlaMetadataBuilder(spec, ["layer"], of_config, torch.device("cpu"))
            fill = torch.nan if stored == torch.float32 else 0x7F
            return impl, layer, builder, torch.full((NUM_PAGES, PAGE, LATENT + ROPE), fill, dtype=stored)

        with set_current_vllm_config(config):
            self.impls, self.layers, self.builders, self.caches = zip(*ranks.run(make), strict=True)

    def step(self, lens: tuple[list[int], list[int]], seed: int = 0, padding: int = 0) -> None:
        """One layer over a batch; its older tokens are already in the caches."""
        generator = torch.Generator().manual_seed(seed)
        batch = lay_out(lens, self.size, self.interleave, generator, padding=padding)
        latents = torch.randn(len(batch.slots), LATENT + ROPE, generator=generator)
        written = latents
        if self.cache_dtype != "auto":
            scale = self.layers[0]._k_scale
            rounded = (latents / scale).to(torch.float8_e4m3fn)
            latents, written = rounded.float() * scale, rounded.view(torch.uint8)
        q = torch.randn(len(batch.new) + padding, HEADS * self.size, NOPE + ROPE, generator=generator)
        kv_c, k_pe = torch.cat([latents[batch.new], torch.zeros(padding, LATENT + ROPE)]).split(
            [LATENT, ROPE], -1
        )

        def run(rank: int) -> Tensor:
            mine = batch.old & (batch.owners == rank)
            cache, layer = self.caches[rank], self.layers[rank]
            cache[batch.slots[mine] // PAGE, batch.slots[mine] % PAGE] = written[mine]
            cm = batch.metadata(rank, self.size, self.interleave, "cpu")
            metadata = self.builders[rank].build(0, cm)
            assert metadata.num_decodes == sum(query_len == 1 for query_len in lens[0]) + padding
            self.impls[rank].do_kv_cache_update(
                kv_c, k_pe.unsqueeze(1), cache, cm.slot_mapping, self.cache_dtype, layer._k_scale
            )
            output = torch.full((len(q), HEADS * V), torch.nan)
            MLAAttention.forward_impl(
                layer,
                q[:, rank * HEADS : (rank + 1) * HEADS],
                kv_c,
                k_pe.unsqueeze(1),
                cache,
                metadata,
                output=output,
            )
            return output

        for rank, output in enumerate(self.ranks.run(run)):
            w_uk, w_uv = self.projections[rank].parts(torch.float64)
            row = 0
            for query_len, tokens in zip(lens[0], batch.of_request, strict=True):
                latent, rotated = latents[tokens].double().split([LATENT, ROPE], -1)
                k = torch.cat([torch.einsum("tl,hnl->htn", latent, w_uk), rotated.expand(HEADS, -1, -1)], -1)
                of_rank = q[row : row + query_len, rank * HEADS : (rank + 1) * HEADS].double()
                scores = torch.einsum("qhd,htd->hqt", of_rank, k) * SCALE
                hidden = (
                    torch.arange(len(tokens)) > torch.arange(len(tokens) - query_len, len(tokens))[:, None]
                )
                probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
                expected = torch.einsum(
                    "hqt,htv->qhv", probabilities, torch.einsum("tl,hvl->htv", latent, w_uv)
                ).flatten(1)
                error = (output[row : row + query_len].double() - expected).norm() / expected.norm()
                assert error <= 1e-5
                row += query_len


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_SAMPLER", "0")
    monkeypatch.setattr(mla_attention.ops, "cp_gather_cache", gather, raising=False)


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("size", [2, 4])
def test_layers_of_vllm(monkeypatch: pytest.MonkeyPatch, size: int, interleave: int) -> None:
    deployment = Deployment(make_ranks(monkeypatch, size), interleave)
    for seed, lens in enumerate([MIXED, DECODES, SPECULATION]):
        deployment.step(lens, seed)


def test_padding_of_a_full_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    Deployment(make_ranks(monkeypatch, 2), 1).step(DECODES, padding=3)


@pytest.mark.parametrize(("cache_dtype", "comm"), [("fp8", "ag_rs"), ("auto", "a2a")])
def test_decodes(monkeypatch: pytest.MonkeyPatch, cache_dtype: str, comm: str) -> None:
    """Over 8-bit latents, with the engine's other merge."""
    Deployment(make_ranks(monkeypatch, 2), 4, cache_dtype, comm).step(DECODES)


def test_what_vllm_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with speculation are prefills: full graphs are made only for decodes of one token."""
    deployment = Deployment(make_ranks(monkeypatch, 2), 1)
    assert all(impl.need_to_return_lse_for_decode and impl.lse_base_on_e for impl in deployment.impls)
    assert [builder.reorder_batch_threshold for builder in deployment.builders] == [1, 1]
    config = deployment.builders[0].vllm_config
    assert (
        MlaMetadataBuilder.get_cudagraph_support(config, None)
        is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    config.parallel_config.decode_context_parallel_size = 1
    assert MlaMetadataBuilder.get_cudagraph_support(config, None) is AttentionCGSupport.UNIFORM_BATCH
    assert not SparseMlaBackend.supports_dcp()


def test_deployments_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NotImplementedError,
        match=r"decode context parallelism of 3 ranks.*pass --decode-context-parallel-size 1, or 2, 4, 8",
    ):
        Deployment(make_ranks(monkeypatch, 3), 1)
    config = SimpleNamespace(
        attention_config=SimpleNamespace(), parallel_config=SimpleNamespace(decode_context_parallel_size=2)
    )
    assert "decode context parallelism of sparse attention" in str(support.unsupported_sparse_feature(config))  # type: ignore[arg-type]
