"""Which cubins a device uses of the standard kernels."""

from __future__ import annotations

import torch

from .cubins import arch_of, find_kernel


def arch_on(device: torch.device) -> str:
    """The arch whose build serves a CUDA device.

    Raises:
        ValueError: a GPU older than Ampere, or one that cannot run ATTN_BACKEND_ARCH.
    """
    return arch_of(torch.cuda.get_device_capability(device))


def kernel_file(name: str, device: torch.device) -> str:
    """The cubin of a kernel of the manifest; "" on a CPU, which has none.

    Raises:
        ValueError: a GPU older than Ampere, or one that cannot run ATTN_BACKEND_ARCH.
        RuntimeError: the cubin is nowhere and cannot be compiled.
    """
    return str(find_kernel(name, arch_on(device))) if device.type == "cuda" else ""
