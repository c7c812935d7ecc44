"""The benchmark of variants: its lines, small and on a CPU, compute what they claim. Nothing is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiers import mostly_slow

from attn_backend.jit import compilers
from benchmarks import variant_cases
from benchmarks.batches import LARGEST_ERROR, Batch
from benchmarks.cases import Case
from benchmarks.variant_cases import MEANINGS, TREE, Expected, all_cases, ours, visible, work
from benchmarks.variant_peers import peers_of
from benchmarks.variants import markdown

CPU = torch.device("cpu")
PROMPT = Case("prompts", (300,) * 2, (300,) * 2, 8, 2, 64, 1, ragged=True)
DECODE = Case("decode", (1,) * 3, (333,) * 3, 8, 2, 64)
TREES = Case("trees", (TREE,) * 2, (100 + TREE,) * 2, 8, 2, 64)

needs_cpp = pytest.mark.skipif(compilers.cpp_compiler() is None, reason="needs a C++ compiler")


def test_lines_have_names_of_their_own() -> None:
    names = [line.name for line in all_cases()]
    assert len(set(names)) == len(names)
    assert {line.variant for line in all_cases()} == set(MEANINGS)


@needs_cpp
@pytest.mark.parametrize("name", mostly_slow(MEANINGS, fast=3))
def test_ours_is_what_a_line_means(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant_cases, "WINDOW", 100)
    monkeypatch.setattr(variant_cases, "CAP", 2.0)
    for case in (TREES,) if name == "tree mask" else (PROMPT, DECODE):
        batch = Batch.make(case, device="cpu")
        meaning = MEANINGS[name](case, CPU)
        expected = Expected(batch, meaning)
        assert expected.error(ours(batch, meaning).run()) < LARGEST_ERROR
        if name != "causal" and case is not DECODE:
            assert (
                Expected(batch, MEANINGS["causal"](case, CPU)).error(expected_out(expected, batch))
                > LARGEST_ERROR
            )


def expected_out(expected: Expected, batch: Batch) -> torch.Tensor:
    """The known rows of the output; the others are 0."""
    out = torch.zeros_like(batch.q, dtype=torch.float64)
    out[expected.rows] = expected.out
    return out


def test_work_is_that_of_the_pairs_that_are_seen() -> None:
    causal = MEANINGS["causal"]
    assert work(causal(PROMPT, CPU), PROMPT, CPU) == (PROMPT.bytes, PROMPT.flops)
    assert work(causal(DECODE, CPU), DECODE, CPU) == (DECODE.bytes, DECODE.flops)
    long = replace(DECODE, kv_lens=(3000,) * 3)
    moved, flops = work(MEANINGS["gpt-oss"](long, CPU), long, CPU)
    assert flops == 4 * 3 * variant_cases.GPT_OSS_WINDOW * 8 * 64
    assert moved < long.bytes / 10
    documents = MEANINGS["document mask"](PROMPT, CPU)
    assert work(documents, PROMPT, CPU)[1] < PROMPT.flops / 4
    assert not visible(documents, PROMPT, 1, torch.tensor([299]))[0, 0]


def test_each_peer_has_its_lines() -> None:
    found: dict[str, set[str]] = {}
    for line in all_cases():
        small = replace(line.case, qo_lens=line.case.qo_lens[:1], kv_lens=line.case.kv_lens[:1])
        batch = Batch.make(replace(DECODE, ragged=False), device="cpu")
        for peer, kernels in peers_of(replace(batch, case=small), MEANINGS[line.variant](small, CPU)).items():
            if kernels:
                found.setdefault(peer, set()).add(line.variant)
    assert found["FA3"] == {"causal", "soft cap 30", "window 1024", "sinks", "gpt-oss"}
    assert found["FlashInfer"] == set(MEANINGS) - {"scaled K and V"}
    assert found["flex_attention"] == set(MEANINGS) - {"sigmoid", "RoPE", "scaled K and V"}


def test_the_table() -> None:
    line = {
        "case": "a",
        "floor": 1.0,
        "ours": 3.0,
        "causal": 2.0,
        "plan": 1.0,
        "error": 1e-3,
        "FA3": 6.0,
        "FlashInfer": None,
        "flex_attention": None,
    }
    cells = [cell.strip() for cell in markdown([line]).splitlines()[-1].split("|")[1:-1]]
    assert cells == ["a", "1.0", "3.0", "1.0", "6.0", "-", "-", "0.50", "1.50", "1.0e-03"]
