"""Layers over 8-bit caches with the scales of vLLM's own layers, compared with float64 attention over the
stored values.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.v1", reason="needs vLLM")

from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.attention import Attention
from vllm_float8 import attend_once, builder_of, cache_of, fill, held, layer_of, reasons
from vllm_layer import (
    NUM_PAGES,
    PAGE,
    Batch,
    make_batch,
    make_builder,
    make_cache,
    make_config,
    make_impl,
    make_spec,
)
from vllm_steps import TOLERANCE, check, fill_cache, run_layer

from attn_backend.adapters import layers
from attn_backend.adapters.layers import LayerSpec
from attn_backend.adapters.vllm.attention import AttnImpl, CpuAttnImpl, kv_cache_view
from attn_backend.adapters.vllm.backend import CpuAttnBackend
from attn_backend.adapters.vllm.metadata import AttnMetadataBuilder, layer_specs
from attn_backend.adapters.vllm.rules import FLOAT8_CACHES

MIXED = ([1, 1, 7, 40, 3], [33, 64, 23, 40, 100])


def serve(
    impl: AttnImpl,
    layer: torch.nn.Module,
    cache: Tensor,
    batch: Batch,
    dtype: torch.dtype = torch.float32,
    **mask: Any,
) -> None:
    builder = builder_of([impl], dtype, num_kv_heads=impl.num_kv_heads, head_size=impl.head_size)
    k, v = fill(impl, layer, cache, batch, dtype)
    query, output = attend_once(impl, layer, cache, builder.build(0, batch.metadata), batch, dtype)
    check(output, query, batch, k, v, **mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory", ["NHD", "HND", "padded", "interleaved"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_mixed_batch(kv_cache_dtype: str, memory: str, dtype: torch.dtype) -> None:
    cache, batch = cache_of(kv_cache_dtype, memory), make_batch(*MIXED)
    serve(make_impl(kv_cache_dtype=kv_cache_dtype), layer_of(0.05, 0.3), cache, batch, dtype)
    nothing = cache.view(FLOAT8_CACHES[kv_cache_dtype]).float().isnan()
    # nothing else was written
    assert (~nothing).sum() == sum(batch.kv_lens) * cache.shape[1] * cache.shape[3]


def test_a_cache_that_comes_in_its_own_dtype() -> None:
    serve(
        make_impl(kv_cache_dtype="fp8"),
        layer_of(),
        cache_of("fp8").view(torch.float8_e4m3fn),
        make_batch(*MIXED),
    )


def test_scales_of_heads() -> None:
    serve(
        make_impl(kv_cache_dtype="fp8"),
        layer_of([0.02, 0.4], [1.5, 0.1]),
        cache_of("fp8"),
        make_batch(*MIXED),
    )


def test_numbers_that_are_too_large_are_limited() -> None:
    serve(make_impl(kv_cache_dtype="fp8"), layer_of(0.002, 0.003), cache_of("fp8"), make_batch(*MIXED))


@pytest.mark.parametrize("arguments", [{"sliding_window": 9}, {"logits_soft_cap": 5.0}])
def test_windows_and_soft_caps(arguments: dict[str, Any]) -> None:
    mask = {"window_left": 8} if "sliding_window" in arguments else arguments
    serve(
        make_impl(kv_cache_dtype="fp8", **arguments),
        layer_of(0.1, 0.2),
        cache_of("fp8"),
        make_batch(*MIXED),
        **mask,
    )


def test_each_layer_has_its_own_scales() -> None:
    impls = [make_impl(kv_cache_dtype="fp8") for _ in range(2)]
    layers, caches = [layer_of(0.05, 0.3), layer_of(0.6, 0.02)], [cache_of("fp8") for _ in range(2)]
    builder, batch = builder_of(list(impls)), make_batch(*MIXED)
    assert len(builder.planned) == 1
    metadata = builder.build(0, batch.metadata)
    for impl, layer, cache in zip(impls, layers, caches, strict=True):
        k, v = fill(impl, layer, cache, batch, torch.float32)
        query, output = attend_once(impl, layer, cache, metadata, batch, torch.float32)
        check(output, query, batch, k, v)


def test_scales_that_are_found_later() -> None:
    """vLLM up to 0.27 may compute the scales in the first step (calculate_kv_scales). The tensors stay the
    same, and kernels read them when they run.
    """
    impl, layer, cache = make_impl(kv_cache_dtype="fp8"), layer_of(), cache_of("fp8")
    serve(impl, layer, cache, make_batch(*MIXED))
    view = kv_cache_view(cache, 64)
    layer._k_scale.fill_(0.04)
    layer._v_scale.fill_(0.2)
    serve(impl, layer, cache, make_batch(*MIXED, seed=1))
    assert kv_cache_view(cache, 64) is view


@pytest.mark.parametrize("names", [("_k_scale",), ("_v_scale",), ("_k_scale", "_v_scale")])
def test_scales_in_other_tensors(names: tuple[str, ...]) -> None:
    """compressed-tensors puts its own tensors into the layer once weights are loaded."""
    impl, layer, cache = make_impl(kv_cache_dtype="fp8"), layer_of(), cache_of("fp8")
    serve(impl, layer, cache, make_batch(*MIXED))
    for name in names:
        layer.register_buffer(name, torch.tensor([0.05]))
    serve(impl, layer, cache, make_batch(*MIXED, seed=1))


@pytest.mark.parametrize("set_later", [False, True], ids=["constructor", "layer"])
def test_a_layer_that_reads_another_ones_cache_reads_it_with_its_scales(set_later: bool) -> None:
    """Gemma 4's MTP drafts: vLLM sets it on the layer after creating the impl."""
    target = "layer.0"
    writer, reader = (
        make_impl(kv_cache_dtype="fp8"),
        make_impl(kv_cache_dtype="fp8", kv_sharing_target_layer_name=None if set_later else target),
    )
    cache, batch, layer = cache_of("fp8"), make_batch(*MIXED), layer_of(0.05, 0.3)
    metadata = builder_of([writer, reader]).build(0, batch.metadata)
    k, v = fill(writer, layer, cache, batch, torch.float32)
    reading_layer = layer_of(7.0, 9.0)
    if set_later:
        reading_layer.kv_sharing_target_layer_name = target
    query, output = attend_once(reader, reading_layer, cache, metadata, batch, torch.float32)
    check(output, query, batch, k, v)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("vllm_as_it_was")
