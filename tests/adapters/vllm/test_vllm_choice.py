"""How vLLM finds this backend: its loader of plugins, and its choice of a backend for each kind of layer."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1", reason="needs vLLM")

from vllm import plugins
from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import register_backend
from vllm_layer import Layer, make_config

from attn_backend.adapters.vllm import compat, support
from attn_backend.adapters.vllm.backend import AttnBackend
from attn_backend.adapters.vllm.plugin import BACKEND_PATH, register
from attn_backend.adapters.vllm.support import CPU_SWITCH

OTHER = "other_package.backend.OtherBackend"
FULL, WINDOWED = "full_attention", "sliding_window"


@pytest.fixture(autouse=True)
def log(registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if not hasattr(registry, "register"):
        pytest.skip("this release has a fixed list of names")
    logger = logging.Logger("of this test")
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(support, "logger", logger)
    support._log_registration.cache_clear()
    support._log_other_plugin.cache_clear()
    monkeypatch.delenv(CPU_SWITCH, raising=False)


class Gpu:
    """A platform that takes the selected backend if it accepts the layer, as vLLM's does for CUDA."""

    is_cpu = staticmethod(lambda: False)

    @staticmethod
    def get_attn_backend_cls(selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=DeviceCapability(9, 0), **attn_selector_config._asdict()
        )
        assert selected_backend.name == "CPU_ATTN" or not reasons
        path: str = selected_backend.get_path()
        return path


@pytest.fixture
def nothing_was_chosen() -> Iterator[None]:
    selector._cached_get_attn_backend.cache_clear()
    yield
    selector._cached_get_attn_backend.cache_clear()


@pytest.mark.usefixtures("nothing_was_chosen")
@pytest.mark.parametrize("name", ["ATTN_BACKEND", "CUSTOM"])
@pytest.mark.parametrize("ours", [{FULL}, {WINDOWED}, {FULL, WINDOWED}], ids=["full", "windowed", "all"])
@pytest.mark.parametrize("by_kind", [False, True])
def test_a_backend_for_each_kind_of_layers(
    by_kind: bool, ours: set[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`backend_per_kind` overrules the backend for all layers, in either direction."""
    register()
    all_layers = "CPU_ATTN" if by_kind else name
    per_kind = {kind: name if kind in ours else "CPU_ATTN" for kind in (FULL, WINDOWED)}
    per_kind = {kind: chosen for kind, chosen in per_kind.items() if by_kind or chosen != all_layers}
    config = VllmConfig(attention_config=AttentionConfig(backend=all_layers, backend_per_kind=per_kind))
    assert compat.is_chosen(config)
    monkeypatch.setattr("vllm.platforms.current_platform", Gpu)
    with set_current_vllm_config(config):
        found = {
            kind: selector.get_attn_backend(128, torch.bfloat16, "auto", has_sliding_window=kind == WINDOWED)
            for kind in (FULL, WINDOWED)
        }
    assert {kind for kind, backend in found.items() if backend is AttnBackend} == ours
    assert set(found.values()) <= {AttnBackend, CPUAttentionBackend}


def test_kinds_that_only_others_serve() -> None:
    register()
    config = VllmConfig(attention_config=AttentionConfig(backend_per_kind={WINDOWED: "CPU_ATTN"}))
    assert not compat.is_chosen(config)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Loads plugins with vLLM's own loader, in this order."""

    def load(*entry_points: Callable[[], None]) -> None:
        found = [
            SimpleNamespace(name=function.__name__, value="", load=lambda function=function: function)
            for function in entry_points
        ]
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda group: found if "general" in group else []
        )
        monkeypatch.setattr(plugins, "plugins_loaded", False)
        plugins.load_general_plugins()

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return load


@pytest.mark.parametrize("ours_first", [True, False])
def test_two_plugins_at_once(
    ours_first: bool, registry: Any, loads: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """The other plugin takes CUSTOM. ATTN_BACKEND stays ours. A warning names the other package."""

    def other() -> None:
        register_backend(registry.CUSTOM, OTHER)

    loads(*((register, other) if ours_first else (other, register)))
    assert registry.CUSTOM.get_path() == OTHER
    assert registry["ATTN_BACKEND"].get_path() == BACKEND_PATH
    layers = {"model.layers.0.attn": Layer("an impl", AttnBackend)}
    chosen = {
        name: make_config(layers, attention_config=SimpleNamespace(backend=registry[name]))
        for name in ("CUSTOM", "ATTN_BACKEND")
    }
    assert [name for name, config in chosen.items() if compat.is_chosen(config)] == ["ATTN_BACKEND"]
    support.check_layers(chosen["CUSTOM"])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert f"It belongs to {OTHER}" in warnings[0]
    assert "--attention-backend ATTN_BACKEND" in warnings[0]
