"""Registration, and models that are refused while the engine starts."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape, model_config, plans_of
from sglang.srt import runtime_context, server_args
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

from attn_backend.adapters import layers
from attn_backend.adapters.sglang import backend, compat, register, rules
from attn_backend.adapters.sglang.compat import NAME


@pytest.fixture(autouse=True)
def any_release_serves_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """These refusals do not depend on the release."""
    monkeypatch.setattr(compat, "starts_triton_on_cpu", lambda name: False)


def test_registration_can_be_repeated() -> None:
    register()
    register()
    assert ATTENTION_BACKEND_CHOICES.count(NAME) == 1
    assert ATTENTION_BACKENDS[NAME](FakeEngine().runner()).page_size == 1


def test_pools_that_do_more_than_copy_write_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    class CountingPool(MHATokenToKVPool):
        def set_kv_buffer(self, *args: object, **more: object) -> None: ...

    plain = FakeEngine().pool
    assert compat.copies_to_slots(plain)
    assert not compat.copies_to_slots(FakeEngine((LayerShape(), LayerShape(window=20)), hybrid=True).pool)
    for name, value in (
        ("store_dtype", torch.uint8),
        ("kv_cache_layout", "hnd"),
        ("requires_physical_write_loc", True),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(plain, name, value, raising=False)
            assert not compat.copies_to_slots(plain), name
    monkeypatch.setattr(plain, "set_kv_buffer", lambda *_: None)  # a wrapper around this pool's method
    assert not compat.copies_to_slots(plain)
    counting = FakeEngine().pool
    counting.__class__ = CountingPool
    assert not compat.copies_to_slots(counting)


def test_deterministic_inference_is_allowed_with_the_radix_cache() -> None:
    if not hasattr(server_args, "DETERMINISTIC_ATTENTION_BACKEND_CHOICES"):
        pytest.skip(f"SGLang {compat.release()} has no list of deterministic backends")
    register()
    register()
    assert server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count(NAME) == 1
    assert server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.count(NAME) == 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """cascade and batch_invariant of every Attention that a backend creates."""
    arguments_of: list[tuple[bool, bool]] = []
    monkeypatch.setattr(layers, "record_attention", lambda *_: None)
    monkeypatch.setattr(
        layers,
        "Attention",
        lambda *heads, **arguments: arguments_of.append((arguments["cascade"], arguments["batch_invariant"])),
    )
    return arguments_of


@pytest.mark.parametrize(("variable", "cascade"), [(None, True), ("1", True), ("0", False), ("", False)])
def test_what_the_environment_says(
    variable: str | None, cascade: bool, made: list[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTN_BACKEND_CASCADE", raising=False)
    if variable is not None:
        monkeypatch.setenv("ATTN_BACKEND_CASCADE", variable)
    backend.SGLangAttentionBackend(FakeEngine().runner())
    assert made == [(cascade, False)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_inference_is_batch_invariant(
    deterministic: bool, made: list[tuple[bool, bool]]
) -> None:
    context = runtime_context.get_context()
    if not hasattr(context, "override_server_args"):
        pytest.skip(f"SGLang {compat.release()} has no way to set an option of a server that is not there")
    with context.override_server_args(enable_deterministic_inference=deterministic):
        backend.SGLangAttentionBackend(FakeEngine().runner())
    assert made == [(True, deterministic)]


def test_what_deterministic_inference_excludes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "deterministic", lambda: True)
    monkeypatch.setattr(
        compat,
        "setting",
        lambda path, default: True if path == "schedule.enable_mixed_chunk" else default,
    )
    with pytest.raises(
        ValueError,
        match=r"--enable-mixed-chunk with --enable-deterministic-inference: leave out --enable-mixed-chunk$",
    ):
        backend.SGLangAttentionBackend(FakeEngine().runner())
    refused = rules.unsupported_deterministic(has_latents=True, has_mixed_chunks=False)
    assert refused is not None
    assert refused.what == "MLA with --enable-deterministic-inference"


def test_a_package_that_cannot_be_loaded_is_no_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setitem(sys.modules, "attn_backend.adapters.sglang.backend", None)
    with pytest.raises(RuntimeError, match="attn-backend doctor"):
        ATTENTION_BACKENDS[NAME](FakeEngine().runner())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "xpu"}, "device 'xpu'"),
        ({"model_config": model_config(attention_arch=AttentionArch.MLA)}, "latents in a MHATokenToKVPool"),
        ({"model_config": model_config(attention_arch="another")}, "the attention architecture another"),
    ],
)
def test_refused_runners(changes: dict[str, object], message: str) -> None:
    register()
    with pytest.raises(ValueError, match=message):
        ATTENTION_BACKENDS[NAME](FakeEngine().runner(**changes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec.speculative_algorithm": "DSPARK"}, "--speculative-algorithm DSPARK.*EAGLE.*DFLASH"),
        (
            {"memory.enable_unified_memory": True},
            "--enable-unified-memory: leave it out, or use another --attention-backend",
        ),
        (
            {"exec.dllm.dllm_algorithm": "LowConfidence"},
            "--dllm-algorithm: leave it out, or use another --attention-backend",
        ),
        ({"parallel.attn_dcp_size": 2}, "--dcp-size 2: pass --dcp-size 1, or use --attention-backend triton"),
        ({"parallel.attn_cp_size": 2}, "--attn-cp-size 2: pass --attn-cp-size 1"),
    ],
)
def test_refused_options(settings: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setattr(compat, "setting", settings.get)
    with pytest.raises(ValueError, match=message):
        ATTENTION_BACKENDS[NAME](FakeEngine().runner())


def test_a_release_that_starts_triton_on_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setattr(compat, "starts_triton_on_cpu", lambda name: True)
    with pytest.raises(ValueError, match=r"0\.5\.22"):
        ATTENTION_BACKENDS[NAME](FakeEngine().runner())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_cap": 5.0, "logit_capping_method": "other"}, "'other'"),
        (
            {"sliding_window_size": 8, "is_cross_attention": True},
            "sliding window over the tokens of an encoder",
        ),
    ],
)
def test_refused_layers(changes: dict[str, object], message: str) -> None:
    register()
    layer = RadixAttention(4, 64, 0.125, 2, layer_id=0, **changes)
    with pytest.raises(ValueError, match=message):
        ATTENTION_BACKENDS[NAME](FakeEngine().runner(model=torch.nn.ModuleList([layer])))


class Gemma3ForConditionalGeneration(torch.nn.ModuleList):
    """Has the method through which models pass image masks to SGLang's Triton backend."""

    def prepare_attn_masks(self, forward_batch: object, input_ids: object, mask_dtype: object) -> None: ...


