"""A GPU's special paths for small batches (csrc/sampling/device/unfiltered.cuh, candidates.cuh) give the
CPU's results.
"""

from __future__ import annotations

import random

import attention_kernels
import pytest
import torch
from sampling_problems import ROW_KINDS, draw_settings, moved, rows_of

from attn_backend import Samples, sample, sampling_workspace

VOCABS = [1, 511, 4096, 4097, 8193, 32000, 50001, 128256, 262144]


def assert_same(of_gpu: Samples, of_cpu: Samples) -> None:
    assert of_gpu.token_ids.tolist() == of_cpu.token_ids.tolist()
    assert of_gpu.valid.tolist() == of_cpu.valid.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROW_KINDS)
def test_rows_without_filters_that_many_ctas_share(kind: str) -> None:
    choose, generator = random.Random(kind), torch.Generator().manual_seed(ROW_KINDS.index(kind))
    workspace = sampling_workspace("cuda")
    for vocab in VOCABS:
        batch = choose.choice([1, 2, 8, 33])
        logits = rows_of(kind, batch, vocab, generator).to(
            choose.choice([torch.float32, torch.bfloat16, torch.float16])
        )
        settings = draw_settings(choose, batch, vocab, generator)
        on_cpu = sample(logits, **settings)
        for row_ctas in (0, 1, 2, 5, 11):
            assert_same(
                sample(logits.cuda(), workspace=workspace, row_ctas=row_ctas, **moved(settings)), on_cpu
            )
    assert workspace.any()


@pytest.mark.gpu
def test_a_workspace_serves_one_launch_after_another() -> None:
    """Also in graph replays, whose positions are read when they run."""
    workspace, seed, position = (
        sampling_workspace("cuda"),
        torch.arange(4, device="cuda"),
        torch.zeros(4, dtype=torch.int64, device="cuda"),
    )
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
    """Filters, log-probabilities, and batches that are too large: the workspace is not written."""
    workspace = sampling_workspace("cuda")
    generator = torch.Generator().manual_seed(0)
    for batch, wanted in (
        (2, {"top_k": 5}),
        (2, {"top_p": 0.5}),
        (2, {"min_p": 0.1}),
        (3, {"return_logprobs": True}),
        (3, {"num_top_logprobs": 2}),
        (600, {}),
    ):
        logits = torch.randn(batch, 9000, generator=generator)
        settings = {"seed": torch.arange(batch), **wanted}
        assert_same(sample(logits.cuda(), workspace=workspace, **moved(settings)), sample(logits, **settings))
        assert not workspace.any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROW_KINDS)
def test_rows_of_which_few_tokens_survive(kind: str) -> None:
    choose, generator = random.Random(kind), torch.Generator().manual_seed(100 + ROW_KINDS.index(kind))
    for vocab in VOCABS[2:]:
        batch = choose.choice([1, 2, 8, 33])
        logits = rows_of(kind, batch, vocab, generator).to(
            choose.choice([torch.float32, torch.bfloat16, torch.float16])
        )
        settings = draw_settings(choose, batch, vocab, generator)
        settings["top_k"] = torch.tensor(
            [choose.choice([1, 2, 20, 40, 50, 50, 64, 65, 100, 0, vocab]) for _ in range(batch)]
        )
        if choose.random() < 0.8:
            settings["top_p"] = torch.tensor(
                [choose.choice([0.9, 0.9, 0.95, 0.5, 1.0, 0.0, 0.999]) for _ in range(batch)]
            )
        if choose.random() < 0.4:
            settings["min_p"] = torch.tensor([choose.choice([0.1, 0.01, 0.0, 1.0]) for _ in range(batch)])
        settings["filter_order"] = choose.choice(["top_k_first", "top_k_first", "joint"])
        on_cpu = sample(logits, **settings)
        for row_ctas in (0, 1, 2, 4, 8, 16) if attention_kernels.has_clusters() else (0, 1):
            assert_same(sample(logits.cuda(), row_ctas=row_ctas, **moved(settings)), on_cpu)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", ["flat", "peaked", "largest at low ids", "few values", "mostly excluded", "far below zero"]
)
def test_few_tokens_survive_top_k_and_a_top_p_of_all_tokens(kind: str) -> None:
    """SGLang's order: the result depends on the mass of the whole row."""
    choose, generator = random.Random(kind), torch.Generator().manual_seed(200 + ROW_KINDS.index(kind))
    for vocab in VOCABS[4:]:
        logits = rows_of(kind, 6, vocab, generator).to(
            choose.choice([torch.float32, torch.bfloat16, torch.float16])
        )
        settings = draw_settings(choose, 6, vocab, generator)
        settings["temperature"] = torch.tensor([0.2, 0.6, 0.6, 1.0, 1.0, 2.0])
        settings["top_k"] = torch.tensor([choose.choice([1, 20, 50, 64]) for _ in range(6)])
        settings["top_p"] = torch.tensor([0.001, 0.01, 0.1, 0.3, 0.6, 0.9])
        settings["min_p"] = choose.choice([0.0, 0.05])
        on_cpu = sample(logits, filter_order="joint", **settings)
        for row_ctas in (0, 4, 8, 16) if attention_kernels.has_clusters() else (0,):
            assert_same(
                sample(logits.cuda(), filter_order="joint", row_ctas=row_ctas, **moved(settings)), on_cpu
            )
