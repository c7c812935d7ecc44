"""The ways that a GPU takes in small batches (csrc/sampling/device/unfiltered.cuh, sampling_few.cuh) give what a CPU gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from sampling_oracle import bits
from test_sampling_invariance import moved

from attn_backend import Samples, sample, sampling_workspace

VOCABS = [1, 511, 4096, 4097, 8193, 32000, 50001, 128256, 262144]


def assert_same(of_gpu: Samples, of_cpu: Samples) -> None:
    assert of_gpu.token_ids.tolist() == of_cpu.token_ids.tolist()
    assert of_gpu.valid.tolist() == of_cpu.valid.tolist()


def rows(kind: str, batch: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Rows whose largest values lie in all places, in few, or nowhere."""
    logits = torch.randn(batch, vocab, generator=generator)
    hot = torch.zeros(vocab)
    hot[: min(vocab, 700)] = 6.0
    ascending = torch.linspace(-8, 8, vocab).repeat(batch, 1)
    return {
        "flat": logits,
        "peaked": logits * 4,
        "largest at low ids": logits + hot,
        "largest at one end": ascending,
        "equal": torch.full((batch, vocab), 2.5),
        "few values": (logits * 2).round(),
        "mostly excluded": logits.masked_fill(torch.rand(batch, vocab, generator=generator) < 0.995, -torch.inf),
        "far below zero": logits - 100,
        "about zero": logits * 1e-30,
        "next to zero": logits * 1e-38,
        "far apart": logits * 1e38,
        "bad": torch.where(torch.rand(batch, vocab, generator=generator) < 0.5 / vocab, torch.nan, logits),
        "nothing allowed": torch.full((batch, vocab), -torch.inf),
    }[kind]


KINDS = ["flat", "peaked", "largest at low ids", "largest at one end", "equal", "few values", "mostly excluded", "far below zero", "about zero"]
KINDS += ["next to zero", "far apart", "bad", "nothing allowed"]


def some_settings(choose: random.Random, batch: int, vocab: int, generator: torch.Generator) -> dict[str, Any]:
    settings = {
        "temperature": torch.tensor([choose.choice([0.0, 0.6, 1.0, 1.0, 5.0, 1e-7, 1e30, -1.0, float("nan")]) for _ in range(batch)]),
        "seed": torch.randint(0, 2**62, (batch,), generator=generator),
        "position": torch.randint(0, 2**31, (batch,), generator=generator),
    }
    if choose.random() < 0.3:
        settings["token_mask"] = bits(torch.rand(batch, vocab, generator=generator) < choose.choice([0.5, 2 / vocab]))
    return settings


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_filters_that_many_ctas_share(kind: str) -> None:
    choose, generator = random.Random(kind), torch.Generator().manual_seed(KINDS.index(kind))
    workspace = sampling_workspace("cuda")
    for vocab in VOCABS:
        batch = choose.choice([1, 2, 8, 33])
        logits = rows(kind, batch, vocab, generator).to(choose.choice([torch.float32, torch.bfloat16, torch.float16]))
        settings = some_settings(choose, batch, vocab, generator)
        on_cpu = sample(logits, **settings)
        for row_ctas in (0, 1, 2, 5, 11):
            assert_same(sample(logits.cuda(), workspace=workspace, row_ctas=row_ctas, **moved(settings)), on_cpu)
    assert workspace.any()


@pytest.mark.gpu
def test_a_workspace_serves_one_launch_after_another() -> None:
    """Replays of a graph too, whose positions are read when they run."""
    workspace, seed, position = sampling_workspace("cuda"), torch.arange(4, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    logits = torch.randn(4, 50000, device="cuda")
    expected = [sample(logits.cpu(), seed=seed.cpu(), position=i).token_ids.tolist() for i in range(50)]
    out = torch.empty(4, dtype=torch.int32, device="cuda")
    sample(logits, seed=seed, position=position, out=out, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, seed=seed, position=position, out=out, workspace=workspace)
    drawn = []
    for i in range(50):
        position.fill_(i)
        graph.replay()
        drawn.append(out.clone())
    assert [tokens.tolist() for tokens in drawn] == expected


@pytest.mark.gpu
def test_what_a_workspace_does_not_suit_goes_another_way() -> None:
    """Filters, log-probabilities, batches that are too large: nobody writes into the workspace."""
    workspace = sampling_workspace("cuda")
    generator = torch.Generator().manual_seed(0)
    for batch, wanted in ((2, {"top_k": 5}), (2, {"top_p": 0.5}), (2, {"min_p": 0.1}), (3, {"return_logprobs": True}), (3, {"num_top_logprobs": 2}), (600, {})):
        logits = torch.randn(batch, 9000, generator=generator)
        settings = {"seed": torch.arange(batch), **wanted}
        assert_same(sample(logits.cuda(), workspace=workspace, **moved(settings)), sample(logits, **settings))
        assert not workspace.any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_which_few_tokens_survive(kind: str) -> None:
    choose, generator = random.Random(kind), torch.Generator().manual_seed(100 + KINDS.index(kind))
    for vocab in VOCABS[2:]:
        batch = choose.choice([1, 2, 8, 33])
        logits = rows(kind, batch, vocab, generator).to(choose.choice([torch.float32, torch.bfloat16, torch.float16]))
        settings = some_settings(choose, batch, vocab, generator)
        settings["top_k"] = torch.tensor([choose.choice([1, 2, 20, 40, 50, 50, 64, 65, 100, 0, vocab]) for _ in range(batch)])
        if choose.random() < 0.8:
            settings["top_p"] = torch.tensor([choose.choice([0.9, 0.9, 0.95, 0.5, 1.0, 0.0, 0.999]) for _ in range(batch)])
        if choose.random() < 0.4:
            settings["min_p"] = torch.tensor([choose.choice([0.1, 0.01, 0.0, 1.0]) for _ in range(batch)])
        settings["filter_order"] = choose.choice(["top_k_first", "top_k_first", "joint"])
        on_cpu = sample(logits, **settings)
        for row_ctas in (0, 1, 2, 4, 8, 16) if torch.cuda.get_device_capability() == (9, 0) else (0, 1):
            assert_same(sample(logits.cuda(), row_ctas=row_ctas, **moved(settings)), on_cpu)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["flat", "peaked", "largest at low ids", "few values", "mostly excluded", "far below zero"])
def test_few_tokens_survive_top_k_and_a_top_p_of_all_tokens(kind: str) -> None:
    """SGLang's order: the mass of the whole row is part of the answer."""
    choose, generator = random.Random(kind), torch.Generator().manual_seed(200 + KINDS.index(kind))
    for vocab in VOCABS[4:]:
        logits = rows(kind, 6, vocab, generator).to(choose.choice([torch.float32, torch.bfloat16, torch.float16]))
        settings = some_settings(choose, 6, vocab, generator)
        settings["temperature"] = torch.tensor([0.2, 0.6, 0.6, 1.0, 1.0, 2.0])
        settings["top_k"] = torch.tensor([choose.choice([1, 20, 50, 64]) for _ in range(6)])
        settings["top_p"] = torch.tensor([0.001, 0.01, 0.1, 0.3, 0.6, 0.9])
        settings["min_p"] = choose.choice([0.0, 0.05])
        on_cpu = sample(logits, filter_order="joint", **settings)
        for row_ctas in (0, 4, 8, 16) if torch.cuda.get_device_capability() == (9, 0) else (0,):
            assert_same(sample(logits.cuda(), filter_order="joint", row_ctas=row_ctas, **moved(settings)), on_cpu)
