"""Metadata for a package that is on PYTHONPATH but not installed."""

from __future__ import annotations

import textwrap
import tomllib

from integration.dist_info import write_dist_info
from integration.model import REPOSITORY


def test_dist_info_has_the_projects_entry_points(tmp_path):
    written = (write_dist_info(tmp_path) / "entry_points.txt").read_text()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for group, entries in project["entry-points"].items():
        assert textwrap.dedent(f"[{group}]") in written
        assert all(f"{name} = {value}" in written for name, value in entries.items())
