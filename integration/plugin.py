"""Does a running server really use this package? vLLM on a CPU serves with its own backend, silently, when the plugin is not discovered."""

from __future__ import annotations

import os
from pathlib import Path

LIBRARY = "libattn_backend"


def library_is_loaded(process_group: int) -> bool:
    """Whether a process of the group has this package's host library in its memory map. The engines' plugins load it when they register or start."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if os.getpgid(int(folder.name)) == process_group and LIBRARY in (folder / "maps").read_text():
                return True
        except OSError:  # it ended meanwhile
            continue
    return False
