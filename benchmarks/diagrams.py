"""Diagrams of the documentation, drawn from what the package computes: a batch as a matrix, its schedule, a
shared prefix, the masks of variants, and the parts of the package.

Text is large enough for a screen of 400 pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

import torch

from attn_backend import Attention, BSRView, PageTable, Variant
from attn_backend.cli.picture import DECODE, FAINT, INK, NOT_TAKEN, PREFILL, TAKEN
from attn_backend.variants import builtin

WIDTH = 640
TEXT = 16
PAPER = "#ffffff"
MIDDLE = 0.35  # of a text's size: from its middle to its baseline


@dataclass
class Drawing:
    """A picture of rectangles, lines and text, in pixels from the upper left corner."""

    height: float
    width: float = WIDTH
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = PAPER, line: str = "none"
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{fill}" '
            f'stroke="{line}"/>'
        )

    def line(
        self, x0: float, y0: float, x1: float, y1: float, arrow: bool = False, color: str = FAINT
    ) -> None:
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{color}" '
            f'stroke-width="1.5"{end}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = TEXT,
        anchor: str = "start",
        bold: bool = False,
        color: str = INK,
    ) -> None:
        """Words whose middle is at the height `y`."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y + MIDDLE * size:g}" font-size="{size:g}" text-anchor="{anchor}"{weight} '
            f'fill="{color}">{escape(words)}</text>'
        )

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="sans-serif">\n'
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker></defs>\n'
        )
        paper = f'<rect width="{self.width:g}" height="{self.height:g}" fill="{PAPER}"/>\n'
        return head + paper + "\n".join(self.parts) + "\n</svg>\n"


# The batch of the pages "The schedule" and "Two ideas in pictures": two decodes, and a prompt of five rows.
PAGES = [[0, 3, 6], [1], [2, 4, 5, 7]]
ROWS = [1, 5, 1]
KINDS = ("decode", "prefill", "decode")


def matrix() -> str:
    """Rows of Q x pages of the cache: the block-sparse view of three requests."""
    cell, left, top, gap = 44.0, 196.0, 64.0, 10.0
    columns = 8
    drawing = Drawing(top + sum(ROWS) * 28 + 2 * gap + 12)
    drawing.text(left + columns * cell / 2, 16, "pages of the cache", anchor="middle", color=FAINT)
    for page in range(columns):
        drawing.text(left + (page + 0.5) * cell, 44, str(page), anchor="middle")
    y = top
    for request, (pages, rows) in enumerate(zip(PAGES, ROWS, strict=True)):
        height = rows * 28.0
        color = (PREFILL if rows > 1 else DECODE)[1]
        drawing.text(8, y + height / 2 - (9 if rows > 1 else 0), f"request {request}", bold=True)
        words = f"{rows} rows: {KINDS[request]}" if rows > 1 else KINDS[request]
        drawing.text(*((8, y + height / 2 + 11) if rows > 1 else (98, y + height / 2)), words)
        for row in range(rows):
            for page in range(columns):
                fill = color if page in pages else NOT_TAKEN
                drawing.box(left + page * cell + 1, y + row * 28 + 1, cell - 2, 26, fill)
        y += height + gap
    return drawing.svg()


@dataclass(frozen=True)
class Cut:
    """A part of a request's KV tiles that one CTA computes."""

    request: int
    begin: int
    end: int
    cta: int


