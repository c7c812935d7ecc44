"""SGLang plugin: `--attention-backend attn_backend`, `--sampling-backend attn_backend`.

SGLang finds `register` through the entry point group `sglang.srt.plugins`.
"""

from .plugin import register

__all__ = ["register"]
