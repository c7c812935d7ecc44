"""SGLang's lists of backend names, and the hooks that substitute an accepted name if the server uses ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from sglang.srt.plugins.hook_registry import HookRegistry

from attn_backend.adapters.sglang import plugin
from attn_backend.adapters.sglang.compat import NAME


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> type[HookRegistry]:
    """SGLang's registry without hooks; restored afterwards."""
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    return HookRegistry


def test_hooks_are_registered_once(registry: Any) -> None:
    assert plugin.hook_name_checks(NAME)
    assert plugin.hook_name_checks(NAME)
    checks = next(
        checks for checks in plugin.CHECKS if all(plugin._exists(check.function) for check in checks)
    )
    assert len(registry._hooks) == len(checks) + len({check.view for check in checks})
    assert {len(hooks) for hooks in registry._hooks.values()} == {1}


def test_a_release_with_other_checks_is_left_alone(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plugin,
        "CHECKS",
        ((plugin.Check("sglang.srt:nothing", "sglang.srt:nothing", "triton", True),),),
    )
    assert not plugin.hook_name_checks(NAME)
    assert not registry._hooks


def server(backend: str | None, architecture: str = "GptOssForCausalLM") -> Any:
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    return SimpleNamespace(
        attention_backend=backend,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        get_model_config=lambda: config,
    )


@pytest.mark.parametrize(
    ("backend", "architecture", "read"),
    [
        (NAME, "GptOssForCausalLM", "triton"),
        (NAME, "Gemma4ForConditionalGeneration", "triton"),
        (NAME, "DeepseekV4ForCausalLM", NAME),  # not served
        ("torch_native", "GptOssForCausalLM", "torch_native"),
        (None, "GptOssForCausalLM", None),
    ],
)
def test_what_a_check_reads(
    backend: str | None, architecture: str, read: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # hides the releases' own access to a model's configuration
    monkeypatch.setattr(plugin, "import_module", lambda name: SimpleNamespace())
    seen = []

    def check(server_args: Any) -> None:
        view = plugin.renamed_view(lambda arguments: arguments, server_args)
        seen.append((view.attention_backend, view.prefill_attention_backend))

    around = plugin.reading(plugin.Check("", "", "triton", True), NAME)
    arguments = server(backend, architecture)
    around(check, arguments)
    assert seen == [(read, None)]
    assert arguments.attention_backend == backend
    # other readers get the settings themselves
    assert plugin.renamed_view(lambda server_args: server_args, arguments) is arguments


def test_a_check_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(server_args: Any) -> None:
        raise AssertionError("refused")

    with pytest.raises(AssertionError, match="refused"):
        plugin.reading(plugin.Check("", "", "flashinfer", False), NAME)(check, server(NAME))
    assert plugin._reads.get() is None
