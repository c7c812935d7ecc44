"""Sampling in float64, from its definition: the tokens that survive the filters, and their probabilities; and
statistics of draws.
"""

from __future__ import annotations

import math

import torch


def bits(token_mask: torch.Tensor) -> torch.Tensor:
    """bool [batch, vocab] as the int32 words of a token mask."""
    batch, vocab = token_mask.shape
    padded = torch.zeros(batch, (vocab + 31) // 32 * 32, dtype=torch.int64)
    padded[:, :vocab] = token_mask
    words = (padded.view(batch, -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def keeps(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    filter_order: str = "top_k_first",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool [vocab]: the tokens of one row [vocab] that survive. Tokens with equal logits stay together."""
    x = logits.double()
    if mask is not None:
        x = x.masked_fill(~mask, -math.inf)
    p = torch.softmax((x - x.max()) / temperature, -1)
    kept = x > -math.inf
    if min_p is not None and min_p > 0:
        kept &= (x == x.max()) | (p >= min(min_p, 1.0) * p.max())
    by_min_p = kept.clone()
    if top_k is not None and 0 < top_k < len(x):
        values = x[kept].sort(descending=True).values
        kept &= x >= values[min(top_k, len(values)) - 1]
    if top_p is not None and top_p < 1:
        counted = (
            torch.ones_like(kept)
            if filter_order == "joint" or bool((kept == (x > -math.inf)).all())
            else kept
        )
        ordered, order = torch.where(counted, x, -math.inf).sort(descending=True)
        mass = torch.where(ordered > -math.inf, p[order], 0.0)
        mass = mass / mass.sum()
        before = mass.cumsum(-1) - mass
        last = int((before < top_p).nonzero().max()) if top_p > 0 else 0
        kept &= x >= ordered[last]
    assert bool((kept & ~by_min_p).any()) is False
    return kept


def probabilities(logits: torch.Tensor, kept: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """float64 [vocab]: softmax of the survivors' logits / temperature."""
    x = logits.double().masked_fill(~kept, -math.inf)
    return torch.softmax((x - x.max()) / temperature, -1)


def chi_square_p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """The chance of counts [vocab] at least this far from `probs`; tokens with expected counts below 5 are
    merged.
    """
    expected = probs * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare].double(), counts[rare].sum().double()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = wanted >= 5
    statistic = ((observed[used] - wanted[used]) ** 2 / wanted[used]).sum()
    degrees = int(used.sum()) - 1
    if degrees < 1:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(degrees / 2, dtype=torch.float64), statistic / 2))


def uniformity_p_value(p_values: list[float]) -> float:
    """Kolmogorov-Smirnov: the chance of values at least this far from uniform (asymptotic, Stephens'
    correction).
    """
    x = torch.tensor(sorted(p_values), dtype=torch.float64)
    n = len(x)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum((steps[1:] - x).max(), (x - steps[:-1]).max()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    return min(
        1.0,
        max(0.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * scaled * scaled) for k in range(1, 101))),
    )


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10, from the paper's description: four 32-bit words."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def race_values(logits: torch.Tensor, seed: int, position: int, temperature: float = 1.0) -> torch.Tensor:
    """float64 [vocab]: the race values of the tokens of one row [vocab] in a request's draw.

    The survivor with the largest value is drawn.
    """
    mask = 0xFFFFFFFF
    counter, key = [position & mask, position >> 32 & mask], [seed & mask, seed >> 32 & mask]

    def bits(token: int) -> int:
        # of eight tokens: four consecutive ones, and four that are 128 later
        block = token // 512 * 64 + token // 4 % 32 * 2 + token // 256 % 2
        first = (
            philox4x32([*counter, block, 0], key)[token // 2 % 2 + token // 128 % 2 * 2] >> 16 * (token % 2)
            & 0xFFFF
        )
        return first << 32 | philox4x32([*counter, token, 2], key)[0]

    x = (torch.tensor([bits(token) for token in range(len(logits))], dtype=torch.float64) + 0.5) / 2**48
    return logits.double() / temperature - torch.log(-torch.log1p(-x))
