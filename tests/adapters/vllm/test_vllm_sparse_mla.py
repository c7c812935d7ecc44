"""Sparse MLA: vLLM's own layer and metadata around our builder and implementation, on CPU tensors, compared
with float64 attention over the selected tokens.

vLLM's indexer has GPU kernels only, and vLLM refuses such models on a CPU. The tests fill in the selection.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import latent_cases
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
    WIDTHS,
    Chosen,
    Projection,
    V,
    check,
    impl_arguments,
    make_layer,
    make_mla_config,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import sparse_mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm_layer import NUM_PAGES, PAGE, Batch, make_batch

from attn_backend.adapters.vllm import compat
from attn_backend.adapters.vllm.mla import MlaBackend, MlaPrefill
from attn_backend.adapters.vllm.rules import OTHER_BACKEND, OTHER_CACHE
from attn_backend.adapters.vllm.sparse_mla import SparseMlaBackend, SparseMlaImpl, SparseMlaMetadataBuilder
from attn_backend.kernels.attention import MAX_CUDA_INVARIANT_BATCH

TOPK = 24


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sampler and no group of ranks; torch replaces vLLM's small kernel that maps rows to requests."""
    monkeypatch.setenv("ATTN_BACKEND_SAMPLER", "0")
    monkeypatch.setattr(
        sparse_mla_attention, "get_tensor_model_parallel_world_size", lambda: 1, raising=False
    )
    monkeypatch.setattr(CommonAttentionMetadata, "token_to_req_indices", requests_of_rows, raising=False)


def requests_of_rows(metadata: CommonAttentionMetadata, buffer: Tensor) -> Tensor:
    """int32 [tokens]; 0 for padding."""
    lens = metadata.query_start_loc.diff()
    buffer.zero_()
    buffer[: lens.sum()] = torch.repeat_interleave(lens).int()
    return buffer[: metadata.num_actual_tokens]


def make_impl(kv_b_proj: Any, indices: Tensor | None, **changes: Any) -> SparseMlaImpl:
    with set_current_vllm_config(VllmConfig()):
        return SparseMlaImpl(
            HEADS,
            LATENT + ROPE,
            SCALE,
            1,
            **impl_arguments(kv_b_proj) | {"topk_indices_buffer": indices} | changes,
        )


