from attn_backend.flashinfer.triton.cascade import *  # noqa: F403
