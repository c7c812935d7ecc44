"""Put the reports of several runs of `integration.serve_benchmark` into one: loads or backends that were
measured in separate runs, in one table each.

    python -m integration.merge_reports RESULTS FIRST/report.json SECOND/report.json ...

Runs of different engines, models, machines or software do not belong in one table and are refused. RESULTS
gets the same files as a run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from integration.engines import Metrics
from integration.report import format_table, write_report
from integration.results import Row

# These must be equal. Loads may differ: their tables have separate headings
COMMON = (
    "engine",
    "model",
    "device_name",
    "versions",
    "dtype",
    "cuda_graphs",
    "max_model_len",
    "max_num_seqs",
    "max_concurrency",
    "seed",
    "server_arguments",
)


def merge(folder: Path, reports: list[Path]) -> list[Row]:
    """Write the merged report into `folder`, return its rows: the reports' own, in the order given.

    Raises ValueError for runs that differ in COMMON.
    """
    read: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in reports]
    for path, report in zip(reports, read, strict=True):
        if not isinstance(report, dict) or not {"title", "settings", "rows"} <= report.keys():
            raise ValueError(
                f"{path} is not a report.json that `python -m integration.serve_benchmark` wrote"
            )
    first = read[0]["settings"]
    for path, report in zip(reports, read, strict=True):
        for name in COMMON:
            if report["settings"].get(name) != first.get(name):
                raise ValueError(
                    f"{path}: {name} is {report['settings'].get(name)!r}, in {reports[0]} it is "
                    f"{first.get(name)!r}"
                )
    rows = [
        Row(row["backend"], row["workload"], [Metrics(**run) for run in row["repeats"]])
        for report in read
        for row in report["rows"]
    ]
    pairs = [(row.backend, row.workload) for row in rows]
    twice = next((pair for pair in pairs if pairs.count(pair) > 1), None)
    if twice:
        raise ValueError(f"reports: {twice[0]} was measured twice with the load {twice[1]!r}")
    folder.mkdir(parents=True, exist_ok=True)
    write_report(folder, read[0]["title"], {"merged": [report["settings"] for report in read]}, rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("reports", type=Path, nargs="+", metavar="report.json")
    given = parser.parse_args()
    try:
        rows = merge(given.results, given.reports)
    except (OSError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    print(format_table(rows))


if __name__ == "__main__":
    main()
