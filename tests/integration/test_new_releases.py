"""`make releases`: new releases of the engines, and the changes that it reports."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from attn_backend.releases import RELEASES
from integration import new_releases
from integration.engine_sources import CannotFetch, _keep
from integration.new_releases import Report, failed_tests, markdown, own_kernels

KNOWN = ("0.32.0", "0.33.0")
FILE: list[dict[str, Any]] = [{"yanked": False}]

VLLM_MODEL = """
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

class Plain:
    def __init__(self):
        self.attn = Attention(8, 128, attn_backend=None)

class Own(AttentionLayerBase):
    def get_attn_backend(self):
        return OwnBackend

class Padded(MLAAttention):
    def __init__(self, **kwargs):
        kwargs["attn_backend"] = OwnBackend
        self.attn = Attention(8, 128, attn_backend=OwnBackend)
"""
SGLANG_MODEL = """
def overrides(server_args):
    found = {"attention_backend": "dsv4", "page_size": 64}
    assert prefill_backend == "flashinfer"
    assert moe_runner_backend == "triton"
    if any(backend not in (None, "fa3") for backend in requested):
        raise ValueError("needs fa3")
    if attention_backend == "fa3":
        print("fine")
"""


def archive(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "sources.zip"
    with zipfile.ZipFile(path, "w") as out:
        for name, text in files.items():
            out.writestr(name, text)
    return path


@pytest.mark.parametrize(
    ("version", "files", "is_new"),
    [
        ("0.34.0", FILE, True),
        ("0.33.1", FILE, True),
        ("0.33.0.post1", FILE, True),
        ("0.32.1", FILE, True),
        ("0.100.0", FILE, True),
        ("0.33.0", FILE, False),
        ("0.31.0", FILE, False),
        ("0.9.2", FILE, False),
        ("0.34.0rc1", FILE, False),
        ("0.34.0", [], False),
        ("0.34.0", [{"yanked": True}], False),
        ("0.34.0", [{"yanked": True}, {"yanked": False}], True),
    ],
)
def test_releases_that_are_new(version: str, files: list[dict[str, Any]], is_new: bool) -> None:
    described = {"releases": {"0.32.0": FILE, version: files}}
    assert new_releases.new_releases(described, KNOWN) == [version] * is_new


def test_new_releases_are_in_order() -> None:
    described = {"releases": dict.fromkeys(["0.100.0", "0.34.0", "0.33.0.post1", "0.33.1"], FILE)}
    assert new_releases.new_releases(described, KNOWN) == ["0.33.0.post1", "0.33.1", "0.34.0", "0.100.0"]


def test_models_of_vllm_that_choose_their_kernels(tmp_path: Path) -> None:
    model, others = "vllm/models/own/nvidia/model.py", ("models/own/amd/model.py", "v1/attention/backend.py")
    files = {model: VLLM_MODEL} | {f"vllm/{other}": VLLM_MODEL for other in others}
    assert own_kernels("vllm", archive(tmp_path, files)) == {
        "`models/own/nvidia/model.py`: class Own",
        "`models/own/nvidia/model.py`: kwargs['attn_backend'] = OwnBackend",
        "`models/own/nvidia/model.py`: attn_backend=OwnBackend",
    }


def test_models_of_sglang_that_choose_their_kernels(tmp_path: Path) -> None:
    path = "srt/arg_groups/model_overrides/own.py"
    files = {f"sglang/{path}": SGLANG_MODEL, "sglang/srt/managers/own.py": SGLANG_MODEL}
    assert own_kernels("sglang", archive(tmp_path, files)) == {
        f"`{path}`: attention_backend: 'dsv4'",
        f"`{path}`: assert prefill_backend == 'flashinfer'",
        f"`{path}`: refuses if any((backend not in (None, 'fa3') for backend in requested))",
    }


def test_architectures_that_came_and_went(tmp_path: Path) -> None:
    names = [
        name
        for entry in new_releases.OWN_KERNELS
        if entry.sglang is not None and not isinstance(entry.sglang, new_releases.Missing)
        for name in entry.sglang.architectures
    ]
    path = "sglang/srt/models/all.py"
    assert not new_releases.changed_architectures("sglang", archive(tmp_path, {path: " ".join(names)}))
    changed = " ".join([*names[1:], "Step5ForCausalLM"])
    assert new_releases.changed_architectures("sglang", archive(tmp_path, {path: changed})) == [
        f"{names[0]}: now missing",
        "Step5ForCausalLM: a new model",
    ]


@pytest.mark.parametrize(
    ("cases", "found"),
    [
        ('<testcase name="test_a[vllm-0.34.0]"/>', []),
        (
            '<testcase name="test_a[vllm-0.34.0]">'
            "<failure message=\"assert not ['gone']&#10;more\"/></testcase>"
            '<testcase name="test_b[0.34.0]"><error message="broken"/></testcase>'
            '<testcase name="test_c[0.34.0]"><skipped message="fine"/></testcase>',
            ["`test_a`: assert not ['gone'] more", "`test_b`: broken"],
        ),
        ("", ["the tests did not run: none was selected"]),
    ],
)
def test_failures_are_read(cases: str, found: list[str]) -> None:
    assert list(failed_tests(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")) == found


def test_whole_sources_are_kept_on_request(tmp_path: Path) -> None:
    wheel = archive(
        tmp_path, {"sglang/srt/models/own.py": "", "sglang/srt/server_args.py": "", "sglang/a.txt": ""}
    )
    for whole, kept in ((False, ["server_args.py"]), (True, ["models/own.py", "server_args.py"])):
        path = tmp_path / f"{whole}.zip"
        _keep("sglang", wheel.rename(wheel.with_suffix(".whl")), path, whole)
        wheel.with_suffix(".whl").rename(wheel)
        with zipfile.ZipFile(path) as found:
            assert sorted(found.namelist()) == [f"sglang/srt/{name}" for name in kept]


@pytest.mark.parametrize("has_failures", [False, True])
@pytest.mark.parametrize("has_choices", [False, True])
def test_status_and_report(
    has_failures: bool,
    has_choices: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    newest = RELEASES["vllm"][-1]
    described = {"vllm": [newest, "99.0.0"], "sglang": [RELEASES["sglang"][-1]]}
    monkeypatch.setattr(
        new_releases, "published", lambda engine: {"releases": dict.fromkeys(described[engine], FILE)}
    )
    monkeypatch.setattr(new_releases, "failures_of", lambda *release: ["`test_a`: gone"] * has_failures)
    files = {"vllm/models/own/nvidia/model.py": VLLM_MODEL}
    with_choices, without = (
        archive(folder, content)
        for folder, content in ((tmp_path / "new", files), (tmp_path / "old", {}))
        if not folder.mkdir()
    )
    monkeypatch.setattr(
        new_releases,
        "sources",
        lambda engine, version, whole: with_choices if version == "99.0.0" and has_choices else without,
    )
    monkeypatch.setattr(new_releases, "changed_architectures", lambda *arguments: [])
    report = tmp_path / "results" / "report.md"
    monkeypatch.setattr("sys.argv", ["new_releases", "--report", str(report)])
    assert new_releases.main() == int(has_failures or has_choices)
    text = report.read_text()
    assert text in capsys.readouterr().out
    assert "## vLLM 99.0.0" in text
    assert "## SGLang" not in text
    assert ("- `test_a`: gone" in text) == has_failures
    assert (f"class Own (not in {newest})" in text) == has_choices
    assert ("Nothing that the adapters use has changed" in text) != (has_failures or has_choices)


def test_no_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def unreachable(engine: str) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr(new_releases, "published", unreachable)
    monkeypatch.setattr("sys.argv", ["new_releases"])
    assert new_releases.main() == 2
    assert "PyPI cannot be asked: no route to host" in capsys.readouterr().err


def test_a_release_that_cannot_be_fetched_is_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*release: Any, **more: Any) -> Path:
        raise CannotFetch("vllm 99.0.0 cannot be fetched")

    monkeypatch.setattr(new_releases, "sources", refuse)
    monkeypatch.setattr(new_releases, "failures_of", lambda *release: [])
    assert new_releases.check("vllm", "99.0.0").own_kernels == ["vllm 99.0.0 cannot be fetched"]


def test_nothing_new() -> None:
    assert "PyPI has no other releases." in markdown([])
    assert "PyPI has no other releases." not in markdown([Report("vllm", "99.0.0", [], [])])
