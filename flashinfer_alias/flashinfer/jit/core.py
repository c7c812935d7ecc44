from attn_backend.flashinfer.jit.core import *  # noqa: F403
