"""vLLM plugin: `--attention-backend CUSTOM` on a GPU; CPU_ATTN's place on a CPU, when ATTN_BACKEND_VLLM_CPU=1
asks for it.
"""

from __future__ import annotations

import logging
from importlib import import_module

from attn_backend.adapters.vllm.cascade_option import obey_cascade_option
from attn_backend.settings import Settings

CPU_SWITCH = "ATTN_BACKEND_VLLM_CPU"
BACKEND_PATH = "attn_backend.adapters.vllm.choice.Backend"
CPU_BACKEND_PATHS = {  # by the names that vLLM has for what is replaced; not every release has all of them
    "CPU_ATTN": "attn_backend.adapters.vllm.cpu.CpuAttnBackend",
    "CPU_MLA": "attn_backend.adapters.vllm.mla_backend.CpuMlaBackend",
    "AMX_MLA": "attn_backend.adapters.vllm.mla_backend.AmxMlaBackend",
}

logger = logging.getLogger("vllm.attn_backend")  # below vLLM's own, so that it goes where vLLM logs


def register() -> None:
    """Entry point of the group `vllm.general_plugins`: vLLM calls it in each of its processes, possibly more
    than once. Never touches a GPU.

    Environment:
        ATTN_BACKEND_VLLM_CPU: `1` lets this package serve on CPUs as well. vLLM has no choice of backends
            there, so this package replaces CPU_ATTN.

    Raises:
        RuntimeError: this package or what it needs of vLLM cannot be imported.
    """
    obey_cascade_option()
    try:
        # Imported now: a broken installation fails when the engine starts, not when it builds a layer.
        registry = import_module("vllm.v1.attention.backends.registry")
        import_module("attn_backend.kernels.native").library()
        import_module("attn_backend.adapters.vllm.cpu")
        choice = import_module("attn_backend.adapters.vllm.choice")
        registry.register_backend(registry.AttentionBackendEnum.CUSTOM, BACKEND_PATH)
        for name in choice.DIFF_KV_NAMES:
            registry.register_backend(registry.AttentionBackendEnum[name], f"{choice.__name__}.{name}")
        if Settings.read().vllm_cpu:
            for name, path in CPU_BACKEND_PATHS.items():
                if name in registry.AttentionBackendEnum.__members__:
                    registry.register_backend(registry.AttentionBackendEnum[name], path)
            # vLLM does not name the backend that it uses on a CPU
            logger.info("attn_backend takes the place of CPU_ATTN, and of CPU_MLA and AMX_MLA")
    except Exception as error:
        raise RuntimeError(
            f"attn_backend cannot serve as an attention backend of this vLLM: {type(error).__name__}: "
            f"{error}. "
            "Run `attn-backend doctor`, which names the versions, reinstall the package, or leave the plugin "
            "out with VLLM_PLUGINS=''."
        ) from error
