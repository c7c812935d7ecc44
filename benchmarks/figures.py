"""The figures of the documentation: diagrams, schedules by `attn-backend plan`, the Hopper kernel's pipeline,
and tables of docs/reports/ as bars.

python -m benchmarks.figures            # writes docs/figures/*.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from attn_backend.cli.main import main as attn_backend
from attn_backend.cli.picture import INK, new_figure, write
from benchmarks import diagrams, pipeline

DOCS = Path(__file__).resolve().parent.parent / "docs"
REPORTS = DOCS / "reports"
PLANS = {
    "mixed": ["--mixed", "1x2048@6144+20x4096", "--num-ctas", "33"],
    "cascade": ["--shared-prefix", "4x8x4096+1024+256", "--num-ctas", "33"],
}
LOADS = {"ShareGPT": "16/s", "512-2048 tokens": "Prompts of", "shared prefix": "One shared prefix"}
OURS, PEERS = "#d62728", ("#777777", "#9a9a9a", "#bdbdbd", "#d9d9d9")
WIDTH, SIZE, SMALL = 640, 12, 11.5  # pixels and points: text is readable where the figure is 370 pixels wide

Rows = dict[str, dict[str, str]]  # a table's cells by the first cell of the line, then by column


def tables(text: str) -> Iterator[Rows]:
    """The Markdown tables of a page."""
    columns: list[str] = []
    rows: Rows = {}
    for line in [*text.splitlines(), ""]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            if rows:
                yield rows
            columns, rows = [], {}
        elif not columns:
            columns = cells
        elif line.strip("|-: "):
            rows[cells[0]] = dict(zip(columns, cells, strict=True))


def table(report: str, *columns: str) -> Rows:
    """The first table of a report that has these columns."""
    text = (REPORTS / f"{report}.md").read_text()
    return next(rows for rows in tables(text) if {*columns} <= {*next(iter(rows.values()))})


def serving_tables(text: str) -> dict[str, dict[str, dict[str, float]]]:
    """ITL p50 in ms by engine, line above the table, and backend: the tables of `Compared with the engines'
    own backends`.
    """
    section = text.partition("## Compared with the engines' own backends")[2].partition("\n## ")[0]
    found: dict[str, dict[str, dict[str, float]]] = {}
    engine = title = ""
    column = -1
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line in ("vLLM:", "SGLang:"):
            engine = line[:-1]
        elif line.startswith("| backend"):
            column = cells.index("ITL p50 ms")
        elif line.startswith("| ") and engine:
            found.setdefault(engine, {}).setdefault(title, {})[cells[0]] = float(cells[column])
        elif line.strip() and not line.startswith("|"):
            title = line
    return found


def panels(count: int, height: float) -> tuple[Figure, list[tuple[SubFigure, Axes]]]:
    """A column of plots, each this high, with room for its legend."""
    figure = new_figure(WIDTH, count * height)
    figure.set_layout_engine("constrained")
    parts = figure.subfigures(count, 1, squeeze=False)[:, 0]
    return figure, [(part, part.subplots()) for part in parts]


def draw_bars(axes: Axes, title: str, values: Mapping[str, Mapping[str, float]], form: str = "%.1f") -> None:
    """Groups of horizontal bars: {group: {series: value}}; ours is the first series."""
    series = list(dict.fromkeys(name for bars in values.values() for name in bars))
    width = 0.84 / len(series)
    for number, name in enumerate(series):
        places = [place + number * width for place, bars in enumerate(values.values()) if name in bars]
        lengths = [bars[name] for bars in values.values() if name in bars]
        color = OURS if number == 0 else PEERS[number - 1]
        bars = axes.barh(places, lengths, width * 0.92, label=name, color=color)
        axes.bar_label(bars, fmt=form, fontsize=SMALL, padding=2, color=INK)
    axes.set_yticks([place + 0.42 - width / 2 for place in range(len(values))], list(values), fontsize=SIZE)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title(title, fontsize=SIZE, loc="left", color=INK)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(bottom=False, labelbottom=False, left=False)


def legend(part: SubFigure, columns: int) -> None:
    style = {"frameon": False, "fontsize": SMALL, "handlelength": 1.2, "columnspacing": 1.2}
    part.legend(loc="outside lower center", ncols=columns, **style)


def draw_serving(found: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """A panel for each engine: ITL p50 of each backend under three loads, without the lines that disable a
    feature.
    """
    figure, places = panels(len(found), 310)
    for (part, axes), (engine, loads) in zip(places, found.items(), strict=True):
        values = {
            label: {
                name: value
                for name, value in next(rows for title, rows in loads.items() if words in title).items()
                if "," not in name
            }
            for label, words in LOADS.items()
        }
        draw_bars(axes, f"{engine}: ms between two tokens (ITL p50)", values)
        legend(part, 4)
    write(figure, path)


KERNELS = {
    "decode 64 x 4096": "decode bs64 const4096 h32/8 d128 p16",
    "decode, Zipf lengths": "decode bs64 zipf4096 h32/8 d128 p16",
    "prefill 16 x 1024": "prefill bs16 const1024 h32/8 d128 p16",
    "prefill 4 x 4096": "prefill bs4 const4096 h32/8 d128 p16",
    "prefill 1 x 16384": "prefill bs1 const16384 h32/8 d128 p16",
    "chunk + 63 decodes": "mixed 1x2048@6144 + 63 decode@4096 h32/8 d128 p16",
}


def draw_kernels(path: Path) -> None:
    """Time over the floor, ours and the peers'."""
    rows = table("attention", "ours", "FA3", "FlashInfer", "floor")
    values = {
        label: {
            name: float(rows[case][column]) / float(rows[case]["floor"])
            for name, column in (("attn_backend", "ours"), ("FA3", "FA3"), ("FlashInfer", "FlashInfer"))
        }
        for label, case in KERNELS.items()
    }
    figure, ((part, axes),) = panels(1, 520)
    draw_bars(axes, "time of one attention launch; 1 is the device's floor", values, "%.2f")
    legend(part, 3)
    write(figure, path)


