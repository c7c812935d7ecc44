"""MLA: vLLM's own layer, metadata and chunked prefix around our builder and implementation, on CPU tensors,
compared with float64 attention.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1", reason="needs vLLM")

from mla_layer import (
    HEADS,
    LATENT,
    NOPE,
    ROPE,
    SCALE,
    Chosen,
    V,
    check,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.mla.prefill.registry import (
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)
from vllm.v1.attention.backends.mla.prefill.selector import get_mla_prefill_backend
from vllm_latents import Problem, make_impl
from vllm_layer import PAGE, make_batch

from attn_backend.adapters.vllm import compat, plugin
from attn_backend.adapters.vllm.backend import AttnBackend
from attn_backend.adapters.vllm.mla import (
    AmxMlaBackend,
    CpuMlaBackend,
    LatentCache,
    MlaBackend,
    MlaPrefill,
)
from attn_backend.adapters.vllm.rules import OTHER_BACKEND, OTHER_CACHE


@pytest.fixture(autouse=True)
def no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND_SAMPLER", "0")


DECODES = ([1, 1, 1], [33, 64, 5])
SPECULATION = ([3, 1, 4], [33, 64, 20])
NEW_PROMPTS = ([40, 7], [40, 7])
# two over latents, two after a prefix, one whole prompt
CACHED_PREFIXES = ([1, 2, 9, 40, 12], [33, 70, 100, 40, 60])
SEVERAL_CHUNKS = ([1, 5, 6, 7], [90, 180, 190, 200])  # in a workspace of 512 tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "lens",
    [DECODES, SPECULATION, NEW_PROMPTS, CACHED_PREFIXES, SEVERAL_CHUNKS],
    ids=lambda lens: f"{lens[0]}-{lens[1]}",
)
def test_a_layer_of_vllm(lens: tuple[list[int], list[int]], dtype: torch.dtype) -> None:
    problem, batch = Problem(dtype), make_batch(*lens, table_width=16)
    output, expected = problem.run(batch)
    check(output, expected, dtype)
    kept = problem.cache.isfinite().all(-1).sum()
    assert kept == sum(batch.kv_lens), "nothing else was written"
    assert problem.metadata.num_decodes == sum(length <= 4 for length in lens[0])
    num_chunks = len(compat.context_chunks(problem.metadata.prefill)) if problem.metadata.prefill else 0
    assert num_chunks >= {id(CACHED_PREFIXES): 1, id(SEVERAL_CHUNKS): 2}.get(id(lens), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("lens", [DECODES, SPECULATION, NEW_PROMPTS], ids=lambda lens: f"{lens[0]}-{lens[1]}")
def test_a_layer_over_8_bit_latents(
    lens: tuple[list[int], list[int]], cache_dtype: str, dtype: torch.dtype
) -> None:
    """With the scale of the layer. (vLLM's gather of a cached prefix does not support 8 bits on a CPU.)"""
    problem, batch = Problem(dtype, cache_dtype=cache_dtype), make_batch(*lens, table_width=16)
    output, expected = problem.run(batch)
    check(output, expected, dtype)
    assert int((problem.cache != 0x7F).any(-1).sum()) == sum(batch.kv_lens), "nothing else was written"
    assert problem.builder.decode_attention.kv_dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("num_slots", [0, 3, 5, 9])
@pytest.mark.parametrize("num_tokens", [0, 5])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_slots_and_tokens_of_different_numbers(cache_dtype: str, num_tokens: int, num_slots: int) -> None:
    """Both may be padded for a CUDA graph.

    A token without a slot is not written; a slot without a token keeps its content.
    """
    kv_c, k_pe, scale = torch.randn(num_tokens, LATENT), torch.randn(num_tokens, 1, ROPE), torch.tensor(0.25)
    empty = (
        torch.full((4, PAGE, LATENT + ROPE), torch.nan)
        if cache_dtype == "auto"
        else torch.full((4, PAGE, LATENT + ROPE), 0x7F, dtype=torch.uint8)
    )
    cache, slots = empty.clone(), torch.randperm(4 * PAGE)[:num_slots]
    latents = LatentCache(cache_dtype, LATENT)
    latents.append(kv_c, k_pe, cache, slots, scale)
    written = min(num_tokens, num_slots)
    rows, expected = cache.flatten(0, 1), torch.cat([kv_c, k_pe.squeeze(1)], -1)[:written]
    if cache_dtype == "auto":
        assert torch.equal(rows[slots[:written]], expected)
    else:
        assert torch.equal(
            rows[slots[:written]].view(torch.float8_e4m3fn).float(),
            (expected / scale).to(torch.float8_e4m3fn).float(),
        )
    untouched = torch.ones(len(rows), dtype=torch.bool)
    untouched[slots[:written]] = False
    assert torch.equal(rows[untouched].nan_to_num(), empty.flatten(0, 1)[untouched].nan_to_num())


def test_chunks_take_turns_in_every_layer() -> None:
    """When the second layer starts, the current plan belongs to the first layer's last chunk."""
    problem, batch = Problem(), make_batch(*SEVERAL_CHUNKS, table_width=16)
    problem.run(batch)
    prefill, planned = problem.builder._prefill_backend, []
    assert isinstance(prefill, MlaPrefill)
    plan_chunk = prefill._plan_chunk
    prefill._plan_chunk = lambda number: (planned.append(number), plan_chunk(number))  # type: ignore[method-assign,assignment,func-returns-value]
    output, expected = problem.run(batch)
    check(output, expected, torch.float32)
    assert planned == list(range(len(prefill._chunks)))
    assert len(planned) > 1


def test_padding_of_a_full_graph() -> None:
    problem, batch = Problem(), make_batch([1, 1], [20, 50], padding=2)
    output, expected = problem.run(batch, padding=2)
    check(output, expected, torch.float32)


def test_a_graph_serves_the_next_batch() -> None:
    """The plan lies in the builder's workspace, so metadata of an older batch runs the newest plan."""
    problem = Problem()
    problem.run(make_batch([1, 1], [20, 50]))
    older = problem.metadata.decode.attention
    output, expected = problem.run(make_batch([1, 1, 1], [9, 60, 33], seed=1))
    check(output, expected, torch.float32)
    assert problem.metadata.decode.attention is older


def test_lse_where_ranks_merge_states() -> None:
    problem, batch = Problem(), make_batch(*SPECULATION)
    problem.run(batch)
    problem.impl.need_to_return_lse_for_decode = True
    q = torch.randn(sum(batch.query_lens), HEADS, LATENT + ROPE)
    for given in (q, q.split([LATENT, ROPE], -1)):
        out, lse = problem.impl.forward_mqa(
            tuple(given) if isinstance(given, tuple) else given,
            problem.cache,
            problem.metadata,
            problem.layer,
        )
        assert out.shape == (len(q), HEADS, LATENT)
        row = 0
        for query_len, slots in zip(batch.query_lens, batch.slots, strict=True):
            for i in range(query_len):
                keys = problem.cache.flatten(0, 1)[slots[: len(slots) - query_len + i + 1]].double()
                scores = q[row].double() @ keys.T * SCALE
                assert torch.allclose(lse[row].double(), scores.logsumexp(-1), atol=1e-5)
                row += 1


def test_the_users_prefill_backend_stays() -> None:
    assert type(Problem(chosen="FLASH_ATTN").builder._prefill_backend) is Chosen
    assert type(Problem().builder._prefill_backend) is MlaPrefill


@pytest.mark.parametrize("lens", [NEW_PROMPTS, SEVERAL_CHUNKS], ids=str)
def test_prefills_that_vllm_gives_us_by_name(lens: tuple[list[int], list[int]]) -> None:
    """vLLM made the layer's prefill backend. Each builder has a copy, with its own workspace."""
    problem, batch = Problem(chosen="CUSTOM", prefill=MlaPrefill), make_batch(*lens, table_width=16)
    output, expected = problem.run(batch)
    check(output, expected, torch.float32)
    of_builder = problem.builder._prefill_backend
    assert type(of_builder) is MlaPrefill
    assert of_builder is not problem.layer.prefill_backend
    # A builder of another backend leaves the workspace to the first batch.
    problem.builder._prefill_backend = problem.layer.prefill_backend.clone()
    output, expected = problem.run(batch)
    check(output, expected, torch.float32)


@pytest.mark.parametrize(
    ("capability", "value_width", "works"), [((9, 0), V, True), ((7, 5), V, False), ((9, 0), 20, False)]
)
def test_vllm_finds_our_prefill_backend_by_name(
    capability: tuple[int, int], value_width: int, works: bool, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(
        is_cpu=lambda: False,
        get_device_capability=lambda: DeviceCapability(*capability),
        is_rocm=lambda: False,
    )
    monkeypatch.setattr("vllm.platforms.current_platform", gpu)
    plugin.register()
    widths = SimpleNamespace(qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=value_width)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, hf_text_config=widths),
        attention_config=SimpleNamespace(mla_prefill_backend=MLAPrefillBackendEnum.CUSTOM),
    )
    if works:
        assert get_mla_prefill_backend(config) is MlaPrefill
    else:
        with pytest.raises(ValueError, match="CUSTOM is not valid"):
            get_mla_prefill_backend(config)


