"""Registration with SGLang: its registries of backends and samplers, and hooks where it has no registry.

SGLang's factory of draft backends knows backends by name: a hook adds ours.

SGLang refuses some models, --enable-mis and FP4 caches to backends that are missing in its lists of names.
This backend supports the features behind these checks (sinks, windows, chunks, masks, FP4). The lists are
local to the functions that check, so we cannot add a name. Instead a hook in SGLang's own registry shows such
a function, while it runs, the name of a listed backend in place of ours. Nothing else reads that name, and
the server's settings do not change. If a release's checks look different, the hook is not installed, and
SGLang keeps refusing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_backend.metadata.kv_cache import MXFP4
from attn_backend.settings import Settings

from . import compat
from .compat import NAME

if TYPE_CHECKING:
    from attn_backend.adapters.checkpoint import Refusal

    from .backend import SGLangAttentionBackend
    from .sampler import AttnSampler
    from .sparse import SparseBackend

_MARK = "_attn_backend_hook"


def register() -> None:
    """Registers `--attention-backend attn_backend` and `--sampling-backend attn_backend` with SGLang in this
    process. A second call changes nothing.

    Environment:
        ATTN_BACKEND_SAMPLER: `0` leaves the sampler out. `1` also replaces SGLang's `pytorch` sampler, which
            SGLang requires on CPUs and under --enable-deterministic-inference whatever --sampling-backend
            says.

    Raises:
        RuntimeError: this release of SGLang has no registry that this package knows; the message names it.
    """
    compat.register_backend(NAME, create_backend)
    compat.register_draft_backend(NAME)
    hook_name_checks(NAME)
    hook_draft_factory(NAME)
    hook_wrapper()
    sampler = Settings.read().sampler
    if sampler is not False:
        compat.register_sampler(NAME, create_sampler)
    if sampler is True:
        compat.register_sampler("pytorch", create_sampler)


def create_backend(runner: object) -> SGLangAttentionBackend | SparseBackend:
    """The backend of one model runner; SGLang calls it while it starts, so a refusal stops the start.

    Raises:
        ValueError: the model or an option is not supported; the message names it.
        RuntimeError: this package cannot be loaded. Never an ImportError, which SGLang's own test kit reports
            as a skip.
    """
    try:
        from .backend import SGLangAttentionBackend
        from .mla import is_sparse

        if is_sparse(runner):
            from .sparse import SparseBackend  # only now: it imports SGLang's backend for such models

            return SparseBackend(runner)
    except ImportError as error:
        raise RuntimeError(
            f"--attention-backend {NAME} cannot be loaded: {error}. `attn-backend doctor` says what is "
            "missing."
        ) from error
    return SGLangAttentionBackend(runner)


def create_sampler() -> AttnSampler:
    """The sampler of one model runner; SGLang calls it while it starts.

    Raises:
        RuntimeError: this package cannot be loaded.
    """
    try:
        from .sampler import AttnSampler
    except ImportError as error:
        advice = "`attn-backend doctor` says what is missing; ATTN_BACKEND_SAMPLER=0 leaves it out"
        raise RuntimeError(f"--sampling-backend {NAME} cannot be loaded: {error}. {advice}.") from error
    return AttnSampler()


def hook_once(path: str, hook: Callable[..., Any]) -> None:
    """Has SGLang call `hook` around a function, from the end of its `load_plugins` on. A second call changes
    nothing.

    Args:
        path: of the function: module:name, or with a dot.
        hook: gets the original function, and its arguments.
    """
    hooks = import_module("sglang.srt.plugins.hook_registry")
    target = path.replace(":", ".")
    if not any(hasattr(known, _MARK) for _, known, *_ in hooks.HookRegistry._hooks.get(target, [])):
        setattr(hook, _MARK, True)
        hooks.HookRegistry.register(target, hook, hooks.HookType.AROUND)


DRAFT_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def hook_draft_factory(name: str) -> None:
    """Adds a draft backend of this name to SGLang's factory."""

    def create_with_ours(
        original: Callable[..., Any],
        factory: Any,
        backend_name: str,
        known: dict[str, Callable[[], Any]],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        steps_follow = known["triton"].__name__ == "_create_triton_decode_backend"
        # 0.5.17 wants only the backend, without its name
        names_it = "stamps_children" in inspect.signature(original).parameters

        def ours() -> Any:
            from .drafts import create_extend, create_steps  # only now: it imports the engine

            backend = create_steps(factory) if steps_follow else create_extend(factory)
            return (name, backend) if names_it else backend

        return original(factory, backend_name, {**known, name: ours}, *arguments, **named)

    hook_once(DRAFT_FACTORY, create_with_ours)


WRAPPER = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"


def hook_wrapper() -> None:
    """Checks which layers of a built model run on our backend.

    A model may choose another backend, or replace ours in this function. Then no code of ours runs after
    registration.
    """

    def wrap_and_check(original: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
        from .support import check_layers  # only now: it imports the engine

        built = original(runner, *arguments, **named)
        check_layers(runner, built)
        return built

    hook_once(WRAPPER, wrap_and_check)


BACKEND_OPTIONS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
# Models that this backend serves, although it is missing in SGLang's lists for them.
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
        view: "module:function" that returns the settings.
        accepted: a name in the list.
        of_models: whether it checks the model, and accepts models without a list.
        of_cache: the only --kv-cache-dtype with which ours is replaced; empty: any.
    """

    function: str
    view: str
    accepted: str
    of_models: bool
    of_cache: str = ""


_MODULES = "sglang.srt.arg_groups"
# Since 0.5.19, and before. Tests compare both with every release.
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
        Check(
            f"{_MODULES}.kv_cache_hook:handle_kv4_compatibility",
            f"{_MODULES}.kv_cache_hook:resolved_view",
            "triton",
            False,
            MXFP4,
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
        Check(
            "sglang.srt.server_args:ServerArgs._handle_kv4_compatibility",
            "sglang.srt.server_args:resolved_view",
            "triton",
            False,
            MXFP4,
        ),
    ),
)

# our name, and the name to read for it
_reads: ContextVar[tuple[str, str] | None] = ContextVar("attn_backend_name", default=None)


def _has_all(checks: Iterable[Check]) -> bool:
    """Whether this release has these checks. The check of FP4 caches is optional."""
    return all(
        _exists(path) for check in checks if not check.of_cache for path in (check.function, check.view)
    )


def hook_name_checks(name: str) -> bool:
    """Makes SGLang's checks accept a backend of this name.

    Returns:
        Whether this release has known checks.
    """
    found: Iterable[Check] | None = next((checks for checks in CHECKS if _has_all(checks)), None)
    if found is None:
        return False
    checks = [check for check in found if _exists(check.function)]
    for check in checks:
        hook_once(check.function, reading(check, name))
        hook_once(check.view, renamed_view)
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


def reading(check: Check, name: str) -> Callable[..., Any]:
    def check_with_accepted_name(original: Callable[[Any], Any], server_args: Any) -> Any:
        if (
            name not in [getattr(server_args, field, None) for field in BACKEND_OPTIONS]
            or (check.of_models and not _serves(server_args))
            or (check.of_cache and server_args.kv_cache_dtype != check.of_cache)
        ):
            return original(server_args)
        for refusal in _unsupported_fp4(server_args) if check.of_cache else ():
            from .support import refuse  # only now: it imports the engine

            refuse(*refusal)
        with _read_as(name, check.accepted):
            return original(server_args)

    return check_with_accepted_name


@contextmanager
def _read_as(name: str, accepted: str) -> Iterator[None]:
    token = _reads.set((name, accepted))
    try:
        yield
    finally:
        _reads.reset(token)


def _serves(server_args: Any) -> bool:
    """Whether the model is in SERVED. If SGLang does not know the model yet, its own check decides."""
    return _model_config(server_args).hf_config.architectures[0] in SERVED


def _unsupported_fp4(server_args: Any) -> Iterator[Refusal]:
    """Refuses models before SGLang makes their pools, which may fail."""
    from . import rules  # only now: few servers need them

    config = _model_config(server_args)
    has_latents = config.attention_arch.name == "MLA"
    return rules.unsupported_fp4("cuda", has_latents=has_latents, has_window_pool=bool(config.is_hybrid_swa))


def _model_config(server_args: Any) -> Any:
    try:
        overrides = import_module(f"{_MODULES}.model_hook")
        return overrides.model_config_of(server_args)
    except (ImportError, AttributeError):
        return server_args.get_model_config()


def renamed_view(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    view = original(*arguments, **named)
    reads = _reads.get()
    return view if reads is None else _Renamed(view, *reads)


class _Renamed:
    """A view of SGLang's settings that shows another name in place of ours."""

    def __init__(self, view: Any, name: str, accepted: str) -> None:
        self._view, self._name, self._accepted = view, name, accepted

    def __getattr__(self, field: str) -> Any:
        value = getattr(self._view, field)
        return self._accepted if field in BACKEND_OPTIONS and value == self._name else value
