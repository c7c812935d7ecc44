"""Threads that share the runtime (threads_test.cpp), under g++'s thread sanitizer.

The sources of csrc/ are compiled without OpenMP, which is not instrumented. The executor then starts
std::threads.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tvm_ffi
from compilation import COMPILER, ROOT, compile_object
from tvm_ffi import libinfo

HERE = Path(__file__).parent
CSRC = ROOT / "csrc"
OTHER_ISAS = ("_avx2", "_avx512", "_amx")
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g1",
    "-w",
    "-fPIC",
    "-fsanitize=thread",
    '-DATTN_HEADERS_DIGEST=""',
    f'-DTVM_FFI_VERSION="{tvm_ffi.__version__}"',
]
pytestmark = pytest.mark.skipif(not COMPILER, reason="needs g++")


def can_run_sanitized(folder: Path) -> bool:
    """The sanitizer of g++ 12 cannot map its memory if the kernel randomizes addresses with more than 28
    bits.
    """
    program = folder / "empty"
    subprocess.run(
        [str(COMPILER), "-fsanitize=thread", "-x", "c++", "-", "-o", str(program)],
        input="int main() {}",
        text=True,
        check=True,
    )
    return subprocess.run([str(program)], check=False, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("threads")
    try:
        is_able = can_run_sanitized(folder)
    except subprocess.CalledProcessError:
        is_able = False
    if not is_able:
        pytest.skip("g++ cannot compile or run programs with -fsanitize=thread here")
    library = Path(libinfo.find_libtvm_ffi())
    includes = [CSRC, Path(libinfo.find_include_path()), Path(libinfo.find_dlpack_include_path())]
    sources = [path for path in sorted(CSRC.rglob("*.cpp")) if not path.stem.endswith(OTHER_ISAS)]
    sources.append(HERE / "threads_test.cpp")
    targets = [folder / f"{i}.o" for i in range(len(sources))]
    with ThreadPoolExecutor(2) as pool:
        objects = list(
            pool.map(lambda target, source: compile_object(target, source, FLAGS, includes), targets, sources)
        )
    fake = compile_object(folder / "fake.o", HERE / "fake_cuda_driver.cpp", FLAGS, [])
    link = [str(COMPILER), "-fsanitize=thread"]
    subprocess.run([*link, "-shared", str(fake), "-o", str(folder / "libcuda.so.1")], check=True)
    made = folder / "threads_test"
    subprocess.run(
        [*link, *map(str, objects), str(library), f"-Wl,-rpath,{library.parent}", "-ldl", "-o", str(made)],
        check=True,
    )
    return made


@pytest.mark.parametrize("use", [*(f"cpu {first}" for first in range(6)), "devices", "shared"])
def test_threads_share_the_runtime(program: Path, use: str) -> None:
    """First uses, plans, runs and samples at the same time.

    "cpu 3": the fourth function is the first use of the process.
    """
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(program.parent),
        "OMP_NUM_THREADS": "3",
        "ATTN_BACKEND_CPU_ISA": "baseline",
    }
    # vLLM's import preloads an OpenMP runtime, whose barriers the sanitizer does not see.
    environment.pop("LD_PRELOAD", None)
    environment["TSAN_OPTIONS"] = "halt_on_error=1 exitcode=66"
    done = subprocess.run(
        [str(program), *use.split()],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]
