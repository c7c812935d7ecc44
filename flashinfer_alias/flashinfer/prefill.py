from attn_backend.flashinfer.prefill import *  # noqa: F403