class Problem:
    """A layer of vLLM, its builder, the buffer that its indexer would fill, and its cache.

    Args:
        prefill: whether vLLM has a prefill backend for the model: prompts of at most TOPK tokens then use it.
        between: pages of other layers between two of this one.
        device: of the builder.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        cache_dtype: str = "auto",
        *,
        prefill: bool = False,
        between: int = 0,
        device: str = "cpu",
        **changes: Any,
    ) -> None:
        torch.manual_seed(0)
        self.projection = Projection(dtype)
        self.indices = torch.full((256, TOPK), -1, dtype=torch.int32)
        self.impl = make_impl(self.projection, self.indices, kv_cache_dtype=cache_dtype)
        backend = Chosen(HEADS, SCALE, LATENT, NOPE, ROPE, V, None) if prefill else None
        self.layer = make_layer(self.impl, self.projection, dtype, cache_dtype, backend)
        self.layer._use_sparse_mha = MethodType(MLAAttention._use_sparse_mha, self.layer)
        self.layer.attn_backend = SparseMlaBackend
        config = make_mla_config(self.layer, dtype, cache_dtype, **changes)
        text = SimpleNamespace(index_topk=TOPK, **WIDTHS)
        vars(config.model_config).update(
            hf_text_config=text,
            hf_config=text,
            model_arch_config=SimpleNamespace(total_num_attention_heads=HEADS),
        )
        vars(config.attention_config).setdefault("sparse_mla_force_mqa", False)
        vars(config.attention_config).setdefault("hisparse_config", None)
        self.layer._vllm_config = config
        stored = dtype if cache_dtype == "auto" else torch.uint8
        width = 656 if cache_dtype == "fp8_ds_mla" else LATENT + ROPE
        spec = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=LATENT + ROPE, dtype=stored)
        builder = type("Builder", (SparseMlaMetadataBuilder,), {"reorder_batch_threshold": 4})
        self.builder = builder(spec, ["layer"], config, torch.device(device))
        memory = torch.zeros(NUM_PAGES, 1 + between, PAGE, width, dtype=stored)
        self.cache = memory[:, between].fill_(0x7F if stored == torch.uint8 else torch.nan)
        self.dtype, self.cache_dtype = dtype, cache_dtype

    def append(self, rows: Tensor, slots: Tensor) -> None:
        kv_c, k_pe = rows.split([LATENT, ROPE], -1)
        self.impl.do_kv_cache_update(
            kv_c, k_pe.unsqueeze(1), self.cache, slots, self.cache_dtype, self.layer._k_scale
        )

    def run(self, batch: Batch, padding: int = 0) -> tuple[Tensor, Tensor]:
        """One layer over a batch; its older tokens are already in the cache. Returns its output and the
        float64 output.
        """
        for query_len, slots in zip(batch.query_lens, batch.slots, strict=True):
            old = slots[: len(slots) - query_len]
            self.append(torch.randn(len(old), LATENT + ROPE).to(self.dtype), old)
        new = torch.randn(sum(batch.query_lens) + padding, LATENT + ROPE).to(self.dtype)
        q = torch.randn(len(new), HEADS, NOPE + ROPE).to(self.dtype)
        chosen = self.select(batch)
        batch.metadata.seq_lens_cpu_upper_bound = batch.metadata.seq_lens
        self.metadata = self.builder.build(0, batch.metadata)
        self.append(new, batch.metadata.slot_mapping)
        output = torch.full((len(new), HEADS * V), torch.nan, dtype=self.dtype)
        kv_c, k_pe = new.split([LATENT, ROPE], -1)
        MLAAttention.forward_impl(
            self.layer, q, kv_c, k_pe.unsqueeze(1), self.cache, self.metadata, output=output
        )
        return output, self.expected(batch, q, chosen)

    def select(self, batch: Batch) -> list[Tensor]:
        """Fills the buffer; returns the selected slots of each row."""
        chosen, row = [], 0
        self.indices.fill_(-1)
        for query_len, slots in zip(batch.query_lens, batch.slots, strict=True):
            for seen in range(len(slots) - query_len + 1, len(slots) + 1):
                tokens = torch.randperm(seen)[:TOPK]
                self.indices[row, torch.randperm(TOPK)[: len(tokens)]] = tokens.int()
                chosen.append(slots[tokens])
                row += 1
        return chosen

    def expected(self, batch: Batch, q: Tensor, chosen: list[Tensor]) -> Tensor:
        w_uk, w_uv = self.projection.parts(torch.float64)
        stored = (
            self.cache if self.cache_dtype in ("auto", "fp8_ds_mla") else self.cache.view(torch.float8_e4m3fn)
        )
        numbers = latent_cases.numbers_of(stored, float(self.layer._k_scale)).flatten(0, 1)
        outputs = []
        for row, slots in enumerate(chosen):
            latent, rotated = numbers[slots].split([LATENT, ROPE], -1)
            k = torch.cat([torch.einsum("tl,hnl->htn", latent, w_uk), rotated.expand(HEADS, -1, -1)], -1)
            v = torch.einsum("tl,hvl->htv", latent, w_uv)
            probabilities = (torch.einsum("hd,htd->ht", q[row].double(), k) * SCALE).softmax(-1)
            outputs.append(torch.einsum("ht,htv->hv", probabilities, v).flatten())
        return torch.stack(outputs)


DECODES = ([1, 1, 1], [33, 64, 5])
SPECULATION = ([3, 1, 4], [33, 64, 20])
MIXED = ([1, 2, 9, 40, 12], [33, 70, 100, 40, 60])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lens", [DECODES, SPECULATION, MIXED], ids=lambda lens: f"{lens[0]}-{lens[1]}")
def test_a_layer_of_vllm(lens: tuple[list[int], list[int]], dtype: torch.dtype) -> None:
    problem, batch = Problem(dtype), make_batch(*lens, table_width=16)
    output, expected = problem.run(batch)
    check(output, expected, dtype)
    assert problem.cache.isfinite().all(-1).sum() == sum(batch.kv_lens), "nothing else was written"


@pytest.mark.parametrize(
    ("cache_dtype", "dtype"),
    [("fp8", torch.float32), ("fp8_e4m3", torch.bfloat16), ("fp8_ds_mla", torch.bfloat16)],
)
@pytest.mark.parametrize("between", [0, 2])
def test_a_layer_over_8_bit_latents(cache_dtype: str, dtype: torch.dtype, between: int) -> None:
    """Whole rows with the layer's scale, and rows with separate scales; also with blocks of other layers
    between.
    """
    problem = Problem(dtype, cache_dtype, between=between)
    for _ in range(2):
        output, expected = problem.run(make_batch(*MIXED, table_width=16))
        check(output, expected, dtype)


def test_short_prompts_are_decompressed() -> None:
    """Prompts of at most TOPK tokens, all selected; requests with few new tokens stay in latents."""
    problem = Problem(prefill=True)
    assert type(problem.builder._prefill_backend) is MlaPrefill
    output, expected = problem.run(make_batch([1, 3, 10, TOPK], [60, 20, 10, TOPK], table_width=16))
    check(output, expected, torch.float32)
    assert problem.metadata.num_decode_tokens == 4
    output, expected = problem.run(make_batch([1, 10, TOPK + 5], [60, 10, TOPK + 5], seed=1, table_width=16))
    check(output, expected, torch.float32)


@pytest.mark.parametrize(("cache_dtype", "dtype"), [("auto", torch.float32), ("fp8_ds_mla", torch.bfloat16)])
def test_batch_invariance(cache_dtype: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests stay in latents, short prompts too. Each has the same bits as by itself."""
    monkeypatch.setattr(compat, "batch_invariant", lambda: True)
    problem, batch = (
        Problem(dtype, cache_dtype, prefill=True),
        make_batch([1, 3, 10, TOPK, 40], [60, 20, 10, TOPK, 64], table_width=16),
    )
    output, expected = problem.run(batch)
    check(output, expected, dtype)
    assert problem.metadata.prefill is None
    q = torch.randn(sum(batch.query_lens), HEADS, LATENT + ROPE).to(dtype)
    together, _ = problem.impl.forward_mqa(q, problem.cache, problem.metadata, problem.layer)
    selected, starts = problem.indices.clone(), batch.metadata.query_start_loc
    for request, query_len in enumerate(batch.query_lens):
        rows = slice(int(starts[request]), int(starts[request + 1]))
        problem.indices[:query_len] = selected[rows].flip(1)
        of_request = {
            "seq_lens": batch.metadata.seq_lens[request : request + 1],
            "block_table_tensor": batch.metadata.block_table_tensor[request : request + 1],
        }
        of_request |= dict.fromkeys(
            ["query_start_loc", "query_start_loc_cpu"], torch.tensor([0, query_len], dtype=torch.int32)
        )
        of_request |= {
            "seq_lens_cpu_upper_bound": of_request["seq_lens"],
            "slot_mapping": batch.metadata.slot_mapping[rows],
        }
        alone = replace(
            batch.metadata,
            num_reqs=1,
            num_actual_tokens=query_len,
            max_query_len=query_len,
            max_seq_len=batch.kv_lens[request],
            **of_request,
        )
        out, _ = problem.impl.forward_mqa(
            q[rows], problem.cache, problem.builder.build(0, alone), problem.layer
        )
        assert torch.equal(out, together[rows])


