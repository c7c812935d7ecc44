"""The SGLang backend over the pools of --kv-cache-dtype fp4_mx_block16: float64 attention over K and V as
SGLang rounds them, and the bytes in the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape, model_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method
from sglang.srt.layers.quantization.kvfp4_tensor import FP4MXBlock16KVQuantizeUtil
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_steps import WINDOWED, serve, serve_shared_prefix, step
from sglang_trees import TREES, draft, eagle, random_tree, verify, without_prefixes
from torch import Tensor

from attn_backend import append_kv
from attn_backend.adapters.sglang import compat, plugin
from attn_backend.adapters.sglang.backend import LayerCache, SGLangAttentionBackend
from attn_backend.adapters.sglang.compat import NAME
from attn_backend.adapters.sglang.drafts import DraftStepsBackend
from attn_backend.metadata.kv_cache import MXFP4

PACKED = torch.float4_e2m1fn_x2  # the pool's dtype, which does not name the format
TWO_LAYERS = (LayerShape(), LayerShape(logit_cap=30.0))
CASES = [
    ("cpu", torch.float32),
    ("cpu", torch.bfloat16),
    ("cpu", torch.float16),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def any_release_serves_on_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These tests do not depend on the release. SGLang's functions run without a compiler."""
    monkeypatch.setattr(compat, "starts_triton_on_cpu", lambda name: False)
    with torch.compiler.set_stance("force_eager"):
        yield


class Engine(FakeEngine):
    """With a pool as SGLang's KVCacheConfigurator makes it."""

    def __init__(self, layers: tuple[LayerShape, ...] = TWO_LAYERS, **options: Any) -> None:
        super().__init__(layers, kv_dtype=PACKED, **options)

    def quant_method(self) -> Any:
        method = get_kv_cache_quant_method(MXFP4)
        if hasattr(method, "configure_attention_backends"):
            method.configure_attention_backends(NAME, NAME)
        return method

    def buffers(self, layer_id: int) -> tuple[Tensor, ...]:
        stored: tuple[Tensor, ...] = self.pool.get_raw_kv_buffer(layer_id)
        return stored

    def runner(self, **changes: object) -> SimpleNamespace:
        return super().runner(**{"kv_cache_dtype_str": MXFP4, **changes})

    def held(self, x: Tensor, scale: object) -> Tensor:
        """As SGLang rounds it. It computes with 16 bits if x has 16; compiled, and here, with 32."""
        rounded = FP4MXBlock16KVQuantizeUtil.batched_quantize(x.float().contiguous())
        return FP4MXBlock16KVQuantizeUtil.batched_dequantize(*rounded, dtype=torch.float32).double()

    def check_pool(self) -> None:
        """SGLang reads the same values from its pool."""
        for layer_id in range(len(self.model)):
            of_slots = self.pool.get_kv_buffer(layer_id)
            for request in self.requests:
                slots = self.req_to_token_pool.req_to_token[request.row, : request.length].long()
                for stored, wanted in zip(of_slots, (request.k, request.v), strict=True):
                    if request.length:
                        assert torch.equal(stored[slots].cpu().double(), wanted[layer_id])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("device", "dtype"), CASES)
def test_serving(page_size: int, device: str, dtype: torch.dtype) -> None:
    engine = Engine(page_size=page_size, dtype=dtype, device=device)
    serve(engine)
    engine.check_pool()


@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_wider_heads(head_dim: int) -> None:
    serve(Engine((LayerShape(head_dim=head_dim, v_head_dim=head_dim),), page_size=16))


def test_windows_in_one_pool() -> None:
    """As with --disable-hybrid-swa-memory."""
    serve(Engine(WINDOWED, page_size=16))


def test_variants() -> None:
    serve(Engine((LayerShape(temperature_len=8, logit_cap=5.0),), page_size=16))


def test_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine((LayerShape(), LayerShape(window=20)), page_size=16)
    outputs, taken = serve_shared_prefix(engine, "always", monkeypatch)
    assert len(outputs) == 10
    assert taken == [[4, 0], [5, 0], [3, 0], [4, 0]]


