"""How a variant's kernels are compiled and cached: with which compiler, and only once, even if compilers,
processes or files fail.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import variant_sources
from cache_users import messages, unprivileged
from fake_nvcc import FakeKernels, cubin, fake_nvcc
from needs import needs_cpp, needs_nvcc, needs_nvrtc
from variant_sources import ALIBI, ALIBI_CPP, MISSPELT, MISSPELT_LINE, SLANTED

from attn_backend import Attention, Variant
from attn_backend.cli.main import main
from attn_backend.jit import code_address, compilers, cubins, kernel_cache, manifest
from attn_backend.jit.manifest import HeadDims
from attn_backend.variants import builtin

pytestmark = pytest.mark.optimized

SOURCES = cubins.source_root()
TARGET = "sm_90a"
AHEAD = "`attn-backend compile --variant module:object` compiles it ahead"


HOPPER, GENERIC = manifest.DESIGNS["hopper"], manifest.DESIGNS["generic"]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernels:
    made = FakeKernels(tmp_path, monkeypatch)
    monkeypatch.setattr(compilers, "nvcc", lambda: str(made.nvcc))
    monkeypatch.setattr(compilers, "nvrtc", lambda: None)
    return made


def kernel_of(
    variant: Variant, design: manifest.Design = HOPPER, head_dim: int = 128, name: str = "attention"
) -> manifest.Kernel:
    return manifest.variant_kernels(
        "sm_90a", design, manifest.KernelShape("bf16", HeadDims.of(head_dim)), variant
    )[name]


def find(variant: Variant = ALIBI, jit: bool = True) -> Path:
    return cubins.find_variant_kernel(variant, kernel_of(variant), TARGET, None if jit else (lambda: AHEAD))


# The cache


def test_what_was_compiled_is_found_whatever_the_compiler(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = find()
    assert path.read_bytes() == cubin()
    assert path.parent == fake.cache / TARGET
    assert path.name.startswith("attention_sm90_bf16_d128_alibi-")
    monkeypatch.setattr(compilers, "nvcc", lambda: None)
    assert find() == path
    assert find(jit=False) == path
    assert fake.runs() == 1
    assert fake.files() == [path.name, path.with_suffix(".txt").name]


def test_what_decides_about_a_kernel_is_in_its_name(fake: FakeKernels) -> None:
    other = variant_sources.alibi(ALIBI_CPP.replace("logit +", "logit -"))
    names = {find().name, find(other).name, find(SLANTED).name}
    names |= {cubins.find_variant_kernel(ALIBI, kernel_of(ALIBI), "sm_80").parent.name}
    names |= {cubins.find_variant_kernel(ALIBI, kernel_of(ALIBI, name="attention_rows"), TARGET).name}
    assert len(names) == 5


@pytest.mark.parametrize(
    ("how", "content"),
    [
        ("truncated", cubin()[:-9]),
        ("empty", b""),
        ("foreign", cubin(b"somebody's code")),
        ("garbage", b"<html>"),
        ("another", b"\x7fELF" * 99),
    ],
)
def test_a_damaged_entry_is_compiled_again(how: str, content: bytes, fake: FakeKernels) -> None:
    path = find()
    path.write_bytes(content)
    assert find() == path
    assert path.read_bytes() == cubin()
    assert fake.runs() == 2


def found_in_a_process(_: int) -> tuple[str, bytes]:
    path = find()
    return str(path), path.read_bytes()


def test_processes_that_need_the_same_kernel_compile_it_once(fake: FakeKernels) -> None:
    fake_nvcc(fake.nvcc, f"sleep 0.5; cp {fake.folder}/good $out")
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        results = set(pool.map(found_in_a_process, range(4)))
    ((path, content),) = results
    assert content == cubin()
    assert fake.runs() == 1
    assert fake.files() == [Path(path).name, Path(path).with_suffix(".txt").name], "locks are gone, too"


def test_who_waits_says_so_and_does_not_wait_for_ever(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = find()
    path.unlink()
    monkeypatch.setattr(compilers, "NVCC_TIME_LIMIT", 0.2)
    with kernel_cache.locked(path, 1, lambda: None):
        assert find() == path
    assert "waiting for another process, which compiles variant alibi" in capfd.readouterr().err
    assert fake.runs() == 2


def test_a_process_that_was_killed_while_it_compiled_is_no_obstacle(fake: FakeKernels) -> None:
    started = fake.folder / "started"
    fake_nvcc(fake.nvcc, f"touch {started}; sleep 60")
    process = os.fork()
    if process == 0:
        find()
        os._exit(0)
    while not started.exists():
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    fake_nvcc(fake.nvcc, f"cp {fake.folder}/good $out")
    begin = time.monotonic()
    path = find()
    assert time.monotonic() - begin < 20
    assert path.read_bytes() == cubin()
    assert not [name for name in fake.files() if name.endswith(".lock")]


def test_a_compiler_that_is_killed_leaves_nothing(fake: FakeKernels) -> None:
    fake_nvcc(fake.nvcc, "echo half > $out; kill -9 $$")
    with pytest.raises(RuntimeError, match="was killed by signal 9 on variant alibi"):
        find()
    assert fake.files() == []
    fake_nvcc(fake.nvcc, f"cp {fake.folder}/good $out")
    assert find().read_bytes() == cubin()


def read_what_is_installed(fake: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may be unable to read installed packages. Keys hash one of our files, and pyelftools is
    imported once the first kernel exists.
    """
    code_address.publish_code_addresses(fake.folder / "good")
    kept = code_address.recipe()
    monkeypatch.setattr(code_address, "recipe", lambda: kept)


