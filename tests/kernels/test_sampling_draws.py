"""Exact draws from probabilities and in speculation: the random numbers that they use, and nothing else.

Logits: test_sampling.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from sampling_oracle import keeps, philox4x32, race_values

from attn_backend import chain_speculative_sampling, sample_from_probs

CLEAR = 1e-5  # race values that differ by more than this are distinct in float32


def seeds_and_positions(generator: torch.Generator, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both have 64 bits, and swapping them gives a different draw."""
    return torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator), torch.randint(
        0, 2**62, (batch,), generator=generator
    )


def race(probs: torch.Tensor, seed: int, position: int) -> torch.Tensor:
    return race_values(probs.double().log(), seed, position)


@pytest.mark.parametrize("as_tensors", [True, False])
def test_from_probs(device: torch.device, as_tensors: bool) -> None:
    vocab, batch = 700, 16
    generator = torch.Generator().manual_seed(20)
    seeds, positions = seeds_and_positions(generator, batch)
    probs = torch.softmax(torch.randn(batch, vocab, generator=generator) * 2, -1)
    values = torch.stack(
        [
            race(p, seed, position)
            for p, seed, position in zip(probs, seeds.tolist(), positions.tolist(), strict=True)
        ]
    )
    decided = 0
    for settings in ({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}):
        if as_tensors:
            tokens = (
                sample_from_probs(
                    probs.to(device), seed=seeds.to(device), position=positions.to(device), **settings
                )
                .token_ids.cpu()
                .long()
            )
        else:
            pairs = zip(probs.to(device), seeds.tolist(), positions.tolist(), strict=True)
            tokens = torch.cat(
                [
                    sample_from_probs(p[None], seed=seed, position=position, **settings).token_ids.cpu()
                    for p, seed, position in pairs
                ]
            ).long()
        kept = torch.stack([keeps(p.double().log(), **settings) for p in probs])
        best = values.masked_fill(~kept, -math.inf).topk(2).values
        clear = best[:, 0] - best[:, 1] > CLEAR
        assert torch.equal(values.gather(1, tokens[:, None])[clear, 0], best[clear, 0])
        decided += int(clear.sum())
    assert decided > 4 * batch * 0.95


