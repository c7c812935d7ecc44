from __future__ import annotations

import sys
from pathlib import Path

import pytest

# release/ is not part of the installed package. At the end of the path, so that the source tree does not hide the installed package
sys.path.append(str(Path(__file__).resolve().parents[2]))


@pytest.fixture(autouse=True)
def sys_path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel's program puts the source tree in front, and other tests of this process must not find it there."""
    monkeypatch.setattr(sys, "path", [*sys.path])
