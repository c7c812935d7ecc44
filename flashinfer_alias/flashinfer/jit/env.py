from attn_backend.flashinfer.jit.env import *  # noqa: F403
