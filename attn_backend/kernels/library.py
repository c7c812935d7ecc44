"""The host library: C++ behind tvm-ffi, no torch ABI."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import tvm_ffi

from . import errors

PACKAGE = Path(__file__).resolve().parent.parent


def library_path() -> Path:
    """Path of the host library inside the installed package.

    An editable install has two folders: the sources, and what was built.

    Raises:
        ImportError: the package was not installed (the library is built by `pip install`).
    """
    for folder in sys.modules[PACKAGE.name].__path__:
        path = Path(folder) / "lib" / "libattn_backend.so"
        if path.exists():
            return path
    if (PACKAGE.parent / "pyproject.toml").exists():
        raise ImportError(
            f"{PACKAGE} is the source tree, which has no built library: run from another folder, or install "
            f"it editable (CONTRIBUTING.md)"
        )
    raise ImportError(
        f"attn_backend is not installed properly: {PACKAGE} has no lib/libattn_backend.so; reinstall it"
    )


@cache
def library() -> Any:
    """The loaded host library; its functions are those that csrc/runtime/ exports."""
    for error in errors.OF_THE_LIBRARY:
        tvm_ffi.register_error(error)
    return tvm_ffi.load_module(str(library_path()))
