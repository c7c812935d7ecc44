"""Do two samples come from one distribution? Tests that assume little, for comparisons of sampled answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

SMALLEST_CELL = 10  # in both samples together: 5 expected in each, if they are equally large
PERMUTATIONS = 10_000


def chi_square(one: Sequence[Hashable], other: Sequence[Hashable]) -> float | None:
    """The p-value of the two-sample chi-square test: the probability of a difference this large if both
    samples came from one distribution.

    Values that are rarer than SMALLEST_CELL in both samples together share a cell. None: all are in one cell,
    so the test shows nothing.
    """
    counts, others = Counter(one), Counter(other)
    pooled = counts + others
    cells = [
        (counts[value], others[value]) for value in sorted(pooled, key=repr) if pooled[value] >= SMALLEST_CELL
    ]
    rare = [(counts[value], others[value]) for value in pooled if pooled[value] < SMALLEST_CELL]
    rest = (sum(pair[0] for pair in rare), sum(pair[1] for pair in rare))
    if sum(rest) >= SMALLEST_CELL or not cells:
        cells.append(rest)
    elif rest != (0, 0):
        smallest = min(range(len(cells)), key=lambda index: sum(cells[index]))
        cells[smallest] = (cells[smallest][0] + rest[0], cells[smallest][1] + rest[1])
    if len(cells) == 1:
        return None
    ratio = (len(other) / len(one)) ** 0.5
    statistic = sum((count * ratio - of_other / ratio) ** 2 / (count + of_other) for count, of_other in cells)
    degrees = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


def same_mean(one: Sequence[float], other: Sequence[float]) -> float:
    """The p-value of a permutation test (two-sided, seeded): how often means differ this much if the values
    are dealt to the two samples again.
    """
    values = torch.tensor([*one, *other], dtype=torch.float64)
    dealt = values[
        torch.rand(PERMUTATIONS, len(values), generator=torch.Generator().manual_seed(0)).argsort(1)
    ]
    return _share(
        dealt[:, : len(one)].mean(1) - dealt[:, len(one) :].mean(1),
        values[: len(one)].mean() - values[len(one) :].mean(),
    )


def zero_mean(differences: Sequence[float]) -> float:
    """The p-value of a sign-flip test (two-sided, seeded) for pairs: how often the mean difference is this
    large if each could equally have the other sign.
    """
    values = torch.tensor(differences, dtype=torch.float64)
    signs = 2 * torch.randint(2, (PERMUTATIONS, len(values)), generator=torch.Generator().manual_seed(0)) - 1
    return _share((signs * values).mean(1), values.mean())


def _share(drawn: Tensor, observed: Tensor) -> float:
    """The share of random differences at least as large as the observed one, which counts as one of them."""
    return (1 + int((drawn.abs() >= observed.abs() - 1e-12).sum())) / (1 + len(drawn))
