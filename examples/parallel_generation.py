"""Parallel generation: n answers to one prompt share its pages.

The prompt is computed once, and read once a step for all n answers.

    # 4 answers of a small random model, by the engine of engine.py
    python examples/parallel_generation.py
    python examples/parallel_generation.py --model HuggingFaceTB/SmolLM2-135M-Instruct -n 8
    # inter-token latency for n = 1 ... 64, with cascade and without
    python examples/parallel_generation.py --benchmark

The engine does not declare shared prompts: the answers' page tables begin with the same pages, and `plan`
decides by cost whether to read them once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import decode_step
import llama
import torch
from decode_step import LLAMA_31_8B, SMALL, DecodeStep, Shape
from engine import SYSTEM, Engine, Request
from torch import Tensor

from attn_backend import Attention, BSRView, KVCache, PageTable, append_kv

PAGE_SIZE = 16


def benchmark(
    shape: Shape, device: str, answers: list[int], in_flight: int, prompt: int, generated: int
) -> list[tuple[int, float, float, int]]:
    """(n, ITL without cascade, with, prefixes that plan took) in ms, for in_flight prompts, each with n
    answers of `generated` tokens so far.
    """
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    prompt_pages, own_pages = prompt // PAGE_SIZE, generated // PAGE_SIZE + 1
    rows = []
    for n in answers:
        batch = in_flight * n
        num_pages = in_flight * prompt_pages + batch * own_pages
        cache = KVCache.from_tensor(
            torch.randn(
                num_pages, 2, PAGE_SIZE, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device
            )
        )
        shared = (
            torch.arange(in_flight * prompt_pages, dtype=torch.int32)
            .view(in_flight, prompt_pages)
            .repeat_interleave(n, 0)
        )
        own = in_flight * prompt_pages + torch.arange(batch * own_pages, dtype=torch.int32).view(
            batch, own_pages
        )
        kv_lens = torch.full(
            (batch,), prompt_pages * PAGE_SIZE + generated + 1, dtype=torch.int32, device=device
        )
        slots = (own[:, generated // PAGE_SIZE] * PAGE_SIZE + generated % PAGE_SIZE).to(device)
        table = PageTable.block_table(torch.cat([shared, own], 1).to(device), kv_lens, PAGE_SIZE)
        view = BSRView(torch.arange(batch + 1, dtype=torch.int32, device=device), table)
        step = DecodeStep(shape, batch, dtype, device)
        steps = []
        for cascade in (False, True):
            attention = Attention(
                shape.num_qo_heads,
                shape.num_kv_heads,
                shape.head_dim,
                dtype=dtype,
                device=device,
                max_rows=batch,
                max_batch=batch,
                cascade=cascade,
            )
            steps.append(whole_step(step, attention, view, cache, slots))
            attention.plan(view)
        taken = sum(node.group >= 0 for node in attention.schedule().forest)
        without, with_cascade = decode_step.measure(steps, device)
        rows.append((n, without, with_cascade, taken))
    return rows


def whole_step(
    step: DecodeStep, attention: Attention, view: BSRView, cache: KVCache, slots: Tensor
) -> Callable[[], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        append_kv(k, v, cache, slots)
        return attention.run(q, cache, after_append=True)

    def call() -> Tensor:
        attention.plan(view)  # part of every step
        return step(attend)

    return call


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or name on the hub; default: small and random")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("-n", type=int, default=4, help="answers to each prompt (%(default)s)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=16, help="tokens to generate for each answer (%(default)s)"
    )
    parser.add_argument(
        "--benchmark", action="store_true", help="measure the time between tokens instead of generating"
    )
    parser.add_argument(
        "--prompt", type=int, help="with --benchmark: tokens of each prompt (2048; on a CPU 512)"
    )
    parser.add_argument("--in-flight", type=int, help="with --benchmark: prompts in a batch (16; on a CPU 2)")
    arguments = parser.parse_args(argv)
    device = llama.pick_device(arguments.device)
    if arguments.benchmark:
        on_gpu = device.startswith("cuda")
        prompt, in_flight = (
            arguments.prompt or (2048 if on_gpu else 512),
            arguments.in_flight or (16 if on_gpu else 2),
        )
        answers = [1, 2, 4, 8, 16, 32, 64] if on_gpu else [1, 4, 16]
        print(f"{in_flight} prompts of {prompt} tokens, n answers to each, 128 tokens generated")
        if not on_gpu:
            print("Set OMP_NUM_THREADS=1 on a busy CPU: threads that wait for each other distort the times.")
        print(
            f"{'n':>4} {'no cascade, ms':>15} {'cascade, ms':>12} {'change by cascade':>18} "
            f"{'prefixes read once':>19}"
        )
        for n, without, with_cascade, taken in benchmark(
            LLAMA_31_8B if on_gpu else SMALL, device, answers, in_flight, prompt, 128
        ):
            print(f"{n:4} {without:15.2f} {with_cascade:12.2f} {with_cascade / without - 1:18.1%} {taken:19}")
        return
    model = llama.load(arguments.model, device)
    engine = Engine(model, device)
    prompt = model.encode(f"{SYSTEM}Question: Name one city that is worth a visit.\nAnswer:")
    requests = [
        Request(list(prompt), arguments.max_new_tokens, temperature=0.8, seed=seed)
        for seed in range(arguments.n)
    ]
    for text in engine.generate(requests):
        print(repr(text))
    pages = sum(len(request.pages) for request in requests)
    print(
        f"{arguments.n} page tables with {pages} pages, of them "
        f"{len({page for request in requests for page in request.pages})} distinct"
    )


if __name__ == "__main__":
    main()
