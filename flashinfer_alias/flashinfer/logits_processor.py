from attn_backend.flashinfer.logits_processor import *  # noqa: F403
