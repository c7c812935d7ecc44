"""The place of downloaded and derived files between runs, and folders that appear there only when
complete.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from attn_backend.settings import Settings


def cache_folder() -> Path:
    """The package's cache: `ATTN_BACKEND_CACHE`, or `attn_backend` in the user's cache folder."""
    return Settings.read().cache_folder().resolve()


def cached_folder(name: str, fill: Callable[[Path], None]) -> Path:
    """Return the cached folder `name`, calling `fill(folder)` to make it if it does not exist.

    It is filled under another name and renamed, so an interrupted or concurrent run never leaves half a
    folder behind.

    Raises:
        RuntimeError: the cache cannot be written.
    """
    final = cache_folder() / name
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    except OSError as error:
        raise RuntimeError(
            f"{final} cannot be made: {error.strerror}. Set ATTN_BACKEND_CACHE to a folder that you can "
            f"write to"
        ) from error
    try:
        fill(partial)
        partial.chmod(0o755)
        try:
            partial.rename(final)
        except OSError:  # another process was faster
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final