def test_padding_of_a_full_graph() -> None:
    problem, batch = Problem(), make_batch([1, 1], [20, 50], padding=2)
    output, expected = problem.run(batch, padding=2)
    check(output, expected, torch.float32)


def test_a_graph_serves_the_next_batch() -> None:
    """Metadata of an older batch runs the newest plan."""
    problem = Problem()
    problem.run(make_batch([1, 1], [20, 50]))
    older = problem.metadata.attention
    output, expected = problem.run(make_batch([1, 1, 1], [9, 60, 33], seed=1))
    check(output, expected, torch.float32)
    assert problem.metadata.attention is older


def test_lse_where_ranks_merge_states() -> None:
    problem, batch = Problem(), make_batch(*SPECULATION)
    problem.run(batch)
    problem.impl.need_to_return_lse_for_decode = True
    q = torch.randn(sum(batch.query_lens), HEADS, LATENT + ROPE)
    out, lse = problem.impl.forward_mqa(
        q.split([LATENT, ROPE], -1), problem.cache, problem.metadata, problem.layer
    )  # type: ignore[arg-type]
    assert out.shape == (len(q), HEADS, LATENT)
    assert lse is not None
    for row, slots in enumerate(_slots_of(problem, batch)):
        scores = q[row].double() @ problem.cache.flatten(0, 1)[slots].double().T * SCALE
        assert torch.allclose(lse[row].double(), scores.logsumexp(-1), atol=1e-5)


