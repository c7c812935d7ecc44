"""Structs of csrc/, as Python writes and reads them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from attn_backend import Attention
from attn_backend.jit import manifest
from attn_backend.jit.manifest import HeadDims
from attn_backend.kernels import attention, schedule
from attn_backend.kernels.native import dtype_of, pack, unpack, values_of
from attn_backend.metadata.kv_cache import DTYPES, SCALED_DTYPES
from attn_backend.metadata.views import MAX_LEVELS
from attn_backend.stored_formats import FORMATS

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++")
OPTIONS = {
    "index": 1,
    "num_levels": 2,
    "page_size": 16,
    "window_left": -1,
    "kv_offsets": 0,
    "prompts": 0,
    "positions": {"positions": 0, "requests": 5, "num_rows": 3},
    "entry_step": 1,
    "causal": True,
    "finds_row_ranges": False,
    "pages_change": True,
    "has_slots": False,
}


def test_fields_lie_where_the_library_says() -> None:
    tile = dtype_of("RowTile")
    assert tile.names == ("cost_begin", "group", "kind", "packed_begin", "kv_begin", "kv_end", "num_kv_tiles")
    assert [tile.fields[name][1] for name in tile.names] == [0, 8, 12, 16, 20, 24, 28]
    assert tile.itemsize == 32
    header = dtype_of("ScheduleHeader")
    assert header["levels"].base == dtype_of("Level")
    assert header["kv_tile_cost"].shape == dtype_of("ScheduleConfig")["kv_tile_cost"].shape


def test_what_is_packed_is_unpacked() -> None:
    positions = tuple(OPTIONS["positions"].values())
    assert unpack("LevelOptions", pack("LevelOptions", **OPTIONS)).item() == tuple(
        (OPTIONS | {"positions": positions}).values()
    )


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"pages": 3}, TypeError),
        ({"page_size": None}, TypeError),
        ({"page_size": 1.5}, OverflowError),
        ({"entry_step": 2**31}, OverflowError),
        ({"causal": 2}, OverflowError),
    ],
)
def test_other_fields_and_values_are_refused(changes: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        pack("LevelOptions", **OPTIONS | changes)


def test_a_field_must_not_be_left_out() -> None:
    with pytest.raises(TypeError, match="page_size"):
        pack("LevelOptions", **{name: value for name, value in OPTIONS.items() if name != "page_size"})


def test_the_library_refuses_bytes_of_another_size() -> None:
    made = Attention(1, 1, 8, dtype=torch.float32, device="cpu", max_rows=1, max_batch=1)
    with pytest.raises(ValueError, match="bytes of a struct is 8, must be"):
        made._library.attention_create(b"too few.", {})


def test_names_of_values_are_those_of_the_library() -> None:
    assert schedule.ERRORS.keys() == values_of("ScheduleError").keys()
    assert schedule.REASONS.keys() == values_of("NodeReason").keys()
    assert {f"k{stored.struct}" for stored in FORMATS} == values_of("DataType").keys()
    assert (torch.float8_e4m3fn, torch.float8_e5m2) == SCALED_DTYPES
    assert (torch.bfloat16, torch.float16, torch.float32, *SCALED_DTYPES, torch.int8) == DTYPES
    assert set(attention.CASCADE_MODES.values()) == values_of("CascadeMode").keys()
    assert {"cpu", *(design.folder for design in manifest.DESIGNS.values())} == values_of(
        "KernelDesign"
    ).keys()
    assert values_of("Limit")["kMaxLevels"] == MAX_LEVELS
    for columns, struct in ((schedule.GROUP_COLUMNS, "RowGroup"), (schedule.TILE_COLUMNS, "RowTile")):
        assert set(columns) < set(dtype_of(struct).names)


def test_designs_have_a_folder_and_cubins() -> None:
    for design in manifest.DESIGNS.values():
        assert (ROOT / "csrc" / "attention" / design.folder / "design.h").exists()
        for arch in design.archs:
            shapes = [
                manifest.KernelShape(element, HeadDims.of(dim))
                for element in manifest.CUDA_ELEMENTS
                for dim in (64, 256)
            ]
            names = {
                manifest.attention_name(stem, shape) for stem in design.cubins.values() for shape in shapes
            }
            assert names <= manifest.kernels(arch).keys()


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    ("fields", "compiles"),
    [
        ("a, b", True),
        ("b, a", False),
        ("a", False),
        ("b", False),
    ],
)
def test_a_table_that_lacks_a_field_does_not_compile(fields: str, compiles: bool, tmp_path: Path) -> None:
    source = tmp_path / "table.cpp"
    source.write_text(
        f'#include "runtime/struct_fields.h"\nnamespace attn {{ struct Pair {{ int a; int b; '
        f"}};\nATTN_STRUCT(Pair, 0, {fields}); }}\n"
    )
    done = subprocess.run(
        [str(COMPILER), "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}", str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == compiles, done.stderr
    assert compiles or "the table of Pair lacks a field" in done.stderr
