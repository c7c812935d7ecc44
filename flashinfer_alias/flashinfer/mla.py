from attn_backend.flashinfer.mla import *  # noqa: F403
