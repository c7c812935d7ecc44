from attn_backend.flashinfer.jit import *  # noqa: F403

from . import attention  # noqa: F401
