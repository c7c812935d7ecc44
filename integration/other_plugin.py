"""A second plugin of an engine, for the start logs (start_up.py). OTHER_PLUGIN selects what it does:

- custom: takes vLLM's name CUSTOM.
- layers: makes all layers choose the engine's own backend, like models with their own kernels.
"""

from __future__ import annotations

import os
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

GROUPS = ("vllm.general_plugins", "sglang.srt.plugins")


def write_metadata(folder: Path) -> None:
    """Makes engines with this folder on PYTHONPATH load the plugin."""
    target = folder / "other_plugin-1.0.dist-info"
    target.mkdir(parents=True, exist_ok=True)
    (target / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
    entries = "\n".join(f"[{group}]\nother = {__name__}:{group.partition('.')[0]}" for group in GROUPS)
    (target / "entry_points.txt").write_text(f"{entries}\n")


def vllm() -> None:
    registry = import_module("vllm.v1.attention.backends.registry")
    platform = import_module("vllm.platforms").current_platform
    module, _, name = _of_vllm(platform.is_cpu()).rpartition(".")
    if os.environ.get("OTHER_PLUGIN") == "custom":
        registry.register_backend(registry.AttentionBackendEnum.CUSTOM, f"{module}.{name}")
    elif os.environ.get("OTHER_PLUGIN") == "layers":
        attention: Any = import_module("vllm.model_executor.layers.attention").Attention
        original = attention.__init__

        @wraps(original)
        def with_own_kernels(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs | {"attn_backend": getattr(import_module(module), name)})

        attention.__init__ = with_own_kernels


def _of_vllm(on_cpu: bool) -> str:
    backends = "vllm.v1.attention.backends"
    return (
        f"{backends}.cpu_attn.CPUAttentionBackend"
        if on_cpu
        else f"{backends}.flash_attn.FlashAttentionBackend"
    )


def sglang() -> None:
    if os.environ.get("OTHER_PLUGIN") != "layers":
        return
    hooks = import_module("sglang.srt.plugins.hook_registry")
    registry = "sglang.srt.layers.attention.attention_registry"

    def with_own_kernels(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        return import_module(registry).ATTENTION_BACKENDS["torch_native"](runner)

    hooks.HookRegistry.register(f"{registry}.attn_backend_wrapper", with_own_kernels, hooks.HookType.AROUND)
