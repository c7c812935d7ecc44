"""The SGLang backend over 8-bit pools, compared with float64 attention over the stored values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_float8 import E4M3, E5M2, engine_of
from sglang_steps import WINDOWED, check, serve, serve_shared_prefix, step
from torch import Tensor

from attn_backend.adapters.sglang import compat
from attn_backend.adapters.sglang.backend import LayerCache, SGLangAttentionBackend, quantize


@pytest.fixture(autouse=True)
def any_release_serves_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests do not depend on the release."""
    monkeypatch.setattr(compat, "starts_triton_on_cpu", lambda name: False)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        ("cpu", torch.float16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_serving(page_size: int, kv_dtype: torch.dtype, device: str, dtype: torch.dtype) -> None:
    serve(engine_of(kv_dtype, page_size=page_size, dtype=dtype, device=device))


@pytest.mark.parametrize("scales", ["number", "none"])
def test_other_scales(scales: str) -> None:
    serve(engine_of(scales=scales, page_size=16))


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pools_that_write_by_themselves(hybrid: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hybrid pool writes to one of its halves. Neither half divides K and V in place."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    engine = engine_of(layers=WINDOWED, page_size=16, hybrid=hybrid, dtype=dtype, device=device)
    monkeypatch.setattr(compat, "copies_to_slots", lambda pool: False)
    tensors, given = engine.tensors, []

    def remembered(batch: SimpleNamespace, layer_id: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = tensors(batch, layer_id)
        given.append((k, k.clone(), v, v.clone()))
        return q, k, v

    monkeypatch.setattr(engine, "tensors", remembered)
    serve(engine)
    assert given
    assert all(torch.equal(k, k_before) and torch.equal(v, v_before) for k, k_before, v, v_before in given)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_does_not_depend_on_the_pool(
    kv_dtype: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same bits as append_kv and quantize(): ties, values that are too large, and the smallest values."""
    written = []
    for copies in (True, False):
        monkeypatch.setattr(compat, "copies_to_slots", lambda pool, copies=copies: copies)
        engine = engine_of(kv_dtype, dtype=dtype)
        backend = SGLangAttentionBackend(engine.runner())
        batch = engine.batch(ForwardMode.EXTEND, [0], [64])
        backend.init_forward_metadata(batch)
        q, k, v = engine.tensors(batch, 0)
        k, v = k * torch.logspace(-6, 6, 64)[:, None, None].to(dtype), (v * 8).round() / 8
        backend.forward(q, k, v, engine.model[0], batch)
        written.append(
            [buffer.view(torch.uint8)[batch.out_cache_loc] for buffer in engine.pool.get_kv_buffer(0)]
        )
    assert all(torch.equal(one, other) for one, other in zip(*written, strict=True))
    assert written[0][0].view(kv_dtype).float().abs().max() == torch.finfo(kv_dtype).max


def test_quantize() -> None:
    x = torch.tensor([0.0, 1.0, 447.0, 1e6, -1e6, torch.nan])
    assert quantize(x, None, E4M3).float()[:5].tolist() == [0.0, 1.0, 448.0, 448.0, -448.0]
    assert quantize(x, 2.0, E4M3).float()[:5].tolist() == [0.0, 0.5, 224.0, 448.0, -448.0]
    assert quantize(x, torch.tensor(2.0), E5M2).float()[:5].tolist() == [0.0, 0.5, 224.0, 57344.0, -57344.0]
    assert quantize(x, None, E4M3).float()[5].isnan()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_shared_prefix(page_size: int, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (LayerShape(), LayerShape(window=20))
    outputs, taken = serve_shared_prefix(
        engine_of(kv_dtype, layers, page_size=page_size), "always", monkeypatch
    )
    assert len(outputs) == 10
    assert taken == [[4, 0], [5, 0], [3, 0], [4, 0]]


def test_scales_that_are_loaded_again() -> None:
    """A captured graph reads new scales from the same tensors. Other tensors are detected."""
    engine = engine_of(layers=(LayerShape(),))
    backend = SGLangAttentionBackend(engine.runner())
    layer = engine.model[0]
    step(engine, backend, ForwardMode.EXTEND, [0], [10])
    view = backend._caches[0]._kv
    layer.k_scale.fill_(0.2)
    step(engine, backend, ForwardMode.EXTEND, [1], [10])
    assert backend._caches[0]._kv is view
    layer.v_scale = torch.nn.Parameter(torch.tensor(0.3), requires_grad=False)
    step(engine, backend, ForwardMode.EXTEND, [2], [10])
    assert backend._caches[0]._kv is not view


def test_a_layer_that_reads_another_ones_cache_reads_it_with_its_scales() -> None:
    engine = engine_of(layers=(LayerShape(),))
    backend = SGLangAttentionBackend(engine.runner())
    batch = engine.batch(ForwardMode.EXTEND, [0], [30])
    backend.init_forward_metadata(batch)
    q, k, v = engine.tensors(batch, 0)
    engine.remember([0], [30], 0, k, v)
    reader = LayerShape().build(0)
    reader.k_scale, reader.v_scale = 7.0, 9.0
    backend.forward(q, k, v, engine.model[0], batch)
    check(
        backend.forward(q, None, None, reader, batch, save_kv_cache=False), engine.reference([0], [30], 0, q)
    )


def test_views_of_the_pool_are_made_once() -> None:
    pool = MHATokenToKVPool(64, 16, E4M3, 2, 64, 1, "cpu", enable_memory_saver=False)
    layer, cache = RadixAttention(4, 64, 0.125, 2, layer_id=0), LayerCache()
    kv = cache.float8_view(layer, *pool.get_kv_buffer(0), 16, writes=True)
    assert cache.float8_view(layer, *pool.get_kv_buffer(0), 16, writes=True) is kv
    assert kv.dtype == E4M3
    assert kv.k.data_ptr() == pool.k_buffer[0].data_ptr()
    other = MHATokenToKVPool(64, 16, E4M3, 2, 64, 1, "cpu", enable_memory_saver=False)
    assert (
        cache.float8_view(layer, *other.get_kv_buffer(0), 16, writes=True).k.data_ptr()
        == other.k_buffer[0].data_ptr()
    )


def test_what_the_pool_stores_as_bytes_is_copied_to_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = engine_of().pool
    assert pool.store_dtype == torch.uint8
    assert compat.copies_to_slots(pool)
    monkeypatch.setattr(pool, "dtype", torch.bfloat16)
    assert not compat.copies_to_slots(pool)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_cache_dtype": E4M3, "kv_cache_dtype_str": "mxfp8"},
            "--kv-cache-dtype mxfp8: pass --kv-cache-dtype fp8_e4m3, or --dtype bfloat16 --kv-cache",
        ),
        (
            {"kv_cache_dtype": torch.uint8, "dtype": torch.bfloat16},
            "a KV cache of torch.uint8 for a model of torch.bfloat16.*or --kv-cache-dtype bfloat16",
        ),
        ({"kv_cache_dtype": torch.bfloat16}, "a KV cache of torch.bfloat16 for a model of torch.float32"),
    ],
)
def test_refused_caches(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGLangAttentionBackend(FakeEngine().runner(**changes))
