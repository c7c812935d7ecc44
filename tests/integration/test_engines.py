"""The commands and the environment with which each engine's servers and clients are started.

No engine is started.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from integration.benchmark import describe, label
from integration.datasets import make_workload
from integration.engines import ENGINES, Client, Launch
from integration.engines.base import ON_OURS, OURS, OURS_NO_CASCADE, STOCK
from integration.http import counter
from integration.model import Model
from integration.processes import process_environment
from integration.tokenizer import write_word_tokenizer


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_cascade_is_a_matter_of_the_environment_alone(engine, device, tmp_path, monkeypatch):
    # a user's setting must not turn off the backend that the report calls ours
    monkeypatch.setenv("ATTN_BACKEND_CASCADE", "0")
    on, off, stock = (
        Launch("python", Model("none", tmp_path, True), backend, device, 1)
        for backend in (OURS, OURS_NO_CASCADE, STOCK)
    )
    assert engine.server_command(on) == engine.server_command(off)
    assert process_environment(engine.server_environment(on))["ATTN_BACKEND_CASCADE"] == "1"
    assert process_environment(engine.server_environment(off))["ATTN_BACKEND_CASCADE"] == "0"
    assert "ATTN_BACKEND_CASCADE" not in engine.server_environment(stock)
    assert label(engine, OURS_NO_CASCADE, device) == "attn_backend, cascade off"
    assert label(engine, OURS, device) == "attn_backend"


@pytest.mark.parametrize(("engine", "backend"), [("vllm", "FLASHINFER"), ("sglang", "flashinfer")])
def test_an_engines_flashinfer_backend_gets_this_package_in_flashinfers_place(
    engine, backend, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # FlashInfer itself may be there
    theirs, ours = (
        Launch("python", Model("none", tmp_path, True), name, "cuda", 1)
        for name in (backend, backend + ON_OURS)
    )
    assert ENGINES[engine].server_command(ours) == ENGINES[engine].server_command(theirs)
    folder, *_others = process_environment(ENGINES[engine].server_environment(ours))["PYTHONPATH"].split(
        os.pathsep
    )
    assert (Path(folder) / "flashinfer" / "__init__.py").is_file()
    assert process_environment(ENGINES[engine].server_environment(theirs))["PYTHONPATH"] == str(tmp_path)
    assert label(ENGINES[engine], backend + ON_OURS, "cuda") == f"{backend} on attn_backend"


def test_vllm_has_no_choice_of_backends_on_a_cpu(tmp_path):
    for backend in (OURS, OURS_NO_CASCADE, STOCK, "CPU_ATTN"):
        assert ENGINES["vllm"].server_command(
            Launch("python", Model("none", tmp_path, True), backend, "cpu", 1)
        )
    with pytest.raises(ValueError, match="backend: 'FLASH_ATTN', but on a CPU vLLM has CPU_ATTN alone"):
        ENGINES["vllm"].server_command(
            Launch("python", Model("none", tmp_path, True), "FLASH_ATTN", "cpu", 1)
        )


@pytest.mark.parametrize(("backend", "name"), [(OURS, "CUSTOM"), ("FLASH_ATTN", "FLASH_ATTN")])
def test_a_draft_models_configuration_names_the_backend_of_its_server(backend, name, tmp_path):
    configuration = '{"model": "draft", "attention_backend": "{backend}"}'
    launch = Launch(
        "python",
        Model("none", tmp_path, True),
        backend,
        "cuda",
        1,
        extra_arguments=["--speculative-config", configuration],
    )
    command = ENGINES["vllm"].server_command(launch)
    assert (
        json.loads(option(command, "--speculative-config"))["attention_backend"]
        == option(command, "--attention-backend")
        == name
    )
    with pytest.raises(
        ValueError,
        match=r"backend: 'stock', must be a name of vLLM's where the server's arguments have \{backend\}",
    ):
        ENGINES["vllm"].server_command(replace(launch, backend=STOCK))


def option(command, name):
    return command[command.index(name) + 1]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_server_is_told_the_dtype_of_its_cache(engine, tmp_path):
    launch = Launch("python", Model("none", tmp_path, True), OURS, "cuda", 1, kv_cache_dtype="fp8_e4m3")
    assert option(engine.server_command(launch), "--kv-cache-dtype") == "fp8_e4m3"
    assert launch.name == "attn_backend@fp8_e4m3"
    assert label(engine, "attn_backend@fp8_e4m3", "cuda") == "attn_backend, fp8_e4m3 cache"
    assert "--kv-cache-dtype" not in engine.server_command(replace(launch, kv_cache_dtype=None))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_clients_send_copies_in_order_and_at_the_prompts_rate(engine, tmp_path):
    write_word_tokenizer(tmp_path, 5000)
    chats = [
        {
            "conversations": [
                {"from": "human", "value": f"tell me story {i}"},
                {"from": "gpt", "value": "once upon a time"},
            ]
        }
        for i in range(9)
    ]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    workload = make_workload(str(tmp_path / "chats.json"), 3, None, tmp_path, 0, samples=4)
    client = Client(
        "python", Model("none", tmp_path, True), 1, workload, 2.5, None, 0, tmp_path / "client.json"
    )
    command = engine.client_command(client)
    assert (option(command, "--num-prompts"), option(command, "--request-rate")) == ("12", "10.0")
    assert option(command, "--dataset-name") == "sharegpt"
    assert len(json.loads((tmp_path / "client.requests.json").read_text())) == 12
    assert option(command, "--dataset-path") == str(tmp_path / "client.requests.json")
    assert "--disable-shuffle" in command or '"keep_order": true' in command[3]
    assert (
        describe(workload, 2.5)
        == "ShareGPT, first turns, outputs as recorded; 3 prompts at 2.5/s, 4 answers to each"
    )
    assert describe(workload, float("inf")).endswith("; 3 prompts at once, 4 answers to each")
    assert describe(workload, float("inf"), max_concurrency=2).endswith(
        "; 3 prompts 2 at a time, 4 answers to each"
    )


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_several_gpus(engine, tmp_path, monkeypatch):
    """Without multicast neither NCCL nor vLLM's fused all-reduce may use it."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    launch = Launch("python", Model("none", tmp_path, True), OURS, "cuda", 1, tensor_parallel_size=4)
    command = engine.server_command(launch)
    assert option(command, "--tensor-parallel-size") == "4"
    assert engine.server_environment(launch)["NCCL_NVLS_ENABLE"] == "0"
    if engine.name == "vllm":
        assert json.loads(option(command, "--compilation-config")) == {
            "pass_config": {"fuse_allreduce_rms": False}
        }
    assert "--tensor-parallel-size" not in engine.server_command(replace(launch, tensor_parallel_size=1))
    assert "NCCL_NVLS_ENABLE" not in engine.server_environment(replace(launch, tensor_parallel_size=1))


