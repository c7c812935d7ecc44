"""The answer to "does this backend serve that model?", before an engine starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

SERVED, REFUSED, PARTLY = "served", "refused", "partly"


class Refusal(NamedTuple):
    """
    Attributes:
        what: the unsupported need of the model.
        way_out: an option to pass, or another backend.
    """

    what: str
    way_out: str


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        answer: SERVED, REFUSED or PARTLY.
        refusals: all reasons, of REFUSED.
        ours: numbers of the attention layers that this backend serves. others: numbers of the layers that
            run the model's own kernels.
        notes: facts that a user should know in any case.
    """

    answer: str
    refusals: tuple[Refusal, ...] = ()
    ours: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def refused(refusals: Iterable[Refusal]) -> Verdict:
    return Verdict(REFUSED, tuple(refusals))
