from attn_backend.flashinfer.utils import *  # noqa: F403
