"""The benchmark of append on a CPU: its lines, and the peers of a line that do the same work."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from stand_ins import MACHINE, OneMoreEach, install_peers

from attn_backend import Rotary, append_qkv
from benchmarks import append
from benchmarks.append import Line, Projected, all_lines

E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def few_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "POSITIONS", 100)
    torch.manual_seed(0)


def test_lines_have_names_of_their_own() -> None:
    assert len({line.name for line in all_lines()}) == len(all_lines()) == 60


def test_floors() -> None:
    line, of_q, of_kv = Line(40, norm=False), 40 * 32 * 128, 2 * 40 * 8 * 128
    assert Projected(line, torch.device("cpu")).moved_bytes == 4 * of_q + 4 * of_kv + 40 * 256
    assert (
        Projected(replace(line, cache=E4M3), torch.device("cpu")).moved_bytes
        == 4 * of_q + 3 * of_kv + 40 * 256
    )


@pytest.mark.parametrize("form", append.SCALED_HEAD_BYTES)
def test_caches_without_a_peer(form: str) -> None:
    line = append.measure(Line(40, False, torch.uint8, form), OneMoreEach(), MACHINE, "cpu")  # type: ignore[arg-type]
    assert (line["ours"], line["append alone"], line["vLLM"]) == (1.0, 2.0, None)
    projected = Projected(Line(40, False, torch.uint8, form), torch.device("cpu"))
    projected.ours()()
    assert projected.kv.k.view(torch.uint8).any()
    assert projected.kv.v.view(torch.uint8).any()
    assert form in append.markdown([line], "header")


@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("norm", [False, True])
def test_peers_do_the_same_work(
    norm: bool, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_peers(monkeypatch)
    line = append.measure(Line(40, norm, cache), OneMoreEach(), MACHINE, "cpu")  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
    assert (line["ours"], line["append alone"], line["vLLM"]) == (1.0, 2.0, 3.0)
    assert line["FlashInfer"] == (4.0 if cache == E4M3 and not norm else None)
    assert line["case"] in append.markdown([line], "header")


@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
def test_a_peer_that_does_something_else_has_no_time(
    cache: torch.dtype, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_peers(monkeypatch)
    monkeypatch.setattr(append, "vllm_rotate", lambda *arguments: lambda: None)
    monkeypatch.setitem(sys.modules, "flashinfer.rope", SimpleNamespace())
    line = append.measure(Line(40, False, cache), OneMoreEach(), MACHINE, "cpu")  # type: ignore[arg-type]
    assert line["ours"] == 1.0
    assert line["vLLM"] is line["FlashInfer"] is None
    printed = capsys.readouterr().out
    assert "vLLM computes something else" in printed
    assert ("FlashInfer: AttributeError" in printed) == (cache == E4M3)
    assert "- " in append.markdown([line], "header")


def test_only_peers_that_are_asked_for_have_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    install_peers(monkeypatch)
    for peers in ((), ("vLLM",), ("FlashInfer",)):
        line = append.measure(Line(40, False, E4M3), OneMoreEach(), MACHINE, "cpu", peers)  # type: ignore[arg-type]
        assert [peer for peer in append.PEERS if line[peer] is not None] == list(peers)


def test_a_wrong_scale_is_noticed() -> None:
    projected = Projected(Line(40, False, E4M3), torch.device("cpu"))
    wrong, rotary = replace(projected.kv, v_scale=2 * append.SCALE), Rotary(projected.table)
    tensors = (projected.q, projected.k, projected.v)
    assert projected.difference(projected.ours()) == 0
    difference = projected.difference(
        lambda: append_qkv(*tensors, wrong, projected.slots, rotary=rotary, positions=projected.positions)
    )
    assert difference > append.LARGEST_DIFFERENCE[E4M3]