class OtherModel(Gemma3ForConditionalGeneration):
    """A model whose masks nobody has reviewed."""


@pytest.mark.parametrize(
    ("model_class", "multimodal", "chunked", "message"),
    [
        (Gemma3ForConditionalGeneration, True, -1, None),
        (Gemma3ForConditionalGeneration, False, 512, None),  # its default: there are no images
        (
            Gemma3ForConditionalGeneration,
            True,
            512,
            "in prompts that are computed in chunks.*--chunked-prefill-size -1",
        ),
        (
            OtherModel,
            True,
            -1,
            "the masks over the images of a prompt that OtherModel makes.*language_model_only.*triton",
        ),
    ],
)
def test_masks_over_images(
    model_class: type[torch.nn.ModuleList],
    multimodal: bool,
    chunked: int,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register()
    monkeypatch.setattr(
        compat,
        "setting",
        lambda path, default: chunked if path == "schedule.chunked_prefill_size" else default,
    )
    engine = FakeEngine()
    start = partial(
        ATTENTION_BACKENDS[NAME],
        engine.runner(model=model_class(engine.model), model_config=model_config(is_multimodal=multimodal)),
    )
    if message is None:
        start()
    else:
        with pytest.raises(ValueError, match=message):
            start()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule.chunked_prefill_size": 512}, "in chunks"),
        ({"memory.disable_radix_cache": False}, "cached prefixes"),
    ],
)
def test_encoders_need_whole_prompts(
    settings: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    monkeypatch.setattr(compat, "setting", settings.get)
    layer = RadixAttention(4, 64, 0.125, 2, layer_id=0, attn_type=AttentionType.ENCODER_ONLY)
    with pytest.raises(ValueError, match=message):
        ATTENTION_BACKENDS[NAME](FakeEngine().runner(model=torch.nn.ModuleList([layer])))


class Gemma4ForConditionalGeneration(Gemma3ForConditionalGeneration):
    """Makes masks regardless of its configuration."""


@pytest.mark.parametrize("sees_both_sides", ["vision", None])
def test_images_of_gemma_4(sees_both_sides: str | None) -> None:
    """Image tokens see each other only in layers with a window, which have a separate pool."""
    register()
    engine = FakeEngine((LayerShape(window=9), LayerShape()), hybrid=True)
    config = model_config(
        is_multimodal=True, hf_text_config=SimpleNamespace(use_bidirectional_attention=sees_both_sides)
    )
    made = ATTENTION_BACKENDS[NAME](
        engine.runner(model=Gemma4ForConditionalGeneration(engine.model), model_config=config)
    )
    has_spans = sees_both_sides is not None
    assert {(key.window_left, key.has_spans, key.cuts_spans) for key in plans_of(made)} == {
        (9, has_spans, has_spans),
        (-1, False, False),
    }


def test_images_without_masks_are_served() -> None:
    register()
    ATTENTION_BACKENDS[NAME](FakeEngine().runner(model_config=model_config(is_multimodal=True)))


def test_gemma_3_is_known_by_its_masks() -> None:
    gemma3 = pytest.importorskip("sglang.srt.models.gemma3_mm")
    assert hasattr(gemma3.Gemma3ForConditionalGeneration, "prepare_attn_masks")


def test_the_user_is_told_of_an_untried_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(backend, "warn_if_untried", lambda device, logger: asked.append(device))
    backend.SGLangAttentionBackend(FakeEngine().runner())
    assert asked == [torch.device("cpu")]


def test_sinks_of_no_layer_are_refused() -> None:
    register()
    engine = FakeEngine()
    engine.model = torch.nn.ModuleList([engine.model])
    engine.model.sinks = torch.nn.Parameter(torch.zeros(6))
    with pytest.raises(ValueError, match="attention sinks"):
        ATTENTION_BACKENDS[NAME](engine.runner())


def test_refused_at_the_first_forward() -> None:
    register()
    engine = FakeEngine((LayerShape(),))
    backend = ATTENTION_BACKENDS[NAME](engine.runner())
    with pytest.raises(ValueError, match="sinks"):
        backend.forward_extend(
            torch.zeros(1, 384), None, None, engine.model[0], SimpleNamespace(), sinks=torch.zeros(6)
        )
