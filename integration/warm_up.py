"""Requests before the measurement: an engine compiles, tunes and allocates at its first prompts of a kind,
and no figure should include that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from integration.engines import Engine, Sampling
from integration.text import tokenizer_of
from integration.workload import Workload

REQUESTS = 8
MOST_TOKENS = 8
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0)

Prompts = list[tuple[list[int], int]]  # token ids, and how many tokens to generate


def warm_up_prompts(workload: Workload, seed: int) -> Prompts:
    """The first few requests of a load. `seed` must differ from the seed of its measured runs, or the prefix
    cache would answer them.

    Raises:
        ValueError: the model's folder has no tokenizer.json.
    """
    tokenizer = tokenizer_of(workload.model_folder)
    return [
        (tokenizer.encode(request.text).ids, min(request.output_len, MOST_TOKENS))
        for request in workload.requests(seed)[:REQUESTS]
    ]


def warm_up(
    engine: Engine,
    url: str,
    loads: list[Prompts],
    sampling: Sampling | None,
    tell: Callable[[str], None] = lambda what: None,
) -> None:
    """Sends one request of each load by itself, then the others at once: shared prefixes are computed first
    and read from the cache afterwards.

    Args:
        tell: called with the number of answered requests.

    Raises RuntimeError if the server does not answer.
    """

    def ask(request: tuple[int, tuple[list[int], int]]) -> None:
        seed, (prompt, num_tokens) = request
        engine.sample(url, prompt, num_tokens, sampling or GREEDY, seed, logprobs=False)

    with ThreadPoolExecutor(REQUESTS) as pool:
        for prompts in loads:
            first, *others = enumerate(prompts)
            ask(first)
            for answered, _ in enumerate(pool.map(ask, others), 2):
                tell(f"warming up, requests {answered} of {len(prompts)}")


def wait_for_turn(folder: Path | None) -> None:
    """For engines that share a device: creates `ready` in the folder, if there is one, and waits until `go`
    appears there.
    """
    if folder is not None:
        (folder / "ready").touch()
        while not (folder / "go").exists():
            time.sleep(0.2)
