"""attn-backend compile: what it refuses, and that it says once what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_backend.cli.main import main
from attn_backend.kernels import build, cubins

Capture = pytest.CaptureFixture[str]


def test_says_once_that_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(build, "nvcc", lambda: None)
    assert main(["compile"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: no nvcc was found")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "0"], "argument --jobs: is 0, must be at least 1"),
        (["--arch", "sm_70"], "argument --arch: invalid choice: 'sm_70'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compile", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(cubins.nvcc() is None, reason="needs nvcc")
def test_copies_what_it_compiled_and_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path / "cache"))
    (tmp_path / "device").mkdir()
    monkeypatch.setattr(cubins, "source_root", lambda: tmp_path)
    (tmp_path / "device" / "right.cu").write_text('extern "C" __global__ void right_kernel(int* p) { *p = 1; }\n')
    assert main(["compile", "--arch", "sm_80", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "sm_80" / "right.cubin").stat().st_size > 0
    (tmp_path / "device" / "wrong.cu").write_text("no C++\n")
    assert main(["compile", "--arch", "sm_80"]) == 1
    assert "wrong                        FAILED\nnvcc failed on kernel wrong for sm_80:" in capsys.readouterr().out
