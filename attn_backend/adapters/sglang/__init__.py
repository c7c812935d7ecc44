"""SGLang plugin: `--attention-backend attn_backend`. SGLang finds `register` through the entry point group `sglang.srt.plugins`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import SGLangAttentionBackend

NAME = "attn_backend"


def register() -> None:
    """Makes `--attention-backend attn_backend` known to SGLang in this process. Calling it again changes nothing.

    Raises:
        RuntimeError: this release of SGLang has no registry that this package knows; the message says what was looked for.
    """
    from . import compat

    compat.register_backend(NAME, create_backend)


def create_backend(runner: object) -> SGLangAttentionBackend:
    """The backend of one model runner; SGLang calls it while it starts, so what is refused here stops the start.

    Raises:
        ValueError: the model or an option is not supported; the message names it.
        RuntimeError: this package cannot be loaded. Never an ImportError: SGLang's own test kit reports that as a skip.
    """
    try:
        from .backend import SGLangAttentionBackend
    except ImportError as error:
        raise RuntimeError(f"--attention-backend {NAME} cannot be loaded: {error}. `attn-backend doctor` says what is missing.") from error
    return SGLangAttentionBackend(runner)
