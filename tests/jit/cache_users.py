"""A process without root's rights, and the log of the cache."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "attn_backend" and record.levelno == logging.WARNING
    ]


@contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """Root may write everywhere, so this becomes another user who can access the parent folders."""
    if os.geteuid() != 0:
        yield
        return
    opened = {parent: mode(parent) for parent in (folder, *folder.parents)}
    for parent, before in opened.items():
        if before & 0o055 != 0o055:
            parent.chmod(before | 0o055)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for parent, before in opened.items():
            if mode(parent) != before:
                parent.chmod(before)