def accepts(seed: int, position: int, draft: float, target: float) -> bool:
    """24 bits of a separate stream, compared with the ratio."""
    mask = 0xFFFFFFFF
    word = philox4x32([position & mask, position >> 32 & mask, 0, 1], [seed & mask, seed >> 32 & mask])[0]
    return (word >> 8) / 2**24 * draft < target


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("as_tensors", [True, False])
def test_speculation(device: torch.device, as_tensors: bool, ids_dtype: torch.dtype) -> None:
    """The word at a draft token's own position accepts it. The last token is drawn at the position after the
    accepted ones.
    """
    vocab, drafts, batch = 60, 4, 64
    generator = torch.Generator().manual_seed(21)
    seeds, positions = seeds_and_positions(generator, batch)
    draft = torch.softmax(torch.randn(batch, drafts, vocab, generator=generator), -1)
    target = torch.softmax(
        torch.cat([draft.log(), draft[:, :1].log()], 1)
        + torch.randn(batch, drafts + 1, vocab, generator=generator),
        -1,
    )
    # always accepted; if the id is no token, only the target is left to draw from
    target[::4, :drafts] = draft[::4]
    ids = torch.stack(
        [torch.multinomial(draft[:, i], 1, generator=generator)[:, 0] for i in range(drafts)], 1
    )
    ids[::8, 2] = torch.tensor([-1, vocab]).repeat(batch // 16)
    given = [draft.to(device), ids.to(device, ids_dtype), target.to(device)]
    if as_tensors:
        samples = [chain_speculative_sampling(*given, seed=seeds.to(device), position=positions.to(device))]
    else:
        rows = enumerate(zip(seeds.tolist(), positions.tolist(), strict=True))
        samples = [
            chain_speculative_sampling(*(t[i : i + 1] for t in given), seed=seed, position=position)
            for i, (seed, position) in rows
        ]
    tokens = torch.cat([s.token_ids for s in samples]).tolist()
    num_accepted, num_passed = (
        torch.cat([s.num_accepted for s in samples]).tolist(),
        torch.cat([s.num_passed for s in samples]).tolist(),
    )
    assert bool(torch.cat([s.valid for s in samples]).all())
    assert set(num_accepted) == set(num_passed) == set(range(drafts + 1))
    decided = 0
    for i, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        passes = [
            0 <= (token := int(ids[i, j])) < vocab
            and accepts(seed, position + j, float(draft[i, j, token]), float(target[i, j, token]))
            for j in range(drafts)
        ]
        wanted = [*passes, False].index(False)
        assert (num_accepted[i], num_passed[i]) == (wanted, sum(passes))
        assert tokens[i][:wanted] == ids[i, :wanted].tolist()
        assert tokens[i][wanted + 1 :] == [-1] * (drafts - wanted)
        rest = (target[i, wanted] - draft[i, wanted]).clamp_min(0) if wanted < drafts else target[i, wanted]
        values = race(rest if bool(rest.any()) else target[i, wanted], seed, position + wanted)
        best = values.topk(2)
        if float(best.values[0] - best.values[1]) > CLEAR:
            decided += 1
            assert tokens[i][wanted] == int(best.indices[0])
    assert decided > batch * 0.95


@pytest.mark.parametrize(
    ("draft", "target", "valid"),
    [
        ([0.5, 0.5, 0.0], [0.0, 0.6, 0.4], True),
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], True),  # nothing is left: drawn from the target
        ([0.5, 0.5, 0.0], [0.0, -0.1, 1.1], False),  # negative, whether or not the draft has more ...
        ([0.5, 0.0, 0.5], [0.0, -0.1, 1.1], False),
        ([0.5, 0.5, 0.0], [-0.1, 0.5, 0.0], False),  # ... and if nothing else is left
        ([0.5, 0.5, 0.0], [0.0, math.nan, 1.0], False),
        ([0.5, math.nan, 0.0], [0.0, 0.5, 0.5], False),
        ([0.5, 0.5, 0.0], [0.0, math.inf, 1.0], False),
        ([0.5, 0.5, 0.0], [0.0, 0.0, 0.0], False),  # no probability at all
    ],
)
def test_what_a_draft_is_refused_for_may_spoil_the_row(
    device: torch.device, draft: list[float], target: list[float], valid: bool
) -> None:
    """Other rows stay intact. Draft token -1 is never accepted."""
    good = torch.tensor([0.2, 0.3, 0.5])
    drafts = torch.stack([good, torch.tensor(draft), good])[:, None]
    targets = torch.stack([good, torch.tensor(target), good])[:, None].repeat(1, 2, 1)
    ids = torch.tensor([[0], [-1], [2]])
    samples = chain_speculative_sampling(drafts.to(device), ids.to(device), targets.to(device), seed=5)
    assert samples.num_accepted.tolist() == [1, 0, 1]
    assert samples.valid.tolist() == [True, valid, True]
    assert valid or samples.token_ids[1].tolist() == [0, -1]


@pytest.mark.parametrize(
    "target", [[-0.1, 0.6, 0.5], [0.5, math.nan, 0.5], [math.inf, 0.0, 0.0], [0.0, 0.0, 0.0]]
)
def test_the_target_after_accepted_drafts_may_spoil_the_row(
    device: torch.device, target: list[float]
) -> None:
    good = torch.tensor([0.2, 0.3, 0.5])
    targets = torch.stack([good, torch.tensor(target)])[None]
    samples = chain_speculative_sampling(
        good[None, None].to(device), torch.tensor([[2]], device=device), targets.to(device)
    )
    assert (samples.num_accepted.tolist(), samples.valid.tolist(), samples.token_ids.tolist()) == (
        [1],
        [False],
        [[2, 0]],
    )
