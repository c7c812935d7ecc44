"""Fake compilers and their output, for tests of how kernels are compiled and cached."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from attn_backend.jit import cubins, kernel_cache, progress

FATBIN = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 8) + b"a kernel"


def cubin(code: bytes = b"machine code") -> bytes:
    """An ELF file for a GPU: header, one section of `code`, one section of zeros that occupies no file space,
    and the section table.
    """
    table = 64 + len(code)
    header = (
        b"\x7fELF\2\1\1"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, table, 0, 64, 56, 0, 64, 3, 0)
    )
    sections = [
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, 64, size, 0, 0, 1, 0)
        for kind, size in ((0, 0), (1, len(code)), (8, 1 << 20))
    ]
    return header + code + b"".join(sections)


def fake_nvcc(path: Path, body: str, version: str = "Build fake.1") -> Path:
    """A shell script that answers --version and otherwise runs `body`, with the output's path in $out; each
    run adds a line to PATH.runs.
    """
    begin = (
        f'if [ "$1" = --version ]; then echo "fake compiler"; echo "{version}"; exit; fi\necho run >> '
        f"{path}.runs\nfor out; do :; done"
    )
    path.write_text(f"#!/bin/sh\n{begin}\n{body}\n")
    path.chmod(0o755)
    return path


class FakeKernels:
    """A folder with the source of one kernel `k`, a cache, a temporary folder, and a compiler that writes
    `cubin()` and prints `a report`.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.cache, self.temporary = folder, folder / "cache", folder / "tmp"
        (folder / "good").write_bytes(cubin())
        self.temporary.mkdir()
        self.nvcc = fake_nvcc(folder / "nvcc", f"cp {folder}/good $out; echo a report")
        monkeypatch.setenv("ATTN_BACKEND_CACHE", str(self.cache))
        monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(self.temporary))
        self.sources = {"k": "// a kernel\n"}
        monkeypatch.setattr(cubins, "source_root", lambda: folder)
        monkeypatch.setattr(cubins, "kernel_sources", lambda arch: self.sources)
        monkeypatch.setattr(cubins, "PACKAGE", folder / "package")
        monkeypatch.setattr(cubins, "nvcc", lambda: str(self.nvcc))
        monkeypatch.setattr(progress, "warned", set())
        cubins.find_kernel.cache_clear()

    def runs(self) -> int:
        """The number of compilations."""
        log = Path(f"{self.nvcc}.runs")
        return len(log.read_text().splitlines()) if log.exists() else 0

    def files(self) -> list[str]:
        """Names of all files in the cache and in the temporary folder."""
        return sorted(
            path.name
            for folder in (self.cache, self.temporary)
            for path in folder.rglob("*")
            if not path.is_dir()
        )
