"""Which class `--attention-backend CUSTOM` selects: vLLM has one name for all models, but a class serves
either MLA or other models, and either sparse attention or none. The same for the names that models with keys
and values of different sizes ask for.
"""

from __future__ import annotations

from attn_backend.adapters.vllm import compat
from attn_backend.adapters.vllm.backend import AttnBackend

NAME = "Backend"
DIFF_KV_NAMES = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")  # vLLM's names, and those of this module


def __getattr__(name: str) -> type:
    """vLLM looks `Backend` up each time that a layer asks for its backend, under the configuration of the
    layer's model; a model looks up the other names in the same way.
    """
    if name in DIFF_KV_NAMES:
        return _diff_kv(name)
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not compat.uses_mla():
        return AttnBackend
    if compat.uses_sparse_mla():
        # only now: it imports the engine's layers
        from attn_backend.adapters.vllm.sparse_mla_backend import SparseMlaBackend

        return SparseMlaBackend
    from attn_backend.adapters.vllm.mla_backend import MlaBackend

    return MlaBackend


def _diff_kv(name: str) -> type:
    """Ours if the user has chosen it, else vLLM's own."""
    from attn_backend.adapters.vllm import diff_kv

    if compat.serves_on_cpu():
        return diff_kv.CpuDiffKvBackend
    return diff_kv.DiffKvBackend if compat.is_chosen() else compat.own_backend(name)
