"""Builder and implementation on CPU tensors, compared with float64 attention."""

from __future__ import annotations

import gc
import weakref
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1", reason="needs vLLM")

from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices, split_attn_metadata
from vllm_layer import (
    NUM_PAGES,
    PAGE,
    make_batch,
    make_builder,
    make_cache,
    make_config,
    make_impl,
    make_spec,
)
from vllm_steps import MIXED, TOLERANCE, check, fill_cache, run_layer

from attn_backend.adapters import layers
from attn_backend.adapters.layers import LayerSpec
from attn_backend.adapters.vllm.attention import AttnImpl, CpuAttnImpl, kv_cache_view
from attn_backend.adapters.vllm.metadata import (
    AttnMetadata,
    AttnMetadataBuilder,
    layer_specs,
    workspace_maxima,
)
from attn_backend.kernels.attention import Attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory", ["NHD", "HND", "padded", "interleaved"])
def test_mixed_batch(memory: str, dtype: torch.dtype) -> None:
    impl, cache, batch = make_impl(), make_cache(memory, dtype=dtype), make_batch(*MIXED)
    builder = make_builder([impl], make_spec(dtype=dtype))
    k, v = fill_cache(cache, batch)
    query, output = run_layer(impl, builder.build(0, batch.metadata), batch, cache, k, v)
    check(output, query, batch, k, v)
    written = cache[batch.new_slots // PAGE, :, batch.new_slots % PAGE]
    assert torch.equal(written, torch.cat([k[batch.new_slots], v[batch.new_slots]], dim=-1))
    # nothing else was written
    assert cache.isfinite().sum() == sum(batch.kv_lens) * cache.shape[1] * cache.shape[3]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_head_shapes(num_heads: int, num_kv_heads: int, head_size: int) -> None:
    impl, cache, batch = (
        make_impl(num_heads, head_size, num_kv_heads),
        make_cache("NHD", num_kv_heads, head_size),
        make_batch(*MIXED),
    )
    builder = make_builder([impl], make_spec(num_kv_heads, head_size))
    k, v = fill_cache(cache, batch)
    query, output = run_layer(impl, builder.build(0, batch.metadata), batch, cache, k, v)
    check(output, query, batch, k, v)


def test_layers_of_one_group_with_different_windows_share_the_batch() -> None:
    """Gemma with vLLM's hybrid KV cache manager off."""
    windows = [None, 8, 8, 1]
    impls = [make_impl(sliding_window=window, logits_soft_cap=5.0) for window in windows]
    builder, batch = make_builder(impls), make_batch(*MIXED)
    assert len(builder.planned) == 3
    metadata = builder.build(0, batch.metadata)
    for impl, window in zip(impls, windows, strict=True):
        cache = make_cache("HND")
        k, v = fill_cache(cache, batch)
        query, output = run_layer(impl, metadata, batch, cache, k, v)
        check(
            output, query, batch, k, v, window_left=-1 if window is None else window - 1, logits_soft_cap=5.0
        )


@pytest.mark.parametrize("cascade", [True, "always"])
@pytest.mark.parametrize(
    ("query_lens", "own_lens", "pays"),
    [
        pytest.param([1] * 6, [1, 30, 16, 7, 40, 17], True, id="decode"),
        pytest.param([2, 1, 3, 1], [2, 9, 33, 18], True, id="extend"),
        # on a CPU, where cost depends on the rows
        pytest.param([30, 1, 3, 25], [30, 9, 33, 60], False, id="long extend"),
    ],
)
def test_shared_prefix(
    query_lens: list[int],
    own_lens: list[int],
    pays: bool,
    cascade: bool | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests that begin with the same 12 pages, with cascade off and on."""
    outputs = []
    for mode in (False, cascade):
        monkeypatch.setattr(layers, "use_cascade", lambda mode=mode: mode)
        torch.manual_seed(0)
        batch = make_batch(
            query_lens, [12 * PAGE + own_len for own_len in own_lens], shared_pages=12, table_width=16
        )
        impl, cache = make_impl(), make_cache("NHD")
        builder = make_builder([impl])
        k, v = fill_cache(cache, batch)
        query, output = run_layer(impl, builder.build(0, batch.metadata), batch, cache, k, v)
        check(output, query, batch, k, v)
        outputs.append(output)
        taken = [node for node in builder.planned[impl.spec].attention.schedule().forest if node.group >= 0]
        if mode == "always" or (mode and pays):
            assert (taken[0].num_requests, taken[0].begin_page, taken[0].end_page) == (len(query_lens), 0, 12)
        else:
            assert not taken
    assert (outputs[1] - outputs[0]).norm() <= TOLERANCE[torch.float32] * outputs[0].norm()


def test_not_causal() -> None:
    impl, cache, batch = make_impl(), make_cache("NHD"), make_batch(*MIXED, causal=False)
    builder = make_builder([impl])
    k, v = fill_cache(cache, batch)
    metadata = builder.build_for_drafting(batch.metadata, 0)
    assert metadata.causal is False
    query, output = run_layer(impl, metadata, batch, cache, k, v)
    check(output, query, batch, k, v, causal=False)


def test_padding_of_a_full_cuda_graph() -> None:
    """Padding requests have no query and no KV; padding tokens have slot -1."""
    impl, cache, batch = make_impl(), make_cache("NHD"), make_batch([1, 1, 1], [50, 1, 16], padding=5)
    builder = make_builder([impl])
    k, v = fill_cache(cache, batch)
    query, output = run_layer(impl, builder.build(0, batch.metadata), batch, cache, k, v, padding=5)
    check(output, query, batch, k, v)


def test_padding_of_a_piecewise_graph() -> None:
    """Queries and keys are padded, the metadata is not. The block table and query_start_loc may still come
    from the padded batch.
    """
    impl, cache, batch = make_impl(), make_cache("NHD"), make_batch(*MIXED)
    builder = make_builder([impl])
    k, v = fill_cache(cache, batch)
    wide = make_batch(*MIXED, padding=2).metadata
    batch.metadata.block_table_tensor, batch.metadata.query_start_loc = (
        wide.block_table_tensor,
        wide.query_start_loc,
    )
    query, output = run_layer(impl, builder.build(0, batch.metadata), batch, cache, k, v, padding=12)
    check(output, query, batch, k, v)


def test_halves_of_a_step_that_overlap() -> None:
    """Dual-batch overlap: vLLM splits a step's tokens in two, here in the middle of a request. Each half has
    a separate builder and thread.
    """
    impl, cache, batch = make_impl(), make_cache("NHD"), make_batch(*MIXED)
    k, v = fill_cache(cache, batch)
    batch.metadata.seq_lens_cpu_upper_bound = batch.metadata.seq_lens
    halves, _ = maybe_create_ubatch_slices(
        True, np.array(batch.query_lens), sum(batch.query_lens), len(batch.query_lens), 2
    )
    # both halves have a part of this request
    assert halves[0].request_slice.stop > halves[1].request_slice.start
    # both are planned before either runs
    metadata = [make_builder([impl]).build(0, half) for half in split_attn_metadata(halves, batch.metadata)]
    query = torch.randn(sum(batch.query_lens), impl.num_heads, impl.head_size)
    output = torch.full_like(query, torch.nan)
    key, value = k[batch.new_slots], v[batch.new_slots]

    def run(half: int) -> None:
        tokens, of_half = halves[half].token_slice, metadata[half]
        impl.do_kv_cache_update(None, key[tokens], value[tokens], cache, of_half.slot_mapping)
        impl.forward(None, query[tokens], None, None, cache, of_half, output[tokens])

    for half in (0, 1):
        thread = Thread(target=run, args=(half,))
        thread.start()
        thread.join()
    check(output, query, batch, k, v)


def test_idle_batch_of_data_parallelism() -> None:
    impl, cache, batch = make_impl(), make_cache("NHD"), make_batch([], [], padding=4)
    builder = make_builder([impl])
    k, v = fill_cache(cache, batch)
    _, output = run_layer(impl, builder.build(0, batch.metadata), batch, cache, k, v, padding=4)
    assert output.isnan().all()
    assert cache.isnan().all()


def test_capture_and_profiling_batches() -> None:
    impl = make_impl()
    builder = make_builder([impl])
    batch = make_batch([1] * 8, [PAGE * 8] * 8)  # every request at its maximum length
    assert isinstance(builder.build_for_cudagraph_capture(batch.metadata), AttnMetadata)
    output = torch.full((4, 6, 64), torch.nan)
    assert impl.forward(None, torch.randn(4, 6, 64), None, None, torch.empty(0), None, output) is output
    assert (output == 0).all()


def test_plan_follows_the_last_batch() -> None:
    """A CUDA graph relies on this: run() uses the most recently built batch."""
    impl = make_impl()
    builder = make_builder([impl])
    first = builder.build(0, make_batch(*MIXED).metadata)
    cache, batch = make_cache("NHD"), make_batch([2, 1], [90, 5], seed=1)
    k, v = fill_cache(cache, batch)
    second = builder.build(0, batch.metadata)
    assert first.planned is second.planned
    query, output = run_layer(impl, second, batch, cache, k, v)
    check(output, query, batch, k, v)


def test_draft_loop_plans_again_from_the_same_tensors() -> None:
    impl, cache, batch = make_impl(), make_cache("NHD"), make_batch([1, 1], [30, 41])
    builder = make_builder([impl])
    k, v = fill_cache(cache, batch)
    batch.metadata.seq_lens -= 1  # the draft before the current one
    metadata = builder.build(0, batch.metadata)
    batch.metadata.seq_lens += 1
    builder.update_draft_decode_metadata(metadata)
    query, output = run_layer(impl, metadata, batch, cache, k, v)
    check(output, query, batch, k, v)


def test_layer_that_shares_the_cache_of_another() -> None:
    """vLLM does not update the cache for it."""
    owner, sharer = make_impl(), make_impl(kv_sharing_target_layer_name="layer.0")
    builder, cache, batch = make_builder([owner, sharer]), make_cache("NHD"), make_batch(*MIXED)
    assert len(builder.planned) == 1
    k, v = fill_cache(cache, batch)
    metadata = builder.build(0, batch.metadata)
    run_layer(owner, metadata, batch, cache, k, v)
    query, output = run_layer(sharer, metadata, batch, cache, k, v, update=False)
    check(output, query, batch, k, v)


@pytest.mark.parametrize(
    ("has_key", "shares", "appended"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_run_is_promised_an_append_where_vllm_has_appended(
    has_key: bool, shares: bool, appended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised: list[bool] = []
    monkeypatch.setattr(
        Attention, "run", lambda self, *tensors, after_append, **options: promised.append(after_append)
    )
    impl, batch = make_impl(kv_sharing_target_layer_name="layer.0" if shares else None), make_batch(*MIXED)
    metadata = make_builder([impl]).build(0, batch.metadata)
    query, key = torch.zeros(52, 6, 64), torch.zeros(52, 2, 64) if has_key else None
    impl.forward(None, query, key, key, make_cache("NHD"), metadata, torch.empty_like(query))
    assert promised == [appended]


def test_long_lengths_are_refused_on_a_cpu() -> None:
    builder, batch = make_builder([make_impl()]), make_batch([1], [33], table_width=3)
    batch.metadata.seq_lens += 16
    with pytest.raises(ValueError, match="kv_lens"):
        builder.build(0, batch.metadata)


def test_view_of_the_cache_is_made_once_and_does_not_outlive_it() -> None:
    cache = make_cache("NHD")
    view = kv_cache_view(cache, 64)
    assert kv_cache_view(cache, 64) is view
    assert view.k.data_ptr() == cache.data_ptr()
    assert view.k.shape == view.v.shape == (NUM_PAGES, PAGE, 2, 64)
    freed = weakref.ref(view)
    gc.disable()  # without the garbage collector: gigabytes depend on it
    try:
        del cache, view
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"head_size": 100}, "head size 100"),
        ({"head_size": 264}, "head size 264"),
        ({"kv_cache_dtype": "nvfp4_4over6"}, "nvfp4_4over6"),
        ({"attn_type": "encoder"}, "type encoder"),
        ({"sinks": torch.zeros(5)}, r"sinks of shape \(5,\) in a layer of 6 heads"),
        # 0: a query sees only its own chunk
        *(({"chunk_lookback": lookback}, f"chunk_lookback = {lookback}") for lookback in (0, 1, 2)),
        *(({"other": value}, f"other = {value!r}") for value in (0, 0.0, True, -2)),
        ({"other": torch.zeros(1)}, "other = a float32 tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_are_refused(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(
        NotImplementedError, match=f"attn_backend does not support .*{what}.*ATTN_BACKEND_VLLM_CPU"
    ):
        make_impl(**arguments)


def test_layers_that_are_accepted() -> None:
    impl = make_impl(
        sinks=None,
        chunk_lookback=-1,
        use_alibi_sqrt=False,
        other=None,
        logits_soft_cap=None,
        sliding_window=None,
        head_size=80,
    )
    assert impl.spec == LayerSpec(6, 2, 80, -1)
    assert impl.logits_soft_cap == 0.0
    with pytest.raises(NotImplementedError, match="head size 272: choose another --attention-backend"):
        AttnImpl(6, 272, 1.0, 2)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_config": SimpleNamespace(rswa_window=128)}, "R-SWA"),
        ({"model_config": SimpleNamespace(is_mm_prefix_lm=True)}, "--disable-chunked-mm-input"),
        (
            {"parallel_config": SimpleNamespace(prefill_context_parallel_size=2)},
            "prefill context parallelism",
        ),
        ({"diffusion_config": SimpleNamespace()}, "diffusion"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_that_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(NotImplementedError, match=what):
        make_builder([make_impl()], **changes)


def test_caches_that_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="another head size"):
        make_builder([make_impl()], make_spec(head_size_v=32))
    with pytest.raises(
        NotImplementedError, match=r"a KV cache of torch\.bfloat16 for a model of torch\.float32"
    ):
        make_builder(
            [make_impl()], make_spec(dtype=torch.bfloat16), model_config=SimpleNamespace(dtype=torch.float32)
        )


def test_mixed_causality_is_refused() -> None:
    batch = make_batch([1], [4], causal=torch.ones(1, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="mix causal"):
        make_builder([make_impl()]).build(0, batch.metadata)


def test_plans_of_layers_that_vllm_does_not_know() -> None:
    """Its attention tests build metadata for a layer that does not exist."""
    assert layer_specs(make_config(), make_spec(sliding_window=128), ["placeholder"]) == [
        LayerSpec(6, 2, 64, 127)
    ]
    assert list(make_builder([]).planned) == [LayerSpec(6, 2, 64, -1)]


def test_implementations_behind_a_composite() -> None:
    impls = [make_impl(), make_impl(sliding_window=9), SimpleNamespace()]
    composite = SimpleNamespace(get_impl_variants=lambda: impls)
    assert set(make_builder([composite]).planned) == {LayerSpec(6, 2, 64, -1), LayerSpec(6, 2, 64, 8)}


@pytest.mark.parametrize(("variable", "cascade"), [(None, True), ("1", True), ("0", False), ("", False)])
@pytest.mark.parametrize("invariant", [False, True])
def test_what_the_environment_says(
    variable: str | None, cascade: bool, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(layers, "record_attention", lambda *_: None)
    monkeypatch.setattr(layers, "Attention", lambda *heads, **arguments: made.append(arguments))
    monkeypatch.delenv("ATTN_BACKEND_CASCADE", raising=False)
    if variable is not None:
        monkeypatch.setenv("ATTN_BACKEND_CASCADE", variable)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    make_builder([make_impl()])
    assert [(arguments["cascade"], arguments["batch_invariant"]) for arguments in made] == [
        (cascade, invariant)
    ]


def test_bits_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With VLLM_BATCH_INVARIANT=1: each request by itself and in a batch."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    impl, cache, batch = (
        make_impl(),
        make_cache("NHD"),
        make_batch([1, 40, 1, 40, 1], [400, 100, 200, 130, 150], table_width=25),
    )
    builder = make_builder([impl])
    k, v = fill_cache(cache, batch)
    query, output = run_layer(impl, builder.build(0, batch.metadata), batch, cache, k, v)
    for i, (rows, together) in enumerate(
        zip(query.split(batch.query_lens), output.split(batch.query_lens), strict=True)
    ):
        alone = make_batch(batch.query_lens[i : i + 1], batch.kv_lens[i : i + 1], table_width=25).metadata
        alone.block_table_tensor = batch.metadata.block_table_tensor[i : i + 1]
        out = torch.full_like(rows, torch.nan)
        assert torch.equal(
            impl.forward(None, rows, None, None, cache, builder.build(0, alone), out), together
        )


@pytest.mark.parametrize("window", [None, 50])
def test_bits_do_not_depend_on_the_cached_prefix(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With VLLM_BATCH_INVARIANT=1: whole prompts, and their last tokens after a cached prefix.

    A decode in the batch keeps its bits.
    """
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    impl, cache = make_impl(sliding_window=window), make_cache("NHD")
    kv_lens = [180, 70, 1, 390]
    batch = make_batch([180, 70, 1, 1], kv_lens, table_width=25)
    batch.metadata.is_prefilling = torch.tensor([True, True, True, False])
    builder = make_builder([impl])
    k, v = fill_cache(cache, batch)
    query, output = run_layer(impl, builder.build(0, batch.metadata), batch, cache, k, v)
    whole = list(zip(query.split(batch.query_lens), output.split(batch.query_lens), strict=True))
    for rest in (1, 2, 15, 16, 17, 63, 64, 65):
        query_lens = [min(rest, length) for length in batch.query_lens]
        some = make_batch(query_lens, kv_lens, table_width=25, padding=2).metadata
        some.block_table_tensor[:4] = batch.metadata.block_table_tensor
        some.is_prefilling = batch.metadata.is_prefilling  # without padding, as in vLLM's newer model runner
        rows = torch.cat([q[-new:] for (q, _), new in zip(whole, query_lens, strict=True)])
        out = torch.full((len(rows) + 2, *rows.shape[1:]), torch.nan)
        impl.forward(None, torch.cat([rows, rows[:2]]), None, None, cache, builder.build(0, some), out)
        (layers,) = builder.planned.values()
        schedule = layers.attention.schedule()
        assert schedule.of_groups("kind")[:4].tolist() == [schedule.max_kind] * 3 + [0]
        for i, last in enumerate(out[: len(rows)].split(query_lens)):
            assert torch.equal(last, whole[i][1][-len(last) :]), (rest, i)


def test_maxima() -> None:
    assert workspace_maxima(make_config()) == (256, 8)
    graphs = SimpleNamespace(max_cudagraph_capture_size=512, static_forward_context={})
    assert workspace_maxima(make_config(compilation_config=graphs)) == (512, 512)
    assert workspace_maxima(make_config(speculative_config=SimpleNamespace(num_speculative_tokens=63))) == (
        512,
        8,
    )


def test_class_of_a_cpu_layer() -> None:
    assert isinstance(make_impl(), CpuAttnImpl)
    assert AttnMetadataBuilder.supports_draft_decode_metadata_update
