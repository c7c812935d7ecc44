"""Which peers take part, and what counts for one: its fastest kernel whose output is right."""

from __future__ import annotations

import math
import sys
from importlib import import_module

import pytest
import torch

from benchmarks.peers import fastest
from benchmarks.report import asked_peers, options

BOARDS = (
    "append",
    "attention",
    "fp8",
    "head_shapes",
    "host",
    "layer",
    "sampling",
    "shared_prefix",
    "variants",
)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ([], ("A", "B c")),
        (["--peer", "B c"], ("B c",)),
        (["--peer", "B c", "--peer", "A"], ("A", "B c")),
        (["--peer", "none"], ()),
    ],
)
def test_peers_that_are_asked_for(given: list[str], asked: tuple[str, ...]) -> None:
    peers = ("A", "B c")
    assert asked_peers(peers, options("", peers=peers).parse_args(given)) == asked


@pytest.mark.parametrize("board", BOARDS)
def test_every_board_with_peers_has_the_option(
    board: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = import_module(f"benchmarks.{board}")
    monkeypatch.setattr(sys, "argv", [board, "--peer", "nobody"])
    with pytest.raises(SystemExit):
        module.main()
    said = capsys.readouterr().err
    assert "argument --peer: invalid choice: 'nobody'" in said
    assert all(name in said for name in (*module.PEERS, "none"))


def test_the_fastest_right_kernel_counts(capsys: pytest.CaptureFixture[str]) -> None:
    times = {1.0: 9.0, 2.0: 7.0, 3.0: 1.0, 4.0: 0.5}  # by what is computed

    def timer(run) -> float:
        return times[float(run()[0])]

    def failing():
        raise RuntimeError("no such kernel")

    computed = {"slow": 1.0, "fast": 2.0, "wrong": 3.0, "not a number": 4.0}
    kernels = {"missing": failing} | {
        name: lambda value=value: lambda: torch.tensor([value]) for name, value in computed.items()
    }

    def error(out: torch.Tensor) -> float:
        return {1.0: 1e-3, 2.0: 2e-3, 3.0: 0.5, 4.0: math.nan}[float(out[0])]

    assert fastest("P", "line", kernels, timer, error, 1e-2) == {
        "P": 7.0,
        "P backend": "fast",
        "P error": 2e-3,
    }
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "line: P, wrong: WRONG, relative error 5.0e-01",
        "line: P, not a number: WRONG, relative error nan",
    ]
    assert printed.err == "line: P, missing: RuntimeError: no such kernel\n"
    assert fastest("P", "line", kernels, timer, lambda out: None, 1e-2)["P"] == 0.5, "nothing to compare with"
    assert fastest("P", "line", {"missing": failing}, timer, error, 1e-2) == {"P": None}
    assert fastest("P", "line", {"P": failing}, timer, error, 1e-2) == {"P": None}
    assert capsys.readouterr().err.splitlines()[-1] == "line: P: RuntimeError: no such kernel"
