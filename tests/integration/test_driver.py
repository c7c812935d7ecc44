"""Servers are always stopped, token comparisons count right, reports hold what was measured. No engine is started."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time

import pytest
import tomllib

from integration.benchmark import Load, describe, label
from integration.compare_tokens import compare
from integration.dist_info import write_dist_info
from integration.engines import ENGINES, Client, Launch, Metrics, Token
from integration.engines.base import OURS, OURS_NO_CASCADE, STOCK
from integration.merge_reports import merge
from integration.model import REPOSITORY, Model, resolve_model
from integration.report import Row, format_table, write_report
from integration.serve_benchmark import parse_arguments, parse_loads
from integration.server import ServerError, free_port, process_environment, running_server
from integration.tokenizer import write_word_tokenizer
from integration.workload import make_workload

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


@pytest.mark.parametrize("backend", [OURS, OURS_NO_CASCADE])
def test_a_server_that_lacks_the_plugin_is_not_measured(backend, launch, tmp_path):
    server = running_server(FakeEngine(), launch(backend), tmp_path / "server.log", timeout_s=60)
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
    assert table[2].split("|")[1:3] == [" attn_backend ", "   8 of 9 "]
    assert len({len(line) for line in table}) == 1
    assert [cell.strip() for cell in table[3].split("|")[3:8]] == ["10.0", "20.0", "4.00", "8.00", "100.0"]
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
    loads = parse_loads(["sharegpt", "prefix:8+8"], [4, 5], ["recorded", "16"], [float("inf")], [4, 1])
    assert loads == [Load("sharegpt", 4, None, float("inf"), 4), Load("prefix:8+8", 5, "16", float("inf"), 1)]
    with pytest.raises(ValueError, match="num-prompts: 3 values"):
        parse_loads(["sharegpt", "sharegpt"], [1, 2, 3], ["recorded"], [1.0], [1])
    with pytest.raises(ValueError, match="samples: 3 values"):
        parse_loads(["sharegpt", "sharegpt"], [1], ["recorded"], [1.0], [1, 4, 16])


def test_the_command_line_of_the_loads_that_share_prefixes():
    line = "--engine vllm --backends attn_backend --dataset prefix:4096+256 sharegpt sharegpt --output-len 128 recorded recorded"
    settings = parse_arguments(f"{line} --num-prompts 128 96 24 --request-rate 40 8 2 --samples 1 4 16".split())
    shared, few, many = settings.loads
    assert shared == Load("prefix:4096+256", 128, "128", 40.0, 1)
    assert (few.samples, many.samples) == (4, 16)
    assert few.num_prompts * few.samples == many.num_prompts * many.samples == 384


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_cascade_is_a_matter_of_the_environment_alone(engine, device, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_BACKEND_CASCADE", "0")  # a user's setting must not turn off what the report calls ours
    on, off, stock = (Launch("python", Model("none", tmp_path, True), backend, device, 1) for backend in (OURS, OURS_NO_CASCADE, STOCK))
    assert engine.server_command(on) == engine.server_command(off)
    assert process_environment(engine.server_environment(on))["ATTN_BACKEND_CASCADE"] == "1"
    assert process_environment(engine.server_environment(off))["ATTN_BACKEND_CASCADE"] == "0"
    assert "ATTN_BACKEND_CASCADE" not in engine.server_environment(stock)
    assert label(engine, OURS_NO_CASCADE, device) == "attn_backend, cascade off"
    assert label(engine, OURS, device) == "attn_backend"


def test_vllm_has_no_choice_of_backends_on_a_cpu(tmp_path):
    for backend in (OURS, OURS_NO_CASCADE, STOCK, "CPU_ATTN"):
        assert ENGINES["vllm"].server_command(Launch("python", Model("none", tmp_path, True), backend, "cpu", 1))
    with pytest.raises(ValueError, match="backend: 'FLASH_ATTN', but on a CPU vLLM has CPU_ATTN alone"):
        ENGINES["vllm"].server_command(Launch("python", Model("none", tmp_path, True), "FLASH_ATTN", "cpu", 1))


def option(command, name):
    return command[command.index(name) + 1]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_clients_send_copies_in_order_and_at_the_prompts_rate(engine, tmp_path):
    write_word_tokenizer(tmp_path, 5000)
    chats = [{"conversations": [{"from": "human", "value": f"tell me story {i}"}, {"from": "gpt", "value": "once upon a time"}]} for i in range(9)]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    workload = make_workload(str(tmp_path / "chats.json"), 3, None, tmp_path, 0, samples=4)
    client = Client("python", Model("none", tmp_path, True), 1, workload, 2.5, None, 0, tmp_path / "client.json")
    command = engine.client_command(client)
    assert (option(command, "--num-prompts"), option(command, "--request-rate")) == ("12", "10.0")
    assert option(command, "--dataset-name") == "sharegpt"
    assert len(json.loads((tmp_path / "client.requests.json").read_text())) == 12
    assert option(command, "--dataset-path") == str(tmp_path / "client.requests.json")
    assert "--disable-shuffle" in command or '"keep_order": true' in command[3]
    assert describe(workload, 2.5) == "ShareGPT, first turns, outputs as recorded; 3 prompts at 2.5/s, 4 answers to each"
    assert describe(workload, float("inf")).endswith("; 3 prompts at once, 4 answers to each")
    assert describe(workload, float("inf"), max_concurrency=2).endswith("; 3 prompts 2 at a time, 4 answers to each")


def test_vllms_own_shared_prefix_is_asked_for_exactly(tmp_path):
    workload = make_workload("prefix:4096+256", 128, "128", tmp_path, 0)
    command = ENGINES["vllm"].client_command(Client("python", Model("none", tmp_path, True), 1, workload, 40.0, None, 0, tmp_path / "client.json"))
    assert option(command, "--dataset-name") == "prefix_repetition"
    lengths = [option(command, f"--prefix-repetition-{name}") for name in ("prefix-len", "suffix-len", "num-prefixes", "output-len")]
    assert lengths == ["4096", "256", "1", "128"]
    assert (option(command, "--num-prompts"), option(command, "--request-rate")) == ("128", "40.0")
    assert describe(workload, 40.0).endswith("128 output tokens; 128 prompts at 40/s")


def settings_of_a_run(**changes):
    return {"engine": "vllm", "device_name": "GPU", "backends": [], **changes}


def test_runs_of_other_backends_or_loads_merge_into_one_report(tmp_path):
    reports = []
    for backend, load in (("attn_backend", "one"), ("FLASH_ATTN", "one"), ("FLASH_ATTN", "two")):
        folder = tmp_path / f"{backend}-{load}"
        folder.mkdir()
        reports.append(write_report(folder, "title", settings_of_a_run(backends=[backend]), [Row(backend, load, [metrics(1.0), metrics(2.0)])])[0])
    rows = merge(tmp_path / "all", reports)
    assert [(row.backend, row.workload, len(row.repeats)) for row in rows] == [("attn_backend", "one", 2), ("FLASH_ATTN", "one", 2), ("FLASH_ATTN", "two", 2)]
    report = json.loads((tmp_path / "all" / "report.json").read_text())
    assert report["title"] == "title"
    assert [run["backends"] for run in report["settings"]["merged"]] == [["attn_backend"], ["FLASH_ATTN"], ["FLASH_ATTN"]]
    with pytest.raises(ValueError, match="FLASH_ATTN was measured twice"):
        merge(tmp_path / "all", [reports[1], reports[1]])


def test_what_is_no_report_does_not_merge(tmp_path):
    for text in ("[]", '{"rows": []}'):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(ValueError, match=r"report\.json is no report\.json that"):
            merge(tmp_path / "all", [tmp_path / "report.json"])


def test_runs_on_different_machines_do_not_merge(tmp_path):
    reports = []
    for name in ("GPU", "another GPU"):
        folder = tmp_path / name
        folder.mkdir()
        reports.append(write_report(folder, "title", settings_of_a_run(device_name=name), [Row(name, "load", [metrics(1.0)])])[0])
    with pytest.raises(ValueError, match="device_name is 'another GPU'"):
        merge(tmp_path / "all", reports)


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
