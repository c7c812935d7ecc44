"""The instructions of a CPU and the dtype of servers on it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from attn_backend import machine

AVX512 = ["fpu", "avx2", "avx512f", "avx512bw"]


@pytest.mark.parametrize(("avx512_bf16", "amx_bf16", "similar"), list(product([False, True], repeat=3)))
def test_servers_run_in_float32_where_a_cpu_has_no_bf16_instructions(
    avx512_bf16: bool, amx_bf16: bool, similar: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (
        AVX512
        + ["avx512_bf16"] * avx512_bf16
        + ["amx_bf16"] * amx_bf16
        + ["amx_tile", "avx512_fp16", "bf16"] * similar
    )
    core = (
        f"processor\t: 0\nmodel name\t: x\nvmx flags\t: avx512_bf16 amx_bf16\nflags\t\t: {' '.join(flags)}\n"
    )
    (tmp_path / "cpuinfo").write_text(core + core)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.cpu_flags() == set(flags)
    dtype = machine.serving_dtype()
    assert dtype == ("auto" if avx512_bf16 or amx_bf16 else "float32")
    said = machine.serving_choice(dtype)
    assert ("neither avx512_bf16 nor amx_bf16" in said) == (dtype == "float32")
    assert ("float32" in said) == (dtype == "float32")
    assert "eager mode" in said
    assert "neither" not in machine.serving_choice("bfloat16")


@pytest.mark.parametrize("text", [None, "", "processor : 0\nFeatures : fp asimd\n"])
def test_a_cpu_that_lists_no_flags_has_none(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.cpu_flags() == frozenset()
    assert machine.serving_dtype() == "float32"
