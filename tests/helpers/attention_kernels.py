"""The attention kernel that the tests' objects use.

A GPU of compute capability 9.0 has two kernels, unless ATTN_BACKEND_ARCH=sm_80. A random case selects one by
its seed, always the same. A test with the fixture `kernel` runs with each, and fails if it does not call
kernel_of().
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from attn_backend.jit import manifest
from attn_backend.jit.manifest import BUILDS
from attn_backend.kernels.native import arch_on

GPU_KERNELS = ("hopper", "generic")


@dataclass
class Forced:
    """The kernel that the running test's fixture requests. kernel: None on a CPU."""

    kernel: str | None
    was_asked: bool = False


_forced: list[Forced] = []


def is_available(kernel: str) -> bool:
    """Whether this GPU runs it, given the selected build (ATTN_BACKEND_ARCH)."""
    return arch_on(torch.device("cuda")) in manifest.DESIGNS[kernel].archs


def has_clusters() -> bool:
    """Whether CTAs of this GPU may share a row in sampling."""
    return BUILDS[arch_on(torch.device("cuda"))].has_clusters


def kernel_of(device: torch.device, seed: int = 0) -> str | None:
    """The argument `kernel` of Attention for case number `seed`; None on a CPU."""
    if _forced:
        _forced[-1].was_asked = True
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    if _forced and _forced[-1].kernel is not None:
        return _forced[-1].kernel
    available = [kernel for kernel in GPU_KERNELS if is_available(kernel)]
    return available[seed % len(available)]


@contextmanager
def forced(kernel: str | None) -> Iterator[None]:
    """Everything on a GPU uses this kernel, for any seed. None: on a CPU."""
    _forced.append(Forced(kernel))
    try:
        yield
    finally:
        _forced.pop()


def was_asked() -> bool:
    """Whether the running test has called kernel_of(), if it must use one kernel."""
    return not _forced or _forced[-1].was_asked
