"""The results of one backend under one load."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, fields

from integration.engines import Metrics


@dataclass(frozen=True)
class Row:
    """One backend's results under one load, one `Metrics` for each repeat."""

    backend: str
    workload: str
    repeats: list[Metrics]

    @property
    def metrics(self) -> Metrics:
        """The median of each figure over the repeats."""
        values = {
            field.name: statistics.median(getattr(repeat, field.name) for repeat in self.repeats)
            for field in fields(Metrics)
        }
        return Metrics(**values)


def by_load(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each load, in the order in which the loads were measured."""
    return {
        load: [row for row in rows if row.workload == load]
        for load in dict.fromkeys(row.workload for row in rows)
    }
