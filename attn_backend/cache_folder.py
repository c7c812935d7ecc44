"""The folder of compiled kernels and downloads.

Needs only the standard library: the checks before an installation ask for it.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ATTN_BACKEND_CACHE"


def cache_folder(given: str | Path | None) -> Path:
    """The folder that ATTN_BACKEND_CACHE gives, or attn_backend/ in the user's cache folder.

    Raises:
        RuntimeError: there is no home directory, and nothing says where.
    """
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn_backend"
