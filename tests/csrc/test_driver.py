"""The calls of csrc/runtime/driver.cpp to the CUDA driver; fake_cuda_driver.cpp only prints them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
COMPILER = shutil.which("g++") or ""
# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
OVERLAP, CLUSTER = "6", "4"


@pytest.mark.skipif(not COMPILER, reason="needs g++")
def test_only_a_kernel_that_waits_overlaps_the_previous_one(tmp_path: Path) -> None:
    """griddepcontrol begins with Hopper. A kernel of sm_80, whose PTX runs there too, would read data that
    the previous kernel has not written yet.
    """
    from tvm_ffi import libinfo

    library = Path(libinfo.find_libtvm_ffi())
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
    fake = [
        str(HERE / "fake_cuda_driver.cpp"),
        "-DFAKE_PRINTS_LAUNCHES",
        "-shared",
        "-fPIC",
        "-o",
        str(tmp_path / "libcuda.so.1"),
    ]
    program = [
        str(HERE / "driver_test.cpp"),
        str(CSRC / "runtime" / "driver.cpp"),
        "-o",
        str(tmp_path / "driver_test"),
    ]
    includes = [
        f"-I{CSRC}",
        "-isystem",
        libinfo.find_include_path(),
        "-isystem",
        libinfo.find_dlpack_include_path(),
    ]
    subprocess.run([COMPILER, *flags, *fake], check=True)
    subprocess.run(
        [COMPILER, *flags, *includes, *program, str(library), f"-Wl,-rpath,{library.parent}", "-ldl"],
        check=True,
    )
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [str(tmp_path / "driver_test"), "80", "90", "120"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    launches = [
        (version, attributes.split())
        for version, attributes in (line.split(":") for line in done.stdout.splitlines())
    ]
    expected = {"80": ([], [], [CLUSTER])} | dict.fromkeys(("90", "120"), ([], [OVERLAP], [OVERLAP, CLUSTER]))
    assert launches == [(version, attributes) for version, three in expected.items() for attributes in three]