def test_a_captured_graph_reads_the_scales_of_its_replay(device: str) -> None:
    """On a CPU the captured code just runs again."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    batch = make_batch([20, 7, 33], [20, 7, 33])  # all tokens are written again at each replay
    cm = batch.metadata
    cm.query_start_loc, cm.seq_lens, cm.block_table_tensor = (
        x.to(device) for x in (cm.query_start_loc, cm.seq_lens, cm.block_table_tensor)
    )
    slots = cm.slot_mapping.to(device)
    model = SimpleNamespace(dtype=dtype, get_num_attention_heads=lambda config: 6)
    impl, layer, cache = make_impl(kv_cache_dtype="fp8"), layer_of().to(device), cache_of("fp8").to(device)
    metadata = make_builder([impl], make_spec(dtype=torch.uint8), device, model_config=model).build(0, cm)
    query, key, value = (torch.randn(60, heads, 64).to(device, dtype) for heads in (6, 2, 2))
    output = torch.full_like(query, torch.nan)

    def run() -> None:
        impl.do_kv_cache_update(layer, key, value, cache, slots)
        impl.forward(layer, query, key, value, cache, metadata, output)

    replay = run
    run()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    for k_scale, v_scale in ((0.05, 0.3), (0.4, 0.02)):
        layer._k_scale.fill_(k_scale)
        layer._v_scale.fill_(v_scale)
        replay()
        k, v = torch.full((2, NUM_PAGES * PAGE, 2, 64), torch.nan, dtype=torch.float64)
        k[batch.new_slots] = held(key.cpu(), layer._k_scale.cpu(), "fp8")
        v[batch.new_slots] = held(value.cpu(), layer._v_scale.cpu(), "fp8")
        check(output.cpu(), query.cpu(), batch, k, v)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_shared_prefix(kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that begin with the same 12 pages."""
    monkeypatch.setattr(layers, "use_cascade", lambda: "always")
    batch = make_batch(
        [1, 1, 3, 1], [12 * PAGE + own for own in (1, 30, 16, 7)], shared_pages=12, table_width=16
    )
    impl, layer, cache = (
        make_impl(kv_cache_dtype=kv_cache_dtype),
        layer_of(0.05, 0.3),
        cache_of(kv_cache_dtype),
    )
    builder = builder_of([impl])
    k, v = fill(impl, layer, cache, batch, torch.float32)
    query, output = attend_once(impl, layer, cache, builder.build(0, batch.metadata), batch, torch.float32)
    check(output, query, batch, k, v)
    taken = [node for node in builder.planned[impl.spec].attention.schedule().forest if node.group >= 0]
    assert (taken[0].num_requests, taken[0].begin_page, taken[0].end_page) == (4, 0, 12)


def test_an_encoder_has_no_cache() -> None:
    """vLLM gives its group the dtype of the other caches."""
    impl = make_impl(kv_cache_dtype="fp8", attn_type="encoder_only")
    assert impl.spec.kv_dtype is None
    batch = make_batch([20, 7], [20, 7], causal=False)
    metadata = builder_of([impl]).build(0, batch.metadata)
    query, key, value = (torch.randn(27, heads, 64) for heads in (6, 2, 2))
    output = torch.full_like(query, torch.nan)
    impl.forward(layer_of(), query, key, value, torch.empty(0), metadata, output)
    for rows in (slice(0, 20), slice(20, 27)):
        expected, _ = oracle.attention(query[rows], key[rows], value[rows], causal=False)
        assert (output[rows].double() - expected).norm() <= TOLERANCE[torch.float32] * expected.norm()


