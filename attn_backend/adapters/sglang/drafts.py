"""How SGLang comes to use this backend for draft models: its factory knows backends by name, so a hook adds
ours to the names that it knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def register(name: str) -> None:
    """Has SGLang's factory know a draft backend of this name, from the end of its `load_plugins` on.

    Registering it again changes nothing.
    """
    hooks = import_module("sglang.srt.plugins.hook_registry")

    def create_with_ours(
        original: Callable[..., Any],
        factory: Any,
        backend_name: str,
        known: dict[str, Callable[[], Any]],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        steps_follow = known["triton"].__name__ == "_create_triton_decode_backend"
        create = _create_steps if steps_follow else _create_extend
        # 0.5.17 asks for the backend alone
        names_it = "stamps_children" in inspect.signature(original).parameters

        def ours() -> Any:
            backend = create(factory)
            return (name, backend) if names_it else backend

        return original(factory, backend_name, {**known, name: ours}, *arguments, **named)

    create_with_ours._attn_backend_hook = True  # type: ignore[attr-defined]
    if not any(
        getattr(known, "_attn_backend_hook", None)
        for _, known, *_ in hooks.HookRegistry._hooks.get(FACTORY, [])
    ):
        hooks.HookRegistry.register(FACTORY, create_with_ours, hooks.HookType.AROUND)


def _create_steps(factory: Any) -> Any:
    from .draft_steps import DraftStepsBackend

    return DraftStepsBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def _create_extend(factory: Any) -> Any:
    """For the draft model's passes over prompts and over what was accepted: the backend that its runner has
    already, if it is one of ours.
    """
    from .backend import SGLangAttentionBackend
    from .support import check_drafts

    runner = factory.draft_model_runner
    of_runner = getattr(runner, "attn_backend", None)
    if isinstance(of_runner, SGLangAttentionBackend):
        return of_runner
    check_drafts(runner)
    return SGLangAttentionBackend(runner)
