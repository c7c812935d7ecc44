"""Registration with vLLM, and the class behind each registered name.

A backend has one name for all models, ATTN_BACKEND or its alias CUSTOM, but we have a class for each kind of
model: with or without latents, with or without an indexer. Models whose keys and values differ in size ask
for other names. So vLLM gets paths to names of this module, and `__getattr__` chooses the class for each
request.
"""

from __future__ import annotations

from importlib import import_module

from attn_backend.settings import Settings

NAME = "Backend"
BACKEND_PATH = f"{__name__}.{NAME}"
DIFF_KV_NAMES = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")  # vLLM's names, and names of this module
_PACKAGE = "attn_backend.adapters.vllm"
CPU_BACKEND_PATHS = {  # by vLLM's names for the replaced backends; not every release has all of them
    "CPU_ATTN": f"{_PACKAGE}.backend.CpuAttnBackend",
    "CPU_MLA": f"{_PACKAGE}.mla.CpuMlaBackend",
    "AMX_MLA": f"{_PACKAGE}.mla.AmxMlaBackend",
}


def register() -> None:
    """Entry point of the group `vllm.general_plugins`: vLLM calls it in each of its processes, possibly more
    than once. Never touches a GPU.

    Environment:
        ATTN_BACKEND_VLLM_CPU: `1` also serves on CPUs. vLLM has no choice of backends there, so this package
            replaces CPU_ATTN.

    Raises:
        RuntimeError: this package, or a part of vLLM that it needs, cannot be imported.
    """
    try:
        # Imported now, so that a broken installation shows when the engine starts, before it makes a layer.
        registry = import_module("vllm.v1.attention.backends.registry")
        compat = import_module(f"{_PACKAGE}.compat")
        support = import_module(f"{_PACKAGE}.support")
        support.obey_cascade_option()
        import_module("attn_backend.kernels.native").library()
        import_module(f"{_PACKAGE}.backend")
        compat.register_names(BACKEND_PATH)
        compat.register_cache_name()
        compat.register_mla_prefill(f"{_PACKAGE}.mla.MlaPrefill")
        for name in DIFF_KV_NAMES:
            registry.register_backend(registry.AttentionBackendEnum[name], f"{__name__}.{name}")
        if Settings.read().vllm_cpu:
            for name, path in CPU_BACKEND_PATHS.items():
                if name in registry.AttentionBackendEnum.__members__:
                    registry.register_backend(registry.AttentionBackendEnum[name], path)
        import_module("attn_backend.adapters.metrics").serve_counts()
        compat.after_model_is_built(support.check_layers)
        support.tell_of_registration()
    except Exception as error:
        raise RuntimeError(
            f"attn_backend cannot serve as an attention backend of this vLLM: {type(error).__name__}: "
            f"{error}. "
            "Run `attn-backend doctor`, which names the versions, reinstall the package, or leave the plugin "
            "out with VLLM_PLUGINS=''."
        ) from error


def __getattr__(name: str) -> type:
    """vLLM looks `Backend` up each time that a layer asks for its backend, under the configuration of the
    layer's model. A model looks up the other names.
    """
    if name not in (NAME, *DIFF_KV_NAMES):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import backend, compat  # only now: they import the engine

    if name in DIFF_KV_NAMES:
        if compat.serves_on_cpu():
            return backend.CpuDiffKvBackend
        # ours if the user has chosen it, else vLLM's own
        return backend.DiffKvBackend if compat.is_chosen() else compat.own_backend(name)
    if not compat.setting("model_config.use_mla"):  # nor without a model: vLLM asks for backends then, too
        return backend.AttnBackend
    if hasattr(compat.setting("model_config.hf_config"), "index_topk"):  # the model has an indexer
        from .sparse_mla import SparseMlaBackend  # only now: it imports the engine's layers

        return SparseMlaBackend
    from .mla import MlaBackend

    return MlaBackend
