"""The workspace of an Attention and the schedule's configuration, which are not public.

Tests of device code read and poison them. Only this file knows their place in an Attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from attn_backend import Attention
from attn_backend.kernels.native import library, unpack


class Workspace(NamedTuple):
    """schedule: uint8, the bytes of plan's result. partial_o, partial_lse: float32, states of split row
    tiles. row_ranges: uint8, ranges of tokens and lists of KV tiles that a variant's rows see. dequantized:
    uint8, DequantizedKv.
    """

    schedule: Tensor
    partial_o: Tensor
    partial_lse: Tensor
    row_ranges: Tensor
    dequantized: Tensor


def workspace_of(attention: Attention) -> Workspace:
    return Workspace(
        attention._schedule,
        attention._partial_o,
        attention._partial_lse,
        attention._row_ranges,
        attention._dequantized,
    )


def config_bytes(attention: Attention) -> bytes:
    """The ScheduleConfig as C++ has it."""
    config: bytes = library().schedule_config(attention._handle)
    return config


def config_of(attention: Attention) -> Any:
    """The ScheduleConfig, by its fields."""
    return unpack("ScheduleConfig", config_bytes(attention))


def layout_of(attention: Attention) -> Any:
    """The ScheduleLayout, by its fields."""
    return unpack("ScheduleLayout", library().schedule_layout(attention._handle))
