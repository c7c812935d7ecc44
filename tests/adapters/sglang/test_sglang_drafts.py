"""How SGLang's factory of draft backends finds this one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed")

from fake_engine import FakeEngine
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import draft_utils
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from attn_backend.adapters.sglang import compat, plugin
from attn_backend.adapters.sglang.backend import SGLangAttentionBackend
from attn_backend.adapters.sglang.compat import NAME
from attn_backend.adapters.sglang.drafts import DraftStepsBackend


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook, from a registry that is restored afterwards."""
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    plugin.hook_draft_factory(NAME)
    plugin.hook_draft_factory(NAME)
    ((_, registered, *_),) = HookRegistry._hooks[plugin.DRAFT_FACTORY]
    return registered


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch, hook: Any) -> DraftBackendFactory:
    """SGLang's own factory, with the hook around its function."""
    if compat.starts_triton_on_cpu(NAME):
        pytest.skip(f"SGLang {compat.release()} starts Triton on a CPU for every backend but its own")
    original = DraftBackendFactory._create_backend
    monkeypatch.setattr(
        DraftBackendFactory,
        "_create_backend",
        lambda self, *given, **named: hook(original, self, *given, **named),
    )
    if hasattr(draft_utils, "attention_backends"):
        monkeypatch.setattr(draft_utils, "attention_backends", lambda: (NAME, NAME))
    made = DraftBackendFactory.__new__(DraftBackendFactory)
    made.draft_model_runner = FakeEngine().runner(is_draft_worker=True)
    made.topk, made.speculative_num_steps, made.draft_attn_backend = 2, 3, NAME
    return made


def test_the_factory_makes_ours(factory: DraftBackendFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"triton": factory._create_triton_decode_backend}
    steps = factory._create_backend("decode_attention_backend", known, "{backend_type} is not known")
    assert isinstance(steps, DraftStepsBackend)
    assert (steps.topk, len(steps.attn_backends)) == (2, 2)
    known = {"triton": factory._create_triton_prefill_backend}
    extend = factory._create_backend("prefill_attention_backend", known, "{backend_type} is not known")
    assert isinstance(extend, SGLangAttentionBackend)
    factory.draft_model_runner.attn_backend = extend
    assert (
        factory._create_backend("prefill_attention_backend", known, "{backend_type} is not known") is extend
    )
    assert list(known) == ["triton"]


def test_other_names_are_left_to_sglang(factory: DraftBackendFactory) -> None:
    factory.draft_attn_backend = "another"
    with pytest.raises(ValueError, match="another is not known"):
        factory._create_backend(
            "decode_attention_backend",
            {"triton": factory._create_triton_decode_backend},
            "{backend_type} is not known",
        )


def test_a_release_that_asks_for_the_backend_alone(hook: Any) -> None:
    def _create_triton_prefill_backend() -> None: ...

    def original(factory: Any, backend_name: str, backend_map: Any, error_template: str) -> Any:
        return backend_map[NAME]()

    backend = SGLangAttentionBackend.__new__(SGLangAttentionBackend)
    factory = SimpleNamespace(draft_model_runner=SimpleNamespace(attn_backend=backend))
    assert (
        hook(original, factory, "prefill_attention_backend", {"triton": _create_triton_prefill_backend}, "")
        is backend
    )
