"""Fixtures and the handling of GPU tests: without a GPU they are skipped, visibly and counted."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import attention_kernels
import compilation
import progress_lines
import pytest
import torch

from attn_backend.jit import compilers

NO_GPU = "needs a CUDA GPU"
ROOT = Path(__file__).resolve().parent.parent
# otherwise torch.compile leaves a folder in TMPDIR
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".build" / "torchinductor"))

gc.disable()  # until collection ends: engines are imported, and nothing from that becomes garbage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.enable()  # here, since the process that distributes tests to workers collects none
    gc.freeze()  # the engines and 15,000 tests stay: the garbage collector need not scan them


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise libraries report objects that they have not released


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--progress",
        action="store_true",
        help="with -n: print how many tests are done every 10 s, instead of a dot for each",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--progress") and config.getoption("numprocesses", None):
        config.pluginmanager.register(progress_lines.Progress(config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if line := progress_lines.skipped_line(
        str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])
    ):
        terminalreporter.write_line(line, yellow=True)


@pytest.fixture(autouse=True)
def sys_path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs put the working folder first (`attn-backend compile`, the wheel's). Other tests of this
    process must not find the source tree there.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(autouse=True, scope="session")
def intrinsics_are_precompiled() -> Iterator[None]:
    """Tests compile a hundred variants for CPUs. The libraries do not change."""
    compile_library = compilers.compile_library

    def with_intrinsics(
        command: list[str], text: str, isa: str, headers: Path, digest: str, what: str
    ) -> tuple[bytes, str]:
        if compilers.ISA_FLAGS[isa]:  # others have no intrinsics
            command = compilation.with_intrinsics(command, compilers.cpp_flags(isa))
        return compile_library(command, text, isa, headers, digest, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilers, "compile_library", with_intrinsics)
        yield


@pytest.fixture(autouse=True)
def variants_are_compiled_quickly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, variants for CPUs are compiled with -O1, in half the time, unless the test is marked
    `optimized`. The cache keeps libraries of other flags apart.
    """
    if torch.cuda.is_available() or request.node.get_closest_marker("optimized"):
        return
    flags = compilers.cpp_flags
    monkeypatch.setattr(
        compilers, "cpp_flags", lambda isa: ["-O1" if flag == "-O3" else flag for flag in flags(isa)]
    )


def pytest_sessionstart() -> None:
    # The workers of pytest-xdist share the cores: with more than one thread each, they would wait for each
    # other.
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the fixture `device` runs on a CPU and on a GPU. If it also has the fixture `kernel`, it
    runs on a GPU once for each kernel.
    """
    each_kernel = "kernel" in metafunc.fixturenames
    if any("device" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        return  # has its own parameters
    if "device" in metafunc.fixturenames and each_kernel:
        on_gpu = [
            pytest.param("cuda", kernel, marks=pytest.mark.gpu, id=kernel)
            for kernel in attention_kernels.GPU_KERNELS
        ]
        metafunc.parametrize(
            ("device", "kernel"), [pytest.param("cpu", None, id="cpu"), *on_gpu], indirect=True
        )
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
    elif each_kernel and metafunc.definition.get_closest_marker("gpu"):
        metafunc.parametrize("kernel", attention_kernels.GPU_KERNELS, indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    result = yield
    if not attention_kernels.was_asked():
        pytest.fail(
            "the test takes the fixture `kernel`, but never asked attention_kernels.kernel_of(): its case "
            "`generic` would run the default kernel"
        )
    return result


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The attention kernel that the test's objects use on a GPU (attention_kernels.kernel_of), else None."""
    if not hasattr(request, "param"):  # no device either
        yield None
        return
    name: str | None = request.param
    if name is not None and not attention_kernels.is_available(name):
        pytest.skip(
            f"the {name} kernel needs a GPU of compute capability 9.0, and no ATTN_BACKEND_ARCH=sm_80"
        )
    with attention_kernels.forced(name):
        yield name
