"""Write `attn_backend-VERSION.dist-info` with the entry points of pyproject.toml, for machines where the
package is on PYTHONPATH instead of installed.

    python -m integration.dist_info FOLDER      # then PYTHONPATH=FOLDER lets both engines discover the plugin

The engines find plugins only through this metadata. FOLDER should contain the attn_backend package with its
built library, or be on PYTHONPATH together with it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from integration.model import REPOSITORY


def write_dist_info(folder: Path) -> Path:
    """Write the metadata folder into `folder` and return its path."""
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project.get("version", "0+source")  # the build takes it from the tag
    target = folder / f"{project['name'].replace('-', '_')}-{version}.dist-info"
    target.mkdir(parents=True, exist_ok=True)
    (target / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n", encoding="utf-8"
    )
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    sections = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())])
        for group, entries in groups.items()
    ]
    (target / "entry_points.txt").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    print(write_dist_info(parser.parse_args().folder))
