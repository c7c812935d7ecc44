"""The host planner, compiled from its source and called with the configuration of any Attention object: also of one on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from attn_backend import Attention, BSRView
from attn_backend.kernels.schedule import Schedule

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shutil.which("g++")


def build(folder: Path) -> ctypes.CDLL:
    """Compiles tests/csrc/host_planner.cpp and csrc/host/planner.cpp into a library in `folder`."""
    library = folder / "libhost_planner.so"
    sources = [ROOT / "tests" / "csrc" / "host_planner.cpp", ROOT / "csrc" / "host" / "planner.cpp"]
    includes = [f"-I{ROOT / 'csrc' / 'include'}", f"-I{ROOT / 'csrc'}"]
    subprocess.run([str(COMPILER), "-std=c++17", "-O2", "-fPIC", "-shared", *includes, *map(str, sources), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.host_planner_layout.restype = ctypes.c_int64
    return loaded


def plan(library: ctypes.CDLL, attention: Attention, fixed: Schedule, view: BSRView) -> Schedule:
    """Plans `view` (moved to the CPU) with the configuration of `attention`; `fixed` is any schedule of it."""
    config = [attention.num_kv_heads, attention.num_qo_heads // attention.num_kv_heads, fixed.kv_tile, fixed.max_kind, fixed.num_ctas]
    config += [attention.max_batch, attention.max_rows, fixed.max_tiles, fixed.min_share, *fixed.kv_tile_cost, *fixed.pair_cost]
    c_config = (ctypes.c_int32 * len(config))(*config)
    offsets = (ctypes.c_int64 * 3)()
    workspace = torch.zeros(library.host_planner_layout(c_config, offsets), dtype=torch.uint8)

    table = view.table
    arrays = [None if tensor is None else tensor.cpu() for tensor in (view.qo_indptr, table.indptr, table.last_page_len, table.kv_lens, table.rows)]
    indices = table.indices     # planners read no entry of it: any address but 0 will do
    rows, width, stride = (*indices.shape, indices.stride(0)) if indices is not None and indices.ndim == 2 else (0, 0, 0)
    entries = 2**31 - 1 if indices is None else indices.shape[0] if indices.ndim == 1 else (rows - 1) * stride + width if rows else 0
    numbers = [view.batch_size, view.causal, view.window_left, entries, stride, rows, width, table.page_size, table.entry_step]
    library.host_planner_plan(
        c_config,
        ctypes.c_void_p(workspace.data_ptr()),
        ctypes.c_void_p(None if indices is None else workspace.data_ptr()),
        (ctypes.c_void_p * len(arrays))(*map(_address, arrays)),
        (ctypes.c_int32 * len(arrays))(*(array is not None and array.dtype == torch.int64 for array in arrays)),
        (ctypes.c_int64 * len(numbers))(*numbers),
    )
    costs = [*fixed.kv_tile_cost, *fixed.pair_cost]
    return Schedule.read(workspace, [fixed.num_ctas, fixed.kv_tile, fixed.max_kind, fixed.max_tiles, fixed.min_share, *costs, *offsets])


def _address(tensor: Tensor | None) -> int | None:
    """An empty array has no address; an absent one must be told from it."""
    if tensor is None:
        return None
    return tensor.data_ptr() or ctypes.addressof(_EMPTY)


_EMPTY = ctypes.c_int64(0)
