"""attn-backend compile: arguments that it refuses, and the single report of missing tools."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_nvcc import FakeKernels, cubin, fake_nvcc

from attn_backend.cli.main import main
from attn_backend.jit import build, cubins

Capture = pytest.CaptureFixture[str]


def test_says_once_that_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(build, "nvcc", lambda: None)
    assert main(["compile", "--arch", "sm_90a"]) == 1  # also if the package has all kernels
    captured = capsys.readouterr()
    assert captured.err.startswith("error: no nvcc was found")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "0"], "argument --jobs: is 0, must be at least 1"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compile", *arguments])
    assert message in capsys.readouterr().err


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernels:
    kernels = FakeKernels(tmp_path, monkeypatch)
    monkeypatch.setattr(build, "nvcc", lambda: str(kernels.nvcc))
    for name in ("a", "b"):
        kernels.sources[name] = f"// kernel {name}\n"
    return kernels


def test_compiles_nothing_that_the_package_has(
    fake: FakeKernels, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    shipped = fake.folder / "shipped.cubin"
    monkeypatch.setattr(cubins, "shipped_kernel", lambda name, arch: shipped)
    monkeypatch.setattr(cubins, "shipped_fault", lambda file: "" if file.read_bytes() else "is empty")
    shipped.write_bytes(cubin())
    assert main(["compile"]) == 0
    assert "nothing to compile" in capsys.readouterr().out
    assert fake.runs() == 0
    shipped.write_bytes(b"")
    main(["compile"])
    assert fake.runs() > 0


def test_the_kernels_of_a_cpu_are_there(fake: FakeKernels, capsys: Capture) -> None:
    for arguments in ([], ["--head-dim", "80"]):
        assert main(["compile", "--arch", "cpu", *arguments]) == 0
        assert "--arch cpu only compiles a --variant" in capsys.readouterr().out
    assert fake.runs() == 0
    assert main(["compile", "--arch", "cpu", "--arch", "sm_90a"]) == 0
    assert fake.runs() > 0, "the other arch is compiled"


HEADS = ["--head-dim", "64"]
ON_CPU = ["--variant", "variant_sources:ALIBI", "--arch", "cpu"]
REFUSED = {
    "--head-dim is 7, must be a multiple of 8 up to 576 on a CPU": ["--arch", "cpu", "--head-dim", "7"],
    "--head-dim is 64_0, must be a multiple of 8 up to 576 on a CPU": [
        "--arch",
        "cpu",
        *HEADS,
        "--head-dim",
        "64_0",
    ],
    "--head-dim is 584, must be a multiple of 8": ["--arch", "cpu", "--arch", "sm_80", "--head-dim", "584"],
    "--kv-dtype is uint8, must be another one": ["--arch", "cpu", "--kv-dtype", "uint8", *HEADS],
    "--float8-q is given, must come with --kv-dtype of 8 bits": ["--arch", "cpu", "--float8-q"],
    "--head-dim is 7, must be a multiple of 8 up to 576": [*ON_CPU, "--head-dim", "7"],
    "--head-dim is 584, must be": [*ON_CPU, "--dtype", "float32", "--head-dim", "584"],
    "--kv-dtype is uint8, must be": [*ON_CPU, "--kv-dtype", "uint8"],
    "--kernel is generic, must be left out": [*ON_CPU, "--kernel", "generic"],
    "--float8-q is given, must come with": [*ON_CPU, "--float8-q"],
    "--token-scales and --kv-dtype must come together, with float8_e4m3fn or int8": [
        *ON_CPU,
        "--kv-dtype",
        "int8",
    ],
    "--token-scales and --kv-dtype must come together": ["--token-scales", "--arch", "sm_80"],
    "--float8-q is given, must not come with --token-scales": [
        *ON_CPU,
        "--kv-dtype",
        "float8_e4m3fn",
        "--token-scales",
        "--float8-q",
    ],
    "--head-dim is 512, must be at most 256 on CUDA over a cache with a scale for each token and head": [
        *("--kv-dtype", "int8", "--token-scales"),
        *("--head-dim", "512", "--arch", "sm_80"),
    ],
    "--head-dim is 72, must be at most 256 on CUDA over a cache with a scale for each token and head, and a "
    "multiple of 32 over int4": [
        *("--kv-dtype", "int4", "--head-dim", "72", "--arch", "sm_80"),
    ],
    "--float8-q is given, must not come with --rotation": [
        *ON_CPU,
        *("--kv-dtype", "float8_e4m3fn", "--float8-q", "--rotation"),
    ],
    "--head-dim is 192_128, must be at most 256 with rotation, and the same for V": [
        *("--rotation", "--head-dim", "192_128", "--arch", "sm_80"),
    ],
    "--out is given, must not come with --variant": [*ON_CPU, "--out", "somewhere"],
    "--out is given, must not come with --head-dim": [*HEADS, "--arch", "sm_80", "--out", "somewhere"],
    "--sinks is given, must come with --variant": ["--sinks", *HEADS, "--arch", "sm_80"],
    "--levels is given, must come with --variant": ["--levels", "--arch", "cpu"],
    "--kernel is given, must come with --variant": ["--kernel", "generic"],
    "--dtype is given, must come with": ["--dtype", "bfloat16", "--arch", "sm_80"],
    "--dtype is float32, must be bfloat16 or float16 on a GPU": [
        "--dtype",
        "float32",
        *HEADS,
        "--arch",
        "sm_80",
    ],
    "--dtype is bfloat16, must be float16 on a GPU with --kv-dtype bfloat16": [
        "--dtype",
        "bfloat16",
        "--kv-dtype",
        "bfloat16",
        *HEADS,
        "--arch",
        "sm_80",
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_there_are_no_kernels_of_is_refused(message: str, fake: FakeKernels, capsys: Capture) -> None:
    assert main(["compile", *REFUSED[message]]) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert fake.runs() == 0
    assert fake.files() == []


def test_repairs_what_was_damaged_and_nothing_else(fake: FakeKernels, capsys: Capture) -> None:
    assert main(["compile", "--arch", "sm_90a"]) == 0
    assert fake.runs() == 3
    path = cubins.find_kernel("a", "sm_90a")
    path.write_bytes(b"")
    assert main(["compile", "--arch", "sm_90a", "--out", str(fake.folder / "out")]) == 0
    assert fake.runs() == 4
    assert path.read_bytes() == (fake.folder / "out" / "sm_90a" / "a.cubin").read_bytes() == cubin()
    assert "FAILED" not in capsys.readouterr().out


@pytest.mark.parametrize("what", ["cache", "version"])
def test_what_would_fail_for_every_kernel_is_said_once(what: str, fake: FakeKernels, capsys: Capture) -> None:
    if what == "cache":
        fake.cache.write_text("")
        message = (
            f"error: compiled kernels cannot be kept in {fake.cache}/sm_90a: a file is in its place; "
            f"set ATTN_BACKEND_CACHE"
        )
    else:
        fake.nvcc.write_text("#!/bin/sh\nexit 1\n")
        message = "error: nvcc failed on its version"
    assert main(["compile"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)
    assert fake.runs() == 0


def test_a_folder_for_copies_that_cannot_be_made_is_named(fake: FakeKernels, capsys: Capture) -> None:
    (fake.folder / "out").write_text("")
    assert main(["compile", "--arch", "sm_80", "--out", str(fake.folder / "out")]) == 1
    assert f"'{fake.folder}/out" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupt_ends_the_compilers(fake: FakeKernels) -> None:
    """As from a keyboard. Only the process gets the signal, since its compilers run in separate groups."""
    fake_nvcc(fake.nvcc, f"echo $$ >> {fake.folder}/started; exec sleep 1000")
    environment = {**os.environ, "CUDA_HOME": str(fake.folder / "home"), "TMPDIR": str(fake.temporary)}
    (fake.folder / "home" / "bin").mkdir(parents=True)
    fake.nvcc.rename(fake.folder / "home" / "bin" / "nvcc")
    program = f"""
