from attn_backend.flashinfer.absent import names_of

globals().update(names_of("fused_moe.core"))
