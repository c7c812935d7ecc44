"""Sampling compared with its definition, and the result of every edge case.

With a GPU: the same tokens as on the CPU, bit for bit.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from sampling_oracle import bits, keeps, philox4x32, probabilities, race_values
from sampling_problems import random_settings

from attn_backend import (
    chain_speculative_sampling,
    sample,
    sample_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_p_renorm_probs,
)

NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def row(settings: dict[str, Any], i: int) -> dict[str, Any]:
    """The parameters of one row, for the oracle."""
    return {name: value if isinstance(value, str) else value[i].item() for name, value in settings.items()}


def test_random_numbers_are_philox() -> None:
    # Known answers of Random123.
    assert philox4x32([0, 0, 0, 0], [0, 0]) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])
def test_the_survivor_that_wins_the_race_is_drawn(device: torch.device, scale: float) -> None:
    """The draw is an exponential race with a Philox word for each token."""
    vocab, batch = 1003, 24
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
    positions = torch.randint(0, 2**62, (batch,), generator=generator)
    logits = torch.randn(batch, vocab, generator=generator) * scale
    values = torch.stack(
        [
            race_values(x, seed, position, 0.7)
            for x, seed, position in zip(logits, seeds.tolist(), positions.tolist(), strict=True)
        ]
    )
    decided = 0
    for settings in (
        {},
        {"top_k": 10},
        {"min_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 0.2},
        {"top_k": 600},
        {"top_k": 700, "top_p": 0.8, "min_p": 1e-3},
    ):
        tokens = (
            sample(
                logits.to(device),
                temperature=0.7,
                seed=seeds.to(device),
                position=positions.to(device),
                **settings,
            )
            .token_ids.cpu()
            .long()
        )
        kept = torch.stack([keeps(x, 0.7, **settings) for x in logits])
        best = values.masked_fill(~kept, -INF).topk(2).values
        clear = best[:, 0] - best[:, 1] > 1e-5
        assert torch.equal(values.gather(1, tokens[:, None])[clear, 0], best[clear, 0])
        decided += int(clear.sum())
    assert decided > 7 * batch * 0.95


@pytest.mark.parametrize("number", range(40))
def test_only_survivors_are_drawn(device: torch.device, number: int) -> None:
    choose = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    vocab = choose.choice([1, 2, 31, 33, 511, 513, 1000, 2049, 5000])
    settings = random_settings(choose, 3, vocab, device)
    logits = torch.randn(3, vocab, generator=generator) * choose.choice([0.1, 2.0, 8.0])
    mask = torch.rand(3, vocab, generator=generator) < 0.7
    mask[:, choose.randrange(vocab)] = True
    kept = []
    for i in range(3):
        of_row = row(settings, i)
        if of_row["temperature"] == 0:
            kept.append(logits[i] == logits[i].masked_fill(~mask[i], -INF).max())
            continue
        kept.append(keeps(logits[i], mask=mask[i], **of_row))
    draws = 200
    samples = sample(
        logits.to(device).repeat(draws, 1),
        seed=torch.arange(3 * draws, device=device),
        token_mask=bits(mask).to(device).repeat(draws, 1),
        **{
            name: value if isinstance(value, str) else value.repeat(draws) for name, value in settings.items()
        },
    )
    assert bool(samples.valid.all())
    tokens = samples.token_ids.cpu().long().view(draws, 3)
    for i in range(3):
        assert bool(kept[i][tokens[:, i]].all()), row(settings, i)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_takes_the_first_of_the_largest(device: torch.device, dtype: torch.dtype) -> None:
    logits = torch.randint(-3, 3, (50, 3001), generator=torch.Generator().manual_seed(4)).to(dtype)
    samples = sample(
        logits.to(device),
        temperature=0.0,
        top_k=7,
        top_p=0.1,
        min_p=0.9,
        seed=torch.arange(50, device=device),
    )
    assert samples.token_ids.tolist() == [int((x == x.max()).nonzero()[0]) for x in logits]
    negative_zero = torch.tensor([[-0.0, 0.0], [0.0, -0.0]], dtype=dtype)
    assert sample(negative_zero.to(device), temperature=0.0).token_ids.tolist() == [0, 0]


@pytest.mark.parametrize("of", ["logits", "tempered"])
@pytest.mark.parametrize("vocab", [5, 1000, 40000])
def test_log_probabilities(device: torch.device, vocab: int, of: str) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(5)) * 4
    temperature = torch.tensor([0.0, 0.5, 0.7, 1.0, 1.5, 3.0])
    count = 20
    samples = sample(
        logits.to(device),
        temperature=temperature.to(device),
        top_k=3,
        seed=9,
        return_logprobs=True,
        num_top_logprobs=count,
        logprobs_of=of,  # type: ignore[arg-type]
    )
    assert samples.logprobs is not None
    assert samples.top_logprobs is not None
    assert samples.top_token_ids is not None
    divisor = torch.where(temperature == 0, 1.0, temperature) if of == "tempered" else torch.ones(6)
    expected = torch.log_softmax(logits.double() / divisor[:, None].double(), -1)
    tokens = samples.token_ids.cpu().long()
    torch.testing.assert_close(
        samples.logprobs.cpu().double(), expected.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=2e-6
    )
    exist = min(count, vocab)
    best = expected.topk(exist)
    assert torch.equal(samples.top_token_ids[:, :exist].cpu().long(), best.indices)
    torch.testing.assert_close(
        samples.top_logprobs[:, :exist].cpu().double(), best.values, rtol=1e-5, atol=2e-6
    )
    assert bool((samples.top_logprobs[:, exist:] == -INF).all())


def test_most_likely_tokens_among_equals_are_the_first(device: torch.device) -> None:
    """Thousands of equal values: more than fit."""
    logits = torch.zeros(2, 9000)
    logits[1, 5000:] = 1.0
    samples = sample(logits.to(device), num_top_logprobs=5)
    assert samples.top_token_ids is not None
    assert samples.top_token_ids.tolist() == [[0, 1, 2, 3, 4], [5000, 5001, 5002, 5003, 5004]]


@pytest.mark.parametrize(
    ("settings", "survivors"),
    [
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_k": -5}, {0, 1, 2, 3, 4}),
        ({"top_k": 6}, {0, 1, 2, 3, 4}),
        ({"top_k": 10**12}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1, 3}),  # ties stay together
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {0, 1, 3}),
        ({"top_p": 0.0}, {1, 3}),
        ({"top_p": -1.0}, {1, 3}),
        ({"top_p": 0.3}, {1, 3}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"top_p": 7.0}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.999999}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.0}, {0, 1, 2, 3, 4}),
        ({"min_p": -1.0}, {0, 1, 2, 3, 4}),
        ({"min_p": 1.0}, {1, 3}),
        ({"min_p": 3.0}, {1, 3}),
        ({"min_p": 0.5}, {0, 1, 3}),
    ],
    ids=str,
)
def test_edge_values(device: torch.device, settings: dict[str, Any], survivors: set[int]) -> None:
    logits = torch.tensor([1.5, 2.0, 0.0, 2.0, 0.5, -INF], device=device).expand(2000, -1)
    samples = sample(logits, seed=torch.arange(2000, device=device), **settings)
    assert set(samples.token_ids.tolist()) == survivors
    assert bool(samples.valid.all())


def test_extreme_temperatures(device: torch.device) -> None:
    logits = torch.tensor([1.0, 1.0001, -3.0, -INF], device=device).expand(1000, -1)
    seeds = torch.arange(1000, device=device)
    for cold in (1e-7, 1e-30, 1e-45):
        assert set(sample(logits, temperature=cold, seed=seeds).token_ids.tolist()) == {1}
    for hot in (1e10, 1e38, INF):
        assert set(sample(logits, temperature=hot, seed=seeds).token_ids.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("vocab", [1, 262_144])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_smallest_and_largest_vocabulary(device: torch.device, vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(6)).to(dtype).to(device)
    for settings in (
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 0.0},
    ):
        samples = sample(
            logits, seed=torch.arange(4, device=device), return_logprobs=True, num_top_logprobs=3, **settings
        )
        assert bool(samples.valid.all())
        tokens = samples.token_ids.cpu().long()
        for i in range(4):
            if "temperature" not in settings:
                assert bool(keeps(logits[i].cpu(), **settings)[tokens[i]])


def test_token_mask(device: torch.device) -> None:
    mask = torch.zeros(5, 100, dtype=torch.bool)
    mask[0, 42] = mask[1, 99] = mask[2, 31] = mask[2, 32] = True
    mask[4] = True
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(8))
    logits[0, 7] = NAN  # not allowed, so it does not matter
    logits[1, 5] = INF
    samples = sample(
        logits.to(device), token_mask=bits(mask).to(device), seed=3, num_top_logprobs=2, return_logprobs=True
    )
    assert samples.valid.tolist() == [True, True, True, False, True]
    assert samples.token_ids[0].item() == 42
    assert samples.token_ids[1].item() == 99
    assert samples.token_ids[2].item() in (31, 32)
    assert samples.token_ids[3].item() == 0
    assert samples.logprobs is not None
    assert samples.logprobs[0].item() == 0.0
    bad = logits.clone()
    bad[2, 32] = NAN
    # the first token that is allowed
    assert sample(bad.to(device), token_mask=bits(mask).to(device)).token_ids[2].item() == 31


@pytest.mark.parametrize("is_slice", [False, True])
@pytest.mark.parametrize("vocab", [31, 64, 1000])
def test_token_mask_wider_than_needed(device: torch.device, vocab: int, is_slice: bool) -> None:
    """Bits beyond a row's words do not count: words for a larger vocabulary, or a slice of an engine's
    buffer.
    """
    generator = torch.Generator().manual_seed(8)
    batch, words = 12, (vocab + 31) // 32
    mask = torch.rand(batch, vocab, generator=generator) < 0.3
    mask[5] = False
    logits = torch.randn(batch, vocab, generator=generator)
    logits[3] = torch.where(mask[3], NAN, 0.0)  # a bad row: its first allowed token
    wide = torch.randint(-(2**31), 2**31 - 1, (batch + 1, words + 3), dtype=torch.int32, generator=generator)
    wide[1:, :words] = bits(mask)
    given = wide.to(device)[1:, : words + 1 if is_slice else words + 3]
    for settings in ({}, {"top_p": 0.8}, {"top_k": 5}):
        exact = sample(logits.to(device), token_mask=bits(mask).to(device), seed=11, **settings)
        samples = sample(logits.to(device), token_mask=given, seed=11, **settings)
        assert samples.token_ids.tolist() == exact.token_ids.tolist()
        assert samples.valid.tolist() == exact.valid.tolist() == [i not in (3, 5) for i in range(batch)]
        assert all(mask[i, token] for i, token in enumerate(samples.token_ids.tolist()) if i != 5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_out(device: torch.device, dtype: torch.dtype) -> None:
    out = torch.full((4,), -1, dtype=dtype, device=device)
    samples = sample(torch.randn(4, 10, device=device), out=out)
    assert samples.token_ids is out
    assert bool(((out >= 0) & (out < 10)).all())


def test_empty_batch(device: torch.device) -> None:
    samples = sample(torch.zeros(0, 10, device=device), return_logprobs=True, num_top_logprobs=2)
    assert samples.token_ids.shape == samples.valid.shape == (0,)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax(device: torch.device, dtype: torch.dtype, temperature: float) -> None:
    logits = (torch.randn(5, 3001, generator=torch.Generator().manual_seed(9)) * 3).to(dtype)
    logits[1, 100:2000] = -INF
    result = softmax(logits.to(device), temperature).cpu().double()
    torch.testing.assert_close(
        result, torch.softmax(logits.double() / temperature, -1), rtol=2e-5, atol=1e-11
    )
    assert softmax(torch.tensor([[1.0, 3.0, 3.0]], device=device), 0.0).tolist() == [[0.0, 0.5, 0.5]]
    assert softmax(
        torch.tensor([[1.0, 3.0, 3.0], [NAN, 0.0, 0.0]], device=device),
        torch.tensor([0.0, 1.0], device=device),
    ).tolist() == [
        [0.0, 0.5, 0.5],
        [0.0, 0.0, 0.0],
    ]


@pytest.mark.parametrize("vocab", [10, 1500, 40000])
def test_renormalised_probabilities(device: torch.device, vocab: int) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(10)).double()
    probs = torch.softmax(logits, -1)
    top_k = torch.tensor([1, 7, vocab // 2, vocab])
    top_p = torch.tensor([0.0, 0.5, 0.95, 1.0])
    by_k = top_k_renorm_probs(probs.float().to(device), top_k.int().to(device)).cpu().double()
    by_p = top_p_renorm_probs(probs.float().to(device), top_p.to(device)).cpu().double()
    masked = top_k_mask_logits(logits.float().to(device), top_k.to(device)).cpu()
    for i in range(4):
        kept_k, kept_p = keeps(logits[i], top_k=int(top_k[i])), keeps(logits[i], top_p=float(top_p[i]))
        assert torch.equal(by_k[i] > 0, kept_k)
        assert torch.equal(by_p[i] > 0, kept_p)
        torch.testing.assert_close(by_k[i], probabilities(logits[i], kept_k), rtol=1e-5, atol=0)
        torch.testing.assert_close(by_p[i], probabilities(logits[i], kept_p), rtol=1e-5, atol=0)
        assert torch.equal(masked[i] > -INF, kept_k)
        assert torch.equal(masked[i][kept_k], logits[i].float()[kept_k])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_renormalised_probabilities_of_16_bits(device: torch.device, dtype: torch.dtype) -> None:
    probs = torch.softmax(torch.randn(4, 700, generator=torch.Generator().manual_seed(10)), -1).to(
        device, dtype
    )
    for found, exact in (
        (top_k_renorm_probs(probs, 9), top_k_renorm_probs(probs.float(), 9)),
        (top_p_renorm_probs(probs, 0.6), top_p_renorm_probs(probs.float(), 0.6)),
    ):
        assert torch.equal(found, exact.to(dtype))
        assert 0 < int((found > 0).sum()) < 700


def test_probabilities_that_are_none(device: torch.device) -> None:
    probs = torch.tensor(
        [[0.5, 0.5], [0.0, 0.0], [0.5, -0.1], [NAN, 0.5], [INF, 0.5], [1e-40, 1e-41], [0.0, 2.0]],
        device=device,
    )
    samples = sample_from_probs(probs)
    assert samples.valid.tolist() == [True, False, False, False, False, False, True]
    assert samples.token_ids[1:].tolist() == [0, 0, 0, 0, 0, 1]
    assert top_p_renorm_probs(probs, 0.9)[1:6].tolist() == [[0.0, 0.0]] * 5


def test_refuses(device: torch.device) -> None:
    logits = torch.zeros(3, 64, device=device)
    for argument, call in [
        ("logits", lambda: sample(None)),  # type: ignore[arg-type]
        ("seed", lambda: sample(logits, seed=2**63)),
        ("temperature", lambda: softmax(logits, 2**70)),
        ("top_k", lambda: top_k_renorm_probs(logits, 2**63)),
        ("logits", lambda: softmax([0.0])),  # type: ignore[arg-type]
        ("probs", lambda: top_p_renorm_probs(logits.numpy, 0.5)),  # type: ignore[arg-type]
        ("target_probs", lambda: chain_speculative_sampling(logits, logits, None)),  # type: ignore[arg-type]
        ("logits", lambda: sample(logits.double())),
        ("logits", lambda: sample(logits.int())),
        ("logits", lambda: sample(logits.T)),
        ("logits", lambda: sample(logits[0])),
        ("logits", lambda: sample(torch.zeros(1, 0, device=device))),
        ("logits", lambda: sample(torch.zeros(1, (1 << 19) + 1, device=device))),
        ("temperature", lambda: sample(logits, temperature=-1.0)),
        ("temperature", lambda: sample(logits, temperature=NAN)),
        ("temperature", lambda: sample(logits, temperature="hot")),  # type: ignore[arg-type]
        ("temperature", lambda: sample(logits, temperature=torch.ones(2, device=device))),
        (
            "temperature",
            lambda: sample(logits, temperature=torch.ones(3, dtype=torch.float64, device=device)),
        ),
        ("temperature", lambda: softmax(logits, -1.0)),
        ("top_k", lambda: sample(logits, top_k=torch.ones(3, device=device))),
        ("top_k", lambda: sample(logits, top_k=1.5)),  # type: ignore[arg-type]
        ("top_p", lambda: sample(logits, top_p=NAN)),
        ("min_p", lambda: sample(logits, min_p=torch.ones(3, 1, device=device))),
        ("seed", lambda: sample(logits, seed=torch.ones(3, dtype=torch.uint8, device=device))),
        (
            "position",
            lambda: sample(logits, seed=0, position=torch.ones(6, dtype=torch.int64, device=device)[::2]),
        ),
        (
            "token_mask",
            lambda: sample(logits, token_mask=torch.zeros(3, 1, dtype=torch.int32, device=device)),
        ),
        (
            "token_mask",
            lambda: sample(logits, token_mask=torch.zeros(3, 2, dtype=torch.int64, device=device)),
        ),
        ("out", lambda: sample(logits, out=torch.zeros(3, device=device))),
        ("out", lambda: sample(logits, out=torch.zeros(2, dtype=torch.int32, device=device))),
        ("workspace", lambda: sample(logits, workspace=torch.zeros(4096, dtype=torch.int32, device=device))),
        ("workspace", lambda: sample(logits, workspace=torch.zeros(4095, dtype=torch.int64, device=device))),
        (
            "workspace",
            lambda: sample(logits, workspace=torch.zeros(4097, dtype=torch.int64, device=device)[1:]),
        ),
        ("num_top_logprobs", lambda: sample(logits, num_top_logprobs=129)),
        ("num_top_logprobs", lambda: sample(logits, num_top_logprobs="all")),  # type: ignore[arg-type]
        ("token_mask", lambda: sample(logits, token_mask=[1])),  # type: ignore[arg-type]
        ("out", lambda: sample(logits, out=5)),  # type: ignore[arg-type]
        ("out", lambda: sample_from_probs(logits, out="here")),  # type: ignore[arg-type]
        ("workspace", lambda: sample(logits, workspace="large")),  # type: ignore[arg-type]
        ("row_ctas", lambda: sample(logits, row_ctas=1.5)),  # type: ignore[arg-type]
        ("seed", lambda: sample(logits, seed="random")),  # type: ignore[arg-type]
        ("logits", lambda: sample(logits[0, 0])),
        ("probs", lambda: sample_from_probs(logits[0])),
        ("target_probs", lambda: chain_speculative_sampling(logits, logits, logits)),
        ("filter_order", lambda: sample(logits, filter_order="top_p_first")),  # type: ignore[arg-type]
        ("logprobs_of", lambda: sample(logits, logprobs_of="probs")),  # type: ignore[arg-type]
        ("probs", lambda: sample_from_probs(logits.half())),
    ]:
        with pytest.raises(ValueError, match=rf"^{argument}\b.* is .*, must be "):
            call()
    if device.type == "cuda":
        with pytest.raises(ValueError, match=r"^seed\.device is cpu, must be cuda"):
            sample(logits, seed=torch.zeros(3, dtype=torch.int64))


def test_draws_without_seeds_differ_between_rows_and_calls(device: torch.device) -> None:
    logits = torch.zeros(64, 1 << 16, device=device)
    probs = torch.full((64, 1 << 12), 2.0**-12, device=device)
    target = probs.view(8, 8, -1)
    draws = {
        "sample": lambda: sample(logits).token_ids,
        "sample_from_probs": lambda: sample_from_probs(probs).token_ids,
        "chain_speculative_sampling": lambda: (
            chain_speculative_sampling(
                target[:, :7].contiguous(), torch.zeros(8, 7).int().to(device), target
            ).token_ids
        ),
    }
    for name, draw in draws.items():
        torch.manual_seed(1)
        first, second = draw(), draw()
        torch.manual_seed(1)
        assert torch.equal(first, draw()), name
        assert not torch.equal(first, second), name
        if name != "chain_speculative_sampling":
            assert len(set(first.tolist())) > 60, name
    generator = torch.Generator(device).manual_seed(5)
    first = sample(logits, generator=generator).token_ids
    assert torch.equal(first, sample(logits, generator=generator.manual_seed(5)).token_ids)
    with pytest.raises(ValueError, match=r"generator is .*, must be None beside a seed"):
        sample(logits, seed=1, generator=generator)
    with pytest.raises(ValueError, match="seed is None, must be given beside a position"):
        sample(logits, position=1)
