"""The check of a built model: which layers run on this backend, behind what SGLang wraps around it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine, LayerShape
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.plugins.hook_registry import HookRegistry

from attn_backend.adapters.sglang import plugin, support
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend
from attn_backend.adapters.sglang.compat import NAME
from attn_backend.adapters.sglang.support import check_layers

REFUSAL = r"none of the 3 attention layers.*ATTN_BACKEND_REQUIRE_LAYERS=0"


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.Logger("of this test")
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(support, "logger", logger)
    monkeypatch.delenv("ATTN_BACKEND_REQUIRE_LAYERS", raising=False)


def bare(backend: type) -> Any:
    """An instance whose constructor, which needs a whole engine, has not run."""
    return backend.__new__(backend)


OURS, THEIRS = bare(SGLangAttentionBackend), bare(TorchNativeAttnBackend)


def runner(all_phases: str | None = NAME, is_draft_worker: bool = False, **arguments: Any) -> Any:
    return FakeEngine((LayerShape(),) * 3).runner(
        server_args=SimpleNamespace(attention_backend=all_phases, **arguments),
        is_draft_worker=is_draft_worker,
    )


def split(prefill: Any, decode: Any) -> Any:
    """SGLang's backend for --prefill-attention-backend and --decode-attention-backend."""
    backend = bare(HybridAttnBackend)
    backend.prefill_backend, backend.decode_backend = prefill, decode
    return backend


def test_a_model_of_ours_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    linear = SimpleNamespace(full_attn_backend=OURS, linear_attn_backend=THEIRS, full_attn_layers=[0, 2])
    for built in (OURS, linear):
        check_layers(runner(), built)
    check_layers(runner("fa3"), THEIRS)
    check_layers(runner(None), THEIRS)
    assert not caplog.messages


def test_a_model_that_replaces_the_backend_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek V4 overwrites the choice, Qwen4-Exp drops the backend when SGLang wraps it."""
    in_a_hybrid = SimpleNamespace(full_attn_backend=THEIRS, linear_attn_backend=THEIRS, full_attn_layers=[0])
    for built in (THEIRS, in_a_hybrid):
        with pytest.raises(RuntimeError, match=REFUSAL):
            check_layers(runner(), built)
    monkeypatch.setenv("ATTN_BACKEND_REQUIRE_LAYERS", "0")
    check_layers(runner(), THEIRS)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "TorchNativeAttnBackend: {0-2}" in caplog.messages[0]


def test_sparse_layers_of_others_are_named(caplog: pytest.LogCaptureFixture) -> None:
    minimax = SimpleNamespace(dense=OURS, sparse=THEIRS, sparse_layer_ids=[1, 2])
    for _ in range(2):  # the halves of a step that overlap have a backend each
        check_layers(runner(), minimax)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages == [
        "attn_backend serves 1 of 3 attention layers. Other backends serve the rest: TorchNativeAttnBackend: "
        "{1-2}."
    ]


def test_phases_that_the_user_gave_to_another(caplog: pytest.LogCaptureFixture) -> None:
    check_layers(runner("fa3", decode_attention_backend=NAME), split(THEIRS, OURS))
    check_layers(runner(NAME, prefill_attention_backend="fa3"), split(THEIRS, OURS))
    assert not caplog.messages
    with pytest.raises(RuntimeError, match=r"TorchNativeAttnBackend in decodes: \{0-2\}"):
        check_layers(runner(NAME), split(OURS, THEIRS))  # the engine gave it away


def test_draft_models_never_stop_the_start(caplog: pytest.LogCaptureFixture) -> None:
    of_user: dict[str, Any] = {"speculative_draft_attention_backend": "triton"}
    check_layers(runner(NAME, True, **of_user), THEIRS)
    assert not caplog.messages
    check_layers(runner(NAME, True, speculative_draft_attention_backend=None), THEIRS)
    assert len(caplog.messages) == 1
    assert "0 of 3 attention layers of the draft model" in caplog.messages[0]
    assert f"--speculative-draft-attention-backend {NAME}" in caplog.messages[0]


def test_sglang_checks_each_model_that_it_has_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    plugin.hook_wrapper()
    plugin.hook_wrapper()
    ((_, hook, _),) = HookRegistry._hooks[plugin.WRAPPER]
    with pytest.raises(RuntimeError, match=REFUSAL):
        hook(lambda runner, backend: THEIRS, runner(), OURS)
    assert hook(lambda runner, full_attn_backend: OURS, runner(), full_attn_backend=OURS) is OURS
