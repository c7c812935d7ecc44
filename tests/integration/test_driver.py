"""Servers are always stopped, token comparisons count right, reports hold what was measured. No engine is started."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time

import pytest
import tomllib

from integration.compare_tokens import compare
from integration.dist_info import write_dist_info
from integration.engines import Launch, Metrics, Token
from integration.model import REPOSITORY, Model, resolve_model
from integration.report import Row, format_table, write_report
from integration.serve_benchmark import Load, parse_loads
from integration.server import ServerError, free_port, process_environment, running_server

SERVER = """
import http.server, os, signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"])
print(f"workers {os.getpid()} {worker.pid}", flush=True)
if sys.argv[2] == "fails":
    sys.exit("cannot load the model")
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


class FakeEngine:
    """An engine whose server is a few lines of Python with one worker process that does not listen to INT."""

    name = "fake"

    def server_command(self, launch):
        return [sys.executable, "-c", SERVER, str(launch.port), launch.backend]

    def server_environment(self, launch):
        return {}


@pytest.fixture
def launch(tmp_path):
    def make(backend):
        return Launch(sys.executable, Model("none", tmp_path, True), backend, "cpu", free_port())

    return make


def workers(log):
    return [int(word) for line in log.read_text().splitlines() if line.startswith("workers") for word in line.split()[1:]]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_server_and_its_workers_are_gone_however_the_block_ends(ending, launch, tmp_path):
    log = tmp_path / "server.log"

    def serve():
        with running_server(FakeEngine(), launch("serves"), log, timeout_s=60):
            assert all(alive(pid) for pid in workers(log))
            if ending:
                raise ending("stop")

    if ending:
        with pytest.raises(ending):
            serve()
    else:
        serve()
    assert len(workers(log)) == 2
    assert not any(alive(pid) for pid in workers(log))


def test_a_server_that_fails_shows_its_log_and_leaves_no_worker(launch, tmp_path, capsys):
    log = tmp_path / "server.log"
    begin = time.monotonic()
    with pytest.raises(ServerError, match="exit status 1 before it was ready"), running_server(FakeEngine(), launch("fails"), log, timeout_s=60):
        pass
    assert "cannot load the model" in capsys.readouterr().err
    assert not any(alive(pid) for pid in workers(log))
    assert time.monotonic() - begin < 30


def test_a_server_that_lacks_the_plugin_is_not_measured(launch, tmp_path):
    server = running_server(FakeEngine(), launch("attn_backend"), tmp_path / "server.log", timeout_s=60)
    with pytest.raises(ServerError, match="runs, but without attn_backend"), server:
        pass


def test_pythonpath_is_absolute_and_joined(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"relative{os.pathsep}/absolute")
    joined = process_environment({"PYTHONPATH": "/first"})["PYTHONPATH"].split(os.pathsep)
    assert joined == ["/first", os.path.join(os.getcwd(), "relative"), "/absolute"]


def answer(*ids, logprob=-1.0, alternatives=None):
    return [Token(token_id, logprob, {token_id: logprob, **(alternatives or {})}) for token_id in ids]


def test_equal_answers_are_counted():
    comparison = compare([answer(1, 2), answer(3, 4)], [answer(1, 2), answer(3, 4, logprob=-1.5)])
    assert (comparison.prompts, comparison.equal, comparison.tokens_compared, comparison.differences) == (2, 2, 4, [])
    assert comparison.largest_logprob_difference == 0.5


def test_the_first_difference_ends_a_comparison_and_has_its_gaps():
    reference = answer(1, 2, 9, alternatives={7: -1.1})
    backend = answer(1, 7, 8, alternatives={2: -1.2})
    (difference,) = compare([reference], [backend]).differences
    assert (difference.prompt, difference.position, difference.reference_token, difference.backend_token) == (0, 1, 2, 7)
    assert difference.reference_gap == pytest.approx(0.1)
    assert difference.backend_gap == pytest.approx(0.2)
    assert difference.is_near_tie(0.25)
    assert not difference.is_near_tie(0.15)


def test_a_token_outside_the_alternatives_is_no_near_tie():
    (difference,) = compare([answer(1)], [answer(2)]).differences
    assert difference.reference_gap is None
    assert not difference.is_near_tie(100)


def test_answers_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="prompt 0"):
        compare([answer(1)], [answer(1, 2)])


def metrics(itl):
    return Metrics(8, 1, 10.0, 20.0, itl, 2 * itl, 100.0, 1.0, 50, 60)


def test_report_has_medians_in_every_form(tmp_path):
    rows = [Row("attn_backend", "load", [metrics(1.0), metrics(3.0), metrics(2.0)]), Row("stock", "load", [metrics(4.0)])]
    written = write_report(tmp_path, "title", {"engine": "vllm"}, rows)
    report = json.loads(written[0].read_text())
    assert [row["median"]["itl_p50_ms"] for row in report["rows"]] == [2.0, 4.0]
    assert len(report["rows"][0]["repeats"]) == 3
    heading, _, *table = format_table(rows).splitlines()
    assert heading == "load"
    assert table[2].split("|")[1:3] == [" attn_backend ", " 8 (1 failed) "]
    assert len({len(line) for line in table}) == 1
    pytest.importorskip("matplotlib")
    assert written[2].read_bytes().startswith(b"\x89PNG")


def test_loads_are_reported_one_by_one(tmp_path):
    rows = [Row(backend, load, [metrics(1.0)]) for load in ("one", "two") for backend in ("attn_backend", "stock")]
    table = format_table(rows)
    assert table.count("attn_backend") == 2
    assert table.index("one") < table.index("two")
    pytest.importorskip("matplotlib")
    assert write_report(tmp_path, "title", {}, rows)[2].exists()


def test_an_option_holds_for_all_data_sets_or_for_one_each():
    loads = parse_loads(["sharegpt", "prefix:8+8"], [4, 5], ["recorded", "16"], [float("inf")])
    assert loads == [Load("sharegpt", 4, None, float("inf")), Load("prefix:8+8", 5, "16", float("inf"))]
    with pytest.raises(ValueError, match="num-prompts: 3 values"):
        parse_loads(["sharegpt", "sharegpt"], [1, 2, 3], ["recorded"], [1.0])


def test_a_config_without_weights_gets_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_BACKEND_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300, "bos_token_id": 298, "eos_token_id": [299, 1]}))
    model = resolve_model(str(folder), sys.executable)
    assert (model.name, model.random_weights) == ("tiny", True)
    assert json.loads((model.folder / "tokenizer_config.json").read_text())["eos_token"] == "t299"
    assert (model.folder / "config.json").is_file()
    assert not (folder / "tokenizer.json").exists()


def test_the_llama_shape_ships():
    config = json.loads((REPOSITORY / "integration/models/llama-3.1-8b/config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (32, 8, 128, 128256)


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match="model: 'no-such-model'"):
        resolve_model("no-such-model", sys.executable)


def test_dist_info_has_the_projects_entry_points(tmp_path):
    written = (write_dist_info(tmp_path) / "entry_points.txt").read_text()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for group, entries in project["entry-points"].items():
        assert textwrap.dedent(f"[{group}]") in written
        assert all(f"{name} = {value}" in written for name, value in entries.items())