def cut_batch(kv_lens: Sequence[int], num_ctas: int) -> tuple[list[Cut], list[int]]:
    """Returns the parts into which `plan` cuts decodes of these lengths, and the KV tiles of each request."""
    page_size, batch = 16, len(kv_lens)
    most = -(-max(kv_lens) // page_size)
    table = torch.arange(batch * most, dtype=torch.int32).view(batch, most)
    attention = Attention(
        2,
        1,
        64,
        dtype=torch.float32,
        device="cpu",
        kernel="generic",
        max_rows=batch,
        max_batch=batch,
        num_ctas=num_ctas,
    )
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    attention.plan(
        BSRView(torch.arange(batch + 1, dtype=torch.int32), PageTable.block_table(table, lens, page_size))
    )
    schedule = attention.schedule()
    tiles = [int(n) for n in schedule.of_tiles("num_kv_tiles")[:batch]]
    positions = schedule.positions.tolist()
    cuts = []
    for cta, (begin, end) in enumerate(pairwise(positions)):
        for request in range(begin[0], min(end[0] + 1, batch)):
            first = begin[2] if request == begin[0] else 0
            last = end[2] if request == end[0] else tiles[request]
            if last > first:
                cuts.append(Cut(request, first, last, cta))
    return cuts, tiles


SHADES = ("#9ecae1", "#5b9bd0")
LENGTHS = (3000, 400, 1100, 250, 700)


def schedule() -> str:
    """Five decodes of different length as one list of work, cut for four CTAs."""
    num_ctas = 4
    cuts, tiles = cut_batch(LENGTHS, num_ctas)
    left, right, top = 8.0, WIDTH - 8.0, 78.0
    unit = (right - left) / sum(tiles)
    drawing = Drawing(274)
    drawing.text(left, 16, "the list of work: KV tiles of 64 tokens", bold=True)
    begins = [sum(tiles[:request]) for request in range(len(tiles))]
    for request, (begin, count) in enumerate(zip(begins, tiles, strict=True)):
        middle = left + (begin + count / 2) * unit
        drawing.text(middle, 48, f"{LENGTHS[request]}", anchor="middle")
        for tile in range(count):
            drawing.box(left + (begin + tile) * unit + 0.5, top - 16, unit - 1, 30, SHADES[request % 2])
    drawing.text(left, 124, "its four intervals, one a CTA", bold=True)
    y = 142.0
    for cta in range(num_ctas):
        mine = [cut for cut in cuts if cut.cta == cta]
        drawing.text(left, y + 13, f"CTA {cta}")
        x = left + 68
        for cut in mine:
            for _ in range(cut.begin, cut.end):
                drawing.box(x + 0.5, y, unit * 2 - 1, 26, SHADES[cut.request % 2])
                x += unit * 2
        parts = ", ".join(
            f"{LENGTHS[cut.request]}" + ("" if (cut.begin, cut.end) == (0, tiles[cut.request]) else " (part)")
            for cut in mine
        )
        drawing.text(x + 8, y + 13, parts)
        y += 33
    return drawing.svg()


def launches() -> str:
    """A mixed batch as one launch for each kind of work, and as one launch for all."""
    drawing = Drawing(292)
    left, lane = 8.0, 24.0
    drawing.text(left, 16, "a launch for each kind of work", bold=True)
    ends = [(290, 210), (270, 150), (296, 180), (240, 202)]
    for sm, (prefill, decode) in enumerate(ends):
        y = 34 + sm * (lane + 2)
        drawing.box(left, y, prefill, lane, PREFILL[1])
        drawing.box(left + 300, y, decode, lane, DECODE[1])
    drawing.line(left + 298, 32, left + 298, 34 + 4 * (lane + 2), color=INK)
    drawing.line(left + 510, 32, left + 510, 34 + 4 * (lane + 2), color=INK)
    drawing.text(left + 8, 34 + lane / 2, "prompt", color="#000000")
    drawing.text(left + 308, 34 + lane / 2, "decodes", color="#000000")
    drawing.text(left + 520, 76, "SMs wait")
    drawing.text(left + 520, 98, "twice")
    drawing.text(left, 164, "one launch for all", bold=True)
    even = sum(map(sum, ends)) / len(ends)
    shares = [190, 250, 270, 296]
    for sm, prefill in enumerate(shares):
        y = 182 + sm * (lane + 2)
        drawing.box(left, y, prefill, lane, PREFILL[1])
        drawing.box(left + prefill, y, even - prefill, lane, DECODE[1])
    drawing.line(left + even, 180, left + even, 182 + 4 * (lane + 2), color=INK)
    drawing.text(left + even + 10, 232, "all end together")
    return drawing.svg()


def prefix(requests: int = 4, shared: int = 8, own: int = 2) -> str:
    """Pages that a decode step reads: each request for itself, and the shared ones once."""
    cell, left = 26.0, 8.0
    drawing = Drawing(300)
    reads = requests * (shared + own)
    drawing.text(left, 16, f"each request reads all of its pages: {reads} reads", bold=True)
    y = 34.0
    for request in range(requests):
        for page in range(shared + own):
            color = TAKEN[0] if page < shared else DECODE[request % 2]
            drawing.box(left + 104 + page * cell, y, cell - 3, 22, color)
        drawing.text(left, y + 11, f"request {request}")
        y += 28
    y += 22
    drawing.text(left, y, f"the prefix is read once: {shared + requests * own} reads", bold=True)
    y += 18
    for page in range(shared):
        drawing.box(left + 104 + page * cell, y, cell - 3, requests * 28 - 6, TAKEN[0])
    for request in range(requests):
        for page in range(own):
            drawing.box(
                left + 104 + (shared + page) * cell, y + request * 28, cell - 3, 22, DECODE[request % 2]
            )
        drawing.text(left, y + request * 28 + 11, f"request {request}")
    drawing.text(left + 104 + (shared + own) * cell + 12, y + 36, "one row tile of")
    drawing.text(left + 104 + (shared + own) * cell + 12, y + 58, "all requests' rows")
    return drawing.svg()


def architecture() -> str:
    """Engine, adapter, plan and kernels: what runs when, and where."""
    drawing = Drawing(452)
    left, right = 8.0, WIDTH - 8.0

    def band(y: float, height: float, name: str, note: str, color: str) -> None:
        drawing.box(left, y, right - left, height, color)
        drawing.text(left + 12, y + 20, name, bold=True)
        drawing.text(right - 12, y + 20, note, anchor="end")

    def inner(x: float, y: float, width: float, name: str, note: str) -> None:
        drawing.box(x, y, width, 58, PAPER, FAINT)
        drawing.text(x + width / 2, y + 19, name, anchor="middle", bold=True)
        drawing.text(x + width / 2, y + 41, note, anchor="middle")

    band(4, 104, "engine", "vLLM, SGLang", NOT_TAKEN)
    for number, (name, note) in enumerate(
        (("scheduler", "which requests"), ("KV cache", "pages"), ("prefix cache", "shared pages"))
    ):
        inner(left + 12 + number * 204, 40, 192, name, note)
    band(134, 46, "adapter", "per step and layer", DECODE[0])
    drawing.text(left + 320, 154, "needs to arguments", anchor="middle")
    band(206, 104, "on the GPU, once a step", "plan()", PREFILL[0])
    for number, (name, note) in enumerate(
        (("read", "lengths, tables"), ("search", "shared prefixes"), ("cut", "equal shares"))
    ):
        inner(left + 12 + number * 204, 242, 192, name, note)
    band(336, 104, "on the GPU, in every layer", "run()", PREFILL[0])
    for number, (name, note) in enumerate(
        (("append", "new K and V"), ("attention", "one launch"), ("merge", "states of parts"))
    ):
        inner(left + 12 + number * 204, 372, 192, name, note)
    for number in (0, 1):
        x = left + 12 + number * 204 + 193
        for y in (271, 401):
            drawing.line(x, y, x + 11, y, arrow=True)
    for y in (108, 180, 310):
        drawing.line(WIDTH / 2, y + 2, WIDTH / 2, y + 24, arrow=True)
    return drawing.svg()


SIDE = 24  # positions of a mask's picture
_SPANS = torch.tensor([[-1] * 4 + [0] * 6 + [-1] * 4 + [1] * 6 + [-1] * 4], dtype=torch.int32)
_DOCUMENTS = torch.tensor([[0] * 9 + [1] * 5 + [2] * 10], dtype=torch.int32)

MASKS: dict[str, Callable[[], Variant]] = {
    "causal": builtin.causal,
    "sliding_window(7) & causal": lambda: builtin.sliding_window(7) & builtin.causal(),
    "streaming_llm(6, 3)": lambda: builtin.streaming_llm(6, 3),
    "chunked_local(8)": lambda: builtin.chunked_local(8),
    "prefix_lm": lambda: builtin.prefix_lm(torch.tensor([9], dtype=torch.int32)),
    "bidirectional_spans": lambda: builtin.bidirectional_spans(_SPANS),
    "document": lambda: builtin.document(_DOCUMENTS),
}


def _positions() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zero, and the positions of queries and of tokens."""
    positions = torch.arange(SIDE, dtype=torch.int32)
    return torch.zeros((), dtype=torch.int32), positions[:, None], positions[None, :]


def seen(variant: Variant) -> torch.Tensor:
    """[queries, tokens]: 1 for the tokens that the variant's own function shows to a query."""
    reference = variant.reference()
    assert reference is not None
    zero, queries, tokens = _positions()
    mask = reference.mask(zero, zero, queries, tokens)
    assert mask is not None
    return mask.expand(SIDE, SIDE).float()


def alibi() -> torch.Tensor:
    """[queries, tokens]: ALiBi's bias under a causal mask, from 0.2 for the smallest to 1 for none."""
    reference = builtin.alibi(torch.tensor([1.0])).reference()
    assert reference is not None
    zero, queries, tokens = _positions()
    bias = reference.logits(torch.zeros(SIDE, SIDE), zero, zero, queries, tokens)
    return torch.where(tokens <= queries, 1 + 0.8 * bias / SIDE, 0.0)


def _mix(share: float) -> str:
    """Mixes the colors of hidden and visible tokens."""
    hidden, shown = (tuple(int(color[i : i + 2], 16) for i in (1, 3, 5)) for color in (NOT_TAKEN, DECODE[1]))
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(hidden, shown, strict=True))


