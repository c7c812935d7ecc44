"""Layers that need more than a causal mask and a window, compared with float64 attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch

pytest.importorskip("vllm.v1", reason="needs vLLM")

from vllm.v1.attention.backend import AttentionCGSupport, subclass_attention_backend
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec
from vllm_layer import (
    PAGE,
    Batch,
    Layer,
    make_batch,
    make_builder,
    make_cache,
    make_config,
    make_impl,
    make_spec,
)
from vllm_steps import check, fill_cache, run_layer

from attn_backend.adapters.vllm import compat
from attn_backend.adapters.vllm.backend import CpuAttnBackend
from attn_backend.adapters.vllm.metadata import AttnMetadataBuilder

MIXED = ([1, 1, 7, 40, 3], [33, 64, 23, 40, 100])
PREFIX_LM = {"model_config": SimpleNamespace(is_mm_prefix_lm=True, get_num_attention_heads=lambda config: 6)}
WHOLE_IMAGES = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256, disable_chunked_mm_input=True)


def serve(impl: Any, batch: Batch, builder: AttnMetadataBuilder | None = None, **expected: Any) -> None:
    cache = make_cache("NHD")
    k, v = fill_cache(cache, batch)
    query, output = run_layer(
        impl, (builder or make_builder([impl])).build(0, batch.metadata), batch, cache, k, v
    )
    check(output, query, batch, k, v, **expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks(dtype: torch.dtype) -> None:
    """gpt-oss: sinks have the model's dtype, and are loaded after the layer is made, possibly again."""
    sinks = torch.nn.Parameter(torch.zeros(6, dtype=dtype), requires_grad=False)
    impl = make_impl(sinks=sinks, sliding_window=16)
    for seed in (0, 1):
        sinks.copy_(torch.randn(6, generator=torch.Generator().manual_seed(seed)))
        impl.process_weights_after_loading(dtype)
        serve(impl, make_batch(*MIXED), window_left=15, sinks=sinks.double())


def test_alibi() -> None:
    slopes = [0.5, 0.25, 0.125, 0.0625, 0.03, 0.02]
    table = torch.tensor(slopes, dtype=torch.float64)
    variant = oracle.Variant(
        logits=lambda logits, pairs: logits + table[pairs.head] * (pairs.token - pairs.position)
    )
    serve(make_impl(alibi_slopes=slopes), make_batch(*MIXED), variant=variant)


def of_this_step(impl: Any, batch: Batch, **expected: Any) -> None:
    """An encoder: no cache, and padding rows after K and V."""
    metadata = make_builder([impl]).build(0, batch.metadata)
    tokens = sum(batch.query_lens)
    query, key, value = (torch.randn(tokens + 2, heads, 64) for heads in (6, 2, 2))
    impl.do_kv_cache_update(None, key, value, torch.empty(0), metadata.slot_mapping)
    output = torch.full_like(query, torch.nan)
    impl.forward(None, query, key, value, torch.empty(0), metadata, output)
    begin = 0
    for count in batch.query_lens:
        rows = slice(begin, begin + count)
        reference, _ = oracle.attention(query[rows], key[rows], value[rows], causal=False, **expected)
        assert (output[rows].double() - reference).norm() <= 1e-5 * reference.norm()
        begin += count
    assert output[tokens:].isnan().all()


@pytest.mark.parametrize("window", [None, 8])
def test_encoders(window: int | None) -> None:
    """The window extends left and right: ModernBERT."""
    batch = make_batch([7, 40, 1], [7, 40, 1], causal=False)
    near = oracle.Variant(mask=lambda pairs: window is None or (pairs.token - pairs.position).abs() < window)
    of_this_step(make_impl(attn_type="encoder_only", sliding_window=window), batch, variant=near)


def test_cross_attention() -> None:
    """Each row sees all tokens of the encoder, regardless of the number of rows. A request without an encoder
    gets 0.
    """
    impl, batch = make_impl(attn_type="encoder_decoder"), make_batch([1, 5, 2], [50, 3, 17], causal=False)
    serve(impl, batch, causal=False)


