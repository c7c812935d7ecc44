"""SGLang plugin: `--attention-backend attn_backend`, `--sampling-backend attn_backend`.

SGLang finds `register` through the entry point group `sglang.srt.plugins`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_backend.adapters.options import SAMPLER_SWITCH, insist_on_sampler, use_sampler

if TYPE_CHECKING:
    from .backend import SGLangAttentionBackend
    from .sampler import AttnSampler
    from .sparse import SparseBackend

NAME = "attn_backend"


def register() -> None:
    """Makes `--attention-backend attn_backend` and `--sampling-backend attn_backend` known to SGLang in this
    process. Calling it again changes nothing.

    Environment:
        ATTN_BACKEND_SAMPLER: `0` leaves the sampler out. `1` also replaces SGLang's `pytorch` sampler. SGLang
            insists on that one on CPUs and under --enable-deterministic-inference, whatever
            --sampling-backend says.

    Raises:
        RuntimeError: this release of SGLang has no registry that this package knows; the message says what
            was looked for.
    """
    from . import compat, drafts, name_checks

    compat.register_backend(NAME, create_backend)
    compat.register_draft_backend(NAME)
    name_checks.register(NAME)
    drafts.register(NAME)
    if use_sampler():
        compat.register_sampler(NAME, create_sampler)
    if insist_on_sampler():
        compat.register_sampler("pytorch", create_sampler)


def create_backend(runner: object) -> SGLangAttentionBackend | SparseBackend:
    """The backend of one model runner; SGLang calls it while it starts, so what is refused here stops the
    start.

    Raises:
        ValueError: the model or an option is not supported; the message names it.
        RuntimeError: this package cannot be loaded. Never an ImportError: SGLang's own test kit reports that
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
            f"missing."
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
        advice = f"`attn-backend doctor` says what is missing; {SAMPLER_SWITCH}=0 leaves it out"
        raise RuntimeError(f"--sampling-backend {NAME} cannot be loaded: {error}. {advice}.") from error
    return AttnSampler()