def test_another_package_keeps_the_name_of_its_prefill_backend(registry: Any) -> None:
    register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, "other_package.Prefill")
    plugin.register()
    assert MLAPrefillBackendEnum.CUSTOM.get_path() == "other_package.Prefill"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"kv_cache_dtype": "fp8_ds_mla"},
            r"a cache of latents of dtype fp8_ds_mla \(pass --kv-cache-dtype auto or fp8_e4m3\)",
        ),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            r"a cache of latents of dtype fp8_e5m2 \(pass --kv-cache-dtype auto or fp8_e4m3\)",
        ),
        (
            {"kv_cache_dtype": "int8_per_token_head"},
            r"a cache of latents of dtype int8_per_token_head \(pass --kv-cache-dtype auto or fp8_e4m3\)",
        ),
        ({"sliding_window": 128}, "the argument sliding_window"),
        ({"logits_soft_cap": 30.0}, "the argument logits_soft_cap"),
        ({"indexer": object()}, "the argument indexer"),
        ({"topk_indices_buffer": torch.zeros(1)}, "the argument topk_indices_buffer"),
        ({"attn_type": "encoder"}, "attention of type encoder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_layers_that_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(
        NotImplementedError,
        match=f"attn_backend does not support {reason}.*: choose another --attention-backend",
    ):
        make_impl(None, **changes)


