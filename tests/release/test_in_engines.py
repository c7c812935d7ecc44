"""The check of a wheel inside the engines: its links and its refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from release import in_engines
from release.wheel import ReleaseError


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_environment_s_own_package_is_not_linked(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in (
        "attn_backend",
        "attn_backend-0.1.dist-info",
        "pip",
        "pip-23.2.1.dist-info",
        "__pycache__",
        "vllm",
        "torch-2.13.0.dist-info",
    ):
        (source / name).mkdir(parents=True)
    (source / "shim.pth").write_text("import shim\n")
    (source / "attn_backend.pth").write_text("/a/checkout\n")
    (target / "torch-2.13.0.dist-info").mkdir(parents=True)
    in_engines.link_packages(source, target)
    assert names(target) == {"vllm", "torch-2.13.0.dist-info", "shim.pth"}
    assert in_engines.engines_in(target) == ["vllm"]


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("[sglang.srt.plugins]\nattn_backend = a:b\n", "vllm"),
        ("[vllm.general_plugins]\nother = a:b\n", "vllm"),
    ],
)
def test_an_entry_point_that_is_missing_is_named(tmp_path: Path, text: str, engine: str) -> None:
    (tmp_path / "attn_backend-1.0.dist-info").mkdir()
    (tmp_path / "attn_backend-1.0.dist-info" / "entry_points.txt").write_text(text)
    with pytest.raises(ReleaseError, match=in_engines.GROUPS[engine]):
        in_engines.check_entry_points(tmp_path, [engine])


def test_entry_points_that_are_there_pass(tmp_path: Path) -> None:
    (tmp_path / "attn_backend-1.0.dist-info").mkdir()
    text = "".join(f"[{group}]\nattn_backend = a:b\n" for group in in_engines.GROUPS.values())
    (tmp_path / "attn_backend-1.0.dist-info" / "entry_points.txt").write_text(text)
    in_engines.check_entry_points(tmp_path, list(in_engines.GROUPS))


def test_an_environment_without_the_engine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_engines, "packages_of", lambda _: tmp_path)
    with pytest.raises(ReleaseError, match="has no vllm or sglang"):
        in_engines.check(tmp_path / "a.whl", Path(sys.executable), [], None, tmp_path)
    (tmp_path / "vllm").mkdir()
    with pytest.raises(ReleaseError, match="has no sglang"):
        in_engines.check(tmp_path / "a.whl", Path(sys.executable), ["sglang"], None, tmp_path)
