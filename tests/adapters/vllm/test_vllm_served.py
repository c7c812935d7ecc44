"""The check of a built model: which attention layers run on this backend."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM")

from torch import nn
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import register_backend
from vllm.v1.worker.worker_base import WorkerWrapperBase
from vllm_layer import Layer, make_config

from attn_backend.adapters.vllm import compat, support
from attn_backend.adapters.vllm.backend import AttnBackend
from attn_backend.adapters.vllm.plugin import register
from attn_backend.adapters.vllm.support import CPU_SWITCH, check_layers

OURS = Layer("an impl", AttnBackend)
THEIRS = Layer("an impl", CPUAttentionBackend)


@pytest.fixture(autouse=True)
def on_a_gpu(registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A platform with a choice of backends."""
    logger = logging.Logger("of this test")
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(support, "logger", logger)
    monkeypatch.setattr(support, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.delenv(CPU_SWITCH, raising=False)
    monkeypatch.delenv("ATTN_BACKEND_REQUIRE_LAYERS", raising=False)
    register()
    caplog.clear()


def config(layers: dict[str, Any], backend: Any, speculative: Any = None, **per_kind: Any) -> Any:
    return make_config(
        layers,
        attention_config=SimpleNamespace(backend=backend, backend_per_kind=per_kind),
        speculative_config=speculative,
    )


def numbered(layer: Any, numbers: range) -> dict[str, Any]:
    return {f"model.layers.{number}.attn": layer for number in numbers}


def test_a_model_of_ours_is_no_news(registry: Any, caplog: pytest.LogCaptureFixture) -> None:
    derived = Layer("an impl", type("ChunkedLocal", (AttnBackend,), {}))
    check_layers(config({**numbered(OURS, range(3)), "last": derived}, registry.CUSTOM))
    assert not caplog.messages


def test_layers_of_other_backends_are_named(registry: Any, caplog: pytest.LogCaptureFixture) -> None:
    layers = numbered(OURS, range(3)) | numbered(THEIRS, range(3, 60)) | numbered(THEIRS, range(61, 62))
    check_layers(config(layers, registry.CUSTOM))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages == [
        "attn_backend serves 3 of 61 attention layers. Other backends serve the rest: CPU_ATTN: "
        "model.layers.{3-59,61}.attn."
    ]


def test_a_model_with_its_own_kernels_is_refused(
    registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = config(numbered(THEIRS, range(2)), registry.CUSTOM)
    with pytest.raises(RuntimeError, match=r"none of the 2 attention layers.*ATTN_BACKEND_REQUIRE_LAYERS=0"):
        check_layers(chosen)
    monkeypatch.setenv("ATTN_BACKEND_REQUIRE_LAYERS", "0")
    check_layers(chosen)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "CPU_ATTN: model.layers.{0-1}.attn" in caplog.messages[0]


def test_each_way_to_choose_it(registry: Any) -> None:
    layers = numbered(THEIRS, range(2))
    for of_others in (config(layers, None), config(layers, registry.FLASH_ATTN)):
        check_layers(of_others)
    names = [name for name in ("CUSTOM", "ATTN_BACKEND") if name in registry.__members__]
    for name in names:
        for chosen in (
            config(layers, registry[name]),
            config(layers, None, full_attention=registry[name]),
            config(layers, registry.FLASH_ATTN, sliding_window=registry[name]),
        ):
            assert compat.is_chosen(chosen)
            with pytest.raises(RuntimeError, match="none of the 2"):
                check_layers(chosen)


def test_models_without_attention_start(registry: Any) -> None:
    check_layers(config({}, registry.CUSTOM))


class OwnAttention(nn.Module, AttentionLayerBase):
    """Like DeepSeek V4's and Inkling's: it computes attention itself, without an impl."""

    def forward(self, positions: Any, hidden_states: Any) -> Any: ...

    def get_attn_backend(self) -> Any:
        return CPUAttentionBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...


class IndexerCache(OwnAttention):
    def forward(self) -> Any: ...  # type: ignore[override]


class Ring(nn.Module, AttentionLayerBase):
    get_attn_backend = OwnAttention.get_attn_backend
    get_kv_cache_spec = OwnAttention.get_kv_cache_spec


class MambaBase(OwnAttention):
    """vLLM's class of this name is the base of all state-space layers."""


def test_what_counts_as_an_attention_layer(registry: Any) -> None:
    assert nn.Module.forward is Ring.forward
    layers = {
        "own": OwnAttention(),
        "cache": IndexerCache(),
        "ring": Ring(),
        "state": type("Mixer", (MambaBase,), {})(),
    }
    chosen = config({**layers, "ours": OURS}, registry.CUSTOM)
    assert len(get_layers_from_vllm_config(chosen, AttentionLayerBase)) == 5
    assert list(compat.attention_layers(chosen)) == ["own", "ours"]


def test_draft_models(registry: Any, caplog: pytest.LogCaptureFixture) -> None:
    layers = {"layer.0": OURS, "draft.0": THEIRS}
    of_vllms_choice = SimpleNamespace(attention_backend=None)
    of_users_choice = SimpleNamespace(attention_backend=registry.CPU_ATTN)
    check_layers(config(layers, registry.CUSTOM, of_users_choice))
    assert not caplog.messages
    check_layers(config(layers, registry.CUSTOM, of_vllms_choice))
    assert len(caplog.messages) == 1
    assert "CPU_ATTN: draft.0. A draft model gets attn_backend from" in caplog.messages[0]


def test_a_cpu_without_the_switch(
    registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(support, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    check_layers(config(numbered(THEIRS, range(2)), None))
    assert not caplog.messages
    check_layers(config(numbered(THEIRS, range(2)), registry.CUSTOM))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "attn_backend is not used" in caplog.messages[0]
    assert f"{CPU_SWITCH}=1" in caplog.messages[0]


def test_the_switch_for_cpus_is_a_choice(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has no option for it there."""
    monkeypatch.setattr(support, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setattr(compat, "current_platform", support.current_platform)
    monkeypatch.setenv(CPU_SWITCH, "1")
    with pytest.raises(RuntimeError, match="none of the 2 attention layers"):
        check_layers(config(numbered(THEIRS, range(2)), None))


def test_another_plugin_that_takes_custom_later(registry: Any, caplog: pytest.LogCaptureFixture) -> None:
    register_backend(registry.CUSTOM, "other_package.backend.OtherBackend")
    check_layers(config(numbered(THEIRS, range(2)), registry.CUSTOM))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "CUSTOM. It belongs to other_package.backend.OtherBackend" in caplog.messages[0]


def test_workers_check_once_the_model_is_built(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register()  # a second time
    seen = []
    layers = dict(numbered(OURS, range(1)))  # not yet the model's

    class Worker:
        def load_model(self, *, load_dummy_weights: bool = False) -> str:
            seen.append(load_dummy_weights)
            layers.clear()
            layers.update(numbered(THEIRS, range(2)))
            return "loaded"

    wrapper = WorkerWrapperBase()
    wrapper.worker, wrapper.vllm_config = Worker(), config(layers, registry.CUSTOM)
    with pytest.raises(RuntimeError, match="none of the 2"):
        wrapper.load_model(load_dummy_weights=True)
    assert seen == [True]
    wrapper.vllm_config = config(layers, None)
    assert wrapper.load_model() == "loaded"


def test_the_builder_of_the_last_layers_tells_of_the_start(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(support, "log_start", told.append)
    monkeypatch.setattr(support, "_planned_layers", set())
    model = config({**numbered(OURS, range(3)), "theirs": THEIRS}, registry.CUSTOM)
    support.tell_when_ready(model, ["model.layers.0.attn", "model.layers.2.attn"])
    assert not told
    support.tell_when_ready(model, ["model.layers.1.attn"])
    assert told == [support.logger]


@pytest.mark.parametrize(
    ("executor", "is_rust", "hidden_by"),
    [
        ("mp", False, None),
        ("ray", False, "--distributed-executor-backend ray"),
        (None, True, "VLLM_USE_RUST_FRONTEND"),
    ],
)
def test_counters_that_metrics_cannot_show(
    executor: str | None,
    is_rust: bool,
    hidden_by: str | None,
    registry: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", str(int(is_rust)))
    model = config(numbered(OURS, range(3)), registry.CUSTOM)
    model.parallel_config = SimpleNamespace(distributed_executor_backend=executor)
    check_layers(model)
    assert not caplog.messages  # they are off
    monkeypatch.setenv("ATTN_BACKEND_METRICS", "1")
    check_layers(model)
    told = [f"attn_backend's counters are not in /metrics with {hidden_by}."]
    assert caplog.messages == (told if hidden_by else [])
