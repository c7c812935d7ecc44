"""The board of the attention benchmark: its lines, parts that are put together, the ratios of the table, the
plot. Nothing is measured.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.board import markdown, merge, plot
from benchmarks.cases import Case, SharedCase, all_cases, prefill_cases


def line(case, **times):
    known = {"shape": case.shape, "ragged": case.ragged} if isinstance(case, Case) else {}
    return {
        "case": case.name,
        "floor": 10.0,
        "launch": 1.5,
        "plan": 5.0,
        "error": 1e-3,
        "ours": 20.0,
        **known,
        **times,
    }


@pytest.fixture
def write(tmp_path):
    def part(name, lines, gpu="GPU"):
        path = tmp_path / name
        path.write_text(json.dumps({"header": f"header of {name}", "gpu": gpu, "lines": lines}))
        return path

    return part


def find(name):
    return next(case for case in all_cases() if case.name == name)


def cells(text, name):
    rows = {
        cells[0]: cells
        for cells in ([cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines())
        if cells
    }
    return dict(zip(rows["case"], rows[name], strict=True))


def test_lines_have_names_of_their_own():
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
    assert any(isinstance(case, SharedCase) for case in all_cases())


def test_every_shape_of_prefill_with_small_heads_is_there_ragged():
    shapes = {case.shape for case in prefill_cases() if case.ragged}
    for case in prefill_cases():
        assert case.qo_lens == case.kv_lens
        assert case.shape in shapes or case.head_dim != 128


def test_parts_become_one_board_in_its_order(write):
    first, second, third = all_cases()[:3]
    parts = [write("b", [line(third), line(first, ours=99.0)]), write("a", [line(first), line(second)])]
    lines, headers = merge(parts)
    assert [of_one["case"] for of_one in lines] == [first.name, second.name, third.name]
    assert lines[0]["ours"] == 20.0  # as it was last measured
    assert headers == ["header of b", "header of a"]


def test_parts_of_different_gpus_and_unknown_lines_are_refused(write):
    case = all_cases()[0]
    with pytest.raises(ValueError, match="gpu is 'other', must be 'GPU'"):
        merge([write("a", [line(case)]), write("b", [line(case)], gpu="other")])
    with pytest.raises(ValueError, match="case is 'no such line'"):
        merge([write("c", [line(case) | {"case": "no such line"}])])
    for text in ("[]", '{"lines": []}'):
        (path := write("d", [])).write_text(text)
        with pytest.raises(ValueError, match="d is not a file that `python -m benchmarks"):
            merge([path])


def test_the_table_has_ratios_of_lines_to_peers_floor_and_ragged():
    ragged, paged = (find(f"prefill bs4 const4096 h32/8 d128 {form}") for form in ("ragged", "p16"))
    lines = [
        line(ragged, FA3=16.0, FlashInfer=25.0, flex_attention=None),
        line(paged, ours=21.0, FA3=None, FlashInfer=None),
    ]
    text = markdown(lines, ["header"])
    assert text.startswith("header\n\n| case ")
    of_ragged, of_paged = cells(text, ragged.name), cells(text, paged.name)
    assert (of_ragged["ours / best peer"], of_ragged["ours / floor"], of_ragged["ours / ours ragged"]) == (
        "1.25",
        "2.00",
        "-",
    )
    assert (
        of_paged["ours / best peer"],
        of_paged["FA3"],
        of_paged["ours / ours ragged"],
        of_paged["empty launch"],
    ) == ("-", "-", "1.05", "1.5")
    assert "flex_attention" not in text  # it was nowhere measured


def test_the_plot_has_a_point_for_each_time(tmp_path):
    plot([line(case, FA3=12.0, FlashInfer=None) for case in all_cases()[:4]], tmp_path / "board.svg")
    text = (tmp_path / "board.svg").read_text()
    assert text.count("<use ") > 8
    plot([line(case, FA3=12.0, FlashInfer=None) for case in all_cases()[:4]], tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text
