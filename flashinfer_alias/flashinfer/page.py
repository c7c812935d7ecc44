from attn_backend.flashinfer.page import *  # noqa: F403
