"""flashinfer.utils: queries about devices and kernels."""

from __future__ import annotations

from enum import Enum

import torch

from .features import missing


class MaskMode(Enum):
    """FlashInfer's masks, by number."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class PosEncodingMode(Enum):
    """FlashInfer's position encodings, by number."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class TensorLayout(Enum):
    """Layouts of K and V, by number."""

    NHD = 0
    HND = 1


FP4Tensor = missing("utils.FP4Tensor")  # engines import it for isinstance checks


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device.

    Raises:
        ValueError: it is not a CUDA device.
    """
    if device.type != "cuda":
        raise ValueError(f"device is {device}, must be a CUDA device")
    return torch.cuda.get_device_capability(device)


def is_sm90a_supported(device: torch.device) -> bool:
    """Whether the device runs Hopper kernels."""
    return get_compute_capability(device)[0] == 9


def is_sm100a_supported(device: torch.device) -> bool:
    """Whether the device runs FlashInfer's kernels for newer GPUs: this package has none."""
    return False


def is_sm110a_supported(device: torch.device) -> bool:
    return False


def has_flashinfer_jit_cache() -> bool:
    """Whether kernels are precompiled: they are in the package."""
    return True


def next_positive_power_of_2(x: int) -> int:
    """The smallest power of two that is at least x; 1 for x < 1."""
    return 1 if x < 1 else 1 << (x - 1).bit_length()
