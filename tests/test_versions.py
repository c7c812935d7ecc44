"""Tools have one version: that of the tests' environment is also that of pre-commit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("tool", ["ruff", "clang-format"])
def test_pre_commit_takes_the_version_of_the_environment(tool: str) -> None:
    of_pre_commit, of_environment = (
        set(re.findall(rf"\b{tool}==([\w.]+)", (ROOT / name).read_text()))
        for name in (".pre-commit-config.yaml", "integration/environment.py")
    )
    assert len(of_environment) == 1
    assert of_pre_commit == of_environment
