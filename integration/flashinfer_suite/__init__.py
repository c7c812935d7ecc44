"""FlashInfer's own tests against attn_backend.flashinfer."""