def test_a_cache_that_can_only_be_read_is_read(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read_what_is_installed(fake, monkeypatch)
    path = find()
    for folder in (path.parent, fake.cache):
        folder.chmod(0o555)
    fake.nvcc.parent.joinpath("nvcc.runs").chmod(0o666)
    try:
        with unprivileged(fake.folder):
            assert find() == path
            assert messages(caplog) == []
    finally:
        for folder in (fake.cache, path.parent):
            folder.chmod(0o755)
    assert fake.runs() == 1


def test_beside_a_cache_that_can_only_be_read_a_private_folder_is_used(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read_what_is_installed(fake, monkeypatch)
    fake.cache.mkdir()
    fake.cache.chmod(0o555)
    fake.temporary.chmod(0o777)
    runs = Path(f"{fake.nvcc}.runs")
    runs.touch()
    runs.chmod(0o666)
    try:
        with unprivileged(fake.folder), caplog.at_level(logging.WARNING):
            path = find()
            assert path.is_relative_to(fake.temporary)
            assert path.read_bytes() == cubin()
            assert find() == path
            find(SLANTED)
    finally:
        fake.cache.chmod(0o755)
    assert fake.runs() == 2, "the private folder is a cache, too"
    (message,) = messages(caplog)
    assert "Permission denied" in message
    assert f"private folder instead: {fake.temporary}" in message


# Which compiler


def test_without_jit_the_command_is_named(fake: FakeKernels) -> None:
    with pytest.raises(
        RuntimeError, match=rf"variant alibi \(.*\) is not compiled, and ATTN_BACKEND_JIT=0.*{AHEAD}"
    ):
        find(jit=False)
    assert fake.runs() == 0
    assert fake.files() == []


def test_without_a_compiler_both_are_named(fake: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "nvcc", lambda: None)
    with pytest.raises(
        RuntimeError, match=r"no nvcc was found.*; and no NVRTC was found: `pip install nvidia-cuda-nvrtc`"
    ):
        find()
    monkeypatch.setenv("ATTN_BACKEND_CUDA_COMPILER", "nvrtc")
    with pytest.raises(RuntimeError, match=r"no NVRTC was found: .*ATTN_BACKEND_CUDA_COMPILER is nvrtc"):
        find()


class FakeNvrtc:
    def compile(self, source: str, options: list[str], what: str) -> tuple[bytes, str]:
        assert "--gpu-architecture=sm_90a" in options
        return cubin(b"by NVRTC"), "a report"


def test_an_nvcc_that_does_not_run_gives_way_to_nvrtc(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(fake.nvcc, "echo nvcc fatal: Failed to preprocess host compiler properties; exit 1")
    with pytest.raises(RuntimeError, match="Failed to preprocess host compiler properties"):
        find()
    monkeypatch.setattr(compilers, "nvrtc", FakeNvrtc)
    monkeypatch.setenv("ATTN_BACKEND_CUDA_COMPILER", "nvcc")
    with pytest.raises(RuntimeError, match="Failed to preprocess host compiler properties"):
        find()
    monkeypatch.delenv("ATTN_BACKEND_CUDA_COMPILER")
    assert find().read_bytes() == cubin(b"by NVRTC")


def test_an_error_in_a_variant_is_not_tried_with_another_compiler(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [
        f'<variant misspelt>({MISSPELT_LINE}): error: identifier "logti" is undefined',
        "      return logti + 1;",
        "             ^",
        "csrc/attention/tile/warp_state.cuh(250): error: more of it",
    ]
    fake_nvcc(fake.nvcc, "".join(f"echo '{line}'\n" for line in said) + "exit 2")
    monkeypatch.setattr(compilers, "nvrtc", FakeNvrtc)
    with pytest.raises(RuntimeError) as failure:
        find(MISSPELT)
    line = "  return logti + slope * static_cast<float>(kv_position - row.position);"
    assert str(failure.value) == (
        f'variant misspelt does not compile:\n<variant misspelt>:{MISSPELT_LINE}: error: identifier "logti" '
        f"is undefined\n{MISSPELT_LINE:6} | {line}"
    )


# Compilers that are


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


COMPILERS = [pytest.param("nvcc", marks=needs_nvcc), pytest.param("nvrtc", marks=needs_nvrtc)]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("design", ["hopper", "generic"])
def test_every_kernel_of_a_variant_compiles(
    design: str, compiler: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CUDA_COMPILER", compiler)
    targets = {"hopper": ["sm_90a"], "generic": ["sm_80"]}[design]
    entries = cubins.compile_ahead(SLANTED, targets, design, "bfloat16", 128, "")
    assert len(entries) == len(manifest.DESIGNS[design].cubins) + 2, (
        "merge, too: the variant transforms the output; and row_ranges: it has a mask"
    )
    for entry in entries:
        assert kernel_cache.fault(entry) == ""
        content = entry.read_bytes()
        assert all(
            compilers.damage(content[:length]) for length in (*range(0, len(content), 997), len(content) - 1)
        )
        assert "instructions are serialized" not in kernel_cache.report(entry)
        if code_address.has_pyelftools() and design == "hopper" and not entry.name.startswith("row_ranges"):
            (variable,) = code_address.address_variables(content)
            assert variable.kernel == (
                "merge_kernel" if entry.name.startswith("merge") else "attention_kernel"
            )
            assert code_address.with_address(content, [variable], complete=True) == content, (
                "the entry says where its code lies"
            )


@pytest.mark.parametrize("compiler", COMPILERS)
def test_an_error_shows_the_line_of_the_variant(
    compiler: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CUDA_COMPILER", compiler)
    with pytest.raises(RuntimeError) as failure:
        find(MISSPELT)
    check_misspelt(str(failure.value))


def check_misspelt(message: str) -> None:
    first, second, third = message.split("\n")
    assert first == "variant misspelt does not compile:"
    assert second.startswith(f"<variant misspelt>:{MISSPELT_LINE}: error: ")
    assert "logti" in second
    assert (
        third
        == f"{MISSPELT_LINE:6} |   return logti + slope * static_cast<float>(kv_position - row.position);"
    )


@needs_cpp
def test_an_error_of_a_cpp_compiler_shows_the_line_of_the_variant(cache: Path) -> None:
    with pytest.raises(RuntimeError) as failure:
        cubins.find_library(MISSPELT, "baseline", "float32", 64)
    check_misspelt(str(failure.value))


@needs_cpp
@pytest.mark.parametrize("compiler", ["c++", "nvcc", "nvrtc"])
def test_an_error_quotes_no_file_of_others(
    compiler: str,
    fake: FakeKernels,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_text("root:hunter2:0\n")
    if compiler == "c++":
        monkeypatch.setattr(cubins, "source_root", lambda: SOURCES)
        reader = variant_sources.alibi(
            ALIBI_CPP.replace("return", f'asm(".include \\"{secret}\\""); return'), "reader"
        )
        with pytest.raises(RuntimeError) as failure:
            cubins.find_library(reader, "baseline", "float32", 64)
    else:
        said = [
            f"{secret}(1): error: this declaration has no storage class",
            "  root:hunter2:0",
            "  ^",
            f"{secret}:1:1: error: 'hunter2' is unknown",
            "hunter2 | x",
        ]
        said += [f"{fake.folder}/attention/row.h(3): error: of ours", "  a line of ours"]
        fake_nvcc(fake.nvcc, "".join(f'echo "{line}"\n' for line in said) + "exit 2")
        if compiler == "nvrtc":
            monkeypatch.setattr(compilers, "nvcc", lambda: None)
            monkeypatch.setattr(compilers, "nvrtc", lambda: FailingNvrtc("\n".join(said)))
        with pytest.raises(RuntimeError) as failure:
            find()
        assert f"{fake.folder}/attention/row.h(3): error: of ours\n  a line of ours\n" in str(failure.value)
    assert f"{secret}: errors in this file are not shown" in str(failure.value)
    assert "hunter2" not in str(failure.value)
    assert (
        str(failure.value)
        .split("\n")[-1]
        .endswith(("ended with exit status 1", "ended with exit status 2", "NVRTC_ERROR_COMPILATION"))
    )


class FailingNvrtc:
    def __init__(self, log: str) -> None:
        self.log = log

    def compile(self, source: str, options: list[str], what: str) -> tuple[bytes, str]:
        raise RuntimeError(
            f"NVRTC failed on {what}:\n{self.log}\nNVRTC 13.0 (libnvrtc.so): NVRTC_ERROR_COMPILATION"
        )


@needs_cpp
@pytest.mark.parametrize(
    ("script", "damage"),
    [
        ("echo garbage > $out", "is not an ELF file"),
        (": > $out", "is empty"),
        ("true", "is missing"),
        ("c++ -shared -x c++ /dev/null -o $out && truncate -s -1000 $out", "is truncated"),
        ("c++ -c -x c++ /dev/null -o $out", "is no shared library for this machine"),
        (
            "c++ -shared -x c++ /dev/null -o $out && printf '\\\\267' | dd of=$out bs=1 seek=18 conv=notrunc "
            "2> /dev/null",
            "is no shared library for this machine",
        ),
    ],
)
def test_a_cpp_compiler_that_writes_no_library_is_named(
    script: str, damage: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "my c++"
    compiler.write_text(f"#!/bin/sh\nfor out; do :; done\necho a warning\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{compiler}' --option")
    with pytest.raises(RuntimeError) as failure:
        cubins.find_library(ALIBI, "baseline", "float32", 64)
    message = str(failure.value)
    assert message.startswith(
        f"{compiler} --option reported no error on variant alibi (float32, for a CPU with baseline), but its "
        f"output {damage}: install g++, or"
    )
    assert message.endswith("\na warning")
    assert not [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ('g++ "-O3', "which is no command (No closing quotation)"),
        ("'", "which is no command (No closing quotation)"),
        ("g++ \\", "which is no command (No escaped character)"),
        (" ", "which is not a program here"),
        ("\t\n", "which is not a program here"),
        ("no-such-compiler -m64", "which is not a program here"),
    ],
)
def test_a_cxx_that_cannot_be_run_is_named(
    command: str, reason: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", command)
    assert compilers.cpp_compiler() is None
    with pytest.raises(RuntimeError) as failure:
        cubins.find_library(ALIBI, "baseline", "float32", 64)
    assert (
        f"cannot be compiled: CXX is {command!r}, {reason}: install g++, or set CXX to a C++ compiler"
        in str(failure.value)
    )


def test_without_a_cpp_compiler_the_message_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compilers, "cpp_compiler", lambda: None)
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler was found: install g\+\+, or set CXX"):
        cubins.find_library(ALIBI, "baseline", "float32", 64)
    with pytest.raises(RuntimeError, match=f"ATTN_BACKEND_JIT=0.*{AHEAD}"):
        cubins.find_library(ALIBI, "baseline", "float32", 64, ahead=lambda: AHEAD)


def test_the_instruction_sets_have_the_flags_of_the_package() -> None:
    """csrc/common/cpu/isa.cmake has the flags for the kernels in the package."""
    text = (Path(__file__).parents[2] / "csrc" / "common" / "cpu" / "isa.cmake").read_text()
    known = {"avx2": "", "avx512": "${avx2}", "amx": "${avx512}"}
    flags: dict[str, list[str]] = {}
    for isa, base in known.items():
        (line,) = [line for line in text.splitlines() if line.strip().startswith(f"set({isa} ")]
        words = line.strip().removeprefix(f"set({isa} ").rstrip(")").split()
        flags[isa] = [
            flag
            for word in words
            for flag in (flags[word[2:-1]] if word == base else [word])
            if not flag.startswith("-W")
        ]
    assert {"baseline": [], **flags} == compilers.ISA_FLAGS


# The command


@needs_cpp
def test_a_variant_is_compiled_ahead_by_the_command(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        "compile",
        "--variant",
        "variant_sources:ALIBI",
        "--arch",
        "cpu",
        "--dtype",
        "float32",
        "--head-dim",
        "64",
    ]
    assert main(arguments) == 0
    (path,) = capsys.readouterr().out.split()
    assert Path(path).is_relative_to(cache)
    monkeypatch.setattr(compilers, "cpp_compiler", lambda: None)
    assert main(arguments) == 0
    assert capsys.readouterr().out.split() == [path]


@needs_cpp
def test_a_built_in_is_compiled_ahead_by_the_command_that_the_message_names(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention() -> Attention:
        return Attention(
            4, 2, 64, dtype=torch.float32, device="cpu", max_rows=1, max_batch=1, variant=builtin.alibi()
        )

    with monkeypatch.context() as patch:
        patch.setenv("ATTN_BACKEND_JIT", "0")
        with pytest.raises(RuntimeError, match="ATTN_BACKEND_JIT=0") as refused:
            attention()
        command = str(refused.value).split("`")[1]
        assert command.startswith("attn-backend compile --variant attn_backend.variants.builtin:alibi ")
        assert main(command.split()[1:]) == 0
        attention()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--variant", "variant_sources", "--arch", "cpu"],
            "--variant is 'variant_sources', must be MODULE:OBJECT",
        ),
        (
            ["--variant", "no_such_module:x", "--arch", "cpu"],
            "--variant is 'no_such_module:x': No module named 'no_such_module'",
        ),
        (["--variant", "variant_sources:NOTHING", "--arch", "cpu"], "variant_sources has no NOTHING"),
        (
            ["--variant", "attn_backend.variants.builtin:sliding_window", "--arch", "cpu"],
            "a function that does not return a Variant without arguments: ",
        ),
        (
            ["--variant", "variant_sources:ALIBI", "--arch", "sm_86"],
            "--arch is 'sm_86', must be cpu, sm_90a, sm_80 (8.6 and 8.9, too), sm_100",
        ),
        (["--variant", "variant_sources:ALIBI_CPP", "--arch", "cpu"], "which is a str, must be a Variant"),
        (
            ["--variant", "variant_sources:ALIBI", "--arch", "tpu"],
            "--arch is 'tpu', must be cpu, sm_90a, sm_80",
        ),
        (
            ["--variant", "variant_sources:ALIBI", "--arch", "sm_90a", "--dtype", "float32"],
            "--dtype is float32, must be bfloat16 or float16 on a GPU",
        ),
        (
            ["--variant", "variant_sources:ALIBI", "--arch", "sm_80", "--kernel", "hopper"],
            "kernel is hopper, must be generic for sm_80, head_dim 128",
        ),
        (["--arch", "sm_75"], "--arch is 'sm_75', must be sm_90a (Hopper) or sm_80 (all other GPUs"),
    ],
)
def test_the_command_names_what_is_wrong(
    arguments: list[str], message: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *arguments]) == 1
    assert message in capsys.readouterr().err


# Seconds


@needs_cpp
def test_what_is_in_the_cache_is_found_without_a_compiler(cache: Path) -> None:
    """In a separate process, which has no state.

    A header is read at most twice: for the digest of all headers, and for the headers that the source
    includes.
    """
    cubins.find_library(ALIBI, "baseline", "float32", 64)
    program = (
        "import sys, variant_sources\n"
        "from attn_backend.jit import cubins\n"
        "events = []\n"
        "sys.addaudithook(lambda event, given: events.append((event, given[0])) if event in ('open', "
        "'subprocess.Popen') else None)\n"
        "cubins.find_library(variant_sources.ALIBI, 'baseline', 'float32', 64, ahead=str)\n"
        "print(*(f'{event} {what}' for event, what in events), sep='\\n')\n"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(variant_sources.__file__).parent), *sys.path])
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    events = done.stdout.split("\n")[:-1]
    assert all(event.startswith("open ") for event in events)
    assert 1 <= max(events.count(event) for event in events) <= 2
