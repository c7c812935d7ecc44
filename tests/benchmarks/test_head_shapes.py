"""The head shapes' benchmark: its lines, and small ones of each kind on a CPU.

Our own implementation of FlashInfer's API replaces FlashInfer.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import pytest
from stand_ins import MACHINE, OneMoreEach, install_peers

from benchmarks import head_shape_peers, head_shapes
from benchmarks.batches import LARGEST_ERROR
from benchmarks.head_shape_cases import ShapeCase, Tensors, all_cases, mla
from benchmarks.head_shape_peers import flashinfer_kernels, peers_of

CASES = list(all_cases())


def small(case: ShapeCase) -> ShapeCase:
    """Three requests of at most 70 tokens, which may share a page."""
    lens = {
        "qo_lens": tuple(min(n, 20) for n in case.qo_lens[:3]),
        "kv_lens": tuple(min(n, 70) for n in case.kv_lens[:3]),
    }
    return replace(case, **lens, shared=min(case.shared, 64))


def test_lines_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_floors() -> None:
    mla = ShapeCase("MLA decode", (1,), (1000,), 16, 1, 576, 512, page_size=64, v_in_k=True)
    assert mla.bytes == 2 * (1000 * 576 + 16 * (576 + 512)), "the latent once"
    assert mla.flops == 2 * 16 * 1000 * (576 + 512)
    latents = ShapeCase("MLA decode", (1,), (1000,), 16, 1, 576, 512, page_size=64, v_in_k=True, kv="latent")
    assert latents.bytes == 1000 * 656 + 2 * 16 * (576 + 512)
    sparse = ShapeCase(
        "sparse MLA",
        (1,) * 8,
        (1000,) * 8,
        16,
        1,
        576,
        512,
        page_size=1,
        v_in_k=True,
        kv="e4m3",
        selects_from=5000,
    )
    assert sparse.bytes == 5000 * 576 + 2 * 8 * 16 * (576 + 512), "no token more than once"
    shared = ShapeCase(
        "MLA decode", (1,) * 4, (1000,) * 4, 16, 1, 576, 512, page_size=64, v_in_k=True, shared=640
    )
    assert shared.bytes == 2 * ((640 + 4 * 360) * 576 + 4 * 16 * (576 + 512)), "what is shared once"
    causal = ShapeCase("prefill", (3,), (5,), 2, 1, 64, 32)
    assert causal.bytes == 2 * (5 * 96 + 3 * 2 * 96)
    assert causal.flops == 2 * 2 * (3 + 4 + 5) * 96


@pytest.mark.parametrize("index", range(len(CASES)))
def test_a_small_line_of_each_kind_is_right(index: int) -> None:
    case = small(CASES[index])
    tensors = Tensors.make(case, "cpu")
    plan, run = head_shapes.ours(tensors)
    plan()
    out = run()
    assert tensors.error(out) < LARGEST_ERROR
    out[-1] += 0.1
    assert tensors.error(out) > LARGEST_ERROR, "the check can fail"
    if case.v_in_k:
        plan, run = head_shapes.ours(tensors, q_parts=True)
        plan()
        assert tensors.error(run()) < LARGEST_ERROR


def test_requests_share_the_pages_of_their_prefix() -> None:
    case = small(next(case for case in CASES if case.shared))
    table = Tensors.make(case, "cpu").block_table
    assert table[:, 0].unique().numel() == 1
    assert table[:, 1].unique().numel() == 3


KINDS = (
    "d64 h32/8",
    "d192/128 h16/16 p16",
    "d192/128 h16/16 ragged",
    "d512 h8/2 p16",
    "d512 h8/2 p16 e4m3",
    "d576/512 h16/1 p64",
)


@pytest.mark.parametrize(
    "index",
    [i for i, case in enumerate(CASES) if case.kv != "latent" and any(kind in case.name for kind in KINDS)],
)
def test_flashinfer_is_called_as_its_api_is(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install_peers(monkeypatch)
    tensors = Tensors.make(small(CASES[index]), "cpu")
    kernels = flashinfer_kernels(tensors)
    assert kernels
    for make in kernels.values():
        assert tensors.error(make()()) < LARGEST_ERROR


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("prefill bs4 4096 d80 h32/8 p16", {"FlashInfer": [], "FA3": ["FA3"]}),
        ("decode bs64 4096 d128 h32/8 p16", {"FlashInfer": ["tensor cores", "CUDA cores"], "FA3": ["FA3"]}),
        ("prefill bs4 4096 d512 h8/2 p16 e4m3", {"FlashInfer": ["fa2"]}),
        (
            "MLA, 8192 tokens shared, bs64 8448 d576/512 h128/1 p64",
            {"FlashInfer": ["fa3"], "FA3": ["FA3"], "FlashMLA": ["FlashMLA"]},
        ),
        (
            "MLA, 2 query tokens bs64 4096 d576/512 h16/1 p64",
            {"FlashInfer": ["fa3"], "FA3": ["FA3"], "FlashMLA": ["FlashMLA"]},
        ),
        ("MLA decode bs64 4096 d576/512 h16/1 p64 latent", {}),
    ],
)
def test_peers_of_a_line(name: str, expected: dict[str, list[str]]) -> None:
    case = next(case for case in CASES if case.name == name)
    assert {
        peer: list(kernels) for peer, kernels in peers_of(Tensors.make(small(case), "cpu")).items()
    } == expected


def test_a_line_goes_on_without_peers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(head_shapes.Tensors, "make", lambda case, make=Tensors.make: make(case, "cpu"))
    install_peers(monkeypatch)
    monkeypatch.setattr(head_shape_peers, "workspace", lambda device: 1 / 0)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.flashmla", None)
    arguments = argparse.Namespace(peer=[], kernel=None, q_parts=False)
    line = head_shapes.measure(small(mla(2, 70, 16)), OneMoreEach(), MACHINE, arguments)
    assert [line[peer] for peer in head_shapes.PEERS] == [None] * 3
    errors = capsys.readouterr().err
    assert all(
        text in errors
        for text in (
            "FlashInfer, fa3: ZeroDivisionError",
            "FA3: ModuleNotFoundError",
            "FlashMLA: ModuleNotFoundError",
        )
    )
    assert line["case"] in head_shapes.markdown([line])