@pytest.mark.parametrize("page_size", [1, 16])
def test_drafts(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains, trees, and the steps of a draft model with branches."""
    monkeypatch.setattr(compat, "setting", lambda name, default=None: TREES.get(name, default))
    engine = Engine(page_size=page_size)
    backend = SGLangAttentionBackend(engine.runner())
    step(engine, backend, ForwardMode.EXTEND, [0, 1, 2], [33, 1, 16])
    chain = SimpleNamespace(topk=1, draft_token_num=4, custom_mask=None)
    step(engine, backend, ForwardMode.TARGET_VERIFY, [1, 0], [4, 4], chain)
    step(engine, backend, ForwardMode.DRAFT_EXTEND_V2, [2, 1], [4, 4])
    trees = [random_tree(engine.generator) for _ in range(3)]
    verify(engine, backend, [0, 1, 2], trees, eagle(without_prefixes(trees)))
    engine.check_pool()
    draft(engine, DraftStepsBackend(engine.runner(is_draft_worker=True), 3, 4), [2, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_does_not_depend_on_the_pool(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same bytes from append_kv and from the pool, up to the precision of SGLang's exponents in 16 bits."""
    written = []
    for copies in (True, False):
        monkeypatch.setattr(compat, "copies_to_slots", lambda pool, copies=copies: copies)
        engine = Engine(dtype=dtype)
        backend = SGLangAttentionBackend(engine.runner())
        batch = engine.batch(ForwardMode.EXTEND, [0], [64])
        backend.init_forward_metadata(batch)
        q, k, v = engine.tensors(batch, 0)
        k = k * torch.logspace(-6, 6, 64)[:, None, None].to(dtype)
        backend.forward(q, k, v, engine.model[0], batch)
        written.append([buffer[batch.out_cache_loc] for buffer in engine.buffers(0)])
    for one, other in zip(*written, strict=True):
        apart = (one != other).float().mean()
        assert apart == 0 if dtype == torch.float32 else apart < 0.05


def test_the_backend_replaces_the_pools_writes() -> None:
    engine = Engine()
    assert compat.copies_to_slots(engine.pool)
    assert compat.holds_fp4(engine.pool)
    assert not compat.holds_fp4(FakeEngine().pool)


def test_tokens_take_36_bytes_of_128() -> None:
    """SGLang plans the pool by these sizes. No workspace belongs to it."""
    engine = Engine(page_size=16)
    method = engine.pool.quant_method
    assert method.dequant_workspace_dtype() is None
    of_token = sum(buffer[0].nbytes for layer in range(2) for buffer in engine.buffers(layer))
    assert of_token == method.compute_cell_size(2, 64, 2, 1) == 2 * 2 * 2 * 36


def test_hybrids_read_their_full_layers() -> None:
    """Layers 1 and 3 of a model with linear attention. Its pool counts them as 0 and 1, and writes."""
    pool = HybridLinearKVPool(
        size=64,
        dtype=PACKED,
        page_size=1,
        head_num=2,
        head_dim=64,
        full_attention_layer_ids=[1, 3],
        device="cpu",
        mamba_pool=SimpleNamespace(get_kv_size_bytes=lambda: (0, 0)),
        quant_method=get_kv_cache_quant_method(MXFP4),
    )
    assert compat.holds_fp4(pool)
    assert not compat.copies_to_slots(pool)
    rows, scales = compat.raw_kv_buffer(pool, 3)
    assert rows[0].data_ptr() == pool.full_kv_pool.k_buffer[1].data_ptr()
    k, v = torch.randn(2, 8, 2, 64).unbind()
    pool.set_kv_buffer(LayerShape().build(3), torch.arange(8), k, v)
    kv = LayerCache().view(*rows, 1, scales)
    ours = LayerCache().view(*(x.clone() for x in rows), 1, (scales[0].clone(), scales[1].clone()))
    append_kv(k, v, ours, torch.arange(8))
    assert torch.equal(ours.k, kv.k)
    assert torch.equal(ours.v, kv.v)


def test_views_are_made_once_and_wait_for_kv_that_is_loaded() -> None:
    pool = Engine(page_size=16).pool
    waited: list[int] = []
    pool.layer_transfer_counter = SimpleNamespace(wait_until=waited.append)
    cache = LayerCache()

    def view() -> Any:
        rows, scales = compat.raw_kv_buffer(pool, 1)
        return cache.view(*rows, 16, scales)

    kv = view()
    assert view() is kv
    assert waited == [1, 1]
    assert kv.stored_dtype == MXFP4
    assert kv.k_scale.blocks.data_ptr() == pool.k_scale_buffer[1].data_ptr()
    pool.k_buffer[1] = pool.k_buffer[1].clone()
    assert view() is not kv


@pytest.mark.parametrize(
    ("layers", "changes", "settings", "message"),
    [
        ((LayerShape(head_dim=96, v_head_dim=96),), {}, {}, "fp4_mx_block16 for heads of 96 columns"),
        ((LayerShape(head_dim=128, v_head_dim=64),), {}, {}, "for heads of 128_64 columns: pass --kv-cache"),
        (
            TWO_LAYERS,
            {"model_config": model_config(attention_arch=AttentionArch.MLA)},
            {},
            "fp4_mx_block16 for latents: pass --kv-cache-dtype fp8_e4m3",
        ),
        (TWO_LAYERS, {"kv_cache_dtype_str": "nvfp4"}, {}, "--kv-cache-dtype nvfp4"),
        (
            TWO_LAYERS,
            {},
            {"memory.enable_hierarchical_cache": True},
            "with --enable-hierarchical-cache: SGLang would not move the scales: leave out",
        ),
        (TWO_LAYERS, {}, {"memory.enable_lmcache": True}, "with --enable-lmcache"),
        (TWO_LAYERS, {}, {"memory.enable_flexkv": True}, "with --enable-flexkv"),
        (TWO_LAYERS, {}, {"memory.radix_cache_backend": "flexkv"}, "with --radix-cache-backend"),
        (TWO_LAYERS, {}, {"disagg.disaggregation_mode": "decode"}, "with --disaggregation-mode"),
        (
            TWO_LAYERS,
            {"is_draft_worker": True},
            {"spec.speculative_algorithm": "DFLASH"},
            "for drafts of DFLASH: pass --speculative-draft-kv-cache-dtype bfloat16",
        ),
    ],
)
def test_refused(
    layers: tuple[LayerShape, ...],
    changes: dict[str, object],
    settings: dict[str, object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"memory.enable_lmcache": False, "disagg.disaggregation_mode": "null", **settings}
    monkeypatch.setattr(compat, "setting", settings.get)
    with pytest.raises(ValueError, match=message):
        SGLangAttentionBackend(Engine(layers).runner(**changes))


def test_a_draft_of_16_bits_with_an_fp4_target() -> None:
    """With --speculative-draft-kv-cache-dtype auto, SGLang gives its runner the target's name."""
    backend = SGLangAttentionBackend(FakeEngine().runner(kv_cache_dtype_str=MXFP4, is_draft_worker=True))
    assert backend.kv_dtype == torch.float32


def test_separate_pools_of_windows_are_refused() -> None:
    """SGLang makes their halves with whole bytes and without scales."""
    engine = FakeEngine(WINDOWED, hybrid=True)
    assert not compat.holds_fp4(engine.pool)
    with pytest.raises(ValueError, match="sliding windows: pass --disable-hybrid-swa-memory"):
        SGLangAttentionBackend(engine.runner(kv_cache_dtype=PACKED, kv_cache_dtype_str=MXFP4))


def test_pools_without_scales_are_refused() -> None:
    engine = FakeEngine()
    with pytest.raises(ValueError, match="fp4_mx_block16 in a MHATokenToKVPool"):
        SGLangAttentionBackend(engine.runner(kv_cache_dtype=PACKED, kv_cache_dtype_str=MXFP4))


# SGLang's own check of names.


def server(cache: str = MXFP4, kind: str = "MHA", backend: str = NAME, has_window_pool: bool = False) -> Any:
    config = SimpleNamespace(attention_arch=SimpleNamespace(name=kind), is_hybrid_swa=has_window_pool)
    return SimpleNamespace(
        kv_cache_dtype=cache,
        attention_backend=backend,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        speculative_algorithm=None,
        enable_unified_memory=False,
        get_model_config=lambda: config,
    )


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of SGLang's check, on a Hopper GPU."""
    module = pytest.importorskip("sglang.srt.arg_groups.kv_cache_hook", reason="since 0.5.19")
    gpu = SimpleNamespace(is_cuda=True, is_sm100=False, is_sm120=False)
    monkeypatch.setattr(module, "get_platform", lambda: gpu, raising=False)
    monkeypatch.setattr(module, "is_cuda", lambda: True, raising=False)
    monkeypatch.setattr(module, "resolving_view", lambda arguments: arguments, raising=False)
    monkeypatch.setattr(module, "use_mla_backend", lambda arguments: False)
    monkeypatch.setattr(
        module, "resolved_view", lambda arguments: plugin.renamed_view(lambda given: given, arguments)
    )
    return module


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook around it."""
    monkeypatch.setattr(plugin, "import_module", lambda name: SimpleNamespace())
    (of_caches,) = [check for checks in plugin.CHECKS[:1] for check in checks if check.of_cache]
    return plugin.reading(of_caches, NAME)


def test_the_engine_accepts_our_name(engines: Any, check: Any) -> None:
    original = engines.handle_kv4_compatibility
    with pytest.raises(AssertionError, match=f"got {NAME}"):
        original(server())
    check(original, server())
    with pytest.raises(AssertionError, match="got flashinfer"):
        check(original, server(backend="flashinfer"))


def test_other_caches_see_our_name(engines: Any, check: Any) -> None:
    seen: list[str] = []
    for cache in ("nvfp4", "auto"):
        check(
            lambda arguments: seen.append(engines.resolved_view(arguments).attention_backend), server(cache)
        )
    assert seen == [NAME, NAME]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"kind": "MLA"}, "fp4_mx_block16 for latents: pass --kv-cache-dtype fp8_e4m3"),
        ({"has_window_pool": True}, "fp4_mx_block16 in a separate.*: pass --disable-hybrid-swa-memory"),
    ],
)
def test_models_are_refused_before_their_pools_are_made(
    model: dict[str, Any], message: str, check: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        check(lambda arguments: pytest.fail("asked"), server(**model))
