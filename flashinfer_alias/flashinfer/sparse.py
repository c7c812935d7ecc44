from attn_backend.flashinfer.sparse import *  # noqa: F403
