"""SGLang plugin: `--attention-backend attn_backend`, `--sampling-backend attn_backend`.

SGLang finds `register` through the entry point group `sglang.srt.plugins`.
"""

__all__ = ["register"]


def register() -> None:
    """Calls plugin.register(), whose module imports torch."""
    from .plugin import register

    register()
