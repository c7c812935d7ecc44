"""SGLang's lists of backends by name: some models and --enable-mis are refused to any backend that is not in
a list of the engine's own.

This backend has what these checks ask for (sinks, windows, chunks, masks), but nothing can be added to their
lists, which are local to the functions that check. So a hook in SGLang's own registry lets such a function,
while it runs, read the name of a backend in its list where the server's name is ours. Nothing else reads that
name: the server's settings stay as they are. A release whose checks look different is left alone, and goes on
refusing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NamedTuple

_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
# Models that this backend serves, though SGLang's list for them lacks it.
SERVED = (
    *(
        "GptOssForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "Exaone4ForCausalLM",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
    ),
    *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
)


class Check(NamedTuple):
    """A function of SGLang that looks for the backend's name in a list.

    Attributes:
        function: "module:function", where it has one argument: the server's arguments.
        view: "module:function" that it reads settings through.
        accepted: a name that is in the list.
        of_models: whether it is about the model, and lets through what it has no list for.
    """

    function: str
    view: str
    accepted: str
    of_models: bool


_MODULES = "sglang.srt.arg_groups"
# Since 0.5.19, and before. Both have been read: tests compare them with every release.
CHECKS = (
    (
        Check(
            f"{_MODULES}.model_hook:handle_model_specific_adjustments",
            f"{_MODULES}.model_hook:resolved_view",
            "triton",
            True,
        ),
        Check(
            f"{_MODULES}.attention_hook:handle_multi_item_scoring",
            f"{_MODULES}.attention_hook:resolved_view",
            "flashinfer",
            False,
        ),
    ),
    (
        Check(
            "sglang.srt.server_args:ServerArgs._handle_model_specific_adjustments",
            "sglang.srt.server_args:resolved_view",
            "triton",
            True,
        ),
        Check(
            "sglang.srt.server_args:ServerArgs._handle_multi_item_scoring",
            "sglang.srt.server_args:resolved_view",
            "flashinfer",
            False,
        ),
    ),
)

# our name, and what is read for it
_reads: ContextVar[tuple[str, str] | None] = ContextVar("attn_backend_name", default=None)


def register(name: str) -> bool:
    """Has SGLang's checks accept a backend of this name, from the end of its `load_plugins` on.

    Registering it again changes nothing.

    Returns:
        Whether this release has the checks that are known.
    """
    hooks = import_module("sglang.srt.plugins.hook_registry")
    checks = next(
        (
            checks
            for checks in CHECKS
            if all(_exists(path) for check in checks for path in (check.function, check.view))
        ),
        None,
    )
    if checks is None:
        return False
    around = hooks.HookType.AROUND
    for path, hook in [(check.function, _reading(check, name)) for check in checks] + [
        (path, _renamed_view) for path in {check.view for check in checks}
    ]:
        target = path.replace(":", ".")
        if not any(
            getattr(known, "_attn_backend_hook", None)
            for _, known, *_ in hooks.HookRegistry._hooks.get(target, [])
        ):
            hooks.HookRegistry.register(target, hook, around)
    return True


def _exists(path: str) -> bool:
    module, _, names = path.partition(":")
    try:
        found: Any = import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return True


def _reading(check: Check, name: str) -> Callable[..., Any]:
    def check_with_accepted_name(original: Callable[[Any], Any], server_args: Any) -> Any:
        if name not in [getattr(server_args, field, None) for field in _BACKENDS] or (
            check.of_models and not _serves(server_args)
        ):
            return original(server_args)
        with _read_as(name, check.accepted):
            return original(server_args)

    check_with_accepted_name._attn_backend_hook = True  # type: ignore[attr-defined]
    return check_with_accepted_name


@contextmanager
def _read_as(name: str, accepted: str) -> Iterator[None]:
    token = _reads.set((name, accepted))
    try:
        yield
    finally:
        _reads.reset(token)


def _serves(server_args: Any) -> bool:
    """Whether the model is one of those above.

    Where SGLang cannot say what it is yet, its own check decides.
    """
    try:
        overrides = import_module(f"{_MODULES}.model_hook")
        config = overrides.model_config_of(server_args)
    except (ImportError, AttributeError):
        config = server_args.get_model_config()
    return config.hf_config.architectures[0] in SERVED


def _renamed_view(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    view = original(*arguments, **named)
    reads = _reads.get()
    return view if reads is None else _Renamed(view, *reads)


_renamed_view._attn_backend_hook = True  # type: ignore[attr-defined]


class _Renamed:
    """A view of SGLang's settings that shows another name in place of ours."""

    def __init__(self, view: Any, name: str, accepted: str) -> None:
        self._view, self._name, self._accepted = view, name, accepted

    def __getattr__(self, field: str) -> Any:
        value = getattr(self._view, field)
        return self._accepted if field in _BACKENDS and value == self._name else value
