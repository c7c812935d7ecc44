"""The board of the attention benchmark: its lines, merged parts, the ratios of the table, the plot. Nothing
is measured.
"""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.board import changes, changes_text, main, markdown, merge, plot
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
    assert lines[0]["ours"] == 20.0  # the last measurement
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


def timed(case, first, third, **times):
    return line(case, **{"ours quartiles": [first, third], "ours": (first + third) / 2, **times})


def test_a_change_is_more_than_the_noise_of_both():
    overlapping, slower, faster, of_slower_gpu = all_cases()[:4]
    earlier = [timed(case, 19.0, 21.0) for case in (overlapping, slower, faster)]
    earlier.append(timed(of_slower_gpu, 19.0, 21.0, floor=10.0))
    now = [
        timed(overlapping, 20.9, 23.0),
        timed(slower, 21.1, 23.0),
        timed(faster, 17.0, 18.9),
        timed(of_slower_gpu, 24.0, 26.0, floor=12.5),
    ]
    found = changes(now, earlier)
    assert [[pair[0]["case"] for pair in pairs] for pairs in found] == [[slower.name], [faster.name]]
    text, num_slower = changes_text(now, earlier)
    assert num_slower == 1
    assert text.startswith("1 slower, 1 faster, of 4 lines in both boards:")
    assert cells(text, slower.name)["now / earlier"] == "1.103"
    same, none = changes_text(now[:1], earlier)
    assert (same, none) == ("0 slower, 0 faster, of 1 lines in both boards.\n", 0)


def test_boards_that_cannot_be_compared_are_refused():
    first, second = all_cases()[:2]
    with pytest.raises(ValueError, match="no line of this board"):
        changes([timed(first, 1.0, 2.0)], [timed(second, 1.0, 2.0)])
    with pytest.raises(ValueError, match="has no quartiles"):
        changes([timed(first, 1.0, 2.0)], [line(first)])


def test_the_program_exits_with_1_if_a_line_is_slower(write, monkeypatch, capsys):
    case = all_cases()[0]
    earlier, later = (
        str(write(name, [timed(case, *times)])) for name, times in (("a", (1.0, 2.0)), ("b", (3.0, 4.0)))
    )
    for now, then, status, said in ((later, earlier, 1, "1 slower"), (earlier, later, 0, "1 faster")):
        monkeypatch.setattr(sys, "argv", ["board", now, "--against", then])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code, said in capsys.readouterr().out) == (status, True)


def test_operations_that_are_counted():
    causal, full = (
        Case("", (3, 1), (4, 5), 2, 1, head_dim=8, causal=is_causal) for is_causal in (True, False)
    )
    assert causal.flops == 4 * (2 + 3 + 4 + 5) * 2 * 8
    assert full.flops == 4 * (3 * 4 + 5) * 2 * 8
    text = markdown([line(find("prefill bs1 const16384 h32/8 d128 p16"), ours=1e3, flops=5e11)], [])
    assert "TFLOP/s" in text
    assert "| 500 |" in text.replace("  ", "")
