"""The host planner, compiled from its source and called with the configuration of any Attention object: also of one on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from attn_backend import Attention, BSRView, Composition
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


class _View(ctypes.Structure):
    _fields_ = (
        ("indices", ctypes.c_void_p),
        ("row_list", ctypes.c_void_p),
        ("arrays", ctypes.c_void_p * 5),
        ("is_int64", ctypes.c_int32 * 5),
        ("numbers", ctypes.c_int64 * 10),
    )


def plan(library: ctypes.CDLL, attention: Attention, fixed: Schedule, composition: BSRView | Composition) -> Schedule:
    """Plans `composition` (moved to the CPU) with the configuration of `attention`; `fixed` is any schedule of it."""
    config = [attention.num_kv_heads, attention.num_qo_heads // attention.num_kv_heads, fixed.kv_tile, fixed.max_kind, fixed.num_ctas]
    config += [attention.max_batch * attention.max_levels, attention.max_rows, attention.max_levels, fixed.max_tiles, fixed.min_share]
    config += [*fixed.kv_tile_cost, *fixed.pair_cost]
    c_config = (ctypes.c_int32 * len(config))(*config)
    offsets = (ctypes.c_int64 * 4)()
    workspace = torch.zeros(library.host_planner_layout(c_config, offsets), dtype=torch.uint8)

    levels = composition.levels if isinstance(composition, Composition) else (composition,)
    kept: list[Tensor | None] = []     # what the views point to
    views = (_View * len(levels))(*(_view(level, attention.max_rows, workspace, kept) for level in levels))
    library.host_planner_plan(c_config, ctypes.c_void_p(workspace.data_ptr()), views, len(levels))
    costs = [*fixed.kv_tile_cost, *fixed.pair_cost]
    return Schedule.read(workspace, [fixed.num_ctas, fixed.kv_tile, fixed.max_kind, fixed.max_tiles, fixed.min_share, *costs, *offsets], attention.max_rows)


def _view(view: BSRView, max_rows: int, workspace: Tensor, kept: list[Tensor | None]) -> _View:
    table = view.table
    arrays = [None if tensor is None else tensor.cpu() for tensor in (view.qo_indptr, table.indptr, table.last_page_len, table.kv_lens, table.rows)]
    row_list = None if view.rows is None else view.rows.cpu()
    kept += [*arrays, row_list]
    indices = table.indices     # planners read no entry of it: any address but 0 will do
    rows, width, stride = (*indices.shape, indices.stride(0)) if indices is not None and indices.ndim == 2 else (0, 0, 0)
    entries = 2**31 - 1 if indices is None else indices.shape[0] if indices.ndim == 1 else (rows - 1) * stride + width if rows else 0
    limit = max_rows if row_list is None else min(max_rows, row_list.shape[0])
    numbers = [view.batch_size, view.causal, view.window_left, limit, entries, stride, rows, width, table.page_size, table.entry_step]
    return _View(
        None if indices is None else workspace.data_ptr(),
        _address(row_list),
        (ctypes.c_void_p * 5)(*map(_address, arrays)),
        (ctypes.c_int32 * 5)(*(array is not None and array.dtype == torch.int64 for array in arrays)),
        (ctypes.c_int64 * 10)(*numbers),
    )


def _address(tensor: Tensor | None) -> int | None:
    """An empty array has no address; an absent one must be told from it."""
    if tensor is None:
        return None
    return tensor.data_ptr() or ctypes.addressof(_EMPTY)


_EMPTY = ctypes.c_int64(0)
