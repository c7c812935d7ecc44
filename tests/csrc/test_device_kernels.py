"""Append and sampling kernels without a GPU: tests/csrc/device_kernels.cpp runs them on fibers.

Only CUDA is emulated; the kernels are the real ones.
"""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

import device_kernels
import host_planner
import numpy
import pytest
import torch
from device_kernels import DeviceSampling
from sampling_oracle import bits
from sampling_problems import (
    ROW_KINDS,
    TOP_P_KINDS,
    draw_settings,
    random_logits,
    random_settings,
    row_about_its_threshold,
    rows_of,
)

from attn_backend import (
    Samples,
    chain_speculative_sampling,
    merge_states,
    sample,
    sample_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_p_renorm_probs,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(host_planner.COMPILER is None, reason="needs g++")]

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library(emulated: Path) -> ctypes.CDLL:
    return device_kernels.build(emulated)


def strided(
    rng: numpy.random.Generator, dtype: torch.dtype, aligned: bool, *shape: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A slice of a larger random tensor, with its dimensions except the last in any order, and the larger
    tensor. `aligned`: rows are whole chunks of 16 bytes.
    """
    step = 16 // dtype.itemsize if aligned else 1
    outer = len(shape) - 1
    before = [*rng.integers(0, 2, outer).tolist(), step * int(rng.integers(0, 2))]
    sizes = [b + size + int(rng.integers(0, 2)) for b, size in zip(before[:-1], shape, strict=False)]
    order = rng.permutation(outer).tolist()
    columns = before[-1] + shape[-1]
    room = torch.from_numpy(
        rng.integers(0, 100, [*(sizes[dim] for dim in order), -(-columns // step) * step])
    ).to(dtype)
    whole = room.permute([*(order.index(dim) for dim in range(outer)), outer])
    return whole[tuple(slice(b, b + size) for b, size in zip(before, shape, strict=True))], room


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_append(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """K and V anywhere in larger tensors; the rest must not change. Uses chunks of 16 bytes if all rows allow
    it.
    """
    for seed in range(60):
        rng = numpy.random.default_rng([seed, 42])
        tokens, heads, pages, page_size = (int(rng.integers(1, most)) for most in (30, 4, 9, 18))
        aligned = seed % 2 == 1
        head_dim = int(rng.choice([16, 64, 128] if aligned else [1, 5, 33, 64]))
        (k, _), (v, _) = (
            strided(rng, dtype, aligned, tokens + extra, heads, head_dim) for extra in (seed % 3, seed % 2)
        )
        (k_cache, k_room), (v_cache, v_room) = (
            strided(rng, dtype, aligned, pages, page_size, heads, head_dim) for _ in range(2)
        )
        # some negative, some beyond the cache
        slots = torch.from_numpy(rng.permutation(pages * page_size + tokens)[:tokens] - tokens // 2)
        slots = slots.to([torch.int32, torch.int64][seed // 2 % 2])
        before = k_room.clone(), v_room.clone()
        device_kernels.append_kv(
            library, k, v, k_cache, v_cache, slots, blocks=int(rng.integers(1, 2 * tokens + 1))
        )
        got = k_room.clone(), v_room.clone()
        for room, was, cache, source in ((k_room, before[0], k_cache, k), (v_room, before[1], v_cache, v)):
            room.copy_(was)
            for i, slot in enumerate(slots.tolist()):
                if 0 <= slot < pages * page_size:
                    cache[slot // page_size, slot % page_size] = source[i]
        assert torch.equal(got[0], k_room), seed
        assert torch.equal(got[1], v_room), seed


def assert_same(got: Samples, expected: Samples) -> None:
    for name in ("token_ids", "valid", "logprobs", "top_token_ids", "top_logprobs"):
        a, b = getattr(got, name), getattr(expected, name)
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampling_without_filters(library: ctypes.CDLL, dtype: torch.dtype, masked: bool) -> None:
    """The CPU's tokens, for any number of CTAs: each token's random bits, its bit of the mask, the end of the
    row.
    """
    workspace, sampling = torch.zeros(4096, dtype=torch.int64), DeviceSampling(library)
    for number, vocab in enumerate((1, 31, 33, 512, 700, 3000, 9000)):
        generator = torch.Generator().manual_seed(vocab)
        batch = 5
        wide = torch.full((batch, vocab + number % 3 * 4 + 8), torch.nan, dtype=dtype)
        logits = wide[:, :vocab]
        logits.copy_(torch.randn(batch, vocab, generator=generator) * 2)
        if vocab > 31:
            logits[1, vocab // 2] = [torch.nan, torch.inf][number % 2]
            logits[2, : vocab // 2] = -torch.inf
        mask = None
        if masked:
            allowed = torch.rand(batch, vocab, generator=generator) < 0.6
            allowed[3] = False
            words = torch.randint(
                -(2**31), 2**31 - 1, (batch, (vocab + 31) // 32 + 2), dtype=torch.int32, generator=generator
            )
            words[:, :-2] = bits(allowed)
            mask = words[:, :-1]
        seed = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
        position = torch.randint(0, 2**62, (batch,), generator=generator)
        for temperature in (
            torch.tensor([1.0, 0.7, 0.0, 1.3, 0.7]),
            torch.tensor([0.5, 0.0, 1.0, torch.nan, 0.0]),
        ):
            expected = sample(logits, temperature=temperature, seed=seed, position=position, token_mask=mask)
            for ctas in (1, 2, 5):
                given = {"temperature": temperature, "seed": seed, "position": position, "token_mask": mask}
                assert_same(
                    sampling.sample(logits, unfiltered=True, workspace=workspace, ctas=ctas, **given),
                    expected,
                )


@pytest.mark.parametrize("poison", [0, 1, -1])
def test_ctas_that_start_after_the_wait(library: ctypes.CDLL, poison: int) -> None:
    """Some CTAs of a row start after its last CTA has stopped waiting.

    The row is marked, and no later launch accepts their messages.
    """
    rng, sampling = numpy.random.default_rng(poison + 1), DeviceSampling(library)
    workspace = torch.full((4096,), poison, dtype=torch.int64)
    failures = 0
    for step in range(60):
        batch, vocab, ctas = int(rng.integers(1, 4)), int(rng.integers(1, 3000)), int(rng.choice([2, 3, 5]))
        logits = torch.from_numpy(rng.standard_normal((batch, vocab)).astype(numpy.float32)) * 2
        given = {"seed": torch.from_numpy(rng.integers(0, 2**62, batch)), "position": 0, "temperature": 1.0}
        order = rng.permutation(ctas).tolist() if step % 2 else None
        # closed by an expired wait: senders give up if they run before the receiver
        closed = workspace.view(torch.int32)[:batch] < 0
        samples = sampling.sample(
            logits, unfiltered=True, workspace=workspace, ctas=ctas, run_seed=step, order=order, **given
        )
        expected = sample(logits, **given)
        valid = torch.ones_like(closed) if order is None else ~closed & (order[-1] == ctas - 1)
        assert torch.equal(samples.valid, valid), step
        assert torch.equal(samples.token_ids[valid], expected.token_ids[valid]), step
        failures += int((~valid).sum())
    assert failures > 20


@pytest.mark.parametrize("block", range(6))
def test_sampling_with_filters(library: ctypes.CDLL, block: int) -> None:
    """Every path for a row, by one CTA or a cluster, gives the CPU's tokens, log-probabilities and rows."""
    sampling = DeviceSampling(library)
    for number in range(20 * block, 20 * block + 20):
        choose, generator = random.Random(number), torch.Generator().manual_seed(number)
        vocab, batch, ctas = (
            choose.choice([1, 31, 512, 513, 1000, 2049, 5000, 8192, 20001]),
            choose.choice([1, 2]),
            choose.choice([1, 1, 2, 4]),
        )
        wide = torch.zeros(
            batch, vocab + choose.choice([0, 3, 8]), dtype=choose.choice([torch.float32, torch.bfloat16])
        )
        logits = wide[:, :vocab]
        logits.copy_(random_logits(choose, batch, vocab, generator))
        settings = random_settings(choose, batch, vocab, CPU)
        settings["seed"] = torch.randint(0, 2**62, (batch,), generator=generator)
        settings["position"] = torch.randint(0, 2**31 - 1, (batch,), generator=generator).int()
        if choose.random() < 0.3:
            settings["token_mask"] = bits(torch.rand(batch, vocab, generator=generator) < 0.5)
        if choose.random() < 0.4:
            settings["top_k"] = torch.tensor([choose.choice([0, 1, 20, 50, 250]) for _ in range(batch)])
        wanted: dict[str, Any] = {
            "return_logprobs": True,
            "num_top_logprobs": choose.choice([0, 1, 20, 128]),
            "logprobs_of": choose.choice(["logits", "tempered"]),
        }
        if choose.random() < 0.5:
            wanted = {}
        assert_same(
            sampling.sample(logits, ctas=ctas, run_seed=number, **settings, **wanted),
            sample(logits, **settings, **wanted),
        )
        probs = torch.softmax(logits.float(), -1)
        from_probs = {
            name: settings[name] for name in ("top_k", "top_p", "min_p", "seed", "position", "filter_order")
        }
        assert_same(
            sampling.sample(probs, from_probs=True, ctas=ctas, **from_probs),
            sample_from_probs(probs, **from_probs),
        )
        hot, top_k, top_p = settings["temperature"].clamp(0.1, 10), settings["top_k"], settings["top_p"]
        for got, expected in (
            (sampling.write_rows(logits, sampling.RENORM, ctas=ctas, temperature=hot), softmax(logits, hot)),
            (
                sampling.write_rows(logits, sampling.MASK_LOGITS, ctas=ctas, top_k=top_k),
                top_k_mask_logits(logits, top_k),
            ),
            (
                sampling.write_rows(probs, sampling.RENORM, from_probs=True, ctas=ctas, top_k=top_k),
                top_k_renorm_probs(probs, top_k),
            ),
            (
                sampling.write_rows(probs, sampling.RENORM, from_probs=True, ctas=ctas, top_p=top_p),
                top_p_renorm_probs(probs, top_p),
            ),
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", TOP_P_KINDS)
def test_sampling_with_top_p_in_long_rows(library: ctypes.CDLL, kind: str) -> None:
    """Such rows are surveyed first, then raced based on float32 sums."""
    choose, generator = random.Random(kind), torch.Generator().manual_seed(TOP_P_KINDS.index(kind))
    for vocab in (16384, 33001):
        batch = 5
        logits = row_about_its_threshold(kind, batch, vocab, generator).to(
            choose.choice([torch.float32, torch.bfloat16])
        )
        settings: dict[str, Any] = {
            "temperature": torch.tensor(
                [choose.choice([0.6, 0.6, 1.0, 0.1, 3.0, 1e-4, 1e-7, 1e30]) for _ in range(batch)]
            ),
            "top_p": torch.tensor(
                [choose.choice([0.9, 0.9, 0.95, 0.5, 0.1, 0.999, 0.9999999, 1e-6, 0.0]) for _ in range(batch)]
            ),
            "seed": torch.randint(0, 2**62, (batch,), generator=generator),
        }
        if choose.random() < 0.3:
            settings["token_mask"] = bits(torch.rand(batch, vocab, generator=generator) < 0.5)
        for ctas, wants in ((1, False), (4, False), (2, True)):
            got = DeviceSampling(library).sample(logits, ctas=ctas, return_logprobs=wants, **settings)
            assert_same(got, sample(logits, return_logprobs=wants, **settings))


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_sampling_of_few_survivors(library: ctypes.CDLL, kind: str) -> None:
    """Likely tokens in all places, in one warp's segments, and among thousands of ties."""
    choose, generator = random.Random(kind), torch.Generator().manual_seed(100 + ROW_KINDS.index(kind))
    for vocab in (4097, 32000):
        batch = 4
        logits = rows_of(kind, batch, vocab, generator).to(choose.choice([torch.float32, torch.bfloat16]))
        settings = draw_settings(choose, batch, vocab, generator)
        settings["top_k"] = torch.tensor(
            [choose.choice([1, 2, 20, 40, 50, 50, 64, 65, 100, 0, vocab]) for _ in range(batch)]
        )
        settings["top_p"] = torch.tensor(
            [choose.choice([0.9, 0.9, 0.95, 0.5, 1.0, 0.0, 0.999]) for _ in range(batch)]
        )
        settings["min_p"] = torch.tensor([choose.choice([0.1, 0.01, 0.0, 0.0, 1.0]) for _ in range(batch)])
        settings["filter_order"] = choose.choice(["top_k_first", "top_k_first", "joint"])
        for ctas in (1, 4):
            assert_same(
                DeviceSampling(library).sample(logits, ctas=ctas, **settings), sample(logits, **settings)
            )


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_sampling_with_min_p_alone(library: ctypes.CDLL, kind: str) -> None:
    """The first CTA races the survivors: from one to more than fit in its lists."""
    choose, generator = random.Random(kind), torch.Generator().manual_seed(200 + ROW_KINDS.index(kind))
    for vocab in (4097, 20001):
        logits = rows_of(kind, 6, vocab, generator).to(choose.choice([torch.float32, torch.bfloat16]))
        settings: dict[str, Any] = {
            "min_p": torch.tensor([1.0, 0.5, 0.1, 0.01, 1e-3, 1e-6]),
            "temperature": torch.tensor([choose.choice([0.6, 1.0, 5.0]) for _ in range(6)]),
            "seed": torch.randint(0, 2**62, (6,), generator=generator),
        }
        for ctas, wanted in ((1, {}), (4, {}), (2, {"return_logprobs": True, "num_top_logprobs": 3})):
            assert_same(
                DeviceSampling(library).sample(logits, ctas=ctas, **settings, **wanted),
                sample(logits, **settings, **wanted),
            )


def test_most_likely_tokens_below_the_bound(library: ctypes.CDLL) -> None:
    """The request needs more tokens than reach the bound of pairs of lanes. Min-p keeps the others, so they
    are listed.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(1, 20001, generator=generator) - 3
    segments, pairs = 512 * torch.arange(8)[:, None], 8 * torch.arange(16)
    # one for each pair of lanes of the first CTA
    logits[0, (segments + pairs).flatten()] = 5 + torch.rand(128, generator=generator)
    logits[0, 4096 + 8 * torch.arange(100)] = 4 + torch.rand(100, generator=generator)
    settings: dict[str, Any] = {"min_p": 0.05, "seed": 5, "num_top_logprobs": 128}
    assert_same(DeviceSampling(library).sample(logits, ctas=4, **settings), sample(logits, **settings))


@pytest.mark.parametrize("drafts", [0, 1, 5, 40])
def test_speculative_sampling(library: ctypes.CDLL, drafts: int) -> None:
    generator = torch.Generator().manual_seed(drafts)
    batch, vocab = 6, 3001
    draft = torch.softmax(torch.randn(batch, drafts, vocab, generator=generator), -1).contiguous()
    target = torch.softmax(torch.randn(batch, drafts + 1, vocab, generator=generator), -1)
    target[: batch // 2, :drafts] = draft[: batch // 2]
    target[1, drafts, 7] = torch.nan
    ids = torch.randint(-1, vocab + 1, (batch, drafts), generator=generator)
    expected = chain_speculative_sampling(draft, ids, target, seed=torch.arange(batch), position=3)
    for ctas in (1, 2, 4):
        got = DeviceSampling(library).speculate(
            draft, ids, target, seed=torch.arange(batch), position=3, ctas=ctas
        )
        for name in vars(expected):
            assert torch.equal(getattr(got, name), getattr(expected, name)), (name, ctas)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_merge_states(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Same as the CPU's loop: vectorized and one by one, with an indptr, masked-out rows, and states that
    have seen nothing.
    """
    for seed in range(24):
        rng = numpy.random.default_rng([seed, 43])
        rows, states, heads, blocks = (int(rng.integers(1, most)) for most in (6, 40, 4, 5))
        head_dim = int(rng.choice([5, 8, 64, 136]))
        indptr = (
            torch.from_numpy(numpy.concatenate(([0], rng.integers(0, states, rows).cumsum())))
            if seed % 3 == 0
            else None
        )
        shape = (rows, states) if indptr is None else (int(indptr[-1]),)
        o = torch.from_numpy(rng.standard_normal((*shape, heads, head_dim))).to(dtype)
        lse = torch.from_numpy(rng.standard_normal((*shape, heads)) * 4).float()
        lse[torch.from_numpy(rng.random(lse.shape) < 0.3)] = -torch.inf
        mask = torch.from_numpy(rng.random(rows) < 0.7) if seed % 2 else None
        found = device_kernels.merge_states(library, o, lse, indptr, mask, seed % 4 == 0, blocks)
        expected = merge_states(o, lse, indptr, log2=seed % 4 == 0)
        is_merged = torch.ones(rows, dtype=torch.bool) if mask is None else mask
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got[is_merged], wanted[is_merged], rtol=tolerance, atol=tolerance)
            assert got[~is_merged].isnan().all()


def test_probabilities_of_rows_that_are_named(library: ctypes.CDLL) -> None:
    sampling = device_kernels.DeviceSampling(library)
    probs = torch.rand(4, 700, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.int32, torch.int64):
        rows = torch.tensor([3, 0, 0, 2, 9, -5], dtype=dtype)
        given: dict[str, Any] = {"top_p": 0.8, "seed": 3, "position": torch.arange(6)}
        samples = sample_from_probs(probs, rows=rows, **given)
        assert_same(sampling.sample(probs, from_probs=True, rows=rows, **given), samples)
        # row ids that do not exist become the nearest
        assert_same(samples, sample_from_probs(probs[[3, 0, 0, 2, 3, 0]], **given))
