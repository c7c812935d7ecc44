"""A picture of rectangles, lines and text: written as SVG by itself, as PNG through matplotlib."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

INK = "#222222"
FAINT = "#9a9a9a"


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str
    title: str


@dataclass(frozen=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    color: str
    width: float
    dashed: bool


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    text: str
    size: float
    color: str
    anchor: str
    bold: bool


@dataclass
class Picture:
    """Shapes in pixels from the upper left corner, drawn in the order they were added."""

    width: float
    height: float
    shapes: list[Rect | Line | Text] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", title: str = "") -> None:
        """`title` is shown where the pointer rests on it (SVG)."""
        self.shapes.append(Rect(x, y, width, height, fill, stroke, title))

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = FAINT, width: float = 1, dashed: bool = False) -> None:
        self.shapes.append(Line(x1, y1, x2, y2, color, width, dashed))

    def text(self, x: float, y: float, text: str, size: float = 11, color: str = INK, anchor: str = "start", bold: bool = False) -> None:
        """`y` is the base line; `anchor` is start, middle or end."""
        self.shapes.append(Text(x, y, text, size, color, anchor, bold))

    def svg(self) -> str:
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="DejaVu Sans, Helvetica, Arial, sans-serif">'
        return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *map(_svg, self.shapes), "</svg>\n"])

    def write_png(self, path: Path) -> None:
        """Raises ImportError without matplotlib."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle

        figure = Figure(figsize=(self.width / 100, self.height / 100), dpi=100)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        aligned = {"start": "left", "middle": "center", "end": "right"}
        for order, shape in enumerate(self.shapes):
            if isinstance(shape, Rect):
                corner = (shape.x, shape.y)
                axes.add_patch(Rectangle(corner, shape.width, shape.height, facecolor=shape.fill, edgecolor=shape.stroke, linewidth=0.5, zorder=order))
            elif isinstance(shape, Line):
                dashes = "--" if shape.dashed else "-"
                axes.plot((shape.x1, shape.x2), (shape.y1, shape.y2), color=shape.color, linewidth=0.72 * shape.width, linestyle=dashes, zorder=order)
            else:
                style: dict[str, Any] = {"ha": aligned[shape.anchor], "va": "baseline", "weight": "bold" if shape.bold else "normal", "parse_math": False}
                axes.text(shape.x, shape.y, shape.text, fontsize=0.72 * shape.size, color=shape.color, zorder=order, **style)
        figure.savefig(path, dpi=160)


def text_width(text: str, size: float) -> float:
    """About the pixels that a text takes."""
    return 0.6 * size * len(text)


def _svg(shape: Rect | Line | Text) -> str:
    if isinstance(shape, Rect):
        title = f"<title>{escape(shape.title)}</title>" if shape.title else ""
        stroke = "" if shape.stroke == "none" else f' stroke="{shape.stroke}" stroke-width="0.6"'
        return f'<rect x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}" fill="{shape.fill}"{stroke}>{title}</rect>'
    if isinstance(shape, Line):
        dashes = ' stroke-dasharray="4 3"' if shape.dashed else ""
        ends = f'x1="{shape.x1:.2f}" y1="{shape.y1:.2f}" x2="{shape.x2:.2f}" y2="{shape.y2:.2f}"'
        return f'<line {ends} stroke="{shape.color}" stroke-width="{shape.width:g}"{dashes}/>'
    bold = ' font-weight="bold"' if shape.bold else ""
    place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" fill="{shape.color}" text-anchor="{shape.anchor}"'
    return f"<text {place}{bold}>{escape(shape.text)}</text>"
