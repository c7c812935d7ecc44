"""Both engines serve a real model on the CPU with this backend; the tests of an engine share one server.

Tokens equal the ones from the engine's own backend in float32, and the engine's own client reports figures. A
seed gives the same tokens one at a time and in batches. SGLang's drafts change no token.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NUM_PROMPTS = 8
MAX_TOKENS = 16
LONGEST_PROMPT = 256
CONCURRENCY = 4

# sampling
NUM_SAMPLED = 6
SAMPLED_TOKENS = 12
LONGEST_SAMPLED = 64

# speculation
STEPS = 3
DRAFTED_TOKENS = 32
TEXTS = (
    "one two three one two four one two three one two four one two",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):",
)
NGRAM = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"]
STANDALONE = ["--speculative-algorithm", "STANDALONE", "--speculative-num-steps", str(STEPS)]


@dataclass
class Served:
    """A server with this package's backend.

    `stock`: the answers to `prompts` from a server with the engine's own backend.
    """

    engine: Any
    launch: Any
    url: str
    log: Path
    prompts: list[list[int]]
    stock: list[Any]


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def served(request, need_engine, forked_engines, smollm2, sharegpt, tmp_path_factory) -> Iterator[Served]:
    need_engine(request.param)
    from integration.compare_tokens import serve_and_generate
    from integration.engines import ENGINES, Launch
    from integration.engines.base import OURS, STOCK
    from integration.server import free_port, running_server
    from integration.sharegpt import prompt_token_ids

    engine, folder = ENGINES[request.param], tmp_path_factory.mktemp(request.param)
    prompts = prompt_token_ids(smollm2.folder, sharegpt, NUM_PROMPTS, LONGEST_PROMPT)

    def launch(backend):
        return Launch(
            sys.executable,
            smollm2,
            backend,
            "cpu",
            free_port(),
            "float32",
            max_model_len=2048,
            max_num_seqs=CONCURRENCY,
            environment=engine.forgetting_environment(),
        )

    stock = serve_and_generate(engine, launch(STOCK), prompts, MAX_TOKENS, folder / "stock.log")
    ours, log = launch(OURS), folder / "ours.log"
    with running_server(engine, ours, log, timeout_s=600) as url:
        yield Served(engine, ours, url, log, prompts, stock)


def test_serves_the_same_tokens_as_the_stock_backend(served, smollm2, sharegpt, tmp_path):
    from integration.client import run_client
    from integration.compare_tokens import compare, generate_all, print_outcome
    from integration.engines import Client
    from integration.workload import ShareGPT

    actual = generate_all(served.engine, served.url, served.prompts, MAX_TOKENS, CONCURRENCY)
    # now its prefixes are in the cache
    again = generate_all(served.engine, served.url, served.prompts, MAX_TOKENS, CONCURRENCY)
    # 4 answers to each prompt
    workload = ShareGPT(NUM_PROMPTS // 4, 4, "ShareGPT", smollm2.folder, sharegpt, output_len=8)
    client = Client(
        sys.executable,
        smollm2,
        served.launch.port,
        workload,
        float("inf"),
        CONCURRENCY,
        0,
        tmp_path / "client.json",
    )
    metrics = run_client(served.engine, client, "cpu", tmp_path / "client.log", timeout_s=600)

    outcome = compare(served.stock, actual)
    print_outcome(outcome, largest_gap=0)
    assert all(len(answer) == MAX_TOKENS for answer in actual)
    assert outcome.equal == NUM_PROMPTS
    assert compare(served.stock, again).equal == NUM_PROMPTS
    assert outcome.largest_logprob_difference < 1e-3
    assert metrics.requests == NUM_PROMPTS
    assert metrics.failed == 0
    assert metrics.output_tokens > 0
    assert 0 < metrics.ttft_p50_ms <= metrics.ttft_p99_ms
    assert 0 < metrics.itl_p50_ms <= metrics.itl_p99_ms


def test_answers_of_one_request_are_measured_one_by_one(served, smollm2, tmp_path):
    """The engine's client, with features of bench_client.py: requests with `n`, at given times."""
    from integration.arrivals import of_requests
    from integration.client import run_client
    from integration.datasets import make_workload
    from integration.engines import Client, Sampling

    samples, arrivals = 3, [0.0, 0.6]
    workload = make_workload("uniform:16-32", len(arrivals), "8", smollm2.folder, 0, samples)
    client = Client(
        sys.executable,
        smollm2,
        served.launch.port,
        workload,
        float("inf"),
        None,
        0,
        tmp_path / "client.json",
        sampling=Sampling(),
        arrivals=of_requests(arrivals, samples),
        n_best=True,
    )

    def requests():
        return len(re.findall("POST /(?:v1/completions|generate) ", served.log.read_text(errors="replace")))

    before = requests()
    metrics = run_client(served.engine, client, "cpu", tmp_path / "client.log", timeout_s=600)
    assert (metrics.requests, metrics.failed) == (6, 0)
    assert metrics.output_tokens == 6 * 8
    assert metrics.duration_s > arrivals[-1]
    assert 0 < metrics.ttft_p50_ms <= metrics.ttft_p99_ms
    assert 0 < metrics.itl_p50_ms <= metrics.itl_p99_ms
    assert requests() - before == len(arrivals) + 1, (
        "one for each prompt, and the client's test of the server"
    )
    assert served.engine.forget_prefixes(served.url)