@pytest.mark.parametrize("window", [None, 20])
def test_images_that_see_both_sides(window: int | None) -> None:
    """Gemma 3: (causal and window) or the same image; the third request's image began in an earlier step."""
    spans = {0: [], 2: [(2, 20)], 3: [(3, 11), (12, 30)], 4: [(90, 95)]}
    impl, batch = make_impl(sliding_window=window, logits_soft_cap=5.0), make_batch(*MIXED)
    batch.metadata.mm_req_doc_ranges = spans

    def mask(pairs: oracle.Pairs) -> torch.Tensor:
        far = (
            torch.zeros_like(pairs.position - pairs.token, dtype=torch.bool)
            if window is None
            else pairs.position - pairs.token >= window
        )
        seen = (pairs.token <= pairs.position) & ~far
        for first, last in spans.get(pairs.request, []):
            seen = seen | (
                (pairs.position >= first)
                & (pairs.position <= last)
                & (pairs.token >= first)
                & (pairs.token <= last)
            )
        return seen

    builder = make_builder([impl], scheduler_config=WHOLE_IMAGES, **PREFIX_LM)
    serve(impl, batch, builder, causal=False, logits_soft_cap=5.0, variant=oracle.Variant(mask=mask))
    text = make_batch(*MIXED, seed=1)  # no image state is left
    serve(impl, text, builder, window_left=-1 if window is None else window - 1, logits_soft_cap=5.0)


def may_see_both_sides(monkeypatch: pytest.MonkeyPatch, use_non_causal: bool) -> None:
    """vLLM's configuration while layers are made: the draft's configuration."""
    config = SimpleNamespace(attention_config=SimpleNamespace(use_non_causal=use_non_causal))
    monkeypatch.setattr(compat, "get_current_vllm_config_or_none", lambda: config)


