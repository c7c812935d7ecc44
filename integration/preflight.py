"""Checks the machine before anything is downloaded or compiled. Needs only the standard library.

    python3.11 -m integration.preflight --environment .venv-release --disk-gb 1.5 \\
        --packages build,auditwheel --nvcc

`make demo`, `make test`, `make check`, `make wheel` and `make docs` share these checks.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from attn_backend.jit import compilers
from attn_backend.machine import (
    VARIABLE,
    Problem,
    cache_folder,
    cache_problem,
    existing_parent,
    folder_problem,
)

PYTHONS = ((3, 11), (3, 12), (3, 13))  # the engines provide CPU packages for these
GB = 10**9
TEMPORARY_BYTES = GB // 5
CACHE_BYTES = GB // 2
PROBE_TIMEOUT_S = 120.0
# `pip` retries a request five times, for minutes
PROBE_OPTIONS = ["--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "10"]


class NotReadyError(RuntimeError):
    """The machine lacks something; the message lists all problems and their remedies."""


class Space(NamedTuple):
    """Disk space needed in a folder."""

    folder: Path
    num_bytes: int
    purpose: str
    remedy: str


def python_problem() -> Problem | None:
    version = sys.version_info[:2]
    if version in PYTHONS:
        return None
    known = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    return Problem(
        "Python",
        f"{sys.executable} is {version[0]}.{version[1]}, must be one of {known}",
        "install one of them, or pass BASE_PYTHON=... to make",
    )


def venv_problem() -> Problem | None:
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    return Problem(
        "virtual environments",
        f"{sys.executable} has no module {' and no module '.join(missing)}",
        f"install it (Debian, Ubuntu: apt-get install {package})",
    )


def compiler_problem() -> Problem | None:
    if compilers.cpp_compiler() is not None:
        return None
    text, _, remedy = compilers.no_cpp_compiler().rpartition(": ")
    return Problem(
        "C++ compiler",
        f"{text}; the host library is compiled with it",
        f"{remedy} (Debian, Ubuntu: apt-get install g++)",
    )


def nvcc_problem() -> Problem | None:
    if compilers.nvcc() is not None:
        return None
    return Problem(
        "nvcc", "no nvcc was found; it compiles the kernels that the wheel ships", compilers.NVCC_ADVICE
    )


def path_problem(folders: Iterable[Path]) -> Problem | None:
    """Checks that make, shells, compilers and PATH can handle the folders' names."""
    for folder in folders:
        unusable = "".join(
            sorted(
                {
                    character
                    for character in str(folder.absolute())
                    if not character.isalnum() and character not in "/._-+,@~="
                }
            )
        )
        if unusable:
            remedy = "move the checkout (or VENV) to a path of letters, digits and . _ - + , @ ~ ="
            return Problem(
                "path",
                f"{str(folder.absolute())!r} contains {unusable!r}, which make, shells or compilers split",
                remedy,
            )
    return None


def disk_problems(needs: Sequence[Space]) -> list[Problem]:
    """One problem for each folder that cannot be written to, and for each file system with too little room
    for all data that goes there.
    """
    problems = []
    by_device: dict[int, list[Space]] = {}
    for need in needs:
        if text := folder_problem(need.folder):
            problems.append(Problem(need.purpose, text, need.remedy))
        else:
            by_device.setdefault(existing_parent(need.folder).stat().st_dev, []).append(need)
    for of_device in by_device.values():
        folder = existing_parent(of_device[0].folder)
        needed, free = sum(need.num_bytes for need in of_device), shutil.disk_usage(folder).free
        if free < needed:
            parts = ", ".join(
                f"{need.num_bytes / GB:.1f} GB for {need.purpose} in {need.folder}"
                for need in of_device
                if need.num_bytes
            )
            remedy = "; or ".join(["make room", *dict.fromkeys(need.remedy for need in of_device)])
            problems.append(
                Problem(
                    "disk",
                    f"{free / GB:.1f} GB are free at {folder}, {needed / GB:.1f} GB are needed: {parts}",
                    remedy,
                )
            )
    return problems


def pip_of_base() -> tuple[list[str], dict[str, str]] | None:
    """A command that runs pip before the environment exists, and the environment variables for it. None: this
    Python has no pip.
    """
    command = [sys.executable, "-m", "pip"]
    if importlib.util.find_spec("pip") is not None:
        return command, {}
    ensurepip = importlib.util.find_spec("ensurepip")
    if ensurepip is None or ensurepip.origin is None:
        return None
    folders = [
        Path(ensurepip.origin).parent / "_bundled",
        Path(sysconfig.get_config_var("WHEEL_PKG_DIR") or "/usr/share/python-wheels"),
    ]
    wheel = next((wheel for folder in folders for wheel in sorted(folder.glob("pip-*.whl"))), None)
    return None if wheel is None else (command, {"PYTHONPATH": str(wheel)})


