"""The planners, compiled from their sources and called with the configuration of any Attention object. The
host planner also serves GPU objects; the device planner runs with emulated CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from compilation import COMPILER, ROOT, compile_object, link
from torch import Tensor
from workspace import config_of, workspace_of

from attn_backend import Attention, BSRView, Composition
from attn_backend.kernels.native import dtype_of, pack
from attn_backend.kernels.schedule import Schedule

__all__ = [
    "COMPILER",
    "ROOT",
    "Levels",
    "build",
    "plan",
    "plan_and_lists_rows",
    "plan_with_kind",
    "queue",
    "random_mask",
    "workspace_bytes",
]


def build(folder: Path, device: bool = False, one_kind: bool = False) -> ctypes.CDLL:
    """A library in `folder`, compiled from tests/csrc/host_planner.cpp and the planner unless it exists
    (compilation.py). `device`: also from tests/csrc/device_planner.cpp. `one_kind`: for plan_with_kind().
    """
    tests = ROOT / "tests" / "csrc"
    sources = [
        tests / "host_planner.cpp",
        *(ROOT / "csrc" / "planner" / "host" / name for name in ("planner.cpp",)),
    ]
    includes = [ROOT / "csrc"]
    if device:
        sources += [tests / "device_planner.cpp", tests / "emulated" / "cuda_emulation.cpp"]
        includes.insert(0, tests / "emulated")
    options = ["-std=c++17", "-O2", "-Wno-unknown-pragmas", "-fPIC"]
    if one_kind:
        options += ["-include", "one_kind.h"]
        includes.append(tests)
    objects = [compile_object(folder / f"{source.stem}.o", source, options, includes) for source in sources]
    return ctypes.CDLL(str(link(folder / "libplanner.so", objects)))


def plan(*arguments: Any, **options: Any) -> Schedule:
    """The schedule that plan_and_lists_rows() gives."""
    return plan_and_lists_rows(*arguments, **options)[0]


def plan_and_lists_rows(
    library: ctypes.CDLL,
    attention: Attention,
    composition: BSRView | Composition,
    device_seed: int | None = None,
    *,
    workspace: Tensor | None = None,
    searched: BSRView | None = None,
    lost: int = -1,
    order: Sequence[int] | None = None,
    max_tiles: int | None = None,
    mask: tuple[Tensor, int] | None = None,
) -> tuple[Schedule, bool]:
    """Plans `composition` (moved to the CPU) with the configuration of `attention`. With a seed for the
    thread order, uses the device planner.

    Args:
        workspace: initial content, leftovers of the previous plan or anything else, of `workspace_bytes()`;
            None: zeros.
        searched: the view that the device planner's searching CTAs read; it changes before the first CTA
            plans.
        lost: a CTA of the device planner whose messages get lost.
        order: the execution order of the device planner's CTAs. CTA 0 waits for the others: CTAs after it are
            late. None: all others run between the start of CTA 0 and its wait.
        max_tiles: room for this number of row tiles, instead of the maximum of a batch.
        mask: ranges and lists of a variant's mask, from random_mask().

    Returns:
        The schedule, and whether its last level, a forest's if one was sought, has a row list.
    """
    config, layout = _config_and_layout(library, attention, max_tiles)
    if workspace is None:
        workspace = torch.zeros(int(layout["bytes"]), dtype=torch.uint8)
    views = composition.levels if isinstance(composition, Composition) else (composition,)
    levels = Levels(views, attention.max_rows, mask=mask)
    of_search = levels if searched is None else Levels((searched,), attention.max_rows)
    passed = config.tobytes(), ctypes.c_void_p(workspace.data_ptr()), levels.data, len(views)
    if device_seed is None:
        lists_rows = library.host_planner_plan(*passed)
    else:
        ctas = None if order is None else (ctypes.c_int32 * len(order))(*order)
        lists_rows = library.device_planner_plan(
            *passed, ctypes.c_uint32(device_seed), of_search.data, lost, ctas
        )
    return Schedule.read(workspace, config, layout), bool(lists_rows)


def random_mask(rng: numpy.random.Generator, attention: Attention) -> tuple[Tensor, int]:
    """Row ranges that exclude nothing, followed by random lists of KV tiles (KvTileList in
    csrc/planner/schedule.h), and the number of lists.
    """
    num_lists = attention.max_batch + attention.max_rows
    ranges = torch.tensor([0, 2**31 - 1, 0, 0], dtype=torch.int32).repeat(attention.max_rows, 1)
    lists = torch.zeros(num_lists, 1024, dtype=torch.int32)
    kv_tile = int(config_of(attention)["kv_tile"])
    for row in lists:
        tokens = numpy.flatnonzero(rng.random(200) < rng.choice([0, 0.1, 0.5, 1]))
        row[0] = -1 if rng.random() < 0.1 else len(tokens)
        row[1 : 1 + len(tokens)] = torch.from_numpy(tokens * kv_tile)
    return torch.cat([ranges.flatten(), lists.flatten()]), num_lists


def workspace_bytes(library: ctypes.CDLL, attention: Attention) -> int:
    """Bytes of the workspace of a schedule."""
    return int(_config_and_layout(library, attention)[1]["bytes"])


def queue(library: ctypes.CDLL, attention: Attention, view: BSRView) -> tuple[Schedule, Tensor, Tensor]:
    """Plans `view` with the host planner and reads its work queue.

    Returns:
        The schedule. The pairs in their order, int32 [pairs, 2]: row tile, KV head. For each pair the number
        of heads in a section of its row group, int32 [pairs].
    """
    config, layout = _config_and_layout(library, attention)
    workspace = torch.zeros(int(layout["bytes"]), dtype=torch.uint8)
    address = ctypes.c_void_p(workspace.data_ptr())
    library.host_planner_plan(config.tobytes(), address, Levels((view,), attention.max_rows).data, 1)
    schedule = Schedule.read(workspace, config, layout)
    room = len(schedule.tiles) * attention.num_kv_heads
    pairs, heads = torch.zeros(room, 2, dtype=torch.int32), torch.zeros(room, dtype=torch.int32)
    count = library.host_planner_queue(
        config.tobytes(), address, room, ctypes.c_void_p(pairs.data_ptr()), ctypes.c_void_p(heads.data_ptr())
    )
    assert count == room
    return schedule, pairs, heads


def plan_with_kind(library: ctypes.CDLL, attention: Attention, view: BSRView, kind: int) -> None:
    """Makes `attention` run a schedule of `view` whose row tiles all have one kind.

    `attention` must not look for prefixes, must have room for the tiles, and must have planned this view
    last. `library`: built with one_kind.
    """
    config, layout = _config_and_layout(library, attention)
    workspace = torch.zeros(int(layout["bytes"]), dtype=torch.uint8)
    # The planner leaves the page indices to the kernel, and does not read them.
    levels = Levels((view,), attention.max_rows, indices=view.table.indices)
    library.host_planner_set_kind(kind)
    library.host_planner_plan(config.tobytes(), ctypes.c_void_p(workspace.data_ptr()), levels.data, 1)
    workspace_of(attention).schedule.copy_(workspace)


def _config_and_layout(
    library: ctypes.CDLL, attention: Attention, max_tiles: int | None = None
) -> tuple[Any, Any]:
    """ScheduleConfig of `attention`, and the resulting ScheduleLayout."""
    config = config_of(attention).copy()
    if max_tiles is not None:
        config["max_tiles"] = max_tiles
    layout = numpy.zeros(1, dtype_of("ScheduleLayout"))
    library.host_planner_layout(config.tobytes(), ctypes.c_void_p(layout.ctypes.data))
    return config, layout[0]


class Levels:
    """Views as an array of PlanLevel, together with the tensors that it points to."""

    def __init__(
        self,
        views: Sequence[BSRView],
        max_rows: int,
        indices: Tensor | None = None,
        causal: bool | None = None,
        mask: tuple[Tensor, int] | None = None,
    ) -> None:
        """indices: page indices to use instead of the view's, copied to the CPU. causal: overrides the views'
        setting. mask: from random_mask().
        """
        self._kept: list[Tensor] = []
        self._causal, self._mask = causal, mask
        self.data = b"".join(self._level(view, max_rows, indices) for view in views)

    def _level(self, view: BSRView, max_rows: int, indices: Tensor | None) -> bytes:
        table = view.table
        if indices is None and table.indices is not None:
            indices = _to_cpu(table.indices)
            self._kept.append(indices)
        num_rows, width, stride = (
            (*indices.shape, indices.stride(0)) if indices is not None and indices.ndim == 2 else (0, 0, 0)
        )
        entries = (
            2**31 - 1
            if indices is None
            else indices.shape[0]
            if indices.ndim == 1
            else (num_rows - 1) * stride + width
            if num_rows
            else 0
        )
        return pack(
            "PlanLevel",
            qo_indptr=self._array(view.qo_indptr),
            table={
                "indices": _address(indices),
                "indptr": self._array(table.indptr),
                "last_page_len": self._array(table.last_page_len),
                "kv_lens": self._array(table.kv_lens),
                "rows": self._array(table.rows),
                "num_entries": entries,
                "row_stride": stride,
                "num_rows": num_rows,
                "row_entries": width,
                "page_size": table.page_size,
                "entry_step": table.entry_step,
            },
            rows=self._keep(view.rows),
            max_rows=max_rows if view.rows is None else min(max_rows, view.rows.shape[0]),
            num_groups=view.batch_size,
            visibility={
                "causal": view.causal is not False if self._causal is None else self._causal,
                "window_left": view.window_left,
            },
            kv_offsets=self._keep(view.kv_offsets),
            prompts=self._keep(view.prompts),
            positions={
                "positions": self._keep(view.positions),
                "requests": self._keep(view.requests),
                "num_rows": 0 if view.positions is None else len(view.positions),
            },
            row_ranges=0 if self._mask is None else self._mask[0].data_ptr(),
            kv_tile_lists=0 if self._mask is None else self._mask[0].data_ptr() + 16 * max_rows,
            num_kv_tile_lists=0 if self._mask is None else self._mask[1],
            kv_length=self._array(None),  # prepare_plan() chooses it
        )

    def _array(self, tensor: Tensor | None) -> dict[str, int]:
        """An IndexArray."""
        return {"data": self._keep(tensor), "is_int64": tensor is not None and tensor.dtype == torch.int64}

    def _keep(self, tensor: Tensor | None) -> int:
        """The address of a copy on the CPU."""
        if tensor is not None:
            tensor = tensor.cpu()
            self._kept.append(tensor)
        return _address(tensor)


def _to_cpu(table: Tensor) -> Tensor:
    """A copy with the same strides, since the rows of tests' tables overlap."""
    if table.device.type == "cpu":
        return table
    stored = torch.empty(0, dtype=table.dtype, device=table.device).set_(table.untyped_storage())
    return stored.cpu().as_strided(table.shape, table.stride(), table.storage_offset())


def _address(tensor: Tensor | None) -> int:
    """0: absent. An empty array has no address, but gets one."""
    if tensor is None:
        return 0
    return tensor.data_ptr() or ctypes.addressof(_EMPTY)


_EMPTY = ctypes.c_int64(0)
