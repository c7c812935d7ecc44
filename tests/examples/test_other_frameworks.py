"""examples/other_frameworks.py."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("other_frameworks")


@pytest.mark.parametrize("name", ["numpy", "jax", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_arrays_of_a_framework(example: Any, name: str) -> None:
    """Q, K, V, tables, the output and the cache written by append_kv belong to another framework."""
    pytest.importorskip(name, reason=f"{name} is not installed: no array of it was given")
    given = example.arrays()
    wanted = example.expected(given)
    converted = example.converted(name, given)
    out = example.framework(name).from_dlpack(example.attend(converted))
    assert type(out) is type(converted["q"])
    assert numpy.abs(example.on_host(out) - wanted).max() < 2e-3
    tokens = (
        example.on_host(converted["cache"]).swapaxes(1, 2).reshape(-1, 2, example.KV_HEADS, example.HEAD_DIM)
    )
    assert (tokens[given["slots"]] == numpy.stack((given["k"], given["v"]), 1)).all()


@pytest.mark.gpu
def test_streams_of_cupy(example: Any) -> None:
    """CuPy writes Q on a separate stream, after slow kernels. torch reads it on another stream, and CuPy
    reads the output on the first.
    """
    cupy = pytest.importorskip("cupy", reason="cupy is not installed: no array of it was given")
    given = example.arrays()
    wanted = example.expected(given)
    converted = example.converted("cupy", given)
    q, converted["q"] = converted["q"], cupy.zeros_like(converted["q"])
    cupy.cuda.Device().synchronize()
    large = torch.ones(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            for _ in range(20):
                large @ large
        # not by assignment, for which CuPy would compile a kernel
        converted["q"].data.copy_from_device_async(q.data, q.nbytes)
        with torch.cuda.stream(torch.cuda.Stream()):
            out = cupy.from_dlpack(example.attend(converted))
        assert numpy.abs(example.on_host(out) - wanted).max() < 2e-3


def test_it_runs(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("numpy: ")
    assert all(float(line.split()[-1]) < 2e-3 for line in lines), lines
