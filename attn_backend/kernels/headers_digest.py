"""Digest of the headers that the host library and the kernels of a variant for a CPU share: both must be
compiled from the same.

CMake runs it: python headers_digest.py CSRC prints the digest.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path


def headers_digest(csrc: Path) -> str:
    """The digest of all .h files below a folder."""
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(csrc).as_posix(), path) for path in csrc.rglob("*.h")):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


if __name__ == "__main__":
    print(headers_digest(Path(sys.argv[1])))
