"""Settings from environment variables: every variable, its default, and refusals by name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from attn_backend import settings
from attn_backend.jit import manifest
from attn_backend.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


def test_defaults() -> None:
    read = Settings.read()
    assert (read.cascade, read.debug, read.prefetch_code, read.sampler, read.vllm_cpu) == (
        True,
        False,
        True,
        None,
        False,
    )
    assert (read.arch, read.cache, read.cpu_isa) == (None, None, None)


@pytest.mark.parametrize("field", ["cascade", "debug", "prefetch_code", "sampler", "vllm_cpu"])
@pytest.mark.parametrize(("value", "expected"), [("0", False), ("", False), ("1", True)])
def test_switches(field: str, value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + field.upper(), value)
    assert getattr(Settings.read(), field) is expected


@pytest.mark.parametrize(("value", "expected"), [("", 128), ("0", 0), ("64", 64)])
def test_the_room_of_dequantized_tokens(value: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "DEQUANTIZED_MIB", value)
    assert Settings.read().dequantized_mib == expected


@pytest.mark.parametrize(
    ("name", "value", "must_be"),
    [
        ("CASCADE", "2", "must be 0 or 1"),
        ("DEBUG", "maybe", "must be 0 or 1"),
        ("SAMPLER", "sglang", "must be 0 or 1"),
        ("DEQUANTIZED_MIB", "-1", "must be greater than or equal to 0"),
        ("DEQUANTIZED_MIB", "99999999999999", "must be less than or equal to 1048576"),
        ("ARCH", "sm_70", "must be 'sm_90a' or 'sm_80'"),
        ("CPU_ISA", "avx1024", "must be 'baseline', 'avx2', 'avx512' or 'amx'"),
    ],
)
def test_an_unknown_value_is_refused_by_name(
    name: str, value: str, must_be: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(ValueError, match=f"^ATTN_BACKEND_{name} is '{value}', {must_be}$"):
        Settings.read()


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("ATTN_BACKEND_CASCAD", "did you mean ATTN_BACKEND_CASCADE?"),
        ("ATTN_BACKEND_CACHE_DIR", "did you mean ATTN_BACKEND_CACHE?"),
        ("ATTN_BACKEND_PREFETCH", "did you mean ATTN_BACKEND_PREFETCH_CODE?"),
        ("ATTN_BACKEND_LAYERS", "did you mean ATTN_BACKEND_REQUIRE_LAYERS?"),
        ("attn_backend_jit", "did you mean ATTN_BACKEND_JIT?"),
        ("ATTN_BACKEND_", "`attn-backend doctor` lists the settings"),
        ("ATTN_BACKEND_LOG_FORMAT", "`attn-backend doctor` lists the settings"),
    ],
)
def test_an_unknown_variable_is_warned_of_once(
    variable: str, hint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings.warn_of_unknown_variables.cache_clear()
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("ATTN_BACKENDS", "another program's")
    for name in Settings.model_fields:
        monkeypatch.setenv(PREFIX + name.upper(), "")
    for _ in range(3):
        Settings.read()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"attn_backend: {variable} is unknown and has no effect: {hint}")
    ]


def test_tests_and_documents_use_settings_that_exist() -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    texts = [*ROOT.glob("*.md"), ROOT / "Makefile"]
    texts += [
        path
        for folder in ("docs", "tests", "integration", "benchmarks", "examples", "attn_backend")
        for path in (ROOT / folder).rglob("*")
    ]
    for path in texts:
        if (
            path.suffix in (".md", ".py", ".sh", ".yml", "")
            and path.is_file()
            and path not in (Path(__file__), ROOT / "tests" / "cli" / "test_doctor.py")
        ):
            used = set(re.findall(rf"{PREFIX}[A-Z0-9_]+", path.read_text(errors="replace"))) - {
                f"{PREFIX}FIELD"
            }
            assert used <= known, path


def test_archs_are_those_of_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    for arch in (*manifest.ARCHS, ""):
        monkeypatch.setenv("ATTN_BACKEND_ARCH", arch)
        assert Settings.read().arch == (arch or None)


def test_where_files_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert Settings.read().cache_folder() == Path("/home/somebody/.cache/attn_backend")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert Settings.read().cache_folder() == Path("/cache/attn_backend")
    for value, folder in (("", "/cache/attn_backend"), ("~/kernels", "/home/somebody/kernels")):
        monkeypatch.setenv("ATTN_BACKEND_CACHE", value)
        assert Settings.read().cache_folder() == Path(folder)


def test_the_documentation_lists_every_variable() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    for name in Settings.model_fields:
        assert f"`{PREFIX}{name.upper()}" in text
