"""attn-backend plan: the batches it reads, its description and picture of them, and what it refuses."""

from __future__ import annotations

import argparse
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.path import Path as Outline
from matplotlib.text import Text

from attn_backend import Attention, BSRView
from attn_backend.cli import batches
from attn_backend.cli.main import main
from attn_backend.cli.picture import DECODE, DPI, NOT_TAKEN, PREFILL, TAKEN, draw_plan
from attn_backend.cli.planned import Planned, ScheduleCosts, read_options
from attn_backend.jit.manifest import DESIGNS

Capture = pytest.CaptureFixture[str]


def pages(batch: batches.Batch) -> list[list[int]]:
    """Page ids of each request."""
    return [row.tolist() for row in batch.block_table]


def shares(batch: batches.Batch) -> list[int]:
    """Requests that hold each page, in the order of page ids."""
    holders: dict[int, set[int]] = {}
    for request, row in enumerate(pages(batch)):
        for page in row:
            holders.setdefault(page, set()).add(request)
    return [len(holders[page]) for page in sorted(holders)]


def write_json(folder: Path, **values: object) -> Path:
    path = folder / "batch.json"
    path.write_text(json.dumps(values))
    return path


def write_trace(folder: Path, *lines: dict[str, object]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def request(
    timestamp: float, input_length: int, hash_ids: list[object], output_length: int = 20
) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


# Batches


def test_decode_distributions() -> None:
    const, uniform, zipf = (batches.decode(f"64x{name}:1000", 16) for name in ("const", "uniform", "zipf"))
    assert const.kv_lens == [1000] * 64
    assert all(500 <= length <= 1000 for length in uniform.kv_lens)
    assert len(set(uniform.kv_lens)) > 30
    assert max(zipf.kv_lens) > 5 * 1000
    assert abs(sum(zipf.kv_lens) - 64000) < 64
    for batch in (const, uniform, zipf):
        assert batch.qo_lens == [1] * 64
        assert set(shares(batch)) == {1}
        assert [len(row) for row in batch.block_table] == [-(-length // 16) for length in batch.kv_lens]
    assert batches.decode("64xzipf:1000", 16, seed=1).kv_lens != zipf.kv_lens


def test_prefill_and_mixed() -> None:
    batch = batches.prefill("4xuniform:512", 16)
    assert batch.qo_lens == batch.kv_lens
    batch = batches.mixed("1x2048@6144+3x4096+2x5@100", 16)
    assert batch.qo_lens == [2048, 1, 1, 1, 5, 5]
    assert batch.kv_lens == [6144, 4096, 4096, 4096, 100, 100]


def test_shared_prefix_shares_full_pages() -> None:
    batch = batches.shared_prefix("4x40+20", 16)  # 2.5 pages: each request has its own half page
    assert batch.kv_lens == [60] * 4
    assert shares(batch) == [4, 4] + [1] * 8
    batch = batches.shared_prefix("2x3x32+16+16", 16)
    assert shares(batch) == [6, 6, 3, 3] + [1] * 6
    table = pages(batch)
    assert table[0][:2] == table[5][:2]
    assert table[0][2] == table[2][2] != table[3][2]


def test_json_with_and_without_block_table(tmp_path: Path) -> None:
    batch = batches.from_json(write_json(tmp_path, qo_lens=[1, 5], kv_lens=[17, 32]))
    assert pages(batch) == [[0, 1], [2, 3]]
    batch = batches.from_json(
        write_json(
            tmp_path, qo_lens=[1, 1], kv_lens=[7, 3], block_table=[[9, 4, 5], [9]], page_size=4, heads="8/2"
        )
    )
    assert (pages(batch), batch.page_size, batch.settings) == ([[9, 4], [9]], 4, {"heads": "8/2"}), (
        "the pages that its tokens need"
    )
    assert batches.from_json(tmp_path / "batch.json", page_size=8).page_size == 8


def test_trace_shares_the_full_pages_of_equal_inputs(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path,
        request(0, 10, [1]),
        request(2000, 1000, [7, 8]),
        request(2500, 1100, [[7, 2], 30]),
        request(3000, 600, [7, 40]),
    )
    first, second = pages(batches.from_trace(path, 2, 1.0, 16))
    assert len(first) == -(-1010 // 16)
    assert first[:62] == second[:62]  # 1000 tokens fill 62 pages
    assert not set(first[62:]) & set(second[62:])
    batch = batches.from_trace(path, 32, 1.0, 16)
    assert len(batch.kv_lens) == 3
    table = pages(batch)
    assert table[0][:32] == table[2][:32]
    assert table[0][32] != table[2][32]
    assert [len(row) for row in table] == [-(-kv_len // 16) for kv_len in batch.kv_lens]
    assert len(batches.from_trace(path, 32, 0.0, 16).kv_lens) == 4


def test_view_is_what_the_batch_says() -> None:
    view = batches.mixed("1x3@20+1x0@0+1x40", 16).view()
    assert isinstance(view, BSRView)
    assert view.qo_indptr.tolist() == [0, 3, 3, 4]
    table = view.table
    assert table.indptr is not None
    assert table.indices is not None
    assert table.last_page_len is not None
    assert table.indptr.tolist() == [0, 2, 2, 5]
    assert table.indices.tolist() == [0, 1, 2, 3, 4]
    assert table.last_page_len.tolist()[::2] == [4, 8]


# Costs


@pytest.mark.parametrize(
    "text", ["1x1", "1x5000", "40x300+1x700@900", "30x300@300+1x700@900", "3x0@0+2x64+1x0@9", "2x0@0"]
)
@pytest.mark.parametrize("num_ctas", [1, 7, 132])
def test_costs_add_up(text: str, num_ctas: int) -> None:
    """The parts of a CTA are consecutive and cover its charged cost. Counting KV tiles and pairs one by one
    gives the same sum.
    """
    batch = batches.mixed(text, 16)
    attention = Attention(
        8,
        2,
        64,
        device="cpu",
        max_rows=max(sum(batch.qo_lens), 1),
        max_batch=len(batch.kv_lens),
        num_ctas=num_ctas,
        kernel="hopper",
    )
    attention.plan(batch.view())
    schedule = attention.schedule()
    costs = ScheduleCosts.of(schedule, 2)
    ends = [0] * num_ctas
    for part in costs.parts:
        assert part.begin == ends[part.cta] < part.end
        ends[part.cta] = part.end
    assert ends == costs.ctas.tolist()

    expected = [0] * num_ctas
    positions = [tuple(position) for position in schedule.positions.tolist()]
    for tile, (kind, num_kv_tiles) in enumerate(
        zip(schedule.cost_kinds().tolist(), schedule.of_tiles("num_kv_tiles").tolist(), strict=True)
    ):
        for head in range(2):
            owners = [
                sum(position <= (tile, head, kv_tile) for position in positions[:-1]) - 1
                for kv_tile in range(num_kv_tiles)
            ]
            for cta in owners:
                expected[cta] += schedule.kv_tile_cost[kind]
            for cta in set(owners):
                expected[cta] += schedule.pair_cost[kind]
    if schedule.uses_queue:
        assert sum(expected) == costs.total == int(costs.ctas.sum())
        # A CTA asks for its next pair when it begins one.
        longest = max(part.end - part.begin for part in costs.parts)
        assert int(costs.ctas.max() - costs.ctas.min()) <= 2 * longest
        return
    # If several CTAs start at the same position, the last one has the work and the others have none.
    assert costs.ctas.tolist() == expected
    assert costs.kv_tokens == sum(
        kv_len for qo_len, kv_len in zip(batch.qo_lens, batch.kv_lens, strict=True) if qo_len
    )
    assert costs.balance >= 1


# The plan in words and pictures


def test_members_are_as_many_as_the_planner_says() -> None:
    for batch in (
        batches.shared_prefix("128x8192+256", 16),
        batches.shared_prefix("4x3x100+1024+20", 16),
        batches.shared_prefix("5x2x3x64+64+640+9", 16),
    ):
        planned = Planned.make(batch, batches.PlanOptions())
        assert planned.schedule.forest
        assert [len(members) for members in planned.members] == [
            node.num_requests for node in planned.schedule.forest
        ]
        order = planned.order()
        assert sorted(order) == list(range(len(batch.kv_lens)))
        for members in planned.members:
            places = sorted(map(order.index, members))
            assert places == list(range(places[0], places[0] + len(members)))


@pytest.mark.parametrize("pages", [1, 64])
def test_members_have_all_pages_from_the_first_on(pages: int) -> None:
    """Requests 0 to 3 share leading pages, and 0 and 1 share more. Request 4 also has these, but after
    different pages.

    One page is not worth it, 64 are.
    """
    first, second, own = torch.arange(pages), torch.arange(pages, 2 * pages), 1000 * torch.arange(1, 6)
    heads = [[first, second], [first, second], [first], [first], [first + 500, second]]
    table = [
        torch.cat([*head, own[i] + torch.arange(136 - pages * len(head))]).int()
        for i, head in enumerate(heads)
    ]
    planned = Planned.make(batches.Batch("", [1] * 5, [136 * 16] * 5, table, 16), batches.PlanOptions())
    forest = planned.schedule.forest
    assert {node.end_page: members for node, members in zip(forest, planned.members, strict=True)} == {
        pages: [0, 1, 2, 3],
        2 * pages: [0, 1],
    }
    assert all((node.group >= 0) == (pages > 1) for node in forest)


def test_summary_says_what_cascade_saves(capsys: Capture) -> None:
    assert main(["plan", "--shared-prefix", "128x8192+256"]) == 0
    out = capsys.readouterr().out
    assert "128 requests, 128 rows of Q, 1081344 tokens of KV" in out
    assert f"{8192 + 128 * 256} tokens for each KV head, 1081344 without cascade (-96.2%)" in out
    assert "0 - 512" in out
    assert "taken: row group 128" in out
    assert "balance (busy / ideal)" in out
    assert main(["plan", "--shared-prefix", "128x8192+256", "--no-cascade"]) == 0
    out = capsys.readouterr().out
    assert "0 of shared prefixes" in out
    assert "without" not in out
    assert main(["plan", "--shared-prefix", "1025x64+16"]) == 0
    assert "no search with more than 1024 requests" in capsys.readouterr().out


def test_says_why_a_prefix_is_not_taken(capsys: Capture) -> None:
    assert main(["plan", "--shared-prefix", "2x16+4096"]) == 0
    assert "not taken: " in capsys.readouterr().out


def test_nodes_of_the_forest_are_indented_below_the_node_above_them(capsys: Capture) -> None:
    assert main(["plan", "--shared-prefix", "4x2x2x1024+512+512+64"]) == 0
    extents = [line[:15].rstrip() for line in capsys.readouterr().out.splitlines()[8:]]
    assert extents == ["0 - 64"] + ["  64 - 96", "    96 - 128", "    96 - 128"] * 4


@pytest.mark.parametrize("text", ["20x2x2x64+640+64+9", "3x20x2x16+64+640+9", "2x30x2x16+64+64+9"])
def test_of_a_large_forest_the_first_nodes_are_listed_below_those_above_them(text: str) -> None:
    planned = Planned.make(batches.shared_prefix(text, 16), batches.PlanOptions())
    lines = ["  ".join(row) for row in planned.forest_rows()]
    listed = planned.ranked_forest()[:40]
    assert len(lines) == 40
    assert planned.forest_rest().startswith(f"... and {len(planned.schedule.forest) - 40} more")
    assert sorted(map(tuple, (line.split()[:3:2] for line in lines))) == sorted(
        (str(node.begin_page), str(node.end_page)) for node in listed
    )
    above: list[tuple[int, int]] = []  # (indentation, last page) of possible parents of the next line
    for line in lines:
        indent = len(line) - len(line.lstrip())
        above = [entry for entry in above if entry[0] < indent]
        assert indent == 2 * len(above)
        assert int(line.split()[0]) >= (above[-1][1] if above else 0)
        above.append((indent, int(line.split()[2])))


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)]


def colors(figure: Figure) -> set[str]:
    return {to_hex(patch.get_facecolor()) for axes in figure.axes for patch in axes.patches}


def row_names(figure: Figure) -> list[Text]:
    return figure.axes[0].get_yticklabels()


def test_drawing_holds_view_forest_and_ctas() -> None:
    planned = Planned.make(batches.shared_prefix("4x8x100+8192+20", 16), batches.PlanOptions(num_ctas=24))
    figure = draw_plan(planned)
    view, forest, ctas = figure.axes
    assert view.get_title("left").startswith("BSR view: 32 rows of Q x ")
    assert forest.get_title("left").startswith("prefix forest: 5 nodes, ")
    assert ctas.get_title("left").startswith("24 CTAs: busiest ")
    words = texts(figure)
    for node in planned.schedule.forest:
        assert any(
            f"pages {node.begin_page} - {node.end_page} x" in word and node.reason in word for word in words
        )
    drawn = {tuple(rectangle) for patch in ctas.patches for rectangle in outlines(patch)}
    busy = {cta for cta, cost in enumerate(planned.costs.ctas.tolist()) if cost}
    assert {int(top) for _, top in drawn} == busy
    taken = {TAKEN[node.group % len(TAKEN)] for node in planned.schedule.forest if node.group >= 0}
    assert taken
    assert taken <= colors(figure)
    assert {*DECODE, NOT_TAKEN} <= colors(figure)


def outlines(patch: Patch) -> list[tuple[float, float]]:
    """The first corner of each rectangle of a shape."""
    return [
        (float(x), float(y))
        for (x, y), code in zip(patch.get_path().vertices, patch.get_path().codes, strict=True)
        if code == Outline.MOVETO
    ]


def test_drawing_stays_readable_for_one_request_and_for_many() -> None:
    for text, most in (("1x1", 900), ("1x100000", 900), ("256x2000+1x3000@4000", 1400), ("1000x64", 3000)):
        figure = draw_plan(Planned.make(batches.mixed(text, 16), batches.PlanOptions()))
        assert figure.get_figheight() * DPI < most
        assert sum(len(axes.patches) for axes in figure.axes) < 50, "many rectangles are one shape"
        figure.canvas.draw()
        boxes = [name.get_window_extent() for name in row_names(figure)]
        assert boxes
        assert not any(a.overlaps(b) for a, b in pairwise(boxes))
    assert PREFILL[0] in colors(
        draw_plan(Planned.make(batches.mixed("2x30@30+1x1", 16), batches.PlanOptions()))
    )


def test_draws_nothing_to_attend_to() -> None:
    assert texts(draw_plan(Planned.make(batches.mixed("2x0@0+1x1@0", 16), batches.PlanOptions())))


def test_writes_svg_and_png(tmp_path: Path, capsys: Capture) -> None:
    svg, png = tmp_path / "plan.svg", tmp_path / "plan"  # the option decides, not the name
    arguments = ["plan", "--mixed", "1x64@128+3x500", "--svg", str(svg), "--png", str(png)]
    assert main(arguments) == 0
    words = [element.text or "" for element in ElementTree.parse(svg).iter() if element.tag.endswith("text")]
    assert "BSR view: 67 rows of Q x 104 pages" in words, "text stays text"
    assert png.read_bytes().startswith(b"\x89PNG")
    first = svg.read_bytes()
    assert main(arguments) == 0
    assert svg.read_bytes() == first, "the same plan gives the same file"


@pytest.mark.parametrize("option", ["--svg", "--png"])
def test_says_what_pictures_need(
    option: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["plan", "--decode", "2xconst:64", option, str(tmp_path / "plan.png")]) == 2
    captured = capsys.readouterr()
    assert "pip install 'attn-backend[plot]'" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("option", ["--svg", "--png"])
def test_pictures_that_cannot_be_written_are_refused_before_the_plan(
    option: str, tmp_path: Path, capsys: Capture
) -> None:
    for path in (tmp_path / "nowhere" / "plan.svg", tmp_path):
        assert main(["plan", "--decode", "2xconst:64", option, str(path)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"{option} is {str(path)!r}, must be a file in a folder that exists" in captured.err


def test_help_names_every_key_of_the_files(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    out = capsys.readouterr().out
    for key in (
        "qo_lens",
        "kv_lens",
        "block_table",
        *batches.PlanOptions.model_fields,
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
    ):
        assert f"\n  {key} " in out


def test_settings_options_before_file_before_defaults(tmp_path: Path) -> None:
    batch = batches.from_json(
        write_json(tmp_path, qo_lens=[1], kv_lens=[9], heads="8/2", head_dim=64, causal=False, num_ctas=8)
    )
    options = argparse.Namespace(heads=None, head_dim=None, num_ctas=16, costs=None, no_cascade=True)
    assert read_options(options, batch) == batches.PlanOptions(
        heads="8/2", head_dim=64, num_ctas=16, cascade=False, causal=False
    )
    assert (
        read_options(argparse.Namespace(no_cascade=False), batches.decode("1xconst:1", 16))
        == batches.PlanOptions()
    )


def test_costs_of_every_kernel(capsys: Capture) -> None:
    assert get_args(batches.Costs) == (*DESIGNS, "cpu")
    said = {}
    for name in (None, *DESIGNS):
        assert main(["plan", "--decode", "16xzipf:4096", *([] if name is None else ["--costs", name])]) == 0
        said[name] = capsys.readouterr().out
    assert "132 CTAs, costs of the hopper kernel" in said["hopper"] == said[None]
    assert "132 CTAs, costs of the generic kernel" in said["generic"]
    units = [re.search(r"^cost +(\d+) units", said[name], re.MULTILINE)[1] for name in DESIGNS]  # type: ignore[index]
    assert len(set(units)) == len(units)


def test_costs_of_a_cpu(capsys: Capture) -> None:
    assert (
        main(["plan", "--decode", "2xconst:64", "--costs", "cpu", "--head-dim", "40", "--num-ctas", "4"]) == 0
    )
    assert "head_dim 40, 4 CTAs, costs of a CPU" in capsys.readouterr().out
    assert main(["plan", "--decode", "2xconst:64", "--costs", "cpu"]) == 0
    assert (
        "head_dim 128, 32 CTAs (tasks that its threads take one after another: the same number on every "
        "CPU), costs of a CPU" in capsys.readouterr().out
    )


def test_trace_on_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    path = write_trace(tmp_path, *(request(i, 5000, [[0, 9], 100 + i]) for i in range(20)))
    assert main(["plan", str(path), "--batch", "16"]) == 0
    out = capsys.readouterr().out
    assert "16 requests from 0 s on" in out
    assert "0 - 288" in out  # 9 blocks of 512 tokens
