from attn_backend.flashinfer.absent import names_of

from . import core  # noqa: F401

globals().update(names_of("fused_moe"))