def masks() -> str:
    """The gallery: queries from top to bottom, tokens from left to right."""
    pictures = {name: seen(make()) for name, make in MASKS.items()}
    pictures["alibi: a bias"] = alibi()
    columns, cell, gap = 2, 11.0, 28.0
    side = SIDE * cell
    rows = -(-len(pictures) // columns)
    drawing = Drawing(rows * (side + 40) + 8)
    for number, (name, picture) in enumerate(pictures.items()):
        x = 22 + (number % columns) * (side + gap + 12)
        y = 36 + (number // columns) * (side + 40)
        drawing.text(x, y - 16, name, bold=True)
        for query, line in enumerate(picture.tolist()):
            begin = 0
            for token in range(1, SIDE + 1):  # neighbors of one color are one rectangle
                if token == SIDE or line[token] != line[begin]:
                    drawing.parts.append(
                        f'<rect x="{x + begin * cell:g}" y="{y + query * cell:g}" '
                        f'width="{(token - begin) * cell - 1:g}" height="{cell - 1:g}" '
                        f'fill="{_mix(line[begin])}"/>'
                    )
                    begin = token
    return drawing.svg()


DIAGRAMS: dict[str, Callable[[], str]] = {
    "architecture": architecture,
    "launches": launches,
    "masks": masks,
    "matrix": matrix,
    "prefix": prefix,
    "schedule": schedule,
}


def write_all(folder: Path) -> None:
    for name, draw in DIAGRAMS.items():
        (folder / f"{name}.svg").write_text(draw())