def test_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request has the same bits by itself and in a batch, also after a cached prefix that other prefixes
    would split into other chunks: nothing is decompressed.
    """
    monkeypatch.setattr(compat, "batch_invariant", lambda: True)
    problem, batch = Problem(), make_batch(*SEVERAL_CHUNKS, table_width=16)
    assert problem.builder.reorder_batch_threshold == 256, "as many rows as a step may have"
    output, expected = problem.run(batch)
    check(output, expected, torch.float32)
    assert (problem.metadata.num_prefills, problem.metadata.num_decode_tokens) == (0, sum(batch.query_lens))
    q, old = torch.randn(sum(batch.query_lens), HEADS, LATENT + ROPE), problem.metadata
    together, _ = problem.impl.forward_mqa(q, problem.cache, old, problem.layer)
    row = 0
    for request, query_len in enumerate(batch.query_lens):
        alone = make_batch([query_len], [batch.kv_lens[request]], table_width=16)
        alone.metadata.block_table_tensor = batch.metadata.block_table_tensor[request : request + 1]
        alone.metadata.seq_lens_cpu_upper_bound = alone.metadata.seq_lens
        of_request, _ = problem.impl.forward_mqa(
            q[row : row + query_len], problem.cache, problem.builder.build(0, alone.metadata), problem.layer
        )
        assert of_request.equal(together[row : row + query_len])
        row += query_len


def test_bits_do_not_depend_on_the_cached_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """In batch invariant mode: whole prompts, and their last tokens after a cached prefix."""
    monkeypatch.setattr(compat, "batch_invariant", lambda: True)
    kv_lens = [150, 70, 1]
    problem, batch = Problem(), make_batch(kv_lens, kv_lens, table_width=16)
    batch.metadata.is_prefilling = torch.tensor([True] * 3)
    problem.run(batch)
    q = torch.randn(sum(kv_lens), HEADS, LATENT + ROPE)
    whole, _ = problem.impl.forward_mqa(q, problem.cache, problem.metadata, problem.layer)
    for rest in (1, 2, 17, 64):
        query_lens = [min(rest, length) for length in kv_lens]
        some = make_batch(query_lens, kv_lens, table_width=16).metadata
        some.block_table_tensor = batch.metadata.block_table_tensor
        some.seq_lens_cpu_upper_bound = some.seq_lens
        some.is_prefilling = batch.metadata.is_prefilling
        rows, expected = (
            torch.cat([x[-new:] for x, new in zip(all_rows.split(kv_lens), query_lens, strict=True)])
            for all_rows in (q, whole)
        )
        out, _ = problem.impl.forward_mqa(rows, problem.cache, problem.builder.build(0, some), problem.layer)
        schedule = problem.builder.decode_attention.schedule()
        assert (schedule.of_groups("kind") == schedule.max_kind).all()
        assert out.equal(expected), rest


def test_deployments_that_are_refused() -> None:
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=2)
    with pytest.raises(NotImplementedError, match="prefill context parallelism"):
        Problem(parallel_config=parallel)
    model = SimpleNamespace(dtype=torch.bfloat16)
    with pytest.raises(
        NotImplementedError, match=r"a cache of latents of torch\.float32 for a model of torch\.bfloat16"
    ):
        Problem(model_config=model)


DEEPSEEK = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 64,
    "use_mla": True,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16},
        {"block_size": 16},
        {"block_size": None},
        {"device_capability": DeviceCapability(8, 0)},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"use_batch_invariant": True},
        {"use_dcp": True},
    ],
    ids=str,
)
def test_accepts(changes: dict[str, Any]) -> None:
    assert MlaBackend.validate_configuration(**DEEPSEEK | changes) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": False}, f"non-MLA not supported: {OTHER_BACKEND}"),
        ({"head_size": 320}, f"head_size not supported: {OTHER_BACKEND}"),
        ({"dtype": torch.float32}, "dtype not supported: pass --dtype bfloat16"),
        ({"kv_cache_dtype": "fp8_e5m2"}, f"kv_cache_dtype not supported: {OTHER_CACHE}"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, f"kv_cache_dtype not supported: {OTHER_CACHE}"),
        ({"kv_cache_dtype": "nvfp4"}, f"kv_cache_dtype not supported: {OTHER_CACHE}"),
        (
            {"kv_cache_dtype": "float16"},
            f"kv_cache_dtype float16 is not the model's dtype torch.bfloat16, which latents must have: "
            f"{OTHER_CACHE}",
        ),
        ({"use_sparse": True}, f"sparse not supported: {OTHER_BACKEND}"),
        ({"block_size": 8}, "block_size not supported: pass --block-size 16"),
        ({"has_sink": True}, f"attention sinks not supported: {OTHER_BACKEND}"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], reason: str) -> None:
    assert MlaBackend.validate_configuration(**DEEPSEEK | changes) == [reason]


def test_the_class_is_chosen_by_the_model(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_backend.adapters.vllm.plugin import register
    from attn_backend.adapters.vllm.support import CPU_SWITCH

    monkeypatch.setenv(CPU_SWITCH, "1")
    register()
    assert registry.CUSTOM.get_class() is AttnBackend  # without a model
    for uses_mla, wanted in ((True, MlaBackend), (False, AttnBackend)):
        config = SimpleNamespace(model_config=SimpleNamespace(use_mla=uses_mla))
        monkeypatch.setattr(compat, "get_current_vllm_config_or_none", lambda config=config: config)
        assert registry.CUSTOM.get_class() is wanted
        module, name = wanted.full_cls_name()  # vLLM finds it again by this name
        assert getattr(__import__(module, fromlist=[name]), name) is wanted
    for name, backend in (("CPU_MLA", CpuMlaBackend), ("AMX_MLA", AmxMlaBackend)):
        if name in registry.__members__:
            assert registry[name].get_class() is backend
            assert backend.get_name() == name
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        plugin.Other  # noqa: B018
