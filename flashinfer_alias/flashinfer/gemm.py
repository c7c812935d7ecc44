from attn_backend.flashinfer.features import names_of as _names_of

globals().update(_names_of("gemm"))
