from attn_backend.flashinfer.attention import *  # noqa: F403