def draw_prefixes(path: Path) -> None:
    """Decodes with a shared prefix: automatic levels, none, and the peers."""
    rows = table("shared_prefixes", "automatic", "off", "FI cascade, fa2")
    columns = {
        "cascade on": "automatic",
        "cascade off": "off",
        "FA3": "FA3",
        "FlashInfer, by hand": "FI cascade, fa2",
    }
    values = {
        case: {name: float(cells[column]) for name, column in columns.items()} for case, cells in rows.items()
    }
    values = {case: bars for case, bars in values.items() if not case.startswith("8 x")}
    figure, ((part, axes),) = panels(1, 520)
    draw_bars(axes, "decode, requests x (shared + own tokens): µs", values, "%.0f")
    legend(part, 2)
    write(figure, path)


def draw_fp8(path: Path) -> None:
    """Decodes over an 8-bit cache, a 16-bit cache and the peers."""
    rows = table("fp8", "bf16", "fp8", "FA3 fp8")
    columns = {
        "8-bit cache": "fp8",
        "16-bit cache": "bf16",
        "FA3, 8-bit": "FA3 fp8",
        "FlashInfer, 8-bit": "FlashInfer fp8",
    }
    cases = {
        "decode bs1 8k": "1 x 8k",
        "decode bs16 1k": "16 x 1k",
        "decode bs64 4k": "64 x 4k",
        "decode bs1 128k": "1 x 128k",
    }
    values = {
        label: {name: float(rows[case][column]) for name, column in columns.items()}
        for case, label in cases.items()
    }
    figure, ((part, axes),) = panels(1, 430)
    draw_bars(axes, "decode: µs of one attention launch", values, "%.0f")
    legend(part, 2)
    write(figure, path)


def draw_plans(path: Path) -> None:
    """µs of a plan in a captured graph, by batch size."""
    rows = table("plan", "20 plans / 20", "prefixes taken")
    kinds = {
        "nothing shared": "nothing shared",
        "one shared prefix": "one shared prefix",
        "two-level tree": "two-level tree",
    }
    values = {
        f"{batch} requests": {
            label: float(rows[f"{batch} x 4096: {kind}"]["20 plans / 20"]) for label, kind in kinds.items()
        }
        for batch in (1, 16, 64, 256, 512)
    }
    figure, ((part, axes),) = panels(1, 430)
    draw_bars(axes, "plan, once a step: µs of the GPU", values)
    legend(part, 3)
    write(figure, path)


def draw_all(folder: Path) -> None:
    """Every figure except what `attn-backend plan` draws."""
    diagrams.write_all(folder)
    pipeline.draw(pipeline.simulate(), folder / "pipeline.svg")
    draw_serving(serving_tables((REPORTS / "serving.md").read_text()), folder / "serving.svg")
    draw_kernels(folder / "kernels.svg")
    draw_prefixes(folder / "prefixes.svg")
    draw_fp8(folder / "fp8.svg")
    draw_plans(folder / "plans.svg")


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    folder = DOCS / "figures"
    folder.mkdir(exist_ok=True)
    for name, batch in PLANS.items():
        if attn_backend(["plan", *batch, "--svg", str(folder / f"{name}.svg")]) != 0:
            raise SystemExit(1)
    draw_all(folder)


if __name__ == "__main__":
    main()
