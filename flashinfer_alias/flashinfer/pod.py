from attn_backend.flashinfer.pod import *  # noqa: F403
