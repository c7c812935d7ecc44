"""vLLM on a CPU without its engine: only the code between the engine and this package.

Tests look for `vllm.v1`, not for `vllm`, since this folder itself can be imported as a package `vllm`.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

CPU_SHIMS = Path(__file__).parents[3] / "integration" / "sglang_cpu"


def _make_torchvision_importable() -> None:
    """vLLM imports torchvision when it is installed.

    If SGLang is installed, so is torchvision. With a CPU build of torch it needs the same shim as SGLang's
    tests.
    """
    if (
        torch.cuda.is_available()
        or "torchvision" in sys.modules
        or any(type(finder).__name__ == "_BeforeTorchvision" for finder in sys.meta_path)
    ):
        return
    spec = importlib.util.spec_from_file_location("vllm_cpu_shims", CPU_SHIMS / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


_make_torchvision_importable()


@pytest.fixture
def registry() -> Iterator[Any]:
    """vLLM's registry of attention backends; ours is unregistered afterwards."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    yield AttentionBackendEnum
    MLAPrefillBackendEnum.CUSTOM.clear_override()
    names = "CUSTOM ATTN_BACKEND CPU_ATTN CPU_MLA AMX_MLA FLASH_ATTN_DIFFKV TRITON_ATTN_DIFFKV"
    for name in set(names.split()) & set(AttentionBackendEnum.__members__):
        AttentionBackendEnum[name].clear_override()


@pytest.fixture
def vllm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores vLLM's functions before and after. The exception is a helper that counts ranks, which inductor
    would take seconds to compile.
    """
    from vllm.v1.sample import sampler as vllms
    from vllm_sampling import replaced

    from attn_backend.adapters.vllm import sampler

    monkeypatch.delenv("ATTN_BACKEND_SAMPLER", raising=False)
    monkeypatch.setattr(vllms, "batched_count_greater_than", inspect.unwrap(vllms.batched_count_greater_than))
    sampler.uninstall()
    yield
    sampler.uninstall()
    assert replaced() == {False}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
