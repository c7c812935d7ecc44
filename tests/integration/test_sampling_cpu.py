"""Both engines sample with this package on the CPU: the same seeds give the same tokens, one at a time and in batches, log-probabilities or not."""

from __future__ import annotations

import sys

import pytest

NUM_PROMPTS = 6
MAX_TOKENS = 12
LONGEST_PROMPT = 64
CONCURRENCY = 4


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("engine_name", ["vllm", "sglang"])
def test_a_seed_gives_the_same_tokens_in_every_batch(engine_name, need_engine, smollm2, sharegpt, tmp_path):
    need_engine(engine_name)
    from integration.compare_sampling import compare_answers, serve_and_sample
    from integration.engines import ENGINES, Launch, Sampling
    from integration.engines.base import OURS
    from integration.server import free_port
    from integration.sharegpt import prompt_token_ids

    prompts = prompt_token_ids(smollm2.folder, sharegpt, NUM_PROMPTS, LONGEST_PROMPT)
    launch = Launch(sys.executable, smollm2, OURS, "cpu", free_port(), "float32", max_num_seqs=CONCURRENCY, prefix_caching=False)
    log = tmp_path / "server.log"
    answers = serve_and_sample(ENGINES[engine_name], launch, prompts, MAX_TOKENS, Sampling(), log)
    outcome = compare_answers(*answers)
    print(outcome)
    assert all(len(answer) == MAX_TOKENS for kind in answers for answer in kind)
    assert outcome.holds(same_logits=True)
    assert "does not sample" not in log.read_text(errors="replace")
