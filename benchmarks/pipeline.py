"""A picture of the Hopper kernel's pipeline: which unit works on which KV tile, by the dependencies of
csrc/attention/sm90/prefill.cuh.

Times are for a row tile of 128 rows with heads of 128 columns (docs/adr/0016). A warpgroup's product of 64 x
128 x 128 takes the tensor cores 512 cycles. A copy of a KV tile takes about as long as the memory allows. A
softmax of 64 x 128 scores takes some 1,000 cycles of a warpgroup that shares its schedulers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes

from attn_backend.cli.picture import FAINT, INK, TEXT, Rectangles, add_axes, new_figure, write

PRODUCT, SOFTMAX, COPY = 512, 1000, 450  # cycles
TILES = 4  # KV tiles
STAGES = 5  # in the ring, each a K or a V tile
LANES = ("copies", "tensor cores", "consumer 0", "consumer 1")
COLORS = {"K": "#9ecae1", "V": "#c7e9c0", "QK": "#6baed6", "PV": "#74c476", "softmax": "#fdae6b"}


@dataclass
class Timeline:
    """Steps by lane: (begin, end, what, number of the KV tile, consumer)."""

    steps: dict[str, list[tuple[float, float, str, int, int]]] = field(
        default_factory=lambda: {lane: [] for lane in LANES}
    )

    def add(self, lane: str, ready: float, cycles: float, what: str, tile: int, consumer: int = -1) -> float:
        """A step that begins when its lane is free and after `ready`. Returns its end."""
        begin = max(ready, self.steps[lane][-1][1] if self.steps[lane] else 0.0)
        self.steps[lane].append((begin, begin + cycles, what, tile, consumer))
        return begin + cycles


def simulate() -> Timeline:
    """Each consumer starts the scores of the next KV tile and the values of this one together, then turns
    scores into probabilities.
    """
    timeline = Timeline()
    loaded: list[float] = []  # K0 V0 K1 V1 ...
    freed: list[float] = []

    def copy_next() -> None:
        number = len(loaded)
        room = freed[number - STAGES] if number >= STAGES else 0.0
        loaded.append(timeline.add("copies", room, COPY, "KV"[number % 2], number // 2))

    for _ in range(STAGES):
        copy_next()
    scores = [timeline.add("tensor cores", loaded[0], PRODUCT, "QK", 0, consumer) for consumer in (0, 1)]
    freed.append(max(scores))
    for tile in range(TILES):
        probabilities = [
            timeline.add(f"consumer {consumer}", scores[consumer], SOFTMAX, "softmax", tile, consumer)
            for consumer in (0, 1)
        ]
        while len(loaded) < min(2 * tile + 3, 2 * TILES):
            copy_next()
        ends = []
        for consumer in (0, 1):
            ready = max(probabilities[consumer], loaded[2 * tile + 1])
            if tile + 1 < TILES:
                scores[consumer] = timeline.add(
                    "tensor cores", max(ready, loaded[2 * tile + 2]), PRODUCT, "QK", tile + 1, consumer
                )
            ends.append(timeline.add("tensor cores", ready, PRODUCT, "PV", tile, consumer))
        freed += [max(ends), max(scores)]
        while len(loaded) < min(len(freed) + STAGES, 2 * TILES):
            copy_next()
    return timeline


def draw(timeline: Timeline, path: Path) -> None:
    figure = new_figure(1000, 240)
    axes: Axes = add_axes(figure, 104, 12, 884, 180)
    rectangles = Rectangles(axes)
    for lane, steps in timeline.steps.items():
        row = len(LANES) - 1 - LANES.index(lane)
        for begin, end, what, tile, consumer in steps:
            rectangles.add(COLORS[what], begin + 8, row + 0.1, end - begin - 16, 0.8)
            name = f"{what} {tile}" if lane != "tensor cores" else f"{what} {tile}\nof {consumer}"
            axes.text((begin + end) / 2, row + 0.5, name, ha="center", va="center", fontsize=TEXT, color=INK)
    rectangles.draw()
    axes.set_yticks([len(LANES) - 0.5 - number for number in range(len(LANES))], LANES)
    axes.set_xlim(0, max(steps[-1][1] for steps in timeline.steps.values()))
    axes.set_ylim(0, len(LANES))
    axes.set_xlabel("cycles", fontsize=TEXT, color=FAINT)
    write(figure, path)
