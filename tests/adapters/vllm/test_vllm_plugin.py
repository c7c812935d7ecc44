"""The plugin's entry point."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM")

from vllm.v1.attention.backends.registry import register_backend
from vllm_layer import make_builder, make_config, make_impl

from attn_backend.adapters.layers import use_cascade
from attn_backend.adapters.vllm import metadata as vllm_metadata
from attn_backend.adapters.vllm import support
from attn_backend.adapters.vllm.plugin import BACKEND_PATH, CPU_BACKEND_PATHS, register
from attn_backend.adapters.vllm.support import CPU_SWITCH

# only a shim for torchvision, see conftest.py
CPU_SHIMS = Path(__file__).parents[3] / "integration" / "sglang_cpu"
STOCK_CPU_BACKEND = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


def has_new_names(registry: Any) -> bool:
    """Whether this release of vLLM lets plugins add names."""
    return hasattr(registry, "register")


@pytest.mark.parametrize("switch", [None, "0", ""])
def test_registers_custom_and_leaves_the_cpu_alone(
    switch: str | None, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CPU_SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(CPU_SWITCH, switch)
    register()
    assert registry.CUSTOM.get_path() == BACKEND_PATH
    assert registry.CPU_ATTN.get_path() == STOCK_CPU_BACKEND


def test_takes_the_place_of_the_cpu_backend_when_asked(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_SWITCH, "1")
    register()
    replaced = {name: registry[name].get_path() for name in CPU_BACKEND_PATHS if name in registry.__members__}
    assert "CPU_ATTN" in replaced
    assert replaced == {name: CPU_BACKEND_PATHS[name] for name in replaced}
    assert registry.CUSTOM.get_path() == BACKEND_PATH


def test_can_be_called_again(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_SWITCH, "1")
    register()
    backends = registry.CUSTOM.get_class(), registry.CPU_ATTN.get_class()
    register()
    assert (registry.CUSTOM.get_class(), registry.CPU_ATTN.get_class()) == backends


def test_names_belong_to_vllm(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_SWITCH, "1")
    register()
    for member in (registry.CUSTOM, registry.CPU_ATTN):
        backend = member.get_class()
        # vLLM looks a backend up by its name
        assert registry[backend.get_name()].get_class() is backend
    assert registry.CUSTOM.get_class().get_name() == ("ATTN_BACKEND" if has_new_names(registry) else "CUSTOM")


def test_has_a_name_of_its_own(registry: Any) -> None:
    if not has_new_names(registry):
        pytest.skip("this release has a fixed list of names")
    register()
    register()  # vLLM refuses to add a name twice
    assert registry["ATTN_BACKEND"].get_path() == registry.CUSTOM.get_path() == BACKEND_PATH


def test_its_name_reaches_processes_that_have_not_loaded_plugins(registry: Any, tmp_path: Path) -> None:
    """vLLM pickles its configuration for its processes, which read it before they load plugins."""
    if not has_new_names(registry):
        pytest.skip("this release has a fixed list of names")
    register()
    sent = tmp_path / "sent"
    sent.write_bytes(pickle.dumps([registry["ATTN_BACKEND"], registry.CUSTOM]))
    program = (
        "import pathlib, pickle, sys; own, custom = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()); "
        "assert own.name == 'ATTN_BACKEND' and custom.name == 'CUSTOM'; "
        "from attn_backend.adapters.vllm import register; register(); "
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum; "
        "assert AttentionBackendEnum['ATTN_BACKEND'] is own and own.get_class()"
    )
    paths = os.pathsep.join(filter(None, [str(CPU_SHIMS), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, "-c", program, str(sent)],
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": paths},
    )


OTHER_PLUGIN = "other_package.backend.OtherBackend"


def test_another_plugin_that_was_first_keeps_custom(
    registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_to(caplog, monkeypatch)
    register_backend(registry.CUSTOM, OTHER_PLUGIN)
    for _ in range(2):  # vLLM loads plugins in several places of one process
        register()
    assert registry.CUSTOM.get_path() == OTHER_PLUGIN
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert f"It belongs to {OTHER_PLUGIN}" in caplog.messages[1]
    assert "--attention-backend ATTN_BACKEND" in caplog.messages[1]
    if has_new_names(registry):
        assert registry["ATTN_BACKEND"].get_path() == BACKEND_PATH


def test_registration_is_logged_by_vllms_logger(
    registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert hasattr(support.logger, "info_once")  # vLLM's init_logger adds it
    log_to(caplog, monkeypatch)
    register()
    names = "CUSTOM, ATTN_BACKEND" if has_new_names(registry) else "CUSTOM"
    assert [text.partition(" is ")[2] for text in caplog.messages] == [f"registered as {names}."]


def test_registration_waits_for_the_logger(
    registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines inside the user's process load plugins before they set up vLLM's logger."""
    logger = log_to(caplog, monkeypatch)
    logger.handlers = []
    logger.setLevel(logging.WARNING)
    register_backend(registry.CUSTOM, OTHER_PLUGIN)
    register()
    assert not caplog.messages
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    for _ in range(2):
        support.check_layers(make_config())
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def log_to(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    logger = logging.getLogger(f"of this test {id(caplog)}")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    monkeypatch.setattr(support, "logger", logger)
    support._log_registration.cache_clear()
    support._log_other_plugin.cache_clear()
    return logger


def test_failure_is_loud(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attn_backend.adapters.vllm.backend", None)  # importing it fails
    with pytest.raises(
        RuntimeError,
        match=r"attn_backend cannot serve as an attention backend of this "
        r"vLLM.*attn_backend\.adapters\.vllm\.backend",
    ):
        register()


@pytest.mark.parametrize(("variable", "cascade"), [(None, False), ("1", True), ("0", False)])
@pytest.mark.parametrize(
    "option", ["--disable-cascade-attn", "--disable_cascade_attn", "--no-disable-cascade-attn"]
)
def test_vllms_own_option_is_obeyed(
    registry: Any,
    option: str,
    variable: str | None,
    cascade: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.Logger("of this test")
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(vllm_metadata, "logger", logger)
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "MODEL", option])
    monkeypatch.setenv("ATTN_BACKEND_CASCADE", variable or "")
    if variable is None:
        monkeypatch.delenv("ATTN_BACKEND_CASCADE")
    monkeypatch.setenv("ATTN_BACKEND_SAMPLER", "0")
    register()
    given = not option.startswith("--no-")
    assert use_cascade() == (cascade if given or variable else True)
    for _ in range(2):  # each group of layers has a builder
        make_builder([make_impl()])
    assert [text.split(":")[0] for text in caplog.messages] == [
        "ATTN_BACKEND_CASCADE=1 overrules --disable-cascade-attn"
        if cascade
        else "attn_backend does not look for shared prefixes"
    ] * given


@pytest.mark.gpu
def test_touches_no_gpu() -> None:
    """In a separate process, since other tests may have initialized CUDA in this one."""
    program = (
        "import torch; from attn_backend.adapters.vllm import register; register(); assert not "
        "torch.cuda.is_initialized()"
    )
    paths = os.pathsep.join(filter(None, [str(CPU_SHIMS), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=120, env={**os.environ, "PYTHONPATH": paths}
    )


def test_is_an_entry_point_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {
        "attn_backend": "attn_backend.adapters.vllm:register"
    }
