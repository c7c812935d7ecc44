"""Reports contain all measurements, in every form, and reports of several runs can be merged."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from integration.engines import Metrics
from integration.merge_reports import merge
from integration.report import format_table, write_report
from integration.results import Row


def metrics(itl):
    return Metrics(8, 1, 10.0, 20.0, itl, 2 * itl, 100.0, 1.0, 50, 60)


def test_report_has_medians_in_every_form(tmp_path):
    rows = [
        Row("attn_backend", "load", [metrics(1.0), metrics(3.0), metrics(2.0)]),
        Row("stock", "load", [metrics(4.0)]),
    ]
    written = write_report(tmp_path, "title", {"engine": "vllm"}, rows)
    report = json.loads(written[0].read_text())
    assert [row["median"]["itl_p50_ms"] for row in report["rows"]] == [2.0, 4.0]
    assert len(report["rows"][0]["repeats"]) == 3
    heading, _, *table = format_table(rows).splitlines()
    assert heading == "load"
    assert [cell.strip() for cell in table[2].split("|")[1:3]] == ["attn_backend", "8 of 9"]
    assert len({len(line) for line in table}) == 1
    assert [cell.strip() for cell in table[3].split("|")[3:8]] == ["10.0", "20.0", "4.00", "8.00", "100.0"]
    pytest.importorskip("matplotlib")
    assert written[2].read_bytes().startswith(b"\x89PNG")


def test_loads_are_reported_one_by_one(tmp_path):
    rows = [
        Row(backend, load, [metrics(1.0)]) for load in ("one", "two") for backend in ("attn_backend", "stock")
    ]
    table = format_table(rows)
    assert table.count("attn_backend") == 2
    assert table.index("one") < table.index("two")
    pytest.importorskip("matplotlib")
    assert write_report(tmp_path, "title", {}, rows)[2].exists()


def test_answers_that_are_drafted_have_an_accept_length():
    drafted = replace(metrics(1.0), accept_length=2.5)
    table = format_table([Row("attn_backend", "load", [drafted]), Row("stock", "load", [metrics(1.0)])])
    assert [
        line.split("|")[-2].strip()
        for line in table.splitlines()
        if "load" not in line.split("|")[0] and "---" not in line and "|" in line
    ] == [
        "accept length",
        "2.50",
        "1.00",
    ]
    assert "accept length" not in format_table([Row("stock", "load", [metrics(1.0)])])


def test_one_slow_backend_leaves_the_others_readable():
    pytest.importorskip("matplotlib")
    from integration.plot import draw_rows

    slow = Metrics(8, 0, 20.0, 50_000.0, 5.0, 10.0, 100.0, 1.0, 50, 60)
    figure = draw_rows("title", [Row("attn_backend", "load", [metrics(5.0)]), Row("slow", "load", [slow])])
    first_token, between, throughput = figure.get_axes()
    assert [axis.get_xscale() for axis in (first_token, between, throughput)] == ["log", "log", "linear"]
    ends = [line.get_xdata() for line in first_token.lines if len(line.get_xdata()) == 2]
    assert [tuple(end) for end in ends] == [(10.0, 20.0), (20.0, 50_000.0)], "p50 and p99 of each"
    assert {text.get_text() for text in first_token.texts} == {"10", "20", "50000"}


def test_a_note_stands_above_the_table(tmp_path):
    rows = [Row("attn_backend", "load", [metrics(1.0)])]
    report, tables, *_ = write_report(tmp_path, "title", {}, rows, note="Servers run in float32.")
    assert json.loads(report.read_text())["note"] == "Servers run in float32."
    assert tables.read_text() == f"# title\n\nServers run in float32.\n\n{format_table(rows)}\n"


@pytest.mark.parametrize(
    ("ours", "stock"),
    [(7.8, 7.7), (0.123, 0.124), (55.1, 55.2), (100.0, 101.0), (1e-3, 2e-3), (1234.0, 1235.0)],
)
def test_numbers_that_differ_in_the_third_digit_differ_in_the_picture(ours, stock):
    pytest.importorskip("matplotlib")
    from integration.plot import draw_rows

    def of(value):
        return Metrics(8, 0, value, 2 * value, value, 2 * value, value, 1.0, 50, 60)

    figure = draw_rows("title", [Row("attn_backend", "load", [of(ours)]), Row("stock", "load", [of(stock)])])
    first_token, between, throughput = figure.get_axes()
    assert [text.get_text() for text in throughput.texts] == [f"{value:g}" for value in (ours, stock)]
    for axis in (first_token, between):
        assert [text.get_text() for text in axis.texts][::2] == [f"{value:g}" for value in (ours, stock)]


def settings_of_a_run(**changes):
    return {"engine": "vllm", "device_name": "GPU", "backends": [], **changes}


def test_runs_of_other_backends_or_loads_merge_into_one_report(tmp_path):
    reports = []
    for backend, load in (("attn_backend", "one"), ("FLASH_ATTN", "one"), ("FLASH_ATTN", "two")):
        folder = tmp_path / f"{backend}-{load}"
        folder.mkdir()
        reports.append(
            write_report(
                folder,
                "title",
                settings_of_a_run(backends=[backend]),
                [Row(backend, load, [metrics(1.0), metrics(2.0)])],
            )[0]
        )
    rows = merge(tmp_path / "all", reports)
    assert [(row.backend, row.workload, len(row.repeats)) for row in rows] == [
        ("attn_backend", "one", 2),
        ("FLASH_ATTN", "one", 2),
        ("FLASH_ATTN", "two", 2),
    ]
    report = json.loads((tmp_path / "all" / "report.json").read_text())
    assert report["title"] == "title"
    assert [run["backends"] for run in report["settings"]["merged"]] == [
        ["attn_backend"],
        ["FLASH_ATTN"],
        ["FLASH_ATTN"],
    ]
    with pytest.raises(ValueError, match="FLASH_ATTN was measured twice"):
        merge(tmp_path / "all", [reports[1], reports[1]])


def test_what_is_no_report_does_not_merge(tmp_path):
    for text in ("[]", '{"rows": []}'):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(ValueError, match=r"report\.json is not a report\.json that"):
            merge(tmp_path / "all", [tmp_path / "report.json"])


def test_runs_on_different_machines_do_not_merge(tmp_path):
    reports = []
    for name in ("GPU", "another GPU"):
        folder = tmp_path / name
        folder.mkdir()
        reports.append(
            write_report(
                folder, "title", settings_of_a_run(device_name=name), [Row(name, "load", [metrics(1.0)])]
            )[0]
        )
    with pytest.raises(ValueError, match="device_name is 'another GPU'"):
        merge(tmp_path / "all", reports)
