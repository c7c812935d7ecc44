"""The wheels that `make wheel` refuses to release."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from attn_backend.jit.manifest import ARCHS
from release import wheel

NAME = f"attn_backend-1.2.3-py3-none-{wheel.PLATFORM}.whl"
LIBRARY, HEADER = "attn_backend/lib/libattn_backend.so", "attn_backend/csrc/attention/variant/variants.h"
TYPED = "attn_backend/py.typed"
FILES = {LIBRARY, HEADER, TYPED}


def make(folder: Path, names: set[str], name: str = NAME, content: bytes = b"") -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for member in names:
            archive.writestr(member, content)
    return path


def test_a_whole_wheel_passes(tmp_path: Path) -> None:
    wheel.check_wheel(make(tmp_path, FILES | wheel.cubins_of_manifest()), with_cubins=True)
    wheel.check_wheel(make(tmp_path, FILES), with_cubins=False)


def test_every_arch_has_cubins() -> None:
    cubins = wheel.cubins_of_manifest()
    assert {name.split("/")[2] for name in cubins} == set(ARCHS)
    assert len(cubins) > 50


@pytest.mark.parametrize("missing", sorted(FILES))
def test_a_missing_part_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(wheel.ReleaseError, match=f"lacks {missing}"):
        wheel.check_wheel(make(tmp_path, FILES - {missing}), with_cubins=False)


def test_missing_and_foreign_cubins_are_named(tmp_path: Path) -> None:
    cubins = sorted(wheel.cubins_of_manifest())
    with pytest.raises(wheel.ReleaseError, match=re.escape(cubins[0])):
        wheel.check_wheel(make(tmp_path, {*FILES, *cubins[1:]}), with_cubins=True)
    with pytest.raises(wheel.ReleaseError, match=r"old\.cubin"):
        wheel.check_wheel(
            make(tmp_path, {*FILES, "attn_backend/cubins/sm_80/old.cubin", *cubins}),
            with_cubins=True,
        )


@pytest.mark.parametrize(
    "name",
    [f"attn_backend-1.2.3-cp311-cp311-{wheel.PLATFORM}.whl", "attn_backend-1.2.3-py3-none-linux_x86_64.whl"],
)
def test_another_tag_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(wheel.ReleaseError, match="is not py3-none-manylinux_2_28"):
        wheel.check_wheel(make(tmp_path, FILES, name), with_cubins=False)


def test_too_large_a_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "MAX_BYTES", 1000)
    with pytest.raises(wheel.ReleaseError, match="more than 1000"):
        wheel.check_wheel(make(tmp_path, FILES, content=b"x" * 800), with_cubins=False)


def test_kernels_are_compiled_without_what_they_run_with() -> None:
    """The environment of `make wheel` has only REQUIREMENTS."""
    script = """
import sys
sys.modules["tvm_ffi"] = sys.modules["torch"] = None
from attn_backend.jit import build
print(len(build.cubins.kernel_sources("sm_80")))
"""
    assert (
        int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
        > 10
    )


def test_the_alias_s_wheel_has_every_folder() -> None:
    alias = wheel.REPOSITORY / "flashinfer_alias"
    packages = tomllib.loads((alias / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(packages) == {
        ".".join(path.parent.relative_to(alias).parts) for path in (alias / "flashinfer").rglob("*.py")
    }


def test_a_program_that_fails_is_named() -> None:
    with pytest.raises(wheel.ReleaseError, match="`false` failed"):
        wheel.run("false")
