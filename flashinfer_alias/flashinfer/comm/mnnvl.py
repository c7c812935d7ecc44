from attn_backend.flashinfer.absent import names_of

globals().update(names_of("comm.mnnvl"))
