"""`sample` draws from the tokens that SGLang's filters leave."""

from __future__ import annotations

import pytest
import torch
from sampling_oracle import keeps

from attn_backend import sample

sampler = pytest.importorskip("sglang.srt.layers.sampler", reason="SGLang is not installed")


@pytest.mark.parametrize("has_min_p", [False, True])
def test_same_survivors(has_min_p: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each filter by itself, top-p over all tokens; rows without ties."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(64, 300, generator=generator) * 2
    k = torch.randint(1, 60, (64,), generator=generator)
    p = torch.rand(64, generator=generator) * 0.9 + 0.05
    min_p = torch.rand(64, generator=generator) * 0.2
    probs = torch.softmax(logits, -1)
    filtered: list[torch.Tensor] = []

    def multinomial(weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        filtered.append(weights.clone())
        return weights.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), k, p, min_p, has_min_p, None, torch.zeros(64, dtype=torch.int64)
    )
    theirs = torch.zeros_like(probs, dtype=torch.bool).scatter(
        1, probs.sort(dim=-1, descending=True).indices, filtered[0] > 0
    )
    by_definition = torch.stack(
        [
            keeps(
                logits[i],
                top_k=int(k[i]),
                top_p=float(p[i]),
                min_p=float(min_p[i]) if has_min_p else None,
                filter_order="joint",
            )
            for i in range(64)
        ]
    )
    # At exactly top_p, SGLang keeps one more token; a float sum reaches top_p only through rounding.
    assert int((by_definition != theirs).sum()) == 0
    draws = 400
    tokens = sample(
        logits.repeat(draws, 1),
        top_k=k.int().repeat(draws),
        top_p=p.repeat(draws),
        min_p=min_p.repeat(draws) if has_min_p else None,
        filter_order="joint",
        seed=torch.arange(64 * draws),
    ).token_ids
    assert bool(theirs.gather(1, tokens.view(draws, 64).T.long()).all())
