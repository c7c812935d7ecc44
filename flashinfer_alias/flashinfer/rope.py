from attn_backend.flashinfer.rope import *  # noqa: F403
