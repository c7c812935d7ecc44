"""Layers over caches with scales for each token and head: --kv-cache-dtype int8_per_token_head,
fp8_per_token_head, int4_per_token_head and nvfp4; and int8_k_nvfp4_v, a name that this package registers.

Tests check the bytes of a page, and compare attention with float64 over the stored values.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from float8_cases import E2M1, block_values, e2m1_values, split_int4
from rotations import multiplied_query, rotated, rotated_back
from torch import Tensor

pytest.importorskip("vllm.v1", reason="needs vLLM")

from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import KVQuantMode
from vllm_float8 import attend_once, layer_of, reasons
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
from vllm_steps import MIXED, TOLERANCE, check, fill_cache, run_layer

from attn_backend.adapters import layers
from attn_backend.adapters.layers import LayerSpec
from attn_backend.adapters.vllm import compat
from attn_backend.adapters.vllm.attention import AttnImpl, token_scaled_view
from attn_backend.adapters.vllm.backend import AttnBackend, CpuAttnBackend, DiffKvBackend
from attn_backend.adapters.vllm.compat import STRIDE_ORDERS
from attn_backend.adapters.vllm.metadata import AttnMetadataBuilder, layer_specs
from attn_backend.adapters.vllm.mla import MlaBackend
from attn_backend.adapters.vllm.rules import OWN_CACHE, TOKEN_SCALED_CACHES, bytes_of_row, unsupported_pages
from attn_backend.metadata.kv_cache import (
    INT4,
    INT8_NVFP4,
    NVFP4,
    BlockScales,
    CacheDtype,
    KVCache,
    side_dtypes,
    stored_columns,
)

CACHES = list(TOKEN_SCALED_CACHES)
OF_VLLM = [name for name in CACHES if name != OWN_CACHE]
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# vLLM's dtype of the tensor
STORED = {name: torch.int8 if name == "int8_per_token_head" else torch.uint8 for name in CACHES}
# The mode of registered names, as 0.33 has it: an alias.
CUSTOM = getattr(KVQuantMode, "CUSTOM", None) or SimpleNamespace(
    name="OCTAVE_K3V4", is_custom_mode=True, is_per_token_head=False, is_nvfp4=False, is_turboquant=False
)
MODES: dict[str, Any] = {name: KVQuantMode[name.upper()] for name in OF_VLLM} | {OWN_CACHE: CUSTOM}


TAKES_CACHE_NAMES = compat.takes_cache_names


@pytest.fixture(autouse=True)
def _registers_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 0.33 does: otherwise layers refuse OWN_CACHE."""
    monkeypatch.setattr("attn_backend.adapters.vllm.compat.takes_cache_names", lambda: True)


