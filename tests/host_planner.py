"""The planners, compiled from their sources and called with the configuration of any Attention object: the host planner, also for one on a GPU; and the device
planner with an emulation of what it uses of CUDA."""

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
_MAX_TILES = 7  # in ScheduleConfig


def build(folder: Path, device: bool = False, one_kind: bool = False) -> ctypes.CDLL:
    """Compiles tests/csrc/host_planner.cpp and the planner into a library in `folder`. `device`: also tests/csrc/device_planner.cpp. `one_kind`: for
    plan_with_kind()."""
    library = folder / "libplanner.so"
    tests = ROOT / "tests" / "csrc"
    sources = [tests / "host_planner.cpp", *(ROOT / "csrc" / "planner" / "host" / name for name in ("planner.cpp", "forest.cpp"))]
    includes = [f"-I{ROOT / 'csrc'}"]
    if device:
        sources += [tests / "device_planner.cpp", tests / "emulated" / "cuda_emulation.cpp"]
        includes.insert(0, f"-I{tests / 'emulated'}")
    if one_kind:
        includes += ["-include", str(tests / "one_kind.h")]
    options = ["-std=c++17", "-O2", "-Wno-unknown-pragmas", "-fPIC", "-shared"]
    subprocess.run([str(COMPILER), *options, *includes, *map(str, sources), "-o", str(library)], check=True)
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


def plan(
    library: ctypes.CDLL,
    attention: Attention,
    composition: BSRView | Composition,
    device_seed: int | None = None,
    *,
    workspace: Tensor | None = None,
    searched: BSRView | None = None,
    lost: int = -1,
    max_tiles: int | None = None,
) -> Schedule:
    """Plans `composition` (moved to the CPU) with the configuration of `attention`; with a seed for the order of its threads, by the device planner.

    Args:
        workspace: what the plan before left, or anything else, of `workspace_bytes()`; None: zeros.
        searched: the view as those CTAs of the device planner read it that search for shared prefixes: it changes before the first one plans.
        lost: a CTA of the device planner whose findings get lost.
        max_tiles: room for so many row tiles, instead of as many as a batch may have.
    """
    options = {"workspace": workspace, "searched": searched, "lost": lost, "max_tiles": max_tiles}
    return plan_and_lists_rows(library, attention, composition, device_seed, **options)[0]  # type: ignore[arg-type]


def workspace_bytes(library: ctypes.CDLL, attention: Attention) -> int:
    """Of a schedule."""
    return _workspace(library, attention)[2].numel()


def plan_and_lists_rows(
    library: ctypes.CDLL,
    attention: Attention,
    composition: BSRView | Composition,
    device_seed: int | None = None,
    *,
    workspace: Tensor | None = None,
    searched: BSRView | None = None,
    lost: int = -1,
    max_tiles: int | None = None,
) -> tuple[Schedule, bool]:
    """plan(), and whether its last level, a forest's if one was sought, has a row list."""
    config, c_config, zeros, offsets = _workspace(library, attention, max_tiles)
    workspace = zeros if workspace is None else workspace
    levels = composition.levels if isinstance(composition, Composition) else (composition,)
    kept: list[Tensor | None] = []  # what the views point to
    views = (_View * len(levels))(*(_view(level, attention.max_rows, kept) for level in levels))
    of_search = views if searched is None else (_View * 1)(_view(searched, attention.max_rows, kept))
    address = ctypes.c_void_p(workspace.data_ptr())
    if device_seed is None:
        lists_rows = library.host_planner_plan(c_config, address, views, len(levels))
    else:
        lists_rows = library.device_planner_plan(c_config, address, views, len(levels), ctypes.c_uint32(device_seed), of_search, lost)
    return Schedule.read(workspace, [*config, *offsets]), bool(lists_rows)


def plan_with_kind(library: ctypes.CDLL, attention: Attention, view: BSRView, kind: int) -> None:
    """Has `attention` run a schedule of `view` whose row tiles all are of one kind. `attention` must look for no prefixes, have room for so many tiles, and its
    last plan must have been of this view. `library`: built with one_kind."""
    _, c_config, workspace, _ = _workspace(library, attention)
    kept: list[Tensor | None] = []
    passed = _view(view, attention.max_rows, kept)
    passed.indices = _address(view.table.indices)  # the planner leaves it to the kernel, and does not read it
    library.host_planner_set_kind(kind)
    library.host_planner_plan(c_config, ctypes.c_void_p(workspace.data_ptr()), (_View * 1)(passed), 1)
    attention._schedule.copy_(workspace)


def _workspace(library: ctypes.CDLL, attention: Attention, max_tiles: int | None = None) -> tuple[list[int], ctypes.Array[ctypes.c_int32], Tensor, list[int]]:
    """The configuration of `attention`, the same for C, and a schedule's workspace with where its arrays start."""
    config = list(attention._library.schedule_config(attention._handle))[:-6]
    if max_tiles is not None:
        config[_MAX_TILES] = max_tiles
    c_config = (ctypes.c_int32 * len(config))(*config)
    offsets = (ctypes.c_int64 * 6)()
    workspace = torch.zeros(library.host_planner_layout(c_config, offsets), dtype=torch.uint8)
    return config, c_config, workspace, list(offsets)


def _view(view: BSRView, max_rows: int, kept: list[Tensor | None]) -> _View:
    table = view.table
    arrays = [None if tensor is None else tensor.cpu() for tensor in (view.qo_indptr, table.indptr, table.last_page_len, table.kv_lens, table.rows)]
    row_list = None if view.rows is None else view.rows.cpu()
    indices = None if table.indices is None else _to_cpu(table.indices)
    kept += [*arrays, row_list, indices]
    rows, width, stride = (*indices.shape, indices.stride(0)) if indices is not None and indices.ndim == 2 else (0, 0, 0)
    entries = 2**31 - 1 if indices is None else indices.shape[0] if indices.ndim == 1 else (rows - 1) * stride + width if rows else 0
    limit = max_rows if row_list is None else min(max_rows, row_list.shape[0])
    numbers = [view.batch_size, view.causal, view.window_left, limit, entries, stride, rows, width, table.page_size, table.entry_step]
    return _View(
        _address(indices),
        _address(row_list),
        (ctypes.c_void_p * 5)(*map(_address, arrays)),
        (ctypes.c_int32 * 5)(*(array is not None and array.dtype == torch.int64 for array in arrays)),
        (ctypes.c_int64 * 10)(*numbers),
    )


def _to_cpu(table: Tensor) -> Tensor:
    """A copy with the same strides: the rows of tests' tables overlap."""
    if table.device.type == "cpu":
        return table
    stored = torch.empty(0, dtype=table.dtype, device=table.device).set_(table.untyped_storage())
    return stored.cpu().as_strided(table.shape, table.stride(), table.storage_offset())


def _address(tensor: Tensor | None) -> int | None:
    """An empty array has no address; an absent one must be told from it."""
    if tensor is None:
        return None
    return tensor.data_ptr() or ctypes.addressof(_EMPTY)


_EMPTY = ctypes.c_int64(0)
