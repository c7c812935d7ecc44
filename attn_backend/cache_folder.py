"""The folder of compiled kernels and downloads.

Needs only the standard library, because the pre-installation checks use it.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ATTN_BACKEND_CACHE"


def cache_folder(given: str | Path | None) -> Path:
    """The folder in ATTN_BACKEND_CACHE, or attn_backend/ in the user's cache folder.

    Raises:
        RuntimeError: the variable is not set, and there is no home directory.
    """
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn_backend"