def ask_pip(*arguments: str) -> tuple[int, str]:
    """Exit status and output of a pip command; 0 if there is no pip."""
    pip = pip_of_base()
    if pip is None:
        return 0, ""
    command, variables = pip
    try:
        done = subprocess.run(
            [*command, *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | variables,
            timeout=PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return 1, f"pip did not answer in {PROBE_TIMEOUT_S:.0f} s"
    return done.returncode, done.stdout


def network_problem(
    requirements: Iterable[str], ask: Callable[..., tuple[int, str]] = ask_pip
) -> Problem | None:
    """Whether pip finds the requirements with the user's settings: an index, a mirror or a folder.

    If one is found and every index answers, the others are not looked up, because pip itself reports a
    missing one. Otherwise all must be available.
    """
    remedy = "check the network, and pip's index settings (`pip config list`, PIP_INDEX_URL)"
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        status, output = ask("index", "versions", re.split(r"[<>=!~\[ ]", name)[0], *PROBE_OPTIONS)
        broken = re.search(r"connection broken by '(?:.*?>: )?(.*?)'\)?'?: /", output)
        if status != 0:
            said = [line.strip() for line in output.splitlines() if re.match(r"ERROR|pip did not", line)]
            reason = (
                broken[1]
                if broken
                else (said or output.strip().splitlines() or ["it said nothing"])[0].removeprefix("ERROR: ")
            )
            return Problem("network", f"pip does not find {requirement} ({reason})", remedy)
        if broken is None:
            return None
        # PyTorch's index may have a version such as 2.13.0+cpu
        if (
            version
            and "+" not in version
            and version not in re.findall(r"[\w.+]+", output.partition("Available versions:")[2])
        ):
            return Problem(
                "network", f"pip does not find {requirement}, only other versions ({broken[1]})", remedy
            )
    return None


def uv_space(environment: Path, num_bytes: int) -> Space:
    """Disk space that uv needs in addition to an environment of `num_bytes`.

    Its cache keeps unpacked packages. On one disk, the environment consists of hard links to them.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folder = Path(os.environ.get("UV_CACHE_DIR") or caches / "uv")
    if os.environ.get("UV_NO_CACHE"):
        folder = Path(tempfile.gettempdir())
    links = os.environ.get("UV_LINK_MODE") != "copy"
    if links and existing_parent(folder).stat().st_dev == existing_parent(environment).stat().st_dev:
        num_bytes = 0
    return Space(folder, num_bytes, "uv's cache", "set UV_CACHE_DIR to a folder on the environment's disk")


def shared_spaces() -> list[Space]:
    """Disk space for temporary files, and in the cache for compiled kernels and a small model."""
    # Python ignores a TMPDIR that is not writable; compilers and installers fail
    temporary = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    spaces = [
        Space(
            temporary,
            TEMPORARY_BYTES,
            "temporary files",
            "set TMPDIR to a folder with room that you can write to",
        )
    ]
    if cache_problem() is None:
        cache = cache_folder(os.environ.get(VARIABLE))
        spaces.append(Space(cache, CACHE_BYTES, "the cache", f"set {VARIABLE} to a folder with room"))
    return spaces


def check(
    *,
    environment: Path | None = None,
    needs: Sequence[Space] = (),
    requirements: Iterable[str] = (),
    compiles: bool = True,
    needs_nvcc: bool = False,
) -> None:
    """Checks everything, then reports all problems together.

    Args:
        environment: folder of a virtual environment to be made with this Python; None: no environment is
            made.
        requirements: packages that pip must find; empty: nothing is downloaded.
        compiles: whether the host library is compiled.

    Raises:
        NotReadyError: something is missing.
    """
    found = [path_problem([Path.cwd(), *([environment] if environment else [])]), cache_problem()]
    if environment:
        found += [python_problem(), venv_problem()]
        text = folder_problem(environment)
        found.append(
            Problem(
                "environment",
                text,
                "pass VENV=... (make test: TEST_VENV=...) to make: a folder that you can write to",
            )
            if text
            else None
        )
    found.append(compiler_problem() if compiles else None)
    found.append(nvcc_problem() if needs_nvcc else None)
    found += disk_problems(needs)
    found.append(network_problem(requirements))
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise NotReadyError(
            "this machine is not ready, and nothing was downloaded:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, required=True, help="folder of the virtual environment")
    parser.add_argument(
        "--disk-gb",
        type=float,
        default=0.0,
        help="disk space that the environment needs; nothing is downloaded if it exists",
    )
    parser.add_argument(
        "--packages", default="", help="names of packages that pip must find, with commas between them"
    )
    parser.add_argument("--no-compiler", dest="compiles", action="store_false", help="nothing is compiled")
    parser.add_argument("--nvcc", action="store_true", help="kernels are compiled")
    given = parser.parse_args()
    exists = (given.environment / "bin" / "python").exists()
    needs = (
        []
        if exists
        else [
            Space(
                given.environment, int(given.disk_gb * GB), "the environment", "pass another folder to make"
            )
        ]
    )
    packages = [] if exists else list(filter(None, given.packages.split(",")))
    try:
        check(
            environment=given.environment,
            needs=needs,
            requirements=packages,
            compiles=given.compiles,
            needs_nvcc=given.nvcc,
        )
    except NotReadyError as error:
        sys.exit(f"\nerror: {error}")


if __name__ == "__main__":
    main()
