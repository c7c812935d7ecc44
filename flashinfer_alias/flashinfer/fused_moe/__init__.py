from attn_backend.flashinfer.features import names_of as _names_of

from . import core  # noqa: F401

globals().update(_names_of("fused_moe"))
