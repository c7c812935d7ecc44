"""The host library: C++ behind tvm-ffi, no torch ABI."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import tvm_ffi

PACKAGE = Path(__file__).resolve().parent.parent


def library_path() -> Path:
    """Path of the host library inside the installed package.

    Raises:
        ImportError: the package was not installed (the library is built by `pip install`).
    """
    path = PACKAGE / "lib" / "libattn_backend.so"
    if not path.exists():
        raise ImportError(f"attn_backend is not installed properly: {path} does not exist; run `pip install .` in its checkout")
    return path


@cache
def library() -> Any:
    """The loaded host library; its functions are those exported in csrc/host/bindings.cpp."""
    return tvm_ffi.load_module(str(library_path()))
