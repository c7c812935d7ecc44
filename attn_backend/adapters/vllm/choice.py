"""Which class stands behind `--attention-backend CUSTOM`: vLLM has one name for all models, and a class is either for MLA or not, and
for sparse attention or not."""

from __future__ import annotations

from attn_backend.adapters.vllm import compat
from attn_backend.adapters.vllm.backend import AttnBackend

NAME = "Backend"


def __getattr__(name: str) -> type:
    """`Backend`: vLLM looks it up each time that a layer asks for its backend, under the configuration of the layer's model."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not compat.uses_mla():
        return AttnBackend
    if compat.uses_sparse_mla():
        from attn_backend.adapters.vllm.sparse_mla_backend import SparseMlaBackend  # only now: it imports the engine's layers

        return SparseMlaBackend
    from attn_backend.adapters.vllm.mla_backend import MlaBackend

    return MlaBackend
