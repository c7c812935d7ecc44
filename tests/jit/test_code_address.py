"""Addresses of kernel code: cubins are completed, the loader's result is the code, and plain cubins are used
if that fails.
"""

import ctypes
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loaded_code import Driver

from attn_backend import Attention
from attn_backend.jit import code_address, cubins, progress
from attn_backend.jit.code_address import publish_code_addresses
from attn_backend.kernels import attention, native
from attn_backend.kernels.native import library
from release.kernels import distinct_kernels

needs_nvcc = pytest.mark.skipif(cubins.nvcc() is None, reason="needs nvcc")
needs_pyelftools = pytest.mark.skipif(
    not code_address.has_pyelftools(),
    reason="needs pyelftools (pip install pyelftools): without it cubins stay as nvcc made them, and run "
    "slower",
)
REJECTED = code_address.RejectedKernelError("loading kernels.cubin: CUDA_ERROR_INVALID_IMAGE (200)")


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel was rejected, and there was no warning."""
    monkeypatch.setattr(code_address, "rejected", [])
    progress.warned.clear()
    cubins.find_kernel.cache_clear()


KERNELS = """
#include "common/kernel_code.cuh"
__device__ int a_variable = 7;
extern "C" __global__ void first(int* out) { *out = a_variable; }
extern "C" __global__ void second(int* out) { *out = 2; }
extern "C" __device__ attn::KernelCode first_code{&attn::unknown_code, 0};
extern "C" __device__ attn::KernelCode second_code{&attn::unknown_code, 0};
extern "C" __device__ attn::KernelCode nobodys_code{&attn::unknown_code, 0};
__device__ int* table[2] = {&a_variable, &a_variable};
extern "C" __device__ int* second_other_code = &a_variable;
extern "C" __global__ void second_other(int* out) { *out = *second_other_code + *table[1]; }
"""
COPY = """
extern "C" __global__ void copy(const unsigned* from, unsigned* to, int count) {
  for (int i = threadIdx.x; i < count; i += 32) to[i] = from[i];
}
"""


def compiled(text: str, folder: Path, arch: str = "sm_90a") -> Path:
    source = folder / "kernels.cu"
    source.write_text(text)
    cubin = folder / f"kernels.{arch}.cubin"
    compiler = cubins.nvcc()
    assert compiler is not None
    subprocess.run(
        [compiler, *cubins.arch_flags(arch), str(source), "-o", str(cubin)], check=True, capture_output=True
    )
    return cubin


@needs_nvcc
@needs_pyelftools
def test_variables_of_kernels_are_completed(tmp_path: Path) -> None:
    cubin = compiled(KERNELS, tmp_path)
    before = cubin.read_bytes()
    assert sorted(publish_code_addresses(cubin)) == ["first", "second"]
    after = cubin.read_bytes()
    assert len(after) == len(before)
    assert sum(a != b for a, b in zip(before, after, strict=True)) <= 2 * (8 + 8), (
        "two relocations and two sizes"
    )
    publish_code_addresses(cubin)
    assert cubin.read_bytes() == after


@pytest.mark.slow
@needs_nvcc
@needs_pyelftools
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in distinct_kernels("sm_90a")
        if name.startswith(("attention_sm90", "merge_bf16", "merge_f16"))
    ],
)
def test_cubins_that_are_brought_to_l2_say_where_they_lie(name: str, tmp_path: Path) -> None:
    cubin = tmp_path / "kernel.cubin"
    shutil.copyfile(cubins.compile_kernel(name, "sm_90a")[0], cubin)
    before = cubin.read_bytes()
    assert publish_code_addresses(cubin) == [
        "merge_kernel" if name.startswith("merge") else "attention_kernel"
    ]
    assert cubin.read_bytes() == before, "it was done when the kernel was compiled"


@needs_nvcc
def test_other_files_are_left_alone(tmp_path: Path) -> None:
    for text, arch in ((COPY, "sm_90a"), (KERNELS, "sm_80")):
        cubin = compiled(text, tmp_path, arch)
        before = cubin.read_bytes()
        assert publish_code_addresses(cubin) == []
        assert cubin.read_bytes() == before


def test_what_cannot_be_read_is_left_alone_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = b"\x7fELF" + bytes(range(200))
    for name in ("a.cubin", "b.cubin"):
        (tmp_path / name).write_bytes(content)
        assert publish_code_addresses(tmp_path / name) == []
        assert (tmp_path / name).read_bytes() == content
    assert len(caplog.records) == 1
    assert "do not say where their code lies" in caplog.text


@needs_nvcc
@needs_pyelftools
def test_without_pyelftools_or_with_another_relocation_kernels_stay_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = compiled(KERNELS, tmp_path)
    before = cubin.read_bytes()
    first = code_address.recipe()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "elftools.elf.elffile", None)
        assert publish_code_addresses(cubin) == []
    with monkeypatch.context() as patch:
        patch.setattr(code_address, "GENERIC_ADDRESS", 5)
        assert publish_code_addresses(cubin) == []
    assert cubin.read_bytes() == before
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "is not relocated to" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(code_address, "has_pyelftools", lambda: False)
        assert code_address.recipe() != first, "kernels that were compiled without are compiled again with it"


@needs_nvcc
@needs_pyelftools
def test_plain_copies_are_what_nvcc_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = compiled(KERNELS, tmp_path)
    before = cubin.read_bytes()
    publish_code_addresses(cubin)
    assert code_address.usable(cubin) == cubin
    monkeypatch.setenv("ATTN_BACKEND_PREFETCH_CODE", "0")
    plain = code_address.usable(cubin)
    assert plain.read_bytes() == before
    assert code_address.usable(cubin) == plain, "each kernel has one copy"
    other = compiled(COPY, tmp_path)
    assert code_address.usable(other) == other, "it says nothing of its code"
    monkeypatch.setitem(sys.modules, "elftools.elf.elffile", None)
    with pytest.raises(RuntimeError, match="it needs pyelftools"):
        code_address.usable(cubin)


@needs_nvcc
@pytest.mark.parametrize("end", ["pass", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_no_plain_copy_stays_in_the_temporary_folder(end: str, tmp_path: Path) -> None:
    """However the process ends."""
    cubin = compiled(KERNELS, tmp_path)
    publish_code_addresses(cubin)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    code = (
        f"import os; from pathlib import Path; from attn_backend.jit import code_address as c; "
        f"print(c.usable(Path({str(cubin)!r}))); {end}"
    )
    variables = os.environ | {"TMPDIR": str(temporary), "ATTN_BACKEND_PREFETCH_CODE": "0"}
    done = subprocess.run(
        [sys.executable, "-u", "-c", code], env=variables, check=False, capture_output=True, text=True
    )
    assert done.stdout.strip() not in ("", str(cubin)), done.stderr
    assert list(temporary.iterdir()) == []


def test_when_the_driver_rejects_a_kernel_plain_ones_are_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Attention is still created, with files that were looked up again."""
    asked, plain = [], []

    def create(*arguments: Any) -> int:
        asked.append(arguments)
        if len(asked) == 1:
            raise REJECTED
        plain.append(code_address.rejected)
        return int(library().attention_create(*arguments))

    real = library()
    names = ("attention_destroy", "workspace_size", "set_workspace", "plan_level", "run")
    fake = SimpleNamespace(attention_create=create, **{name: getattr(real, name) for name in names})
    monkeypatch.setattr(attention, "library", lambda: fake)
    Attention(4, 2, 64, device="cpu", max_rows=4, max_batch=2)
    assert plain == [[str(REJECTED)]]
    assert len(caplog.records) == 1
    assert "CUDA_ERROR_INVALID_IMAGE" in caplog.text
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_IMAGE"):
        cubins.use_plain_kernels_or_raise(REJECTED)  # plain ones are also rejected


