"""Fixtures of the tests that run device code on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for compiled kernels, which all workers of a session share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own) / "emulated"
    folder.mkdir(exist_ok=True)
    return folder
