"""Does this backend survive vLLM's sleep mode? Compares greedy answers before and after each of many sleeps;
in one process, on a GPU.

    python -m integration.sleep_wake --model smollm2 --times 20

The prompts share a prefix, and decodes run as CUDA graphs, so plans' state between steps is used. Level 1
discards the KV cache and restores the weights from host memory. Level 2 also discards the weights, and
reloads them from --model. vLLM's allocator shows where every plan's workspace lies. Memory that sleep
discards comes back with arbitrary content, which need not show in the tokens.

Exit status: 0 if all answers are unchanged and no workspace lies in memory that sleep mode discards, 1
otherwise.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from integration.command_line import exit_with
from integration.engines.base import OURS, our_environment
from integration.model import REPOSITORY, Model, resolve_model
from integration.text import TextMaker

LEVELS = (1, 2)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2, a folder, or a name in integration/models; level 2 needs weights in it",
    )
    parser.add_argument("--times", type=int, default=20, help="how often it sleeps; default: %(default)s")
    parser.add_argument(
        "--levels",
        type=int,
        nargs="+",
        choices=LEVELS,
        default=list(LEVELS),
        help="taken in turns; default: 1 2",
    )
    parser.add_argument("--num-prompts", type=int, default=32, help="default: %(default)s")
    parser.add_argument(
        "--prefix", type=int, default=512, help="tokens that all prompts begin with; default: %(default)s"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer; default: %(default)s")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.5, help="vLLM's; default: %(default)s"
    )
    parser.add_argument(
        "--no-cuda-graphs", action="store_true", help="have vLLM launch every kernel by itself"
    )
    parser.add_argument("--batch-invariant", action="store_true", help="VLLM_BATCH_INVARIANT=1")
    return parser.parse_args(arguments)


def make_prompts(model: Model, count: int, prefix: int) -> list[str]:
    """Texts with a common beginning, and ends of 5 to 100 tokens."""
    texts = TextMaker(model.folder, seed=0)
    shared = texts.text(prefix)
    return [shared + texts.text(texts.random.randint(5, 100)) for _ in range(count)]


def start(given: argparse.Namespace, model: Model) -> Any:
    """vLLM in this process: all prompts have arrived when the first step is scheduled, so every run has the
    same batches.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if given.batch_invariant:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    os.environ.update(environment | our_environment(OURS))
    # As in a server's process: the installed package precedes the sources next to this folder.
    sys.path[:] = [*(folder for folder in sys.path if Path(folder).resolve() != REPOSITORY), str(REPOSITORY)]
    from vllm import LLM

    return LLM(
        model=str(model.folder),
        load_format="dummy" if model.random_weights else "auto",
        dtype="bfloat16",
        attention_backend="CUSTOM",
        enable_sleep_mode=True,
        enforce_eager=given.no_cuda_graphs,
        # vLLM also bounds the characters of a prompt by it
        max_model_len=2 * (given.prefix + 128) + given.max_tokens,
        max_num_seqs=given.num_prompts,
        gpu_memory_utilization=given.gpu_memory_utilization,
        disable_log_stats=True,
    )


def generate(llm: Any, prompts: list[str], max_tokens: int) -> list[list[int]]:
    """Token ids of each answer."""
    from vllm import SamplingParams

    answers = llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True), use_tqdm=False
    )
    return [list(answer.outputs[0].token_ids) for answer in answers]


def sleep_and_wake(llm: Any, level: int) -> None:
    llm.sleep(level=level)
    llm.wake_up()
    if level == 2:  # the weights' memory is back, with any content
        llm.collective_rpc("reload_weights")


def differing(before: list[list[int]], after: list[list[int]]) -> list[int]:
    """The prompts whose answers differ."""
    return [prompt for prompt, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]


def workspaces_taken_away() -> tuple[int, int]:
    """The number of tensors that this process's plans hold on the GPU, and the number of those in memory that
    sleep mode discards.
    """
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    from attn_backend import Attention

    gc.unfreeze()  # vLLM freezes existing objects when it has started, and frozen objects are not listed
    pools = [
        (begin, begin + data.handle[1])
        for begin, data in CuMemAllocator.get_instance().pointer_to_data.items()
    ]
    plans = [found for found in gc.get_objects() if type(found) is Attention]
    held = [
        value
        for plan in plans
        for value in vars(plan).values()
        if isinstance(value, torch.Tensor) and value.is_cuda and value.numel()
    ]
    return len(held), sum(any(begin <= tensor.data_ptr() < end for begin, end in pools) for tensor in held)


def run(given: argparse.Namespace) -> bool:
    model = resolve_model(given.model, sys.executable)
    if model.random_weights and 2 in given.levels:
        raise ValueError(
            f"levels: 2 discards the weights, and {given.model!r} has none to read again: pass --levels 1, "
            f"or a model with weights"
        )
    prompts = make_prompts(model, given.num_prompts, given.prefix)
    llm = start(given, model)
    before = generate(llm, prompts, given.max_tokens)
    held, taken = workspaces_taken_away()
    wrong = 0
    for time, level in zip(range(1, given.times + 1), itertools.cycle(given.levels), strict=False):
        sleep_and_wake(llm, level)
        different = differing(before, generate(llm, prompts, given.max_tokens))
        wrong += len(different)
        print(
            f"{time} of {given.times}, level {level}: {len(prompts)} answers, {len(different)} differ "
            f"{different or ''}",
            flush=True,
        )
    print(
        f"slept {given.times} times: {given.times * len(prompts)} answers of {given.max_tokens} tokens, "
        f"{wrong} differ from those before"
    )
    print(f"{held} tensors of plans on the GPU, {taken} in memory that sleep mode takes away")
    return held > 0 and taken == 0 and wrong == 0


def main() -> None:
    exit_with(lambda: run(parse_arguments()))


if __name__ == "__main__":
    main()
