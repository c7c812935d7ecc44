"""vLLM on a CPU, its engine left out: only what stands between it and this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch


def _declare_torchvision_operators() -> None:
    """The package index has torchvision for CUDA only. Beside a torch for CPUs it fails at import, because operators that its compiled part would define are missing; vLLM imports it when it is
    installed, and needs nothing of it here."""
    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            with suppress(RuntimeError):  # declared before
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_declare_torchvision_operators()


@pytest.fixture
def registry() -> Iterator[object]:
    """vLLM's registry of attention backends; afterwards nothing is registered."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    yield AttentionBackendEnum
    AttentionBackendEnum.CUSTOM.clear_override()
    AttentionBackendEnum.CPU_ATTN.clear_override()
