"""Digest of the headers that the host library and the kernels of a variant for a CPU share: both must be compiled from the same.

Run by CMake: python headers_digest.py CSRC HEADER writes it as a C++ header.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path


def headers_digest(csrc: Path) -> str:
    """Of all .h files below a folder."""
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(csrc).as_posix(), path) for path in csrc.rglob("*.h")):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(f'#define ATTN_HEADERS_DIGEST "{headers_digest(Path(sys.argv[1]))}"\n')
