"""Both engines serve a real model on the CPU with this backend: the same tokens as their stock backends in float32, and figures from their own clients."""

from __future__ import annotations

import sys

import pytest

NUM_PROMPTS = 8
MAX_TOKENS = 24
LONGEST_PROMPT = 256
CONCURRENCY = 4


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("engine_name", ["vllm", "sglang"])
def test_serves_the_same_tokens_as_the_stock_backend(engine_name, need_engine, smollm2, sharegpt, tmp_path):
    need_engine(engine_name)
    from integration.client import run_client
    from integration.compare_tokens import compare, generate_all, print_outcome, serve_and_generate
    from integration.engines import ENGINES, Client, Launch
    from integration.engines.base import OURS, STOCK
    from integration.server import free_port, running_server
    from integration.sharegpt import prompt_token_ids
    from integration.workload import ShareGPT

    engine = ENGINES[engine_name]
    prompts = prompt_token_ids(smollm2.folder, sharegpt, NUM_PROMPTS, LONGEST_PROMPT)

    def launch(backend):
        return Launch(sys.executable, smollm2, backend, "cpu", free_port(), "float32", max_model_len=2048, max_num_seqs=CONCURRENCY)

    expected = serve_and_generate(engine, launch(STOCK), prompts, MAX_TOKENS, tmp_path / "stock.log")
    ours = launch(OURS)
    with running_server(engine, ours, tmp_path / "ours.log", timeout_s=600) as url:
        actual = generate_all(engine, url, prompts, MAX_TOKENS, CONCURRENCY)
        again = generate_all(engine, url, prompts, MAX_TOKENS, CONCURRENCY)  # its prefixes are in the cache now
        workload = ShareGPT(NUM_PROMPTS // 4, 4, "ShareGPT", smollm2.folder, sharegpt, output_len=16)  # 4 answers to each prompt
        client = Client(sys.executable, smollm2, ours.port, workload, float("inf"), CONCURRENCY, 0, tmp_path / "client.json")
        metrics = run_client(engine, client, "cpu", tmp_path / "client.log", timeout_s=600)

    outcome = compare(expected, actual)
    print_outcome(outcome, largest_gap=0)
    assert all(len(answer) == MAX_TOKENS for answer in actual)
    assert outcome.equal == NUM_PROMPTS
    assert compare(expected, again).equal == NUM_PROMPTS
    assert outcome.largest_logprob_difference < 1e-3
    assert metrics.requests == NUM_PROMPTS
    assert metrics.failed == 0
    assert metrics.output_tokens > 0
    assert 0 < metrics.ttft_p50_ms <= metrics.ttft_p99_ms
    assert 0 < metrics.itl_p50_ms <= metrics.itl_p99_ms
