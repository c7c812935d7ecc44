"""The plugin's entry point."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1", reason="needs vLLM")

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm_layer import Layer, make_builder, make_config, make_impl, make_spec

from attn_backend.adapters.layers import use_cascade
from attn_backend.adapters.vllm import metadata as vllm_metadata
from attn_backend.adapters.vllm.backend import CpuAttnBackend
from attn_backend.adapters.vllm.metadata import AttnMetadataBuilder
from attn_backend.adapters.vllm.plugin import BACKEND_PATH, CPU_BACKEND_PATHS, CPU_SWITCH, register

# only a shim for torchvision, see conftest.py
CPU_SHIMS = Path(__file__).parents[3] / "integration" / "sglang_cpu"
STOCK_CPU_BACKEND = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


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
        assert registry[member.get_class().get_name()] is member


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


def test_a_draft_model_on_another_backend_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.Logger("of this test")
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(vllm_metadata, "logger", logger)
    impl = make_impl()
    ours = {
        f"layer.{number}": Layer(impl, backend)
        for number, backend in enumerate((CpuAttnBackend, type("Derived", (CpuAttnBackend,), {})))
    }
    drafts = {"draft.0": Layer(impl, CPUAttentionBackend), "draft.1": Layer(impl, CPUAttentionBackend)}
    of_vllms_choice = SimpleNamespace(num_speculative_tokens=3, attention_backend=None)
    of_the_users = SimpleNamespace(num_speculative_tokens=3, attention_backend=CPUAttentionBackend)
    for layers, speculative_config in [
        (ours, of_vllms_choice),
        (ours | drafts, None),
        (ours | drafts, of_the_users),
    ]:
        AttnMetadataBuilder(
            make_spec(),
            list(ours),
            make_config(layers, speculative_config=speculative_config),
            torch.device("cpu"),
        )
    assert not caplog.messages
    for _ in range(2):  # each group of layers has a builder
        AttnMetadataBuilder(
            make_spec(),
            list(ours),
            make_config(ours | drafts, speculative_config=of_vllms_choice),
            torch.device("cpu"),
        )
    assert [text.split(".")[0] for text in caplog.messages] == [
        "vLLM chose CPU_ATTN for some attention layers"
    ]


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
