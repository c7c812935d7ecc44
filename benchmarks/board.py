"""The board of benchmarks.attention: its table, a plot of each kernel's share of the floor, and changes from
another board.

Merges the JSON files of several parts.

    python -m benchmarks.board JSON ... [--against JSON ...] [--markdown FILE] [--plot FILE.svg]

All figures of a line come from one process. Parts of different GPU models are refused. If a line was measured
twice, the last measurement counts.

--against compares our times. It divides each by the floor of the same process, since GPUs of one model differ
in their clocks. A line is slower or faster only if the middle halves of its times and of the earlier times do
not overlap. Exits with 1 if a line is slower.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_backend.cli.plan import check_matplotlib
from benchmarks.cases import all_cases
from benchmarks.report import fastest_of, number, ratio, table

PEERS = ("FA3", "FA4", "FlashInfer", "cuDNN", "flex_attention")
MARKS = dict(zip(PEERS, (("s", "C0"), ("D", "C1"), ("^", "C2"), ("P", "C4"), ("v", "C7")), strict=True))
Line = dict[str, Any]  # the result of benchmarks.attention; times in µs


def of_ragged(line: Line, lines: Sequence[Line]) -> float | None:
    """Our time with pages ÷ our ragged time for the same lengths; None if only one of them was measured."""
    ragged = next(
        (other for other in lines if other.get("ragged") and other["shape"] == line.get("shape")), None
    )
    return None if ragged is None or line is ragged else line["ours"] / ragged["ours"]


def markdown(lines: Sequence[Line], headers: Sequence[str]) -> str:
    """The table below the headers."""
    peers = [name for name in PEERS if any(line.get(name) is not None for line in lines)]
    invariant = any("batch invariant" in line for line in lines)
    columns = [
        "case",
        "floor",
        "empty launch",
        "ours",
        "TFLOP/s",
        "plan",
        *peers,
        "ours / best peer",
        "ours / floor",
        "ours / ours ragged",
    ]
    columns += (["ours, batch-invariant", "batch-invariant / ours"] if invariant else []) + ["error"]
    rows = []
    for line in lines:
        error = max(line["error"], line.get("batch invariant error", 0.0))
        row = [
            line["case"],
            *(number(line.get(name)) for name in ("floor", "launch", "ours")),
            number(ratio(line.get("flops"), line["ours"] * 1e6), 0),
            *(number(line.get(name)) for name in ("plan", *peers)),
        ]
        ratios = (
            ratio(line["ours"], fastest_of(line, PEERS)),
            line["ours"] / line["floor"],
            of_ragged(line, lines),
        )
        row += [number(value, 2) for value in ratios]
        if invariant:
            time = line.get("batch invariant")
            row += [number(time), number(ratio(time, line["ours"]), 2)]
        rows.append([*row, "not checked" if math.isnan(error) else f"{error:.1e}"])
    return "\n".join([*headers, "", table(columns, rows), ""])


def merge(paths: Sequence[Path]) -> tuple[list[Line], list[str]]:
    """The lines of all files in the order of the board, and the files' headers.

    Raises:
        ValueError: a file that is not part of a board, files from different GPU models, or a line that the
            board does not have.
    """
    parts = [json.loads(path.read_text()) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        if not isinstance(part, dict) or not {"header", "gpu", "lines"} <= part.keys():
            raise ValueError(f"{path} is not a file that `python -m benchmarks.attention --json` wrote")
        if part["gpu"] != parts[0]["gpu"]:
            raise ValueError(f"{path}: gpu is {part['gpu']!r}, must be {parts[0]['gpu']!r} as in {paths[0]}")
    lines = {line["case"]: line for part in parts for line in part["lines"]}
    names = [case.name for case in all_cases()]
    unknown = sorted(lines.keys() - set(names))
    if unknown:
        raise ValueError(f"case is {unknown[0]!r}, must be one of benchmarks/cases.py")
    return [lines[name] for name in names if name in lines], list(
        dict.fromkeys(part["header"] for part in parts)
    )


def changes(lines: Sequence[Line], earlier: Sequence[Line]) -> tuple[list[tuple[Line, Line]], ...]:
    """(slower lines, faster lines), each (now, earlier), based on the quartiles of both.

    Raises:
        ValueError: no line is in both boards, or a line has no quartiles.
    """
    before = {line["case"]: line for line in earlier}
    both = [(line, before[line["case"]]) for line in lines if line["case"] in before]
    if not both:
        raise ValueError("--against has no line of this board")
    for line in (line for pair in both for line in pair):
        if "ours quartiles" not in line:
            raise ValueError(f"{line['case']} has no quartiles of its times: measure it again")

    def quartiles(line: Line) -> tuple[float, float]:
        first, third = line["ours quartiles"]
        return first / line["floor"], third / line["floor"]

    slower = [(now, then) for now, then in both if quartiles(now)[0] > quartiles(then)[1]]
    faster = [(now, then) for now, then in both if quartiles(now)[1] < quartiles(then)[0]]
    return slower, faster


def changes_text(lines: Sequence[Line], earlier: Sequence[Line]) -> tuple[str, int]:
    """The result of `changes` as Markdown, and the number of slower lines."""
    slower, faster = changes(lines, earlier)
    rows = [
        [
            now["case"],
            number(then["ours"]),
            number(now["ours"]),
            number(now["ours"] / now["floor"] / (then["ours"] / then["floor"]), 3),
            kind,
        ]
        for kind, pairs in (("slower", slower), ("faster", faster))
        for now, then in pairs
    ]
    compared = len({line["case"] for line in lines} & {line["case"] for line in earlier})
    said = f"{len(slower)} slower, {len(faster)} faster, of {compared} lines in both boards"
    columns = ["case", "earlier, µs", "now, µs", "now / earlier", "change"]
    return (f"{said}:\n\n{table(columns, rows)}\n" if rows else f"{said}.\n"), len(slower)


def plot(lines: Sequence[Line], path: Path) -> None:
    """A dot for ours and each peer on every line: floor ÷ time. 1 is the floor."""
    from attn_backend.cli.picture import new_figure, write

    figure = new_figure(1100, 160 + 21 * len(lines))
    figure.set_layout_engine("constrained")
    axis = figure.subplots()
    places = list(range(len(lines)))
    for name, key, marker, color in (
        ("ours", "ours", "o", "C3"),
        *((peer, peer, *MARKS[peer]) for peer in PEERS),
    ):
        points = [
            (line["floor"] / line[key], place)
            for place, line in zip(places, lines, strict=True)
            if line.get(key) is not None
        ]
        if points:
            x, y = zip(*points, strict=True)
            axis.scatter(
                x, y, marker=marker, color=color, label=name, s=40 if key == "ours" else 22, zorder=3
            )
    for place, line in zip(places, lines, strict=True):
        best = fastest_of(line, PEERS)
        if best is not None:
            axis.plot(
                [line["floor"] / line["ours"], line["floor"] / best],
                [place, place],
                color="C3" if line["ours"] < best else "0.6",
                linewidth=1.5,
            )
    axis.set_yticks(places, [line["case"] for line in lines], fontsize=9)
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.set_xlim(left=0)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel(
        "floor ÷ time (1 is the floor: bytes over the copy rate, or FLOPs over the rate of a large product; "
        "no launch in it)",
        loc="right",
    )
    axis.grid(axis="x", alpha=0.3)
    axis.xaxis.set_tick_params(labeltop=True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=1 + len(PEERS), frameon=False)
    write(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", type=Path, nargs="+", metavar="JSON")
    parser.add_argument(
        "--against", type=Path, nargs="+", metavar="JSON", default=[], help="files of an earlier board"
    )
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    changed, num_slower = "", 0
    try:
        if arguments.plot:
            check_matplotlib("--plot")
        lines, headers = merge(arguments.parts)
        if arguments.against:
            changed, num_slower = changes_text(lines, merge(arguments.against)[0])
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    text = markdown(lines, headers)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    if arguments.plot:
        plot(lines, arguments.plot)
    print(changed, end="")
    parser.exit(1 if num_slower else 0)


if __name__ == "__main__":
    main()
