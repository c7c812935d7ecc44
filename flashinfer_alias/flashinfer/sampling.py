from attn_backend.flashinfer.sampling import *  # noqa: F403