def _slots_of(problem: Problem, batch: Batch) -> list[Tensor]:
    requests = [i for i, query_len in enumerate(batch.query_lens) for _ in range(query_len)]
    return [
        batch.slots[request][problem.indices[row][problem.indices[row] >= 0].long()]
        for row, request in enumerate(requests)
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "a cache of latents of dtype fp8_e5m2"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "a cache of latents of dtype nvfp4_ds_mla"),
        ({"sliding_window": 128}, "the argument sliding_window"),
        ({"q_pad_num_heads": 64}, "the argument q_pad_num_heads"),
        ({"topk_indices_buffer": None}, "a sparse MLA layer without indices"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_layers_that_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(
        NotImplementedError,
        match=f"attn_backend does not support {reason}.*: choose another --attention-backend",
    ):
        make_impl(None, torch.zeros(8, TOPK, dtype=torch.int32), **changes)


def test_deployments_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = SimpleNamespace(
        use_prefill_query_quantization=False, mla_prefill_backend=None, hisparse_config=object()
    )
    with pytest.raises(NotImplementedError, match="latents in host memory"):
        Problem(attention_config=attention)
    with pytest.raises(NotImplementedError, match=r"fp8_ds_mla for a model of torch\.float16"):
        Problem(torch.float16, "fp8_ds_mla")
    monkeypatch.setattr(compat, "batch_invariant", lambda: True)
    scheduler = SimpleNamespace(max_num_seqs=MAX_CUDA_INVARIANT_BATCH + 1, max_num_batched_tokens=256)
    with pytest.raises(
        NotImplementedError, match=r"VLLM_BATCH_INVARIANT with batches of 1025 requests .*--max-num-seqs"
    ):
        Problem(device="cuda", scheduler_config=scheduler)


DEEPSEEK_V32 = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 64,
    "use_mla": True,
    "has_sink": False,
    "use_sparse": True,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla"])
def test_accepts(kv_cache_dtype: str) -> None:
    assert SparseMlaBackend.validate_configuration(**DEEPSEEK_V32 | {"kv_cache_dtype": kv_cache_dtype}) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_sparse": False}, f"non-sparse not supported: {OTHER_BACKEND}"),
        ({"head_size": 512}, f"head_size not supported: {OTHER_BACKEND}"),
        ({"kv_cache_dtype": "fp8_e5m2"}, f"kv_cache_dtype not supported: {OTHER_CACHE}"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, f"kv_cache_dtype not supported: {OTHER_CACHE}"),
        (
            {"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16},
            "kv_cache_dtype fp8_ds_mla not supported with a model of torch.float16: pass --dtype bfloat16",
        ),
        (
            {"kv_cache_dtype": "float16"},
            f"kv_cache_dtype float16 is not the model's dtype torch.bfloat16, which latents must have: "
            f"{OTHER_CACHE}",
        ),
        ({"use_dcp": True}, "DCP not supported: pass --decode-context-parallel-size 1"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], reason: str) -> None:
    assert SparseMlaBackend.validate_configuration(**DEEPSEEK_V32 | changes) == [reason]


def test_the_class_is_chosen_by_the_model(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_backend.adapters.vllm import register

    register()
    for text, wanted in (
        (SimpleNamespace(index_topk=2048), SparseMlaBackend),
        (SimpleNamespace(), MlaBackend),
    ):
        config = SimpleNamespace(model_config=SimpleNamespace(use_mla=True, hf_config=text))
        monkeypatch.setattr(compat, "get_current_vllm_config_or_none", lambda config=config: config)
        assert registry.CUSTOM.get_class() is wanted


def test_what_a_cache_is_like() -> None:
    """Releases that ask for the shape, and releases that lay the cache out themselves: a block's rows are
    numbered."""
    assert SparseMlaBackend.get_kv_cache_shape(7, 64, 1, 576) == (7, 64, 576)
    assert SparseMlaBackend.get_kv_cache_shape(7, 64, 1, 576, "fp8_ds_mla") == (7, 64, 656)
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    if hasattr(spec, "block_stride_alignment"):
        assert SparseMlaBackend.customize_spec(spec).block_stride_alignment == 576 * 2
    assert compat.with_whole_rows_between_blocks("a spec without the field") == "a spec without the field"
