from attn_backend.flashinfer.quantization import *  # noqa: F403
