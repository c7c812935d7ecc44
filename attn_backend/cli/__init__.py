"""The command `attn-backend`."""
