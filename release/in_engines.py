"""Checks that a wheel works inside the engines, without a checkout.

    # every engine that the environment has
    python -m release.in_engines dist/attn_backend-*.whl --python .venv/bin/python --model FOLDER
    python -m release.in_engines dist/attn_backend-*.whl --python .venv-vllm/bin/python --engine vllm

The program does not change the environment. It makes a temporary environment with the wheel and links to all
other packages. There it looks up the entry points, and runs the smoke test, `attn-backend doctor` and
`attn-backend demo`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from importlib.metadata import PathDistribution
from pathlib import Path

from .wheel import ReleaseError

SMOKE_TEST = Path(__file__).resolve().parent / "smoke_test.py"
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
OURS = "attn_backend"
# the new environment has its own
INSTALLERS = ("pip", "setuptools", "_distutils_hack", "distutils-precedence")


def run(*command: str | Path, folder: Path, shown: bool = True) -> str:
    """Runs a program in `folder`, without PYTHONPATH, and returns its output.

    shown: also print it. Raises ReleaseError if the program fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    if shown or done.returncode != 0:
        print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        raise ReleaseError(f"`{shlex.join(map(str, command))}` failed (see above)")
    return done.stdout


def packages_of(python: Path) -> Path:
    """The folder with the packages of an interpreter."""
    found = subprocess.run(
        [python, "-P", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    return Path(found.stdout.strip())


def link_packages(source: Path, target: Path) -> None:
    """Links to all packages in `source`, except attn_backend and the installers."""
    for path in source.iterdir():
        if path.name.split(".")[0].split("-")[0] not in (
            OURS,
            *INSTALLERS,
            "__pycache__",
        ) and not os.path.lexists(target / path.name):
            (target / path.name).symlink_to(path)


def engines_in(packages: Path) -> list[str]:
    return [name for name in GROUPS if (packages / name).is_dir()]


def check_entry_points(packages: Path, engines: list[str]) -> None:
    """Raises ReleaseError if an engine would not find the plugin."""
    registered = {
        entry.group
        for path in packages.glob(f"{OURS}-*.dist-info")
        for entry in PathDistribution(path).entry_points
        if entry.name == OURS
    }
    for engine in engines:
        if GROUPS[engine] not in registered:
            raise ReleaseError(
                f"the wheel has no entry point {OURS} in {GROUPS[engine]}: {engine} does not find it"
            )


def check(wheel: Path, environment: Path, engines: list[str], model: str | None, folder: Path) -> None:
    """environment: its interpreter. Raises ReleaseError if anything fails."""
    theirs = packages_of(environment)
    missing = [engine for engine in engines if engine not in engines_in(theirs)]
    engines = engines or engines_in(theirs)
    if missing or not engines:
        raise ReleaseError(f"{environment} has no {' or '.join(missing or GROUPS)}")
    run(environment, "-m", "venv", folder / "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    ours = packages_of(python)
    link_packages(theirs, ours)
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        wheel.resolve(),
        folder=folder,
    )
    check_entry_points(ours, engines)
    run(python, SMOKE_TEST, folder=folder)
    command = python.with_name("attn-backend")
    findings = json.loads(run(command, "doctor", "--json", folder=folder, shown=False))["findings"]
    library = next(finding["text"] for finding in findings if finding["subject"] == "host library")
    if not Path(library).is_relative_to(ours):
        raise ReleaseError(f"the host library is {library}, must be the wheel's in {ours}")
    for engine in engines:
        run(command, "demo", "--engine", engine, *(("--model", model) if model else ()), folder=folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--python", type=Path, required=True, help="interpreter of an environment that has an engine"
    )
    parser.add_argument(
        "--engine",
        action="append",
        choices=tuple(GROUPS),
        default=[],
        help="default: each engine that the environment has",
    )
    parser.add_argument(
        "--model", help="folder, or name on the hub (default: the model of attn-backend demo)"
    )
    arguments = parser.parse_args()
    model = (
        str(Path(arguments.model).resolve())
        if arguments.model and Path(arguments.model).is_dir()
        else arguments.model
    )
    with tempfile.TemporaryDirectory(prefix="attn_backend-in-engines-") as folder:
        try:
            check(arguments.wheel, arguments.python.absolute(), arguments.engine, model, Path(folder))
        except ReleaseError as error:
            sys.exit(f"error: {error}")
    print("ok: the wheel works inside the engines")


if __name__ == "__main__":
    main()
