"""`sample` draws from the tokens that vLLM's filters leave."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_oracle import keeps

from attn_backend import sample

ops = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler", reason="vLLM is not installed")


@pytest.mark.parametrize("filters", ["k", "p", "kp"])
def test_same_survivors(filters: str) -> None:
    """Top-k first, then top-p of what it leaves; rows without ties."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 300, generator=generator) * 2
    k = torch.randint(1, 60, (64,), generator=generator)
    p = torch.rand(64, generator=generator) * 0.9 + 0.05
    theirs = (
        ops.apply_top_k_top_p_pytorch(
            logits.clone(), k if "k" in filters else None, p if "p" in filters else None
        )
        > -math.inf
    )
    by_definition = torch.stack(
        [
            keeps(
                logits[i],
                top_k=int(k[i]) if "k" in filters else None,
                top_p=float(p[i]) if "p" in filters else None,
            )
            for i in range(64)
        ]
    )
    assert torch.equal(by_definition, theirs)
    draws = 400
    tokens = sample(
        logits.repeat(draws, 1),
        top_k=k.int().repeat(draws) if "k" in filters else None,
        top_p=p.repeat(draws) if "p" in filters else None,
        seed=torch.arange(64 * draws),
    ).token_ids
    assert bool(theirs.gather(1, tokens.view(draws, 64).T.long()).all())
