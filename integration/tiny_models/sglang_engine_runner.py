"""Answers of SGLang on a GPU in bfloat16, with CUDA graphs: its whole engine, with this package's backend or with its Triton backend.

python -m integration.tiny_models.sglang_engine_runner FOLDER [family ...] --backend ours|stock [--jobs N]

Only families that generate from tokens alone.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

from integration.server import free_port
from integration.tiny_models.families import FAMILIES, Family
from integration.tiny_models.questions import NEW_TOKENS, Answer, questions
from integration.tiny_models.runner import run_families

OURS = "ours" if "--backend" in sys.argv and sys.argv[sys.argv.index("--backend") + 1] == "ours" else "stock"


def answer_all(family: Family, folder: Path) -> list[Answer]:
    """Twice, the second time from the prefix cache; the answers are those of the second time."""
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    import sglang

    backend = "attn_backend" if OURS == "ours" else "triton"
    options: dict[str, Any] = {"dtype": "bfloat16", "context_length": 128, "max_running_requests": 8, "max_total_tokens": 4096, "mem_fraction_static": 0.9}
    options |= {"cuda_graph_max_bs_decode": 4, "log_level": "error", "port": free_port(), "sampling_backend": "pytorch"}
    engine = sglang.Engine(model_path=str(folder), attention_backend=backend, **options | family.engines["sglang"])
    try:
        prompts = [question.expanded for question in questions(family)]
        parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        for _ in range(2):
            outputs = engine.generate(input_ids=prompts, sampling_params=parameters, return_logprob=True)
        return [_answer(output["meta_info"]["output_token_logprobs"]) for output in outputs]
    finally:
        engine.shutdown()


def _answer(tokens: list[tuple[float, int, Any]]) -> Answer:
    """Of (natural logarithm of the probability, token, text) of each token."""
    answer = Answer([token for _, token, _ in tokens], [logprob for logprob, _, _ in tokens])
    if not all(math.isfinite(logprob) for logprob in answer.logprobs):
        raise AssertionError(f"log-probabilities {answer.logprobs}, must be finite")
    return answer


if __name__ == "__main__":
    run_families(__doc__, f"sglang-{OURS}", [name for name, family in FAMILIES.items() if "sglang" in family.engines and family.kind == "generate"], answer_all)
