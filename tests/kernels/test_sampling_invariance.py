"""A request's token depends only on its logits, its parameters, its seed and its position."""

from __future__ import annotations

import random
from typing import Any

import attention_kernels
import cpu_isa
import forked_python
import pytest
import torch
from sampling_oracle import bits
from sampling_problems import TOP_P_KINDS, moved, random_logits, random_settings, row_about_its_threshold

from attn_backend import (
    Samples,
    chain_speculative_sampling,
    sample,
    sample_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_p_renorm_probs,
)

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 3000, "top_p": 0.99},
]


def tokens_of(samples: Samples) -> list[int]:
    return samples.token_ids.tolist()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_alone_in_any_batch_in_any_row_with_any_stride(
    device: torch.device, settings: dict[str, Any]
) -> None:
    vocab, batch = 7001, 24
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(batch, vocab, generator=generator) * 2).to(device)
    seeds, positions = (
        torch.arange(batch, device=device) * 977,
        torch.arange(batch, device=device, dtype=torch.int32) % 5,
    )
    together = tokens_of(sample(logits, seed=seeds, position=positions, **settings))
    alone = [
        tokens_of(sample(logits[i : i + 1], seed=int(seeds[i]), position=int(positions[i]), **settings))[0]
        for i in range(batch)
    ]
    assert alone == together
    order = torch.randperm(batch, generator=generator).to(device)
    shuffled = tokens_of(sample(logits[order], seed=seeds[order], position=positions[order], **settings))
    assert shuffled == [together[i] for i in order.tolist()]
    for offset, stride in ((0, 7001 + 3), (1, 7001 + 7), (4, 7001 + 11)):
        wide = torch.full((batch, stride), float("nan"), device=device)
        view = wide.flatten()[offset:].as_strided((batch - 1, vocab), (stride, 1))
        view.copy_(logits[:-1])
        assert tokens_of(sample(view, seed=seeds[:-1], position=positions[:-1], **settings)) == together[:-1]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_values_of_a_wider_type_are_the_same_values(device: torch.device, settings: dict[str, Any]) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        logits = (torch.randn(16, 5003, generator=torch.Generator().manual_seed(1)) * 2).to(dtype).to(device)
        seeds = torch.arange(16, device=device)
        assert tokens_of(sample(logits, seed=seeds, **settings)) == tokens_of(
            sample(logits.float(), seed=seeds, **settings)
        )


def test_a_scalar_is_the_same_as_a_tensor_of_it(device: torch.device) -> None:
    logits = torch.randn(8, 900, generator=torch.Generator().manual_seed(2)).to(device)
    scalars = {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.8,
        "min_p": 0.02,
        "seed": 12345678901,
        "position": 77,
    }
    dtypes = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int64}
    tensors = {
        name: torch.full((8,), value, dtype=dtypes.get(name, torch.float32), device=device)
        for name, value in scalars.items()
    }
    assert tokens_of(sample(logits, **scalars)) == tokens_of(sample(logits, **tensors))  # type: ignore[arg-type]