def test_a_seed_gives_the_same_tokens_in_every_batch(served, smollm2, sharegpt):
    from integration.compare_sampling import ask_four_times, compare_answers
    from integration.engines import Sampling
    from integration.sharegpt import prompt_token_ids

    prompts = prompt_token_ids(smollm2.folder, sharegpt, NUM_SAMPLED, LONGEST_SAMPLED)
    answers = ask_four_times(served.engine, served.url, prompts, SAMPLED_TOKENS, Sampling(), CONCURRENCY)
    outcome = compare_answers(*answers)
    print(outcome)
    assert all(len(answer) == SAMPLED_TOKENS for kind in answers for answer in kind)
    assert outcome.holds(same_logits=True)
    assert "does not sample" not in served.log.read_text(errors="replace")


@pytest.mark.parametrize("served", ["sglang"], indirect=True)
def test_drafts_change_no_token(served, smollm2, tmp_path):
    """SGLang drafts and verifies with this backend: n-grams, and trees from a draft model."""
    from dataclasses import replace

    from integration.http import post_json
    from integration.server import free_port, running_server

    tree = [*STANDALONE, "--speculative-draft-model-path", str(smollm2.folder)]  # the model itself
    tree += ["--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"]

    def answers(url):
        parameters = {"temperature": 0, "max_new_tokens": DRAFTED_TOKENS, "ignore_eos": True}
        with ThreadPoolExecutor(4) as pool:
            return list(
                pool.map(
                    lambda text: post_json(f"{url}/generate", {"text": text, "sampling_params": parameters}),
                    TEXTS,
                )
            )

    expected = [answer["output_ids"] for answer in answers(served.url)]
    accepted = {}
    for name, arguments in {"ngram": NGRAM, "tree": tree}.items():
        launch = replace(
            served.launch,
            port=free_port(),
            max_model_len=1024,
            extra_arguments=[*served.engine.drafts_settings(), *arguments],
        )
        with running_server(served.engine, launch, tmp_path / f"{name}.log", timeout_s=600) as url:
            before = served.engine.drafts(url)
            got = answers(url)
            counted = served.engine.drafts(url) - before  # compare_speculation uses these
        assert counted.passes == sum(answer["meta_info"]["spec_verify_ct"] for answer in got)
        assert counted.gained == len(TEXTS) * (DRAFTED_TOKENS - 1)
        assert [answer["output_ids"] for answer in got] == expected, name
        accepted[name] = [answer["meta_info"]["spec_accept_length"] for answer in got]
    print(accepted)
    assert accepted["ngram"][0] > 2  # the first text repeats itself
    # The model agrees with itself, with one exception: SGLang's draft models do not see the first token of a
    # text.
    assert min(accepted["tree"]) > 2
