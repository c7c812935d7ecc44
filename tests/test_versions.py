"""Versions that several files name: tools, Python, engines."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from attn_backend.releases import RELEASES

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("tool", ["ruff", "clang-format"])
def test_pre_commit_takes_the_version_of_the_environment(tool: str) -> None:
    of_pre_commit, of_environment = (
        set(re.findall(rf"\b{tool}==([\w.]+)", (ROOT / name).read_text()))
        for name in (".pre-commit-config.yaml", "integration/environment.py")
    )
    assert len(of_environment) == 1
    assert of_pre_commit == of_environment


@pytest.mark.parametrize("engine", RELEASES)
def test_an_extra_allows_the_releases_that_were_compared(engine: str) -> None:
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"][engine])
    first, last = Version(RELEASES[engine][0]), Version(RELEASES[engine][-1])
    assert requirement.name == engine
    assert all(release in requirement.specifier for release in RELEASES[engine])
    assert f"{last.major}.{last.minor}.{last.micro + 1}" not in requirement.specifier
    assert f">={first}" in str(requirement.specifier)