def test_seeds_and_positions_matter(device: torch.device) -> None:
    logits = torch.zeros(1, 1 << 18, device=device)
    drawn = {
        tuple(tokens_of(sample(logits, seed=seed, position=position)))
        for seed in range(5)
        for position in range(5)
    }
    assert len(drawn) == 25


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(150))
def test_a_gpu_gives_the_bits_of_a_cpu(number: int) -> None:
    """Tokens, flags, log-probabilities and renormalized rows do not depend on the shape of the launch."""
    choose = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    vocab, batch = (
        choose.choice([1, 31, 512, 513, 1000, 2049, 5000, 8192, 32000, 40961, 128256]),
        choose.choice([1, 2, 3, 7]),
    )
    row_ctas = choose.choice([0, 1, 2, 4, 8, 16] if attention_kernels.has_clusters() else [0, 1])
    dtype = choose.choice([torch.float32, torch.bfloat16, torch.float16])
    wide = torch.zeros(batch, vocab + choose.choice([0, 3, 8]), dtype=dtype)
    logits = wide[:, :vocab]
    logits.copy_(random_logits(choose, batch, vocab, generator))
    settings = random_settings(choose, batch, vocab, torch.device("cpu"))
    settings["seed"] = torch.randint(0, 2**62, (batch,), generator=generator)
    settings["position"] = torch.randint(0, 2**31 - 1, (batch,), generator=generator).int()
    if choose.random() < 0.3:
        settings["token_mask"] = bits(torch.rand(batch, vocab, generator=generator) < 0.5)
    wanted = {
        "return_logprobs": True,
        "num_top_logprobs": choose.choice([0, 1, 20, 128]),
        "logprobs_of": choose.choice(["logits", "tempered"]),
    }
    if choose.random() < 0.3:
        wanted = {}

    on_cpu = sample(logits, **settings, **wanted)
    on_gpu = sample(wide.cuda()[:, :vocab], row_ctas=row_ctas, **moved(settings), **wanted)
    for name in ("token_ids", "valid", "logprobs", "top_token_ids", "top_logprobs"):
        a, b = getattr(on_cpu, name), getattr(on_gpu, name)
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b.cpu(), a, rtol=0, atol=0, equal_nan=True)
    probs = torch.softmax(logits.float(), -1)
    of_probs = {
        name: settings[name] for name in ("top_k", "top_p", "min_p", "seed", "position", "filter_order")
    }
    assert tokens_of(sample_from_probs(probs, **of_probs)) == tokens_of(
        sample_from_probs(probs.cuda(), row_ctas=row_ctas, **moved(of_probs))
    )
    hot = settings["temperature"].clamp(0.1, 10)
    for function, values, parameter in (
        (softmax, logits, hot),
        (top_k_mask_logits, logits, settings["top_k"]),
        (top_k_renorm_probs, probs, settings["top_k"]),
        (top_p_renorm_probs, probs, settings["top_p"]),
    ):
        a, b = function(values, parameter), function(values.cuda(), parameter.cuda(), row_ctas=row_ctas)
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TOP_P_KINDS)
def test_top_p_alone_in_long_rows_is_on_a_gpu_as_on_a_cpu(kind: str) -> None:
    """There a GPU first surveys the row, and trusts float32 sums within their precision."""
    choose, generator = random.Random(kind), torch.Generator().manual_seed(TOP_P_KINDS.index(kind))
    for vocab in (16383, 16384, 33001, 128256):
        batch = 24
        logits = row_about_its_threshold(kind, batch, vocab, generator).to(
            choose.choice([torch.float32, torch.float32, torch.bfloat16])
        )
        settings = {
            "temperature": torch.tensor(
                [choose.choice([0.6, 0.6, 1.0, 0.1, 3.0, 1e-4, 1e-7, 1e30]) for _ in range(batch)]
            ),
            "top_p": torch.tensor(
                [choose.choice([0.9, 0.9, 0.95, 0.5, 0.1, 0.999, 0.9999999, 1e-6, 0.0]) for _ in range(batch)]
            ),
            "seed": torch.randint(0, 2**62, (batch,), generator=generator),
            "position": torch.randint(0, 2**31, (batch,), generator=generator),
        }
        if choose.random() < 0.3:
            settings["token_mask"] = bits(torch.rand(batch, vocab, generator=generator) < 0.5)
        on_cpu = sample(logits, return_logprobs=True, **settings)
        for row_ctas in (0, 1, 2, 4, 8, 16) if attention_kernels.has_clusters() else (0, 1):
            for wants in (False, True):
                on_gpu = sample(logits.cuda(), return_logprobs=wants, row_ctas=row_ctas, **moved(settings))
                assert tokens_of(on_gpu) == tokens_of(on_cpu)
                assert torch.equal(on_gpu.valid.cpu(), on_cpu.valid)
            assert on_gpu.logprobs is not None
            torch.testing.assert_close(on_gpu.logprobs.cpu(), on_cpu.logprobs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 1, 5, 40])
def test_speculative_sampling_on_a_gpu_gives_the_bits_of_a_cpu(drafts: int) -> None:
    generator = torch.Generator().manual_seed(drafts)
    batch, vocab = 6, 3001
    draft = torch.softmax(torch.randn(batch, drafts, vocab, generator=generator), -1).contiguous()
    target = torch.softmax(torch.randn(batch, drafts + 1, vocab, generator=generator), -1)
    target[: batch // 2, :drafts] = draft[: batch // 2]
    ids = torch.randint(-1, vocab + 1, (batch, drafts), generator=generator)
    on_cpu = chain_speculative_sampling(draft, ids, target, seed=torch.arange(batch), position=3)
    on_gpu = chain_speculative_sampling(
        draft.cuda(), ids.cuda(), target.cuda(), seed=torch.arange(batch).cuda(), position=3
    )
    for name in vars(on_cpu):
        assert torch.equal(getattr(on_cpu, name), getattr(on_gpu, name).cpu())


@pytest.mark.gpu
def test_a_captured_launch_reads_seeds_and_positions_anew() -> None:
    logits = torch.randn(5, 32000, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    seed = torch.arange(5, device="cuda")
    position = torch.zeros(5, dtype=torch.int32, device="cuda")
    temperature = torch.full((5,), 0.8, device="cuda")
    out = torch.empty(5, dtype=torch.int64, device="cuda")
    sample(logits, temperature=temperature, top_k=50, top_p=0.9, seed=seed, position=position, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, temperature=temperature, top_k=50, top_p=0.9, seed=seed, position=position, out=out)
    for step in range(20):
        seed.add_(step)
        position.fill_(step)
        logits.mul_(1.01)
        temperature[step % 5] = 0.0 if step % 3 == 0 else 0.7
        graph.replay()
        eager = sample(logits, temperature=temperature, top_k=50, top_p=0.9, seed=seed, position=position)
        assert out.tolist() == eager.token_ids.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("isa", cpu_isa.ISAS[1:])
def test_every_instruction_set_of_a_cpu_draws_the_same(isa: str) -> None:
    """The baseline gives the same result. Its code has no fused multiply-add instruction and calls the
    library's."""
    program = (
        "import torch, attn_backend as a; g = torch.Generator().manual_seed(4); x = torch.randn(64, 3000, "
        "generator=g) * 3; s = torch.arange(64);"
        "print([a.sample(x, seed=s, temperature=t, top_p=p).token_ids.tolist() for t, p in ((0.7, None), "
        "(1.0, 0.9), (1.3, 0.99))],"
        "a.softmax(x, 0.6).view(torch.int32).sum().item())"
    )

    def run(isa: str) -> str:
        return forked_python.run(program, [], cpu_isa.environment(isa))

    assert run(isa) == run("baseline")
