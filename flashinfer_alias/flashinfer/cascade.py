from attn_backend.flashinfer.cascade import *  # noqa: F403
