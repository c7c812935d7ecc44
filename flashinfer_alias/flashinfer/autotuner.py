from attn_backend.flashinfer.autotuner import *  # noqa: F403
