"""Draws follow the exact distribution: chi-square over a million draws (on a GPU) for every combination of
filters, p-values uniform.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from sampling_oracle import chi_square_p_value, keeps, probabilities, uniformity_p_value

from attn_backend import chain_speculative_sampling, sample, sample_from_probs

pytestmark = pytest.mark.slow

DRAWS = 1 << (20 if torch.cuda.is_available() else 18)
# A correct sampler may also fail by chance: only a p-value below this counts as a wrong distribution.
LEAST_P_VALUE = 1e-5

COMBINATIONS: list[dict[str, Any]] = [
    {**k, **p, **m, **order, **t}
    for k, p, m, t in itertools.product(
        ({}, {"top_k": 9}),
        ({}, {"top_p": 0.8}),
        ({}, {"min_p": 0.05}),
        ({"temperature": 0.7}, {"temperature": 1.6}),
    )
    for order in ({}, {"filter_order": "joint"})
    if p or not order  # the order matters only to top-p
]


def draws(logits: torch.Tensor, device: torch.device, settings: dict[str, Any], seed: int) -> torch.Tensor:
    """How often each token of a row is drawn by DRAWS requests."""
    rows = logits.to(device).expand(DRAWS, -1)
    seeds = torch.arange(DRAWS, device=device) + seed * DRAWS
    samples = sample(rows, seed=seeds, position=seed, **settings)
    assert bool(samples.valid.all())
    return torch.bincount(samples.token_ids.long(), minlength=logits.shape[-1]).cpu()


def test_every_combination_of_filters(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(7)
    p_values = []
    for n, settings in enumerate(COMBINATIONS):
        logits = torch.randn(24, generator=generator) * 2
        kept = keeps(logits, **settings)
        probs = probabilities(logits, kept, settings["temperature"])
        counts = draws(logits, device, settings, n)
        assert not bool(counts[~kept].any()), f"{settings}: a token was drawn that a filter removes"
        assert bool((counts > 0)[probs * DRAWS > 40].all()), f"{settings}: a survivor is never drawn"
        p_value = chi_square_p_value(counts, probs)
        assert p_value > LEAST_P_VALUE, settings
        if int(kept.sum()) > 1:
            p_values.append(p_value)
    print("p-values:", " ".join(f"{p:.3f}" for p in p_values))
    assert uniformity_p_value(p_values) > LEAST_P_VALUE


def test_positions_are_draws_too(device: torch.device) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(8))
    samples = sample(logits.to(device).expand(DRAWS, -1), seed=5, position=torch.arange(DRAWS, device=device))
    counts = torch.bincount(samples.token_ids.long(), minlength=24).cpu()
    assert chi_square_p_value(counts, torch.softmax(logits.double(), -1)) > LEAST_P_VALUE


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.95}, {"top_k": 700}, {"min_p": 0.3}], ids=str)
def test_rows_of_many_segments(device: torch.device, settings: dict[str, Any]) -> None:
    """Flat rows of a few thousand tokens, more than the candidates cover; tokens are counted in groups."""
    vocab, rows = 5000, 1 << (14 if device.type == "cpu" else 20)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(9)) * 0.5
    kept = keeps(logits, **settings)
    probs = probabilities(logits, kept)
    tokens = torch.cat(
        [
            sample(
                logits.to(device).expand(1 << 14, -1),
                seed=torch.arange(1 << 14, device=device) + begin,
                position=3,
                **settings,
            ).token_ids.cpu()
            for begin in range(0, rows, 1 << 14)
        ]
    )
    counts = torch.bincount(tokens.long(), minlength=vocab)
    assert not bool(counts[~kept].any())
    groups = torch.arange(vocab) % 100
    of_groups = torch.zeros(100, dtype=torch.float64).index_add_(0, groups, probs)
    assert (
        chi_square_p_value(torch.bincount(groups, weights=counts.double(), minlength=100), of_groups)
        > LEAST_P_VALUE
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}],
    ids=str,
)
def test_from_probs(device: torch.device, settings: dict[str, Any]) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(10)) * 2
    probs = torch.softmax(logits, -1) * 3  # not normalized
    samples = sample_from_probs(
        probs.to(device).expand(DRAWS, -1), seed=torch.arange(DRAWS, device=device), **settings
    )
    counts = torch.bincount(samples.token_ids.long(), minlength=24).cpu()
    kept = keeps(probs.double().log(), **settings)
    assert chi_square_p_value(counts, probabilities(probs.double().log(), kept)) > LEAST_P_VALUE
    assert not bool(counts[~kept].any())


def test_speculative_sampling_draws_from_the_target(device: torch.device) -> None:
    """The first token follows the target's distribution for any draft; the number of accepted tokens follows
    the overlap.
    """
    generator = torch.Generator().manual_seed(11)
    vocab, drafts, rows = 12, 2, 1 << 19
    draft = torch.softmax(torch.randn(drafts, vocab, generator=generator) * 1.5, -1)
    target = torch.softmax(torch.randn(drafts + 1, vocab, generator=generator) * 1.5, -1)
    ids = torch.stack(
        [torch.multinomial(draft[i], rows, replacement=True, generator=generator) for i in range(drafts)], 1
    )
    samples = chain_speculative_sampling(
        draft.expand(rows, -1, -1).contiguous().to(device),
        ids.to(device),
        target.expand(rows, -1, -1).contiguous().to(device),
        seed=torch.arange(rows, device=device),
        position=4,
    )
    tokens, accepted = samples.token_ids.cpu(), samples.num_accepted.cpu()
    assert bool(samples.valid.all())
    assert (
        chi_square_p_value(torch.bincount(tokens[:, 0].long(), minlength=vocab), target[0].double())
        > LEAST_P_VALUE
    )
    second = tokens[accepted >= 1, 1].long()
    assert chi_square_p_value(torch.bincount(second, minlength=vocab), target[1].double()) > LEAST_P_VALUE
    third = tokens[accepted == 2, 2].long()
    assert chi_square_p_value(torch.bincount(third, minlength=vocab), target[2].double()) > LEAST_P_VALUE
    overlap = torch.minimum(draft.double(), target[:drafts].double()).sum(-1)
    wanted = torch.stack([1 - overlap[0], overlap[0] * (1 - overlap[1]), overlap[0] * overlap[1]])
    assert chi_square_p_value(torch.bincount(accepted.long(), minlength=3), wanted) > LEAST_P_VALUE