def test_queries_keep_16_bits() -> None:
    """vLLM's layer quantizes queries if its impl supports that."""
    config = VllmConfig(cache_config=CacheConfig(block_size=PAGE, cache_dtype="fp8"))
    backend: Any = CpuAttnBackend
    with set_current_vllm_config(config):
        layer = Attention(
            6, 128, 128**-0.5, 2, cache_config=config.cache_config, prefix="layer", attn_backend=backend
        )
    assert not layer.impl.supports_quant_query_input
    assert layer.query_quant is None


def test_plan_keys_say_which_8_bits() -> None:
    keys = [make_impl(kv_cache_dtype=name).spec.kv_dtype for name in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")]
    assert keys == [None, torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2]


def test_plans_of_layers_that_vllm_does_not_know() -> None:
    """Its attention tests build metadata for a layer that does not exist."""
    config = make_config(cache_config=SimpleNamespace(cache_dtype="fp8_e5m2"))
    assert layer_specs(config, make_spec(dtype=torch.uint8), ["placeholder"]) == [
        LayerSpec(6, 2, 64, -1, kv_dtype=torch.float8_e5m2)
    ]


@pytest.mark.parametrize("kv_cache_dtype", ["nvfp4_4over6", "fp8_ds_mla", "turboquant_k8v4"])
def test_layers_that_are_refused(kv_cache_dtype: str) -> None:
    message = (
        f"a KV cache of dtype {kv_cache_dtype}: pass fp8 or the model's dtype as --kv-cache-dtype, or "
        f"unset ATTN_BACKEND_VLLM_CPU"
    )
    with pytest.raises(NotImplementedError, match=message):
        make_impl(kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("impl", [AttnImpl, CpuAttnImpl])
def test_wide_heads_are_served(impl: type[AttnImpl]) -> None:
    assert impl(4, 512, 1.0, 1, kv_cache_dtype="fp8").cache_dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_the_backend_says_so(kv_cache_dtype: str, dtype: torch.dtype) -> None:
    assert reasons(kv_cache_dtype=kv_cache_dtype, dtype=dtype) == []
    assert (
        reasons(kv_cache_dtype=kv_cache_dtype, use_per_head_quant_scales=True, has_sink=True, head_size=64)
        == []
    )
    assert reasons(kv_cache_dtype=kv_cache_dtype, head_size=512, dtype=torch.float16) == []


@pytest.mark.parametrize(
    ("skipped", "has_16_bits"),
    [
        ([], [False, False, False]),
        (["1"], [False, True, False]),
        (["sliding_window"], [True, False, True]),
        (["0", "1", "2"], [True, True, True]),
    ],
)
def test_layers_that_skip_8_bits(skipped: list[str], has_16_bits: list[bool]) -> None:
    """--kv-cache-dtype-skip-layers, with vLLM's own layers. Each kind of cache is a group with a builder."""
    dtype = torch.float16
    config = VllmConfig(
        cache_config=CacheConfig(block_size=PAGE, cache_dtype="fp8", kv_cache_dtype_skip_layers=skipped)
    )
    backend: Any = CpuAttnBackend
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(config):
            made = [
                Attention(
                    6,
                    64,
                    64**-0.5,
                    2,
                    cache_config=config.cache_config,
                    per_layer_sliding_window=window,
                    prefix=f"model.layers.{number}.self_attn.attn",
                    attn_backend=backend,
                )
                for number, window in enumerate((20, None, 20))
            ]
    finally:
        torch.set_default_dtype(torch.float32)
    batch = make_batch(*MIXED)
    for layer, is_plain in zip(made, has_16_bits, strict=True):
        spec = layer.get_kv_cache_spec(config)
        assert spec.dtype == (dtype if is_plain else torch.uint8)
        model = SimpleNamespace(dtype=dtype, get_num_attention_heads=lambda config: 6)
        of_engine = make_config({"layer": layer}, model_config=model, cache_config=config.cache_config)
        builder = AttnMetadataBuilder(
            replace(spec, block_size=PAGE), ["layer"], of_engine, torch.device("cpu")
        )
        window = -1 if layer.sliding_window is None else layer.sliding_window - 1
        if is_plain:
            cache = make_cache("NHD", dtype=dtype)
            k, v = fill_cache(cache, batch)
            query, output = run_layer(layer.impl, builder.build(0, batch.metadata), batch, cache, k, v)
        else:
            layer._k_scale.fill_(0.05)
            layer._v_scale.fill_(0.3)
            cache = cache_of("fp8")
            k, v = fill(layer.impl, layer, cache, batch, dtype)
            query, output = attend_once(
                layer.impl, layer, cache, builder.build(0, batch.metadata), batch, dtype
            )
        check(output, query, batch, k, v, window_left=window)