def test_vllms_own_shared_prefix_is_asked_for_exactly(tmp_path):
    workload = make_workload("prefix:4096+256", 128, "128", tmp_path, 0)
    command = ENGINES["vllm"].client_command(
        Client("python", Model("none", tmp_path, True), 1, workload, 40.0, None, 0, tmp_path / "client.json")
    )
    assert option(command, "--dataset-name") == "prefix_repetition"
    lengths = [
        option(command, f"--prefix-repetition-{name}")
        for name in ("prefix-len", "suffix-len", "num-prefixes", "output-len")
    ]
    assert lengths == ["4096", "256", "1", "128"]
    assert (option(command, "--num-prompts"), option(command, "--request-rate")) == ("128", "40.0")
    assert describe(workload, 40.0).endswith("128 output tokens; 128 prompts at 40/s")


def test_a_soaks_cache_is_counted_in_tokens():
    assert option(ENGINES["vllm"].soak_settings(768, "cpu")[0], "--num-gpu-blocks-override") == "24"
    assert option(ENGINES["vllm"].soak_settings(768, "cuda")[0], "--num-gpu-blocks-override") == "48"
    assert option(ENGINES["sglang"].soak_settings(768, "cpu")[0], "--max-total-tokens") == "768"


def test_preemptions_are_counted(monkeypatch):
    of_vllm = (
        '# HELP vllm:num_preemptions_total x\nvllm:num_preemptions_total{engine="0"} '
        '3.0\nvllm:num_preemptions_total{engine="1"} 4.0\n'
    )
    of_sglang = (
        'sglang:num_retracted_reqs{tp_rank="0"} 9.0\nsglang:num_retracted_requests_total{tp_rank="0"} 2.0\n'
    )
    monkeypatch.setattr("integration.http.get_text", lambda url: of_vllm + of_sglang)
    assert ENGINES["vllm"].preemptions("http://127.0.0.1:1") == 7
    assert ENGINES["sglang"].preemptions("http://127.0.0.1:1") == 2


def test_a_counter_may_be_of_one_label(monkeypatch):
    metrics = (
        'sglang:cached_tokens_total{model="m",cache_source="host"} '
        '32.0\nsglang:cached_tokens_total{model="m",cache_source="device"} 5.0\n'
    )
    monkeypatch.setattr("integration.http.get_text", lambda url: metrics)
    assert counter("http://127.0.0.1:1", "sglang:cached_tokens_total") == 37
    assert counter("http://127.0.0.1:1", "sglang:cached_tokens_total", 'cache_source="host"') == 32


@pytest.mark.parametrize(
    ("engine", "status", "body", "forgot"),
    [
        ("vllm", 200, '{"success":true}', True),
        ("vllm", 200, "", True),
        ("vllm", 200, '{"success": false}', False),
        ("sglang", 200, "Cache flushed.", True),
        ("sglang", 400, "Flush cache failed.", False),
    ],
)
def test_a_server_forgets_its_prefixes_unless_it_is_busy(engine, status, body, forgot, monkeypatch):
    asked = []

    def post(url, timeout):
        asked.append(url)
        return httpx.Response(status, text=body)

    monkeypatch.setattr("integration.http.CLIENT", SimpleNamespace(post=post))
    assert ENGINES[engine].forget_prefixes("http://127.0.0.1:1") is forgot
    assert asked == [f"http://127.0.0.1:1/{'reset_prefix_cache' if engine == 'vllm' else 'flush_cache'}"]


def test_a_server_that_cannot_forget_says_so(monkeypatch):
    monkeypatch.setattr(
        "integration.http.CLIENT", SimpleNamespace(post=lambda url, timeout: httpx.Response(404))
    )
    with pytest.raises(RuntimeError, match="reset_prefix_cache: HTTP 404: the server has no such address"):
        ENGINES["vllm"].forget_prefixes("http://127.0.0.1:1")
