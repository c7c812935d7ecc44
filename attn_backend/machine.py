"""The machine: its CPU, and its folder of compiled kernels and downloads.

Needs only the standard library, because the pre-installation checks use it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

VARIABLE = "ATTN_BACKEND_CACHE"
CPUINFO = Path("/proc/cpuinfo")
BF16_FLAGS = ("avx512_bf16", "amx_bf16")
FIGURES_OF_A_CPU = "These are CPU figures: they show that both backends work, not how fast a GPU is."


def cpu_flags() -> frozenset[str]:
    """The flags of the first core, named as in /proc/cpuinfo; empty if the operating system does not list
    them.
    """
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def serving_dtype() -> str:
    """The `--dtype` for an engine on this CPU: "auto" (the model's own), or "float32" on CPUs without bf16
    instructions, which run it several times faster.
    """
    return "auto" if cpu_flags().intersection(BF16_FLAGS) else "float32"


def serving_choice(dtype: str) -> str:
    """One sentence for the user: the dtype and the mode of servers on this CPU.

    The engines run in eager mode, because compiling delays the first answer.
    """
    reason = (
        f" (this CPU has neither {' nor '.join(BF16_FLAGS)})" if dtype == serving_dtype() == "float32" else ""
    )
    name = "the model's dtype" if dtype == "auto" else dtype
    return (
        f"Servers run in {name}{reason} and in eager mode, which gives the first answer sooner. This "
        f"holds for both backends."
    )


def cache_folder(given: str | Path | None) -> Path:
    """The folder in ATTN_BACKEND_CACHE, or attn_backend/ in the user's cache folder.

    Raises:
        RuntimeError: the variable is not set, and there is no home directory.
    """
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn_backend"


class Problem(NamedTuple):
    subject: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}\n      -> {self.remedy}"


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.lexists(folder))


def folder_problem(folder: Path) -> str:
    """Why a folder, which need not exist yet, cannot be written to; "" if it can.

    Makes a file for the answer: root has access to folders of read-only file systems.
    """
    parent = existing_parent(folder)
    if not parent.is_dir():
        return f"{parent} is not a folder"
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        return f"{parent} is not writable ({error.strerror})"
    return ""


def cache_problem(folder: Path | None = None) -> Problem | None:
    """folder: the cache; None: the folder from the environment variables."""
    advice = f"set {VARIABLE} to a folder that you can write to"
    try:
        folder = folder or cache_folder(os.environ.get(VARIABLE))
    except RuntimeError:
        return Problem(
            "cache", "there is no home directory to keep compiled kernels and downloads in", advice
        )
    text = folder_problem(folder)
    return (
        Problem("cache", text if text.startswith(str(folder)) else f"{folder} cannot be made: {text}", advice)
        if text
        else None
    )
