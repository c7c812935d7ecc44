"""Windows, and a variant's range(), over several levels, without a GPU: the attention kernels on fibers, and
the kernel in front of the planner.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import emulation
import host_planner
import numpy
import pytest
import torch
from cascades import Cascade
from compositions import Shape
from device_attention import KERNELS, DeviceAttention
from torch import Tensor
from workspace import config_bytes, workspace_of

from attn_backend import Composition, Variant
from attn_backend.jit import compilers, manifest
from attn_backend.jit.manifest import HeadDims
from attn_backend.variants import builtin

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler"),
]

CPU = torch.device("cpu")
# A window of 1400 tokens, mostly holes, with the last 9 tokens hidden.
GIVEN = Variant.from_source(
    """
  TokenRange range(const ScoreRow& row) const { return {0, row.position - 8}; }
  bool mask(const ScoreRow& row, int32_t kv_position) const {
    return kv_position / 200 % 4 == row.request % 2;
  }
        """,
    name="quarters",
    skips_kv_tiles=True,
) & builtin.sliding_window(1400)
VARIANT = GIVEN.across_levels()  # an Attention compiles this for several levels


def seen_of(request: int, position: int, at: Tensor) -> Tensor:
    return (at >= position - 1400) & (at < position - 8) & (at // 200 % 4 == request % 2)


def cascades() -> list[Cascade]:
    """The first one has row tiles with holes in both levels."""
    shape = Shape(2, 4, 64, torch.bfloat16, 16, 5)
    some = [
        Cascade(
            numpy.random.default_rng(46), shape, CPU, [[2500, 1300], [40, 1500, 900]], [[0, 0, 1]], [2, 3, 1]
        )
    ]
    return some + [
        Cascade.random(numpy.random.default_rng([seed, 46]), CPU, 2 + seed % 2, longest=1500, max_rows=3)
        for seed in range(5)
    ]


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention(emulated: Path, kernel: str) -> None:
    holes = 0
    for seed, cascade in enumerate(cascades()):
        attention = DeviceAttention(emulated, cascade.attention(GIVEN, kernel=kernel), kernel, seed, VARIANT)
        attention.plan(Composition.cascade(**cascade.levels, causal=True))
        cascade.check(attention, seen_of)  # type: ignore[arg-type]
        holes += int((attention.schedule().tiles[:, 3] < 0).sum())
    assert holes >= 2


def test_row_ranges_and_lists_of_each_level(tmp_path: Path) -> None:
    """The device result equals the host's, bit for bit."""
    kernel = manifest.variant_kernels(
        "sm_80", manifest.DESIGNS["generic"], manifest.KernelShape("bf16", HeadDims.of(64)), VARIANT
    )["row_ranges"]
    library = emulation.build(
        tmp_path,
        "row_ranges",
        emulation.TESTS / "device_row_ranges.cpp",
        header=kernel.source,
        options=["-O1"],
    )
    library.device_row_ranges.restype = ctypes.c_char_p
    for seed, cascade in enumerate(cascades()):
        attention = cascade.attention(GIVEN, kernel="hopper")
        composition = Composition.cascade(**cascade.levels, causal=True)
        attention.plan(composition)
        workspace = workspace_of(attention)
        expected = workspace.row_ranges
        levels = host_planner.Levels(composition.levels, attention.max_rows, causal=None)
        memory = torch.zeros_like(expected)
        lists = memory[attention.max_levels * attention.max_rows * 16 :]
        num_lists = len(lists) // attention.max_levels // 4096  # sizeof(KvTileList)
        for level in range(len(composition.levels)):
            emulation.check(
                library.device_row_ranges(
                    config_bytes(attention),
                    ctypes.c_void_p(workspace.schedule.data_ptr()),
                    levels.data,
                    len(composition.levels),
                    level,
                    b"",
                    ctypes.c_size_t(0),
                    ctypes.c_void_p(memory[level * attention.max_rows * 16 :].data_ptr()),
                    ctypes.c_void_p(lists[level * num_lists * 4096 :].data_ptr()),
                    num_lists,
                    1 + seed,
                    ctypes.c_uint32(seed),
                )
            )
        assert torch.equal(memory, expected), seed