def test_the_runtime_throws_errors_by_the_names_that_are_known_here() -> None:
    csrc = Path(__file__).resolve().parents[2] / "csrc" / "runtime"  # the package has no .cpp
    thrown = set(
        re.findall(r"TVM_FFI_THROW\((\w+)\)", "".join(path.read_text() for path in csrc.glob("*.*")))
    )
    assert thrown == {
        "RuntimeError",
        "TypeError",
        "ValueError",
        *(error.__name__ for error in native.LIBRARY_ERRORS),
    }


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        cubins.use_plain_kernels_or_raise(RuntimeError("out of memory"))
    monkeypatch.setenv("ATTN_BACKEND_PREFETCH_CODE", "0")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_IMAGE"):
        cubins.use_plain_kernels_or_raise(REJECTED)


@needs_nvcc
@needs_pyelftools
@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["attention_sm90_bf16_d128_standard", "attention_sm90_f16_d64_standard", "merge_bf16"]
)
def test_the_address_is_where_the_code_is(name: str, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cubins for other GPUs are fatbins, which are left alone")
    cubin = tmp_path / "kernel.cubin"
    shutil.copyfile(cubins.find_kernel(name, "sm_90a"), cubin)
    driver = Driver()
    address, size = driver.read(
        driver.load(cubin), "merge_kernel_code" if name.startswith("merge") else "attention_kernel_code"
    )
    assert size > 10_000
    code = torch.zeros(size // 4, dtype=torch.int32, device="cuda")
    copy = driver.load(compiled(COPY, tmp_path))
    driver.launch(
        copy, "copy", ctypes.c_uint64(address), ctypes.c_uint64(code.data_ptr()), ctypes.c_int(size // 4)
    )
    assert code.cpu().numpy().tobytes() in cubin.read_bytes()