import signal
from pathlib import Path
from attn_backend.cli.main import main
from attn_backend.jit import cubins
cubins.source_root = lambda: Path({str(fake.folder)!r})
signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored: tests run in the background
raise SystemExit(main(["compile", "--arch", "sm_90a", "--jobs", "2"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started = fake.folder / "started"
    try:
        while not (started.exists() and len(started.read_text().split()) == 2):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")
    assert fake.files() == []


@pytest.mark.skipif(cubins.nvcc() is None, reason="needs nvcc")
def test_copies_what_it_compiled_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path / "cache"))
    sources = {"right": 'extern "C" __global__ void right_kernel(int* p) { *p = 1; }\n'}
    monkeypatch.setattr(cubins, "kernel_sources", lambda arch: sources)
    assert main(["compile", "--arch", "sm_80", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "sm_80" / "right.cubin").stat().st_size > 0
    sources["wrong"] = "no C++\n"
    assert main(["compile", "--arch", "sm_80"]) == 1
    assert (
        "wrong                        FAILED\nnvcc failed on kernel wrong for sm_80:"
        in capsys.readouterr().out
    )


def test_kernels_of_other_heads_are_compiled(
    fake: FakeKernels, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["compile", "--head-dim", "96", "--arch", "sm_80", "--dtype", "float16"]) == 0
    names = [Path(line).name.split("-")[0] for line in capsys.readouterr().out.split()]
    assert names == ["attention_sm80_f16_d96_standard", "attention_sm80_f16_d96_sinks"]
    assert fake.runs() == 2
    monkeypatch.setenv("ATTN_BACKEND_JIT", "0")
    assert cubins.find_kernel(names[0], "sm_80").exists()
    with pytest.raises(
        RuntimeError, match=r"`attn-backend compile --arch sm_80 --head-dim 104` compiles it ahead"
    ):
        cubins.find_kernel("attention_sm80_f16_d104_standard", "sm_80")
    for wrong in ("84", "264"):
        assert main(["compile", "--head-dim", wrong]) == 1
        assert f"--head-dim is {wrong}, must be a multiple of 8 up to 256" in capsys.readouterr().err


def test_kernels_of_caches_of_the_other_16_bit_type_are_compiled(
    fake: FakeKernels, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["compile", "--kv-dtype", "bfloat16", "--head-dim", "64", "--arch", "sm_80"]) == 0
    names = [Path(line).name.split("-")[0] for line in capsys.readouterr().out.split()]
    assert names == [
        "append_qkv_f16_bf16",
        "attention_sm80_f16_bf16_d64_standard",
        "attention_sm80_f16_bf16_d64_sinks",
    ]
    monkeypatch.setenv("ATTN_BACKEND_JIT", "0")
    assert all(cubins.find_kernel(name, "sm_80").exists() for name in names)
    for name, options in {
        "append_qkv_bf16_f16": "--kv-dtype float16",
        "attention_sm80_bf16_f16_d80_sinks": "--head-dim 80 --kv-dtype float16",
    }.items():
        with pytest.raises(
            RuntimeError, match=rf"`attn-backend compile --arch sm_80 {options}` compiles it ahead"
        ):
            cubins.find_kernel(name, "sm_80")


def test_kernels_of_8_bit_caches_are_compiled(
    fake: FakeKernels, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        main(
            [
                "compile",
                "--kv-dtype",
                "float8_e5m2",
                "--head-dim",
                "192_128",
                "--arch",
                "sm_80",
                "--dtype",
                "float16",
            ]
        )
        == 0
    )
    names = [Path(line).name.split("-")[0] for line in capsys.readouterr().out.split()]
    assert names == ["attention_sm80_f16_e5m2_d192_128_standard", "attention_sm80_f16_e5m2_d192_128_sinks"]
    assert fake.runs() == 2
    monkeypatch.setenv("ATTN_BACKEND_JIT", "0")
    assert cubins.find_kernel(names[0], "sm_80").exists()
    with pytest.raises(
        RuntimeError,
        match=r"`attn-backend compile --arch sm_80 --head-dim 192 --kv-dtype float8_e4m3fn` compiles it "
        r"ahead",
    ):
        cubins.find_kernel("attention_sm80_f16_e4m3_d192_standard", "sm_80")
    with pytest.raises(ValueError, match="must be one of"):
        cubins.find_kernel("attention_sm80_f16_latent_d512_standard", "sm_80")
    assert main(["compile", "--kv-dtype", "float16", "--float8-q"]) == 1
    assert "--float8-q is given, must come with --kv-dtype of 8 bits" in capsys.readouterr().err
    assert main(["compile", "--float8-q"]) == 1
    assert "--float8-q is given, must come with --kv-dtype" in capsys.readouterr().err
    assert main(["compile", "--kv-dtype", "float8_e4m3fn", "--float8-q", "--head-dim", "576_512"]) == 1
    assert (
        "--float8-q is given, must not be: q_dtype must be None, or dtype, with heads of more than 256 "
        "columns" in capsys.readouterr().err
    )
    assert main(["compile", "--kv-dtype", "uint8", "--head-dim", "128"]) == 1
    assert (
        "--kv-dtype is uint8, must be another one: rows of DeepSeek V3.2's latents are for head_dim = 576, "
        "head_dim_v = 512" in capsys.readouterr().err
    )