def row_bytes(name: str, head_size: int) -> int:
    """Of K and V of a token and head, with their scales."""
    if name == OWN_CACHE:
        return (head_size + 4) + (head_size // 2 + head_size // 16)
    if name == NVFP4:
        return head_size + head_size // 8
    return (head_size if TOKEN_SCALED_CACHES[name] == INT4 else 2 * head_size) + 8


def spec_of(name: str, num_kv_heads: int = 2, head_size: int = 64, **fields: Any) -> Any:
    """As vLLM makes it."""
    spec = make_spec(num_kv_heads, head_size, STORED[name], kv_quant_mode=MODES[name], **fields)
    customize: Any = getattr(AttnBackend, "customize_spec")  # noqa: B009  before 0.28 nothing calls it
    return customize(spec)


def cache_of(name: str, memory: str = "NHD", num_kv_heads: int = 2, head_size: int = 64) -> Tensor:
    """As vLLM passes it. All of its bytes are 0xFF, also scales: NaN."""
    width = row_bytes(name, head_size) // 2
    cache = make_cache(memory, num_kv_heads, width, torch.float8_e4m3fn).view(torch.uint8)
    return cache.fill_(0xFF).view(STORED[name])


def view_of(impl: AttnImpl, cache: Tensor) -> KVCache:
    assert impl.cache_dtype is not None
    return token_scaled_view(cache, impl.head_size, impl.cache_dtype)


def builder_of(impls: list[AttnImpl], dtype: torch.dtype, **spec: Any) -> AttnMetadataBuilder:
    model = SimpleNamespace(dtype=dtype, get_num_attention_heads=lambda config: 6)
    name = impls[0].kv_cache_dtype
    return make_builder(list(impls), make_spec(dtype=STORED[name], **spec), model_config=model)


def held(x: Tensor, of_cache: CacheDtype, dtype: torch.dtype) -> Tensor:
    """In float64: K or V [tokens, heads, columns] as attention sees it. of_cache: its format."""
    if of_cache == INT4:
        rows = rotated(x)
        smallest, largest_ = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
        step = ((largest_ - smallest) / 15).clamp(min=1e-6)
        zero = (-smallest / step).round().clamp(0, 15)
        return rotated_back(((rows / step + zero).round().clamp(0, 15) - zero) * step)
    if of_cache == NVFP4:
        blocks = x.float().unflatten(-1, (-1, 16))
        scale = (blocks.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
        numbers = torch.where(scale > 0, blocks / scale, 0.0)
        codes = torch.bucketize(numbers.abs().contiguous(), (E2M1[1:] + E2M1[:-1]) / 2)
        return (e2m1_values(codes + 8 * (numbers < 0)) * scale).flatten(-2).to(dtype).double()
    assert isinstance(of_cache, torch.dtype)
    largest = LARGEST[of_cache]
    scale = (x.float().abs().amax(-1, keepdim=True) / largest).clamp(min=1e-6)
    elements = x.float() / scale
    elements = elements.round() if of_cache == torch.int8 else elements.to(of_cache).float()
    return (elements * scale).to(dtype).double()


def fill(
    impl: AttnImpl, layer: Any, cache: Tensor, batch: Batch, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Writes random K and V of all tokens of the batch as vLLM does. Rows differ in size.

    Returns the stored values by slot.
    """
    sizes = 10.0 ** torch.empty(2, NUM_PAGES * PAGE, impl.num_kv_heads, 1).uniform_(-3, 0.5)
    k, v = (torch.randn(2, NUM_PAGES * PAGE, impl.num_kv_heads, impl.head_size) * sizes).to(dtype)
    for slots in (
        torch.cat([slots[: len(slots) - n] for n, slots in zip(batch.query_lens, batch.slots, strict=True)]),
        batch.metadata.slot_mapping,
    ):
        impl.do_kv_cache_update(layer, k[slots], v[slots], cache, slots)
    return read_both(impl, cache, k, v, batch, dtype)


def read_both(
    impl: AttnImpl,
    cache: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    dtype: torch.dtype,
    rotated_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The cache's values, by slot. In the slots of the batch they are `held()`, except for elements that are
    rounded the other way.

    rotated_dtype: of dequantized rows of int4. CUDA kernels round them for matrix products.
    """
    view, slots, both = view_of(impl, cache), torch.cat(batch.slots), []
    dtypes = side_dtypes(TOKEN_SCALED_CACHES[impl.kv_cache_dtype])
    parts = (k, view.k, view.k_scale), (v, view.v, view.v_scale)
    for (x, elements, scale), of_side in zip(parts, dtypes, strict=True):
        if isinstance(scale, BlockScales):
            codes = torch.stack([elements & 15, elements >> 4], dim=-1).flatten(-2)
            steps = block_values(scale).repeat_interleave(16, -1)
            stored = (e2m1_values(codes) * steps).to(dtype).double().flatten(0, 1)
        elif of_side == INT4:
            assert isinstance(scale, Tensor)
            step, zero = split_int4(scale)
            numbers = torch.stack([elements & 15, elements >> 4], dim=-1).flatten(-2) - zero[..., None]
            stored = rotated_back((numbers * step[..., None].double()).to(rotated_dtype)).flatten(0, 1)
        else:
            assert isinstance(scale, Tensor)
            stored = (elements.float() * scale[..., None]).to(dtype).double().flatten(0, 1)
        expected = held(x[slots], of_side, dtype)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3 if dtype == torch.float16 else 1e-5
        size = expected.abs()
        if of_side == INT4:  # rotated back, a row's small elements have the rounding of its large ones
            size = size.square().mean(-1, keepdim=True).sqrt()
        close = (stored[slots] - expected).abs() <= tolerance * size + 1e-12
        assert close.double().mean() > 0.98
        # of the largest elements in e4m3 and e2m1; an int4 step is spread over the row
        of_largest = {INT4: 7, NVFP4: 3}.get(str(of_side), 13)
        step = expected.abs().amax(-1, keepdim=True) / of_largest
        assert ((stored[slots] - expected).abs() <= step).all()
        both.append(stored)
    return both[0], both[1]


def serve(
    impl: AttnImpl, cache: Tensor, batch: Batch, dtype: torch.dtype = torch.float32, **mask: Any
) -> None:
    builder = builder_of([impl], dtype, num_kv_heads=impl.num_kv_heads, head_size=impl.head_size)
    layer = layer_of(0.05, 7.0)  # scales that vLLM's layers have anyway
    k, v = fill(impl, layer, cache, batch, dtype)
    query, output = attend_once(impl, layer, cache, builder.build(0, batch.metadata), batch, dtype)
    check(output, query, batch, k, v, **mask)


def add_1_to_each_byte(view: KVCache) -> None:
    for part in (view.k, view.v):
        part.view(torch.uint8).add_(1)
    for scale in (view.k_scale, view.v_scale):
        if isinstance(scale, BlockScales):
            scale.blocks.view(torch.uint8).add_(1)
        else:
            assert isinstance(scale, Tensor)
            scale.view(torch.int32).add_(0x01010101)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize(
    "layout", [item.name for item in getattr(kv_cache_interface, "KVCacheLayout", [])] or ["none"]
)
@pytest.mark.parametrize(("num_kv_heads", "head_size", "page"), [(2, 64, 16), (1, 128, 32), (8, 192, 16)])
def test_all_bytes_of_vllms_pages_are_used_once(
    layout: str, name: str, num_kv_heads: int, head_size: int, page: int
) -> None:
    """In all layouts of 0.29 and later, with vLLM's own views of its allocation."""
    if layout == "none":
        pytest.skip("this release asks the backend for the shape")
    spec = replace(spec_of(name, num_kv_heads, head_size), block_size=page)
    num_blocks, num_layers = 3, 2
    assert spec.page_size_bytes == page * num_kv_heads * row_bytes(name, head_size)
    order = kv_cache_interface.KVCacheLayout[layout]
    raw = torch.zeros(num_blocks * num_layers * spec.page_size_bytes, dtype=torch.int8)
    _, *strides = kv_cache_interface.compute_layout_strides(spec, num_blocks, num_layers, order)
    layer_stride = kv_cache_interface.compute_layout_strides(spec, num_blocks, num_layers, order)[0]
    of_engine = SimpleNamespace(
        layers=[None] * num_layers, layer_stride=layer_stride, block_stride=strides[0], offset=0
    )
    caches = kv_cache_interface.create_kv_cache_views(raw, spec, num_blocks, order, of_engine)
    for cache in caches:
        assert cache.dtype == STORED[name]
        view = token_scaled_view(cache, head_size, TOKEN_SCALED_CACHES[name])
        for rows, of_side in zip((view.k, view.v), side_dtypes(TOKEN_SCALED_CACHES[name]), strict=True):
            assert rows.shape == (num_blocks, page, num_kv_heads, stored_columns(head_size, of_side))
        for rows in (view.k, view.v):  # a head's lie side by side
            assert rows.data_ptr() % 8 == 0
            assert rows.stride(1) == rows.shape[-1]
        for scale in (view.k_scale, view.v_scale):  # a head's lie side by side
            if isinstance(scale, BlockScales):
                assert scale.blocks.stride()[1::2] == (head_size // 16, 1)
            else:
                assert isinstance(scale, Tensor)
                assert scale.stride(1) == 1
        add_1_to_each_byte(view)
    assert (raw == 1).all()


@pytest.mark.parametrize("name", OF_VLLM)
@pytest.mark.parametrize("order", STRIDE_ORDERS)
def test_pages_of_releases_that_ask_for_the_shape(order: tuple[str, bool], name: str) -> None:
    """Up to 0.28. The page of 0.26 and 0.27 has 8 bytes for each token and head, whatever the backend."""
    num_blocks, num_layers, heads, width = 3, 2, 2, 64
    shape = AttnBackend.get_kv_cache_shape(num_blocks, PAGE, heads, width, cache_dtype_str=name)
    assert shape == AttnBackend.get_kv_cache_shape(num_blocks, PAGE, heads, width, name)
    assert shape[1] * shape[2] * shape[3] == PAGE * heads * row_bytes(name, width)
    permutation = STRIDE_ORDERS[order]
    whole = (num_layers, *shape) if order[1] else shape
    raw = torch.zeros(torch.Size(whole).numel(), dtype=torch.uint8)
    inverse = [permutation.index(dim) for dim in range(len(permutation))]
    tensor = raw.view([whole[dim] for dim in permutation]).permute(inverse)
    for cache in tensor if order[1] else [tensor]:
        view = token_scaled_view(cache, width, TOKEN_SCALED_CACHES[name])
        assert view.k.stride(1) == view.k.shape[-1]
        add_1_to_each_byte(view)
    assert (raw == 1).all()


def test_other_caches_have_no_room_for_scales() -> None:
    assert AttnBackend.get_kv_cache_shape(3, 16, 2, 64, "fp8") == (3, 2, 16, 128)
    assert AttnBackend.get_kv_cache_shape(3, 16, 2, 64, cache_dtype_str="auto") == (3, 2, 16, 128)
    for spec in (make_spec(), make_spec(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)):
        assert AttnBackend.customize_spec(spec) is spec


def test_spec_of_values_of_another_size() -> None:
    spec = make_spec(2, 192, torch.int8, head_size_v=128, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    assert DiffKvBackend.customize_spec(spec).page_size_bytes == PAGE * 2 * (192 + 128 + 8)
    assert DiffKvBackend.get_kv_cache_shape(1, PAGE, 2, 192, "int8_per_token_head")[3] == 192 + 128 + 8


def test_a_spec_that_is_complete_stays() -> None:
    spec = spec_of("int8_per_token_head")
    assert AttnBackend.customize_spec(spec) == spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory", ["NHD", "HND", "padded", "interleaved"])
@pytest.mark.parametrize("name", CACHES)
def test_mixed_batch(name: str, memory: str, dtype: torch.dtype) -> None:
    cache, batch = cache_of(name, memory), make_batch(*MIXED)
    serve(make_impl(kv_cache_dtype=name), cache, batch, dtype)
    rest = torch.ones(NUM_PAGES * PAGE, dtype=torch.bool)
    rest[torch.cat(batch.slots)] = False
    view = view_of(make_impl(kv_cache_dtype=name), cache)
    for scale in (view.k_scale, view.v_scale):
        of_slots = scale.blocks.float() if isinstance(scale, BlockScales) else scale
        assert isinstance(of_slots, Tensor)
        assert of_slots.flatten(0, 1)[rest].isnan().all()  # nothing else was written


@pytest.mark.parametrize("arguments", [{"sliding_window": 9}, {"logits_soft_cap": 5.0}])
@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_per_token_head", OWN_CACHE])
def test_windows_and_soft_caps(name: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backend.adapters.vllm.compat.takes_bytes_of_rows", lambda: True)
    mask = {"window_left": 8} if "sliding_window" in arguments else arguments
    impl = make_impl(kv_cache_dtype=name, **arguments)
    serve(impl, cache_of(name), make_batch(*MIXED), **mask)


def test_int4_pages_of_windows_are_too_large_up_to_0_27(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backend.adapters.vllm.compat.takes_bytes_of_rows", lambda: False)
    assert make_impl(kv_cache_dtype="int4_per_token_head").spec.rotation
    assert make_impl(kv_cache_dtype="int8_per_token_head", sliding_window=9).spec.token_scales
    with pytest.raises(NotImplementedError, match="in a layer with a sliding window: use vLLM 0"):
        make_impl(kv_cache_dtype="int4_per_token_head", sliding_window=9)


def test_nvfp4_needs_0_28(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backend.adapters.vllm.compat.takes_bytes_of_rows", lambda: False)
    with pytest.raises(NotImplementedError, match="a KV cache of dtype nvfp4: use vLLM 0"):
        make_impl(kv_cache_dtype=NVFP4)


def test_our_own_name_needs_0_33(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backend.adapters.vllm.compat.takes_cache_names", lambda: False)
    with pytest.raises(NotImplementedError, match=r"a KV cache of dtype int8_k_nvfp4_v: use vLLM 0\.33"):
        make_impl(kv_cache_dtype=OWN_CACHE)


def test_earlier_releases_register_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backend.adapters.vllm.compat.takes_cache_names", TAKES_CACHE_NAMES)
    config: Any = import_module("vllm.config.cache")
    monkeypatch.delattr(config, "register_kv_cache_dtype", raising=False)
    monkeypatch.delattr(config, "is_known_kv_cache_dtype", raising=False)
    compat.register_cache_name()


def test_our_own_name_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not OWN_CACHE.startswith(("fp8", "nvfp4"))  # vLLM may quantize Q for these
    config: Any = import_module("vllm.config.cache")
    known: dict[str, Any] = {}

    def register(name: str) -> Any:
        assert name not in known, "vLLM warns"
        return lambda handler: known.setdefault(name, handler())

    monkeypatch.setattr(config, "register_kv_cache_dtype", register, raising=False)
    monkeypatch.setattr(config, "is_known_kv_cache_dtype", lambda name: name in known, raising=False)
    for _ in range(2):
        compat.register_cache_name()
    assert list(known) == [OWN_CACHE]
    assert known[OWN_CACHE].torch_dtype() == torch.uint8
    interface = SimpleNamespace(KVQuantMode=SimpleNamespace(CUSTOM=CUSTOM))
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_interface", interface)
    assert known[OWN_CACHE].quant_mode() is CUSTOM
    assert OWN_CACHE in AttnBackend.supported_kv_cache_dtypes
    assert OWN_CACHE in CpuAttnBackend.supported_kv_cache_dtypes


def test_the_mode_of_registered_names_is_ours() -> None:
    """Its name is another mode's. Layers of --kv-cache-dtype-skip-layers have no mode."""
    made = spec_of(OWN_CACHE, 2, 128)
    assert made.state_content_bytes == 128 + 4 + 64 + 8
    plain = make_spec(2, 128, torch.bfloat16, kv_quant_mode=KVQuantMode.NONE)
    assert AttnBackend.customize_spec(plain) is plain
    assert sum(sum(bytes_of_row(128, side)) for side in side_dtypes(INT8_NVFP4)) == 204


def test_scales_of_a_layer_multiply_nvfp4_v() -> None:
    """And no int8 K. The view of a cache is made once."""
    impl, cache, layer = make_impl(kv_cache_dtype=OWN_CACHE), cache_of(OWN_CACHE), layer_of()
    layer._k_scale_float, layer._v_scale_float = 0.25, 8.0
    batch = make_batch([5], [5])
    slots = batch.metadata.slot_mapping
    k, v = torch.randn(2, 5, 2, 64)
    impl.do_kv_cache_update(layer, k, v, cache, slots)
    view = view_of(impl, cache)
    assert impl._view(layer, cache) is view
    assert isinstance(view.k_scale, Tensor)
    assert isinstance(view.v_scale, BlockScales)
    assert view.v_scale.factor == 8.0
    rows = (view.k.float() * view.k_scale[..., None]).flatten(0, 1)
    assert (rows[slots] - k).norm() < 0.01 * k.norm()
    codes = torch.stack([view.v & 15, view.v >> 4], dim=-1).flatten(-2)
    values = (e2m1_values(codes) * block_values(view.v_scale).repeat_interleave(16, -1)).flatten(0, 1)
    assert (values[slots] - v).norm() < 0.15 * v.norm()
    metadata = builder_of([impl], torch.float32).build(0, batch.metadata)
    query, output = attend_once(impl, layer, cache, metadata, batch, torch.float32)
    check(output, query, batch, rows.double(), values)


def test_scales_of_a_layer_multiply_nvfp4() -> None:
    """vLLM keeps NVFP4's scale of a tensor there. A layer that reads the cache takes the writer's."""
    impl, cache, layer = make_impl(kv_cache_dtype=NVFP4), cache_of(NVFP4), layer_of()
    layer._k_scale_float, layer._v_scale_float = 0.25, 8.0
    batch = make_batch([5], [5])
    slots = batch.metadata.slot_mapping
    appended = torch.randn(2, 5, 2, 64)
    impl.do_kv_cache_update(layer, *appended, cache, slots)
    view, seen = view_of(impl, cache), []
    for x, rows, scale, factor in zip(
        appended, (view.k, view.v), (view.k_scale, view.v_scale), (0.25, 8.0), strict=True
    ):
        assert isinstance(scale, BlockScales)
        assert scale.factor == factor
        codes = torch.stack([rows & 15, rows >> 4], dim=-1).flatten(-2)
        seen.append((e2m1_values(codes) * block_values(scale).repeat_interleave(16, -1)).flatten(0, 1))
        assert (seen[-1][slots] - x).norm() < 0.15 * x.norm()
    metadata = builder_of([impl], torch.float32).build(0, batch.metadata)
    query, output = attend_once(impl, layer, cache, metadata, batch, torch.float32)
    check(output, query, batch, *seen)
    reader = make_impl(kv_cache_dtype=NVFP4, kv_sharing_target_layer_name="layers.0")
    query, output = attend_once(reader, layer_of(), cache, metadata, batch, torch.float32)
    check(output, query, batch, *seen)


@pytest.mark.parametrize("name", CACHES)
def test_a_prompt_in_chunks_and_then_tokens(name: str) -> None:
    """Steps of one request, whose pages stay the same: chunked prefill, and decode after it."""
    impl, cache, layer = make_impl(kv_cache_dtype=name), cache_of(name), layer_of()
    builder = builder_of([impl], torch.float32)
    k, v = torch.randn(2, NUM_PAGES * PAGE, 2, 64)
    for query_len, kv_len in ((40, 40), (23, 63), (1, 64), (1, 65)):
        batch = make_batch([query_len], [kv_len])
        slots = batch.metadata.slot_mapping
        impl.do_kv_cache_update(layer, k[slots], v[slots], cache, slots)
        seen = read_both(impl, cache, k, v, batch, torch.float32)
        metadata = builder.build(0, batch.metadata)
        query, output = attend_once(impl, layer, cache, metadata, batch, torch.float32)
        check(output, query, batch, *seen)


@pytest.mark.parametrize("name", CACHES)
def test_shared_prefix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix caching: requests that begin with the same 12 pages."""
    monkeypatch.setattr(layers, "use_cascade", lambda: "always")
    batch = make_batch(
        [1, 1, 3, 1], [12 * PAGE + own for own in (1, 30, 16, 7)], shared_pages=12, table_width=16
    )
    impl, layer, cache = make_impl(kv_cache_dtype=name), layer_of(), cache_of(name)
    builder = builder_of([impl], torch.float32)
    k, v = fill(impl, layer, cache, batch, torch.float32)
    metadata = builder.build(0, batch.metadata)
    query, output = attend_once(impl, layer, cache, metadata, batch, torch.float32)
    check(output, query, batch, k, v)
    taken = [node for node in builder.planned[impl.spec].attention.schedule().forest if node.group >= 0]
    assert (taken[0].num_requests, taken[0].begin_page, taken[0].end_page) == (4, 0, 12)


def test_padding_of_a_full_graph() -> None:
    """Padding tokens have negative slots, and keys beyond the slots are padding, too."""
    impl, layer, cache = make_impl(kv_cache_dtype="int8_per_token_head"), layer_of(), cache_of(CACHES[0])
    batch = make_batch([1, 1], [33, 64], padding=3)
    k, v = torch.randn(2, NUM_PAGES * PAGE, 2, 64)
    for slots in (torch.cat(batch.slots), batch.metadata.slot_mapping):
        rows = torch.cat([slots.clamp(min=0), torch.zeros(4, dtype=torch.int64)])
        impl.do_kv_cache_update(layer, k[rows], v[rows], cache, slots)
    seen = read_both(impl, cache, k, v, batch, torch.float32)
    metadata = builder_of([impl], torch.float32).build(0, batch.metadata)
    query, output = attend_once(impl, layer, cache, metadata, batch, torch.float32)
    check(output, query, batch, *seen)


def test_a_layer_that_reads_another_ones_cache() -> None:
    writer = make_impl(kv_cache_dtype="fp8_per_token_head")
    reader = make_impl(kv_cache_dtype="fp8_per_token_head", kv_sharing_target_layer_name="layer.0")
    cache, batch = cache_of("fp8_per_token_head"), make_batch(*MIXED)
    metadata = builder_of([writer, reader], torch.float32).build(0, batch.metadata)
    k, v = fill(writer, layer_of(), cache, batch, torch.float32)
    query, output = attend_once(reader, layer_of(3.0), cache, metadata, batch, torch.float32)
    check(output, query, batch, k, v)


def test_a_view_is_made_once_for_each_tensor() -> None:
    """Sleep mode and profiling: vLLM may allocate the cache again."""
    impl = make_impl(kv_cache_dtype="int8_per_token_head")
    first, second = cache_of("int8_per_token_head"), cache_of("int8_per_token_head")
    serve(impl, first, make_batch(*MIXED))
    view = view_of(impl, first)
    assert view_of(impl, first) is view
    assert view_of(impl, second).k.data_ptr() == second.data_ptr() != view.k.data_ptr()
    serve(impl, second, make_batch(*MIXED, seed=1))


def test_memory_in_another_order_is_refused() -> None:
    cache = torch.zeros(NUM_PAGES, 2, PAGE, 2 * 136, dtype=torch.int8)[..., :136]
    with pytest.raises(NotImplementedError, match=r"a KV cache of strides .*: pass --kv-cache-dtype"):
        token_scaled_view(cache, 64, torch.int8)


def test_an_encoder_has_no_cache() -> None:
    impl = make_impl(kv_cache_dtype="fp8_per_token_head", attn_type="encoder_only")
    assert (impl.spec.kv_dtype, impl.spec.token_scales) == (None, False)
    batch = make_batch([20, 7], [20, 7], causal=False)
    metadata = builder_of([impl], torch.float32).build(0, batch.metadata)
    query, key, value = (torch.randn(27, heads, 64) for heads in (6, 2, 2))
    output = torch.full_like(query, torch.nan)
    impl.forward(layer_of(), query, key, value, torch.empty(0), metadata, output)
    for rows in (slice(0, 20), slice(20, 27)):
        expected, _ = oracle.attention(query[rows], key[rows], value[rows], causal=False)
        assert (output[rows].double() - expected).norm() <= TOLERANCE[torch.float32] * expected.norm()


def test_outputs_have_no_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM then quantizes them itself (fuse_attn_quant)."""
    monkeypatch.setattr("attn_backend.adapters.vllm.compat.fuses_output_scales", lambda: True)
    names = ("fp8", *CACHES)
    assert [make_impl(head_size=128, kv_cache_dtype=name).spec.float8_out for name in names] == [
        True,
        *[False] * len(CACHES),
    ]


def test_plan_keys() -> None:
    keys = [
        (spec.kv_dtype, spec.token_scales, spec.rotation)
        for spec in (make_impl(kv_cache_dtype=name).spec for name in ("fp8", *CACHES))
    ]
    assert keys == [
        (torch.float8_e4m3fn, False, False),
        (torch.int8, True, False),
        (torch.float8_e4m3fn, True, False),
        (INT4, True, True),
        (NVFP4, True, False),
        (INT8_NVFP4, True, False),
    ]


@pytest.mark.parametrize("name", CACHES)
def test_plans_of_layers_that_vllm_does_not_know(name: str) -> None:
    config = make_config(cache_config=SimpleNamespace(cache_dtype=name))
    assert layer_specs(config, make_spec(dtype=STORED[name]), ["placeholder"]) == [
        LayerSpec(
            6, 2, 64, -1, kv_dtype=TOKEN_SCALED_CACHES[name], token_scales=True, rotation=name == CACHES[2]
        )
    ]


@pytest.mark.parametrize("name", OF_VLLM if CUSTOM not in list(KVQuantMode) else CACHES)
@pytest.mark.parametrize(
    ("skipped", "has_16_bits"),
    [([], [False, False]), (["1"], [False, True]), (["sliding_window"], [True, False])],
)
def test_layers_that_skip_8_bits(name: str, skipped: list[str], has_16_bits: list[bool]) -> None:
    """--kv-cache-dtype-skip-layers, with vLLM's own layers. Each kind of cache is a group with a builder."""
    dtype = torch.float16
    config = VllmConfig(
        cache_config=CacheConfig(block_size=PAGE, cache_dtype=name, kv_cache_dtype_skip_layers=skipped)
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
                for number, window in enumerate((20, None))
            ]
    finally:
        torch.set_default_dtype(torch.float32)
    batch = make_batch(*MIXED)
    for layer, is_plain in zip(made, has_16_bits, strict=True):
        assert layer.query_quant is None  # Q stays as it is
        spec = backend.customize_spec(layer.get_kv_cache_spec(config))
        assert spec.dtype == (dtype if is_plain else STORED[name])
        row = 2 * 64 * 2 if is_plain else row_bytes(name, 64)
        assert spec.page_size_bytes == spec.block_size * 2 * row
        model = SimpleNamespace(dtype=dtype, get_num_attention_heads=lambda config: 6)
        of_engine = make_config({"layer": layer}, model_config=model, cache_config=config.cache_config)
        builder = AttnMetadataBuilder(
            replace(spec, block_size=PAGE), ["layer"], of_engine, torch.device("cpu")
        )
        window = -1 if layer.sliding_window is None else layer.sliding_window - 1
        metadata = builder.build(0, batch.metadata)
        if is_plain:
            cache = make_cache("NHD", dtype=dtype)
            k, v = fill_cache(cache, batch)
            query, output = run_layer(layer.impl, metadata, batch, cache, k, v)
        else:
            cache = cache_of(name)
            k, v = fill(layer.impl, layer, cache, batch, dtype)
            query, output = attend_once(layer.impl, layer, cache, metadata, batch, dtype)
        check(output, query, batch, k, v, window_left=window)


@pytest.mark.parametrize("name", CACHES)
def test_the_backend_says_so(name: str) -> None:
    assert reasons(kv_cache_dtype=name) == []
    assert reasons(kv_cache_dtype=name, head_size=64, has_sink=True, dtype=torch.float16) == []
    assert reasons(kv_cache_dtype=name, head_size=512) == [
        f"a KV cache of dtype {name} for heads of 512 columns: pass --kv-cache-dtype fp8_e4m3 or auto"
    ]
    assert reasons(kv_cache_dtype="fp8", head_size=512) == []


def test_wide_heads_on_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_impl(4, 512, 1, kv_cache_dtype="int8_per_token_head").spec.token_scales
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cuda"))
    message = "a KV cache of dtype int8_per_token_head for heads of 512 columns: pass fp8 or the model's"
    with pytest.raises(NotImplementedError, match=message):
        AttnImpl(4, 512, 1.0, 1, kv_cache_dtype="int8_per_token_head")


@pytest.mark.parametrize("name", CACHES)
def test_latents_have_no_such_scales(name: str) -> None:
    assert name not in MlaBackend.supported_kv_cache_dtypes


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["NHD", "HND"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.usefixtures("vllm_as_it_was")
def test_on_a_gpu_and_in_a_captured_graph(name: str, head_size: int, memory: str) -> None:
    if unsupported_pages(name, False, compat.takes_bytes_of_rows()):
        pytest.skip("this release has no room for its scales")
    batch = make_batch([20, 7, 33], [20, 7, 33])  # all tokens are written again at each replay
    cm = batch.metadata
    cm.query_start_loc, cm.seq_lens, cm.block_table_tensor = (
        x.cuda() for x in (cm.query_start_loc, cm.seq_lens, cm.block_table_tensor)
    )
    slots = cm.slot_mapping.cuda()
    model = SimpleNamespace(dtype=torch.bfloat16, get_num_attention_heads=lambda config: 6)
    impl = AttnImpl(6, head_size, head_size**-0.5, 2, kv_cache_dtype=name)
    layer, cache = layer_of().cuda(), cache_of(name, memory, head_size=head_size).cuda()
    spec = make_spec(2, head_size, STORED[name])
    metadata = make_builder([impl], spec, "cuda", model_config=model).build(0, cm)
    query, key, value = (torch.randn(60, heads, head_size).cuda().bfloat16() for heads in (6, 2, 2))
    output = torch.full_like(query, torch.nan)

    def run() -> None:
        impl.do_kv_cache_update(layer, key, value, cache, slots)
        impl.forward(layer, query, key, value, cache, metadata, output)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for size in (1.0, 30.0):
        key.copy_(torch.randn_like(key) * size)
        value.copy_(torch.randn_like(value) / size)
        graph.replay()
        on_host = cache.cpu()
        k, v = torch.full((2, NUM_PAGES * PAGE, 2, head_size), torch.nan, dtype=torch.bfloat16)
        k[batch.new_slots], v[batch.new_slots] = key.cpu(), value.cpu()
        seen = read_both(impl, on_host, k, v, batch, torch.bfloat16, rotated_dtype=torch.bfloat16)
        multiplied = multiplied_query(query) if impl.cache_dtype == INT4 else query.cpu()
        check(output.cpu(), multiplied, batch, *seen, dtype=torch.bfloat16)
