"""Rows from which nothing can be drawn, and a hundred thousand rows of anything: no hangs, no crashes,
correct flags, legal tokens.
"""

from __future__ import annotations

import math

import pytest
import torch
from sampling_oracle import bits

from attn_backend import chain_speculative_sampling, sample, sample_from_probs

NAN, INF = math.nan, math.inf
BATCH = 1000
NASTY = torch.tensor(
    [
        float("nan"),
        float("inf"),
        -float("inf"),
        -float("inf"),
        0.0,
        -0.0,
        1.0,
        -1.0,
        3.4e38,
        -3.4e38,
        1e-45,
        -1e-45,
        65504.0,
        1e4,
        -1e4,
        20.0,
    ]
)


BAD_ROWS = {
    "NaN": [0.0, NAN, 1.0],
    "only NaN": [NAN, NAN, NAN],
    "+inf": [0.0, INF, 1.0],
    "+inf and -inf": [-INF, INF, -INF],
    "all -inf": [-INF, -INF, -INF],
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_flags_itself_and_nobody_else(device: torch.device, name: str, temperature: float) -> None:
    logits = torch.randn(9, 3, generator=torch.Generator().manual_seed(7))
    seeds = torch.arange(9, device=device)
    good = sample(
        logits.to(device), temperature=temperature, seed=seeds, return_logprobs=True, num_top_logprobs=2
    )
    logits[4] = torch.tensor(BAD_ROWS[name])
    for settings in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}):
        bad = sample(
            logits.to(device),
            temperature=temperature,
            seed=seeds,
            return_logprobs=True,
            num_top_logprobs=2,
            **settings,
        )
        assert bad.valid.tolist() == [i != 4 for i in range(9)]
        assert bad.token_ids[4].item() == 0
        assert bad.logprobs is not None
        assert bad.top_logprobs is not None
        assert math.isnan(bad.logprobs[4].item())
        assert bool(bad.top_logprobs[4].isnan().all())
        if not settings:
            others = [i for i in range(9) if i != 4]
            assert bad.token_ids[others].tolist() == good.token_ids[others].tolist()


@pytest.mark.parametrize("parameter", ["temperature", "top_p", "min_p"])
def test_a_nan_parameter_makes_a_bad_row(device: torch.device, parameter: str) -> None:
    values = torch.full((3,), 0.5, device=device)
    values[1] = NAN
    assert sample(torch.zeros(3, 10, device=device), **{parameter: values}).valid.tolist() == [
        True,
        False,
        True,
    ]  # type: ignore[arg-type]
    negative = torch.tensor([1.0, -1.0, 0.0], device=device)
    assert sample(torch.zeros(3, 10, device=device), temperature=negative).valid.tolist() == [
        True,
        False,
        True,
    ]