@pytest.mark.parametrize("window", [None, 9, 20])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_drafts_that_see_both_sides(
    window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DFLASH: a window extends left and right, and reaches from a draft into the tokens before it.

    Other steps of the same layers may be causal.
    """
    may_see_both_sides(monkeypatch, True)
    sinks = torch.randn(6) if has_sinks else None
    impl = make_impl(sliding_window=window, sinks=sinks)
    builder = make_builder([impl])
    drafts = make_batch([16, 16, 5, 40], [33, 16, 100, 64], causal=False)
    near = oracle.Variant(mask=lambda pairs: window is None or (pairs.token - pairs.position).abs() < window)
    of_layer = {} if sinks is None else {"sinks": sinks.double()}
    serve(impl, drafts, builder, causal=False, variant=near, **of_layer)
    serve(
        impl,
        make_batch(*MIXED, seed=1),
        builder,
        window_left=-1 if window is None else window - 1,
        **of_layer,
    )
    assert len(builder.planned) == 1


def test_the_window_is_that_of_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps that are not causal, vLLM defines a window as (left, right), both without the query itself."""
    flash_attn = pytest.importorskip("vllm.v1.attention.backends.flash_attn")
    may_see_both_sides(monkeypatch, True)
    key = make_impl(sliding_window=9).spec
    assert (key.window_left, key.window_right) == flash_attn._maybe_symmetrize_window(
        (9 - 1, 0), causal=False
    )
    may_see_both_sides(monkeypatch, False)
    causal = make_impl(sliding_window=9).spec
    assert (causal.window_left, causal.window_right) == (8, -1)
    with pytest.raises(
        NotImplementedError,
        match="window to the left and right in layers that were made for causal steps: set use_non_causal",
    ):
        make_builder([make_impl(sliding_window=9)]).build(0, make_batch([4], [20], causal=False).metadata)


def test_one_causal_window_in_a_group_is_enough_to_refuse_a_step_that_is_not_causal() -> None:
    """A group has layers with and without a window if vLLM's hybrid KV cache manager is off."""
    builder = make_builder([make_impl(), make_impl(sliding_window=9)])
    assert len(builder.planned) == 2
    with pytest.raises(NotImplementedError, match="layers that were made for causal steps"):
        builder.build(0, make_batch([4], [20], causal=False).metadata)
    builder.build(0, make_batch([4], [20]).metadata)


def chunked_builder(chunk: int, impl: Any, dtype: torch.dtype = torch.float32) -> AttnMetadataBuilder:
    """As vLLM makes it for Llama 4: a class derived from ours that splits requests."""

    class ChunkedLocalAttentionBuilder(AttnMetadataBuilder):
        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
            return AttentionCGSupport.NEVER

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            raise AssertionError("requests are cut")

    backend = subclass_attention_backend("Chunked_", CpuAttnBackend, ChunkedLocalAttentionBuilder)
    spec = ChunkedLocalAttentionSpec(
        block_size=PAGE, num_kv_heads=2, head_size=64, dtype=dtype, attention_chunk_size=chunk
    )
    layers = {"layer.0": Layer(impl)}
    builder = backend.get_builder_cls()(spec, list(layers), make_config(layers), torch.device("cpu"))
    assert isinstance(builder, AttnMetadataBuilder)
    return builder


def test_chunks_are_masks_and_requests_stay_whole() -> None:
    impl = make_impl()
    builder = chunked_builder(32, impl)
    assert builder.get_cudagraph_support(None, None) == AttentionCGSupport.ALWAYS
    near = oracle.Variant(mask=lambda pairs: pairs.position // 32 == pairs.token // 32)
    serve(impl, make_batch(*MIXED), builder, variant=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared_pages", [0, 5])
def test_stale_bits_before_a_chunk_reach_no_output(shared_pages: int, dtype: torch.dtype) -> None:
    """vLLM frees the blocks before a chunk, and may give their memory to layers with another element type.

    Kernels multiply V of tokens that a row does not see by 0, which is NaN if V is. But KV tiles begin at
    multiples of their length, and so do Llama 4's chunks of 8192 tokens. Here a chunk is as long as the CPU's
    largest KV tile.
    """
    chunk, impl = 128, make_impl()
    # decodes right after a chunk begins, and later; prefills from inside a chunk, and over its end
    query_lens, kv_lens = [1, 1, 7, 40, 3], [129, 150, 263, 300, 140]
    batch = make_batch(query_lens, kv_lens, shared_pages=shared_pages, table_width=24)
    cache = make_cache("NHD", dtype=dtype)
    k, v = fill_cache(cache, batch)
    for query_len, slots in zip(query_lens, batch.slots, strict=True):
        stale = slots[: (len(slots) - query_len) // chunk * chunk]
        cache[stale // PAGE, :, stale % PAGE] = torch.nan
    metadata = chunked_builder(chunk, impl, dtype).build(0, batch.metadata)
    query, output = run_layer(impl, metadata, batch, cache, k, v)
    near = oracle.Variant(mask=lambda pairs: pairs.position // chunk == pairs.token // chunk)
    check(output, query, batch, k, v, variant=near)


def test_chunks_of_an_unknown_size_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="attention_chunk_size"):
        compat.chunk_of(SimpleNamespace())


@pytest.mark.parametrize("window", [None, 10])
def test_images_cut_by_a_window(window: int | None) -> None:
    """Gemma 4: (causal or the same image) and window; only causal in layers without a window."""
    spans = {2: [(2, 20)], 3: [(3, 11), (12, 30)], 4: [(90, 95)]}  # some longer than the window
    impl, batch = make_impl(sliding_window=window), make_batch(*MIXED)
    batch.metadata.mm_req_doc_ranges = spans

    def mask(pairs: oracle.Pairs) -> torch.Tensor:
        seen = pairs.token <= pairs.position
        if window is None:
            return seen
        for first, last in spans.get(pairs.request, []):
            seen = seen | (
                (pairs.position >= first)
                & (pairs.position <= last)
                & (pairs.token >= first)
                & (pairs.token <= last)
            )
        return seen & (pairs.position - pairs.token < window)

    layers = {"layer.0": Layer(impl), "layer.1": Layer(make_impl(sliding_window=10))}
    layers["layer.1"].mm_prefix_clamp_sliding_window = True
    config = make_config(layers, scheduler_config=WHOLE_IMAGES, **PREFIX_LM)
    builder = AttnMetadataBuilder(make_spec(), ["layer.0"], config, torch.device("cpu"))
    serve(impl, batch, builder, causal=False, variant=oracle.Variant(mask=mask))


@pytest.mark.parametrize(
    ("rows", "padding"),
    [
        ([[0], [0], [6], [39], [2]], 0),
        ([[0], [0], [6], [39], [0, 1, 2]], 3),  # a verification, and padding for a CUDA graph
        ([[0], [0], [], [39], [2]], 0),  # a chunk that is not the last
    ],
)
def test_fast_prefills_of_layers_that_share_a_cache(rows: list[list[int]], padding: int) -> None:
    """--kv-sharing-fast-prefill: these layers compute only the rows that get a token. vLLM derives a backend.

    rows: places among the new tokens of each request.
    """
    fast = create_fast_prefill_custom_backend("FastPrefill", CpuAttnBackend).get_builder_cls()
    owner, sharer = make_impl(), make_impl(kv_sharing_target_layer_name="layer.0", sliding_window=30)
    spec, cache, batch = make_spec(), make_cache("NHD"), make_batch(*MIXED)
    k, v = fill_cache(cache, batch)
    builders = [
        builder(spec, [name], make_config({name: Layer(impl)}), torch.device("cpu"))
        for builder, name, impl in ((AttnMetadataBuilder, "layer.0", owner), (fast, "layer.1", sharer))
    ]
    starts = batch.metadata.query_start_loc.tolist()
    places = [start + place for start, of_request in zip(starts, rows, strict=False) for place in of_request]
    batch.metadata.logits_indices_padded = torch.tensor(places + [places[-1]] * padding)
    batch.metadata.num_logits_indices = len(places)
    batch.metadata.max_logits_per_req = max(map(len, rows))
    metadata, of_fast = (builder.build(0, batch.metadata) for builder in builders)
    run_layer(owner, metadata, batch, cache, k, v)
    assert of_fast.num_actual_tokens == len(places)
    assert of_fast.logits_indices_padded is batch.metadata.logits_indices_padded

    query = torch.randn(batch.metadata.num_actual_tokens, 6, 64)
    output = torch.full((len(places) + padding, 6, 64), torch.nan)
    selected = query[batch.metadata.logits_indices_padded]
    assert sharer.forward(None, selected, None, None, cache, of_fast, output) is output
    expected, _ = oracle.paged_attention(query, k, v, batch.query_lens, batch.slots, window_left=29)
    assert (output[: len(places)].double() - expected[places]).norm() <= 1e-5 * expected[places].norm()
    assert output[len(places) :].isnan().all()


@pytest.mark.parametrize("armed", [True, False])
def test_fast_prefills_compute_all_rows_of_other_steps(armed: bool) -> None:
    """A decode has one row for each request. A step that vLLM captures names no rows."""
    fast = create_fast_prefill_custom_backend("FastPrefill", CpuAttnBackend).get_builder_cls()
    impl = make_impl(kv_sharing_target_layer_name="layer.0")
    batch = make_batch([1, 1, 1], [33, 64, 5]) if armed else make_batch(*MIXED)
    if armed:
        batch.metadata.logits_indices_padded = torch.arange(3)
        batch.metadata.num_logits_indices = 3
        batch.metadata.max_logits_per_req = 1
    cache = make_cache("NHD")
    k, v = fill_cache(cache, batch)
    new = batch.new_slots
    cache[new // PAGE, :, new % PAGE] = torch.cat([k[new], v[new]], dim=-1)
    metadata = fast(
        make_spec(), ["layer.1"], make_config({"layer.1": Layer(impl)}), torch.device("cpu")
    ).build(0, batch.metadata)
    query, output = run_layer(impl, metadata, batch, cache, k, v, update=False)
    check(output, query, batch, k, v)
