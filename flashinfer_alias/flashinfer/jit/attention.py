from attn_backend.flashinfer.jit.attention import *  # noqa: F403