def nasty(generator: torch.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Rows in which none to all of the values are nasty; a few rows hold only one value."""
    values = torch.randn(rows, vocab, generator=generator) * 4
    share = torch.rand(rows, 1, generator=generator) ** 4 * torch.randint(
        0, 2, (rows, 1), generator=generator
    )
    chosen = torch.rand(rows, vocab, generator=generator) < share
    some = NASTY[torch.randint(0, len(NASTY), (rows, vocab), generator=generator)]
    values = torch.where(chosen, some, values)
    values[: rows // 20] = NASTY[torch.randint(0, len(NASTY), (rows // 20, 1), generator=generator)]
    return values


def choice(
    generator: torch.Generator, values: list[float], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[torch.randint(0, len(values), (BATCH,), generator=generator)]


@pytest.mark.parametrize("number", range(100))
def test_hundred_thousand_rows(device: torch.device, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    vocab = [1, 2, 33, 100, 700][number % 5]
    dtype = [torch.float32, torch.bfloat16, torch.float16][number % 3]
    logits = nasty(generator, BATCH, vocab).to(dtype)
    mask = torch.rand(BATCH, vocab, generator=generator) < torch.rand(BATCH, 1, generator=generator) * 2
    nan, inf = float("nan"), float("inf")
    temperature = choice(generator, [0.0, 1.0, 1.0, 1.0, 0.5, 1e-38, 1e38, inf, -1.0, nan])
    top_p = choice(generator, [1.0, 1.0, 0.9, 0.0, -inf, inf, nan])
    min_p = choice(generator, [0.0, 0.0, 0.1, 1.0, -inf, inf, nan])
    top_k = choice(generator, [0, 0, 1, 5, 10**6, -(2**31), 2**31 - 1], torch.int32)
    masked = number % 2 == 0
    samples = sample(
        logits.to(device),
        temperature=temperature.to(device),
        top_k=top_k.to(device),
        top_p=top_p.to(device),
        min_p=min_p.to(device),
        seed=torch.randint(-(2**63), 2**63 - 1, (BATCH,), generator=generator).to(device),
        position=torch.randint(0, 2**31 - 1, (BATCH,), generator=generator).to(device),
        token_mask=bits(mask).to(device) if masked else None,
        filter_order="joint" if number % 7 == 0 else "top_k_first",
        return_logprobs=number % 3 == 0,
        num_top_logprobs=number % 4,
    )
    allowed = mask if masked else torch.ones_like(mask)
    values = logits.float()
    largest = torch.where(allowed & ~values.isnan(), values, -inf).amax(-1)
    right = ~(values.isnan() & allowed).any(-1) & (largest > -inf) & (largest < inf)
    right &= (temperature >= 0) & ~top_p.isnan() & ~min_p.isnan()
    assert torch.equal(samples.valid.cpu(), right)
    tokens = samples.token_ids.cpu().long()
    assert bool(((tokens >= 0) & (tokens < vocab)).all())
    first = (
        torch.where(allowed.any(-1), allowed.int().argmax(-1), 0)
        if masked
        else torch.zeros(BATCH, dtype=torch.int64)
    )
    assert torch.equal(tokens[~right], first[~right])
    drawn = values.gather(1, tokens[:, None])[:, 0]
    assert bool((allowed.gather(1, tokens[:, None])[:, 0] & (drawn > -inf))[right].all())
    greedy = right & (temperature == 0)
    assert torch.equal(drawn[greedy], largest[greedy])
    if samples.logprobs is not None:
        assert torch.equal(samples.logprobs.cpu().isnan(), ~right)


@pytest.mark.parametrize("number", range(10))
def test_probabilities_that_are_none(device: torch.device, number: int) -> None:
    generator = torch.Generator().manual_seed(1000 + number)
    vocab = [1, 3, 64, 513, 1500][number % 5]
    probs = nasty(generator, BATCH, vocab)
    probs = torch.where(torch.rand(BATCH, 1, generator=generator) < 0.5, probs.abs(), probs)
    samples = sample_from_probs(
        probs.to(device), top_p=0.9 if number % 2 else None, seed=torch.arange(BATCH, device=device)
    )
    right = ~(probs.isnan() | (probs < 0) | (probs == float("inf"))).any(-1) & (probs >= 2.0**-126).any(-1)
    assert torch.equal(samples.valid.cpu(), right)
    tokens = samples.token_ids.cpu().long()
    assert bool((probs.gather(1, tokens[:, None])[:, 0] > 0)[right].all())
    assert not bool(tokens[~right].any())


def test_speculative_sampling_of_nasty_probabilities(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2000)
    drafts, vocab = 3, 50
    draft = nasty(generator, BATCH * drafts, vocab).view(BATCH, drafts, vocab)
    target = nasty(generator, BATCH * (drafts + 1), vocab).view(BATCH, drafts + 1, vocab)
    for probs in (draft, target):
        probs[::2] = probs[::2].abs()
    ids = torch.randint(-2, vocab + 2, (BATCH, drafts), generator=generator)
    samples = chain_speculative_sampling(
        draft.to(device), ids.to(device), target.to(device), seed=torch.arange(BATCH, device=device)
    )
    accepted, tokens = samples.num_accepted.cpu(), samples.token_ids.cpu()
    places = torch.arange(drafts + 1)
    assert bool(((accepted >= 0) & (accepted <= drafts)).all())
    assert bool((tokens[places[None] > accepted[:, None]] == -1).all())
    assert torch.equal(
        tokens[:, :drafts][places[None, :drafts] < accepted[:, None]].long(),
        ids[places[None, :drafts] < accepted[:, None]],
    )
    drawn = tokens.gather(1, accepted[:, None].long())
    assert bool(((drawn >= 0) & (drawn < vocab)).all())
    # The distribution of the token: where the draft leaves nothing, the target.
    row, refused = torch.arange(BATCH), accepted < drafts
    own, of_draft = target[row, accepted.long()], draft[row, accepted.long().clamp_max(drafts - 1)]
    rest = torch.where(refused[:, None], own - of_draft, own)
    rest = torch.where((rest < 0) & (own >= 0), 0.0, rest)
    values = torch.where((rest.isnan() | (rest < 0) | (rest >= 2.0**-126)).any(-1, keepdim=True), rest, own)
    right = ~(values.isnan() | (values < 0) | (values == float("inf"))).any(-1) & (values >= 2.0**-126).any(
        -1
    )
    assert torch.equal(samples.valid.cpu(), right)
    assert int(right.sum()) > BATCH // 10
    assert int((~right).sum()) > BATCH // 10
    assert not bool(drawn[~samples.valid.cpu()].any())
