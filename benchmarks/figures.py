"""The figures of the documentation: schedules by `attn-backend plan`, the Hopper kernel's pipeline, and the
serving tables of docs/benchmarks.md as bars.

python -m benchmarks.figures            # writes docs/figures/*.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from attn_backend.cli.main import main as attn_backend
from attn_backend.cli.picture import new_figure, write
from benchmarks import pipeline

DOCS = Path(__file__).resolve().parent.parent / "docs"
PLANS = {
    "mixed": ["--mixed", "1x2048@6144+20x4096", "--num-ctas", "33"],
    "cascade": ["--shared-prefix", "4x8x4096+1024+256", "--num-ctas", "33"],
}
LOADS = {"ShareGPT": "16/s", "512-2048 tokens": "Prompts of", "shared prefix of 4096": "One shared prefix"}


def serving_tables(text: str) -> dict[str, dict[str, dict[str, float]]]:
    """ITL p50 in ms by engine, line above the table, and backend: the tables of `Beside the engines' own
    backends`.
    """
    section = text.partition("### Beside the engines' own backends")[2].partition("\n### ")[0]
    tables: dict[str, dict[str, dict[str, float]]] = {}
    engine = title = ""
    column = -1
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line in ("vLLM:", "SGLang:"):
            engine = line[:-1]
        elif line.startswith("| backend"):
            column = cells.index("ITL p50 ms")
        elif line.startswith("| ") and engine:
            tables.setdefault(engine, {}).setdefault(title, {})[cells[0]] = float(cells[column])
        elif line.strip() and not line.startswith("|"):
            title = line
    return tables


def draw_serving(tables: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """A panel for each engine: ITL p50 of each backend under three loads, without the lines that disable a
    feature.
    """
    figure = new_figure(1000, 300)
    figure.set_layout_engine("constrained")
    for axes, (engine, loads) in zip(
        figure.subplots(1, len(tables), sharey=True, squeeze=False)[0], tables.items(), strict=True
    ):
        chosen = {
            label: next(rows for title, rows in loads.items() if part in title)
            for label, part in LOADS.items()
        }
        backends = [name for name in next(iter(chosen.values())) if "," not in name]
        width = 0.8 / len(backends)
        for number, name in enumerate(backends):
            places = [place + number * width for place in range(len(chosen))]
            color = "C3" if name == "attn_backend" else ("#777777", "#9a9a9a", "#bdbdbd")[number - 1]
            bars = axes.bar(places, [rows[name] for rows in chosen.values()], width, label=name, color=color)
            axes.bar_label(bars, fmt="%.1f", fontsize=6)
        axes.set_xticks([place + 0.4 - width / 2 for place in range(len(chosen))], list(chosen), fontsize=8)
        axes.set_title(f"{engine}: ms between two tokens (ITL p50)", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7, loc="upper left")
    write(figure, path)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    folder = DOCS / "figures"
    folder.mkdir(exist_ok=True)
    for name, batch in PLANS.items():
        if attn_backend(["plan", *batch, "--svg", str(folder / f"{name}.svg")]) != 0:
            raise SystemExit(1)
    pipeline.draw(pipeline.simulate(), folder / "pipeline.svg")
    draw_serving(serving_tables((DOCS / "benchmarks.md").read_text()), folder / "serving.svg")


if __name__ == "__main__":
    main()
