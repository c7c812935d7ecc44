"""Misbehaving compilers: each leads to one message, and leaves no files behind."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from fake_nvcc import FakeKernels, cubin, fake_nvcc

from attn_backend.jit import compilers, cubins


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernels:
    return FakeKernels(tmp_path, monkeypatch)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def seen_to_end(process: int) -> bool:
    for _ in range(100):
        if not is_running(process):
            return True
        time.sleep(0.1)
    return False


BAD = {
    "ends without output": (
        "echo done",
        r"reported no error on kernel k for sm_90a, but its output is missing: set CUDA_HOME .*\ndone",
    ),
    "leaves its output empty": (": > $out", "but its output is empty"),
    "writes garbage": ("echo garbage > $out", "but its output is neither a cubin nor a fatbin"),
    "stops in the middle": ("head -c 100 {good} > $out", "but its output is truncated"),
    "is killed": (
        "echo half > $out; echo working; kill -9 $$",
        r"was killed by signal 9 on kernel k for sm_90a; if memory ran out, .*--jobs 1.*\nworking",
    ),
    "fails": (
        "echo half > $out; echo wrong source; exit 3",
        r"nvcc failed on kernel k for sm_90a:\nwrong source\n.* ended with exit status 3",
    ),
    "prints what is not text": (r"printf '\377\376'; exit 1", "nvcc failed on kernel k for sm_90a"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_compiler_that_does_not_do_its_work_is_named(how: str, fake: FakeKernels) -> None:
    body, message = BAD[how]
    fake_nvcc(fake.nvcc, body.format(good=fake.folder / "good"))
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        cubins.find_kernel("k", "sm_90a")
    assert fake.runs() == 1
    assert fake.files() == []


def test_a_compiler_that_hangs_is_ended_with_what_it_started(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "NVCC_TIME_LIMIT", 0.5)
    child = fake.folder / "child"
    fake_nvcc(fake.nvcc, f"echo half > $out; sleep 1000 & echo $! > {child}; wait")
    with pytest.raises(
        RuntimeError,
        match=r"took more than 0\.5 s for kernel k for sm_90a and was ended: .*--jobs 1.*set CUDA_HOME",
    ):
        cubins.find_kernel("k", "sm_90a")
    assert seen_to_end(int(child.read_text()))
    assert fake.files() == []


def test_what_a_compiler_leaves_running_is_not_waited_for(fake: FakeKernels) -> None:
    child = fake.folder / "child"
    fake_nvcc(fake.nvcc, f"cp {fake.folder}/good $out; sleep 1000 & echo $! > {child}")
    try:
        assert cubins.find_kernel("k", "sm_90a").read_bytes() == cubin()
        assert is_running(int(child.read_text()))
    finally:
        os.kill(int(child.read_text()), 9)


def test_a_compiler_has_no_input_to_wait_for(fake: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "NVCC_TIME_LIMIT", 10.0)
    fake_nvcc(fake.nvcc, f"read line; cp {fake.folder}/good $out")
    before, (reader, writer) = os.dup(0), os.pipe()
    os.dup2(reader, 0)
    try:
        assert cubins.find_kernel("k", "sm_90a").read_bytes() == cubin()
    finally:
        os.dup2(before, 0)
        for handle in (before, reader, writer):
            os.close(handle)


def test_stop_ends_the_compilers_of_other_threads(fake: FakeKernels) -> None:
    fake_nvcc(fake.nvcc, f"echo $$ > {fake.folder}/started; exec sleep 1000")
    errors: list[str] = []

    def compile_it() -> None:
        try:
            cubins.compile_kernel("k", "sm_90a")
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=compile_it)
    thread.start()
    while not ((fake.folder / "started").exists() and (fake.folder / "started").read_text().strip()):
        time.sleep(0.05)
    compilers.stop_compilers()
    thread.join(60)
    assert not thread.is_alive()
    assert "was killed by signal 9" in errors[0]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh\necho no licence; exit 1\n", r"nvcc failed on its version:\nno licence"),
        ("#!/bin/sh\nkill -11 $$\n", "was killed by signal 11 on its version"),
        ("#!/bin/sh\n", "--version says nothing: set CUDA_HOME"),
        ("#!/bin/sh\nexec sleep 1000\n", r"took more than 0\.3 s for its version"),
        ("#!/nowhere/sh\n", "cannot be run: No such file or directory; set CUDA_HOME"),
        ("", "cannot be run: Exec format error; set CUDA_HOME"),
    ],
)
def test_a_compiler_that_does_not_say_its_version_is_named(
    script: str, message: str, fake: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "VERSION_TIME_LIMIT", 0.3)
    fake.nvcc.write_text(script)
    with pytest.raises(RuntimeError, match=message):
        cubins.find_kernel("k", "sm_90a")
    assert fake.files() == []


def test_the_compiler_is_looked_for_where_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home" / "bin").mkdir(parents=True)
    (tmp_path / "path").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    on_path = fake_nvcc(tmp_path / "path" / "nvcc", "")
    assert compilers.nvcc() == str(on_path)
    at_home = fake_nvcc(tmp_path / "home" / "bin" / "nvcc", "")
    assert compilers.nvcc() == str(at_home)


def test_a_compiler_that_may_not_be_executed_is_passed_over_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\n")
    monkeypatch.setattr(
        compilers,
        "nvcc_candidates",
        lambda: [str(tmp_path / "bin" / "nvcc"), str(tmp_path / "bin"), "/nowhere/nvcc"],
    )
    assert compilers.nvcc() is None
    assert compilers.no_nvcc().startswith(
        f"no nvcc was found ({tmp_path}/bin/nvcc is not an executable file) ({tmp_path}/bin is not an "
        f"executable file): set CUDA_HOME"
    )


def test_no_room_for_temporary_files_is_named(fake: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    compilers.nvcc_version(str(fake.nvcc))
    monkeypatch.setattr(compilers.tempfile, "tempdir", "/proc/nowhere")
    with pytest.raises(
        RuntimeError, match=r"/proc/nowhere.* cannot be written: No such file or directory; set TMPDIR"
    ):
        cubins.find_kernel("k", "sm_90a")
    assert fake.files() == []
