from attn_backend.flashinfer.decode import *  # noqa: F403
from attn_backend.flashinfer.decode import _grouped_size_compiled_for_decode_kernels  # noqa: F401
