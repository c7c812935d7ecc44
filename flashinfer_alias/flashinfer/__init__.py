"""attn_backend.flashinfer under FlashInfer's name."""

from attn_backend.flashinfer import *  # noqa: F403
from attn_backend.flashinfer import __getattr__, __version__  # noqa: F401

from . import (  # noqa: F401
    attention,
    cascade,
    decode,
    jit,
    logits_processor,
    mla,
    page,
    pod,
    prefill,
    quantization,
    rope,
    sampling,
    sparse,
    triton,
    utils,
)
